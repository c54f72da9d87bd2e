"""verify: which checkpoints of a run folder are whole, for people. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from colabtrain.runtime import manifest
from colabtrain.runtime.manifest import CheckpointError


def verify(run: Path) -> Iterator[tuple[str, bool]]:
    """(line, whether it is good) of each checkpoint, newest first. run: a run folder, its `checkpoints`, or one checkpoint.

    Raises ValueError where there is no such folder.
    """
    if not run.is_dir():
        raise ValueError(f"verify: {str(run)!r} is no folder; give the folder of a run")
    first = not _is_one(run)  # which one is the newest is not seen from a single one
    for path in _paths(run):
        try:
            size, written = manifest.num_bytes(path), (path / manifest.MANIFEST).stat().st_mtime
            state = manifest.check(path)
        except (CheckpointError, OSError) as error:
            if path.exists():  # else the live run has removed it in the meantime
                yield f"{path.name}  BAD   {error}", False
            continue
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        mark = "   <- the next start goes on from here" if first else ""
        first = False
        yield f"{path.name}  good  step {int(state['step']):,}, {size / 1e6:,.1f} MB, {when}{mark}", True


def _is_one(run: Path) -> bool:
    return (run / manifest.MANIFEST).exists()


def _paths(run: Path) -> list[Path]:
    if _is_one(run):
        return [run]
    return manifest.listed(run / "checkpoints") or manifest.listed(run)
