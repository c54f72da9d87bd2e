"""Files of a published model, from a local folder or the Hugging Face Hub, with errors that say what a person can do."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
from huggingface_hub import errors
from tqdm import tqdm

from colabtrain.hub_errors import HTTP_ERROR, causes, status
from colabtrain.hub_token import token_fault

COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelAccessError(RuntimeError):
    """The model cannot be had: no access, not found, the Hub out of reach, the disk full. The text says what to do."""


class ModelFiles:
    """The files of `name`, a folder or owner/model on the Hub, all from one revision.

    The token is looked up once, here, because Colab's Secrets answer on the main thread only; it is never shown.
    """

    def __init__(self, name: str | Path, token: str | None = None, revision: str | None = None) -> None:
        given: Any = name
        if not isinstance(given, (str, Path)) or not str(name).strip():
            raise ValueError(f"the name of the model is {name!r}; give a folder, or one on the Hub such as google/gemma-3n-E4B-it")
        name = str(name)
        self.name, self.revision = name, revision
        folder = Path(name).expanduser().absolute()  # a cell may change the working directory
        self.folder = folder if folder.is_dir() else None
        self._token = "" if self.folder else (token or huggingface_hub.get_token() or "").strip()
        if fault := token_fault(self._token):
            raise ValueError(fault)

    def fetch(self, filename: str, report: Callable[[int], None] | None = None) -> Path:
        """Path of `filename`, downloaded if need be; report(n): n more bytes have come.

        Raises FileNotFoundError where the model has no such file, ModelAccessError or ValueError where it cannot be had.
        """
        if self.folder is not None:
            if not (self.folder / filename).is_file():
                raise FileNotFoundError(f"{self.name} has no file {filename}")
            return self.folder / filename
        path = Path(self._ask(huggingface_hub.hf_hub_download, filename, tqdm_class=_silent_bar(report)))
        if COMMIT.fullmatch(path.parent.name):
            self.revision = path.parent.name
        return path

    def size(self, filename: str) -> int:
        """Bytes of `filename`, without a download; raises as fetch()."""
        if self.folder is not None:
            return self.fetch(filename).stat().st_size
        return int(self._ask(huggingface_hub.hf_hub_download, filename, dry_run=True).file_size)

    def tensor_names(self, filename: str) -> list[str]:
        """Names in a safetensors file, from its header alone; raises as fetch()."""
        if self.folder is not None:
            with safetensors_file(self.fetch(filename)) as file:
                return list(file.keys())
        return list(self._ask(huggingface_hub.HfApi().parse_safetensors_file_metadata, filename).tensors)

    def _ask(self, request: Callable[..., Any], filename: str, **options: Any) -> Any:
        try:
            return request(self.name, filename, revision=self.revision, token=self._token or False, **options)
        except Exception as error:
            self._explain(error, filename)

    def _explain(self, error: Exception, filename: str) -> NoReturn:
        chain, code = list(causes(error)), status(error)
        if isinstance(error, errors.HFValidationError):
            raise ValueError(f"{self.name!r} is no folder here and no name on the Hub; give one such as google/gemma-3n-E4B-it") from None
        if any((isinstance(e, OSError) and e.errno == errno.ENOSPC) or "No space left" in str(e) for e in chain):
            text = f"the disk is full: {filename} of {self.name} does not fit; free some space, or set HF_HOME to a larger disk and restart"
        elif isinstance(error, errors.RevisionNotFoundError):
            text = f"{self.name} has no revision {self.revision!r}; leave `revision` out for the newest"
        elif isinstance(error, errors.RemoteEntryNotFoundError):
            raise FileNotFoundError(f"{self.name} has no file {filename}") from error
        elif code in (401, 403):
            text = self._no_access(code, any(isinstance(e, errors.GatedRepoError) for e in chain))
        elif code == 404:
            seen = "the token that was found may not see it" if self._token else "no token was found"
            text = f"there is no model {self.name} on the Hub (check the spelling), or it is private and {seen}"
        elif isinstance(error, (OSError, RuntimeError, HTTP_ERROR)):
            first = f"{type(chain[-1]).__name__}: {chain[-1]}"
            text = f"{filename} of {self.name} cannot be fetched and is not in the cache; is the Hub in reach? ({first})"
        else:
            raise error
        raise ModelAccessError(text) from error

    def _no_access(self, status: int, gated: bool) -> str:
        kind = "is open only to those who accepted its licence" if gated else "is gated, private or misspelt"
        found = "the token that was found has no access" if self._token else "no token was found"
        return (
            f"{self.name} {kind}, and {found} (HTTP {status}). Accept the licence at https://huggingface.co/{self.name}, then put a "
            "token of that account that may read gated models in the environment variable HF_TOKEN, or in Colab's Secrets (the key "
            "icon) under the name HF_TOKEN with access for this notebook, or run huggingface_hub.login()"
        )


@contextmanager
def safetensors_file(path: Path) -> Generator[Any]:
    """The open file, its tensors as views of the disk; raises ValueError where it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and fetch it anew") from error


def _silent_bar(report: Callable[[int], None] | None) -> type[tqdm[Any]]:
    """A progress bar that draws nothing, so that any thread may use it, and reports the bytes written."""

    class Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument]  (generic in its type stubs alone)
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))
            self.update(options.get("initial", 0))

        def update(self, n: float | None = 1) -> None:
            if report is not None and n:
                report(int(n))

        # What was received but not yet written: huggingface_hub gives it to a bar of its own where these are missing.
        def update_transfer(self, n: float) -> None: ...
        def set_transfer_postfix_str(self, text: str, refresh: bool = True) -> None: ...

    return Bar
