"""colabtrain/latest.json: who owns a repo and which checkpoint is the newest. Every commit changes it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LATEST = "colabtrain/latest.json"
FOLDER = "ckpt"
CHECKPOINT = re.compile(rf"{FOLDER}/\d{{6,}}-[0-9a-f]+")
FORMAT = 1


@dataclass(frozen=True)
class Pointer:
    """writer: the session that owns the repo, "" if none has. claim: number of sessions so far. seq: number of checkpoints published
    so far. checkpoint: folder of the newest one, of step `step`, "" if there is none. keep: the ones before it, oldest first. time:
    epoch seconds of the commit. created: the repo is colabtrain's own, so that its history may be squashed."""

    writer: str = ""
    claim: int = 0
    seq: int = 0
    step: int = 0
    checkpoint: str = ""
    keep: tuple[str, ...] = ()
    time: float = 0.0
    host: str = ""
    created: bool = False

    def claimed(self, writer: str, host: str, fallback: tuple[str, int] | None) -> Pointer:
        """The same repo in the hands of a new session. fallback: checkpoint and step that it goes on from, where that is not
        the newest one, which cannot be used."""
        mine = dataclasses.replace(self, writer=writer, claim=self.claim + 1, host=host, time=time.time())
        if fallback is None or fallback[0] not in self.keep:
            return mine
        path, step = fallback
        return dataclasses.replace(mine, checkpoint=path, step=step, keep=self.keep[: self.keep.index(path)])

    def published(self, step: int, nonce: str, keep: int) -> Pointer:
        """After one more checkpoint, `keep` of them kept in all."""
        alive = (*self.keep, self.checkpoint) if self.checkpoint else self.keep
        seq = self.seq + 1
        kept = alive[len(alive) - (keep - 1) :] if len(alive) >= keep else alive
        return dataclasses.replace(self, seq=seq, step=step, checkpoint=f"{FOLDER}/{seq:06d}-{nonce}", keep=kept, time=time.time())

    def candidates(self) -> list[str]:
        """What to go on from, the best first."""
        return [path for path in (self.checkpoint, *reversed(self.keep)) if path]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self), "keep": list(self.keep)}

    @classmethod
    def from_json(cls, given: Any) -> Pointer:
        """Raises ValueError where `given` is no pointer, with what is wrong."""
        if not isinstance(given, Mapping) or given.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        kinds: dict[str, Any] = {"writer": str, "claim": int, "seq": int, "step": int, "checkpoint": str, "keep": list}
        kinds |= {"time": (int, float), "host": str, "created": bool}
        for name, kind in kinds.items():
            if not isinstance(given.get(name), kind):
                raise ValueError(f"{name} is {given.get(name)!r}")
        paths = [path for path in (given["checkpoint"], *given["keep"]) if path != ""]
        if bad := [path for path in paths if not (isinstance(path, str) and CHECKPOINT.fullmatch(path))]:
            raise ValueError(f"{bad[0]!r} is no checkpoint's folder")
        values: dict[str, Any] = {name: given[name] for name in kinds}
        values["keep"] = tuple(given["keep"])
        return cls(**values)
