"""The token for the Hugging Face Hub: found once, never shown, and where there is none, what a person can do."""

from __future__ import annotations

import configparser
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, utils

BEARER = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # all that RFC 6750 allows in a token of its kind
SECRET = re.compile(r"hf_[\w.-]+|[\w-]{30,}")  # what may be a token in the text of others
HUB_MODULE = "huggingface_hub.utils._auth"  # and the name of its logger

_PAGE = "https://huggingface.co/settings/tokens"
_GIVE = (
    f"Make a token with write access at {_PAGE}, then put it in the environment variable HF_TOKEN, or in Colab's Secrets (the key "
    "icon) under the name HF_TOKEN with access for this notebook, or run huggingface_hub.login()"
)
_AGAIN = (
    "huggingface_hub asks Colab once a session only: after a change in Colab's Secrets restart the session or, without a restart, run "
    '`import os; from google.colab import userdata; os.environ["HF_TOKEN"] = userdata.get("HF_TOKEN")` in a cell'
)
NOWHERE = f"there is no Hugging Face token. {_GIVE}"
NO_SECRET = f"there is no Hugging Face token: Colab's Secrets have none under the name HF_TOKEN, or it is empty. {_GIVE}. {_AGAIN}"
REFUSED = (
    "Colab refuses this notebook access to the secret HF_TOKEN. Click the key icon and switch on the access of this notebook to "
    f"HF_TOKEN (a token with write access, from {_PAGE}), or run huggingface_hub.login(). {_AGAIN}"
)
TIMED_OUT = (
    "Colab did not hand over the secret HF_TOKEN in time: nobody answered the pop-up, a browser extension hid it, or the notebook is "
    "not open in Colab's own page. Click the key icon and switch on the access of this notebook to HF_TOKEN (a token with write access, "
    f"from {_PAGE}), or run huggingface_hub.login(). {_AGAIN}"
)
ASKED_EARLIER = (
    "there is no Hugging Face token: Colab's Secrets were asked earlier in this session and gave none (no secret HF_TOKEN, no access "
    f"for this notebook, or no answer). {_GIVE}. {_AGAIN}"
)
OTHER_THREAD = (
    "there is no Hugging Face token but perhaps in Colab's Secrets, which answer on the main thread only, and this is another thread: "
    f"call from a cell. Or: {_GIVE[0].lower()}{_GIVE[1:]}"
)
MALFORMED = (
    f"the Hugging Face token has characters in it that no token has; copy it anew from {_PAGE} (one with write access for publishing) "
    "to where it is kept: the environment variable HF_TOKEN, Colab's Secrets (the key icon) under the name HF_TOKEN with access for this "
    "notebook, or huggingface_hub.login()"
)
EXPIRED = (
    "the stored login of huggingface_hub has expired and could not be renewed (it was revoked, or the Hub is out of reach). Run "
    f"huggingface_hub.login() again. Or: {_GIVE[0].lower()}{_GIVE[1:]}"
)

_answer = ""  # why Colab's Secrets gave none when asked from here; huggingface_hub remembers only that they gave none


class HubError(RuntimeError):
    """The Hub cannot be used: no token, no access, out of reach. The text says what to do."""


class NoToken(HubError):
    """There is no token that can be used. The text says why and what to do; it never holds a token."""


def find_token() -> str:
    """The token that huggingface_hub finds in the environment, the stored login or Colab's Secrets; raises NoToken.

    Colab's Secrets are asked on the main thread only: the request is not safe on others, and may never come back.
    """
    token, reason = _look_up()
    if reason:
        raise NoToken(reason)  # outside of every `except`, as the error there may hold the token
    return token


def token_fault(token: str) -> str:
    """A sentence if `token` has characters that no token has (an HTTP library's own error would print it), else ""."""
    if not token or BEARER.fullmatch(token):
        return ""
    return f"{MALFORMED}. {_AGAIN}" if _colab_was_asked() else MALFORMED  # huggingface_hub remembers a wrong one too


def _look_up() -> tuple[str, str]:
    """The token and "", or "" and why there is none."""
    asked_before = _colab_was_asked()
    on_main_thread = threading.current_thread() is threading.main_thread()
    in_colab = utils.is_google_colab() and not utils.is_colab_enterprise()
    if in_colab and not (on_main_thread or asked_before or _is_elsewhere()):
        return "", OTHER_THREAD
    try:
        with _overheard() as warned:
            token = huggingface_hub.get_token() or ""
    except Exception as error:
        return "", f"the look-up of the Hugging Face token failed ({_redacted(f'{type(error).__name__}: {error}')}). {_GIVE}"
    if not token:
        return "", _why_none(warned, asked_before)
    reason = token_fault(token) or (EXPIRED if _is_expired_login(token) else "")
    return ("", reason) if reason else (token, "")


def _why_none(warned: list[str], asked_before: bool) -> str:
    global _answer
    if not _colab_was_asked():
        return NOWHERE
    if asked_before:
        return _answer or ASKED_EARLIER
    text = _redacted(" ".join(warned))
    if not text:
        _answer = NO_SECRET
    elif "not been granted" in text:
        _answer = REFUSED
    elif "timed out" in text:
        _answer = TIMED_OUT
    else:
        _answer = f"Colab's Secrets failed when asked for HF_TOKEN ({text}). {_GIVE}. {_AGAIN}"
    return _answer


def _colab_was_asked() -> bool:
    """Whether huggingface_hub has Colab's answer, and so will not ask; nothing public tells."""
    return bool(getattr(sys.modules.get(HUB_MODULE), "_IS_GOOGLE_COLAB_CHECKED", False))


def _is_elsewhere() -> bool:
    """Whether huggingface_hub, in its order, comes upon a token (or an error) before it comes to Colab's Secrets."""
    if os.environ.get("HF_OIDC_RESOURCE") or (os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or "").strip():
        return True
    try:
        return bool(Path(constants.HF_TOKEN_PATH).read_text().strip())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # get_token() fails on it too


def _is_expired_login(token: str) -> bool:
    """Whether `token` is of a stored login whose time is over: get_token() then tried to renew it, in vain."""
    stored = configparser.ConfigParser(interpolation=None)
    try:
        stored.read(constants.HF_STORED_TOKENS_PATH, encoding="utf-8")
        mine = [login for login in stored.values() if login.get("hf_token") == token]
        return any(float(login.get("expires_at", "inf")) <= time.time() for login in mine)
    except (configparser.Error, ValueError):  # damaged: the Hub will tell
        return False


@contextmanager
def _overheard() -> Generator[list[str]]:
    """Collects what huggingface_hub warns of, and takes tokens out of what it logs; other code's warnings go their way."""
    texts, logger = list[str](), logging.getLogger(HUB_MODULE)
    logger.addFilter(_redact_record)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
    finally:
        logger.removeFilter(_redact_record)
    for warning in caught:
        if "huggingface_hub" in Path(warning.filename).parts:
            texts.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _redact_record(record: logging.LogRecord) -> bool:
    """A damaged file of logins is logged with the lines that are damaged."""
    record.msg, record.args = _redacted(record.getMessage()), ()
    return True


def _redacted(text: str) -> str:
    return " ".join(SECRET.sub("[not shown]", text).split())
