"""What an error of the Hub client means: whether the call may have landed, whether to try again, and what people are told.

Statuses decide, not classes: the same answer comes as other classes over http and https and from one release of the client to
the next, and an upload's status hides behind a RuntimeError or, from hf_xet, in the text of a ConnectionError.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from typing import Any

from huggingface_hub import errors

HTTP_ERROR = errors.HfHubHTTPError.__bases__[0]  # of the HTTP library that this huggingface_hub uses
CONFLICT, RETRY, REFUSED, LOCAL = "conflict", "retry", "refused", "local"
TRY_AGAIN = {408, 425, 429}  # besides 5xx
XET_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})")
LOCAL_ERRNOS = {errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
MAX_CHARS = 300
MEANINGS = {
    401: "the token is not accepted: it has expired, was revoked, or is not whole",
    402: "the Hub asks for a paid plan",
    403: "the token may not write there, or the account's storage is used up",
    404: "there is no such repo, or the token may not see it",
    413: "the Hub refuses files of this size",
    429: "the Hub asks to wait, too many requests",
}


def status(error: BaseException) -> int | None:
    """The HTTP status behind `error`, None where no answer came."""
    for cause in causes(error):
        response: Any = getattr(cause, "response", None)
        if response is not None:
            return int(response.status_code)
        if found := XET_STATUS.search(str(cause)):
            return int(found[1])
    return None


def kind(error: BaseException) -> str:
    """CONFLICT: HEAD is not where it was thought to be. REFUSED: trying again cannot help. LOCAL: this machine's disk. RETRY: all
    else, an answer that never came and one that makes no sense included."""
    code = status(error)
    if code in (409, 412) or any(isinstance(cause, errors.RevisionNotFoundError) for cause in causes(error)):  # squashed away
        return CONFLICT
    if code is not None:
        return RETRY if code in TRY_AGAIN or code >= 500 else REFUSED
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes(error)):
        return REFUSED
    if isinstance(error, OSError) and error.errno in LOCAL_ERRNOS and error.filename is not None:
        return LOCAL
    return RETRY


def wait_seconds(error: BaseException) -> float | None:
    """How long the Hub asks to wait before the next request."""
    for cause in causes(error):
        headers: Any = getattr(getattr(cause, "response", None), "headers", None)
        if headers is None:
            continue
        if (after := str(headers.get("retry-after", ""))).isdigit():
            return float(after)
        if found := re.search(r"\bt=(\d+)", str(headers.get("ratelimit", ""))):
            return float(found[1])
    return None


def explain(error: BaseException, token: str = "") -> str:
    """One line for people, without the token: a Hub, or a box on the way to it, may say it back."""
    code, last = status(error), list(causes(error))[-1]
    said = _short(getattr(error, "server_message", None) or error, token) or type(error).__name__
    if code not in (None, 401, 403) and XET_STATUS.search(said):
        return f"Xet, the way that large files take, fails ({said})"
    if code is not None:
        said = "from Xet" if XET_STATUS.search(said) else said
        meaning = MEANINGS.get(code, "the Hub has trouble" if code >= 500 else "the Hub refuses")
        meaning = "the repo has changed meanwhile" if kind(error) == CONFLICT else meaning
        return f"{meaning} (HTTP {code}: {said})"
    if isinstance(last, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, which keeps the Hub out of reach; unset it and restart"
    if kind(error) == LOCAL:
        return said
    return f"the Hub is out of reach, or does not answer ({type(last).__name__}: {_short(last, token)})"


def _short(said: object, token: str) -> str:
    """Cut off after the token is out of it, as a part of one is no longer found."""
    return " ".join(hidden(str(said), token).split())[:MAX_CHARS]


def hidden(text: str, token: str) -> str:
    return text.replace(token, "<token>") if token else text


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and all it came from, what it hides too."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
