"""FolderLock: one live run a folder, over all processes."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any

SHOWN = 200  # characters of a path in an error


class AlreadyRunning(RuntimeError):
    """The run folder, or the model, is in use by a live run."""


class FolderLock:
    """One live run a folder: an advisory lock on <run>/lock that ends with the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._file: Any = None

    def check(self) -> None:
        """Raise ValueError where the folder could not be made, as far as that is seen without making it."""
        folder = self.path.parent
        try:
            nearest = next(path for path in (folder, *folder.parents) if path.exists())
        except (OSError, ValueError) as error:
            raise self._unusable(error) from None
        if not nearest.is_dir():
            raise self._unusable(NotADirectoryError(0, f"{nearest} is a file"))
        if not os.access(nearest, os.W_OK):
            raise self._unusable(PermissionError(0, f"nothing may be written in {nearest}"))

    def _unusable(self, error: OSError | ValueError) -> ValueError:
        why = error.strerror if isinstance(error, OSError) else str(error)
        where = repr(str(self.path.parent))
        where = where if len(where) <= SHOWN else f"{where[:SHOWN]}..."
        return ValueError(f"run_dir: the folder {where} cannot be used ({why}); give another one")

    def take(self) -> bool:
        """Lock; False where the system has no such locks. Raises AlreadyRunning if another run has the folder,
        ValueError where it cannot be one."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+")
        except (OSError, ValueError) as error:
            raise self._unusable(error) from None
        try:
            fcntl = importlib.import_module("fcntl")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise AlreadyRunning(
                f"a live run uses {str(self.path.parent)!r} (process {owner}); stop it first, or give another run folder"
            ) from None
        except (ImportError, OSError):  # Windows, and mounted folders of some kinds
            file.close()
            return False
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(ImportError, OSError):
                fcntl = importlib.import_module("fcntl")
                fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked child shares the open file, and with it the lock
            self._file.close()
            self._file = None
