"""The diary: an append-only event log on disk, and the only channel from training to any view.

`<run>/diary.jsonl` holds one JSON object a line; `<run>/train.log` holds the lines meant for people. Both are written
by `Diary.write`, flushed line by line, never rewritten. Readers go by byte offset, so looking costs what is new, not
what is there. Writing never stops training: lines that a full disk refuses are kept and written with a later one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DIARY_FILE, LOG_FILE = "diary.jsonl", "train.log"
MAX_UNWRITTEN = 10_000  # lines kept in memory while the disk refuses them

Event = dict[str, Any]


class Diary:
    """Writer of one run's diary; safe to use from any thread."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.path, self._clock = folder, folder / DIARY_FILE, clock
        self._lock = threading.Lock()
        self._unwritten: list[tuple[Path, str]] = []
        self._refused: OSError | None = None
        self._num_lost = 0
        self._size = dict[Path, int]()  # of each file, up to its last whole line
        folder.mkdir(parents=True, exist_ok=True)
        for path in (self.path, folder / LOG_FILE):
            _end_torn_line(path)

    def write(self, event: str, text: str | None = None, **fields: Any) -> None:
        """Append one event. text: what people read of it, in the log and in views; without it only machines do."""
        now = self._clock()
        entry = {"event": event, **fields, **({} if text is None else {"text": text})}
        with self._lock:
            self._append(now, entry)
            self._flush()

    def _append(self, now: float, entry: Event) -> None:
        self._unwritten.append((self.path, json.dumps(_plain({"time": now, **entry}), allow_nan=False)))
        for line in entry.get("text", "").splitlines():
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            self._unwritten.append((self.folder / LOG_FILE, f"{stamp} {line}"))

    def log(self, text: str) -> None:
        self.write("log", text)

    def adopt(self, other: Path, text: str) -> None:
        """Append the events of another diary: what came before them here is not part of their history. Raises OSError."""
        self.write("resumed", text, step=0)  # readers drop the steps from before
        size = self.size()
        try:
            with self._lock, other.open("rb") as source, self.path.open("ab") as target:
                shutil.copyfileobj(source, target)
        except OSError:
            os.truncate(self.path, size)
            raise
        _end_torn_line(self.path)
        self.write("adopted")  # what had failed there has not failed here

    def size(self) -> int:
        """Bytes of diary.jsonl: what a checkpoint made now takes along. Raises OSError while the disk refuses lines of it."""
        with self._lock:
            self._flush()
            if self._refused is not None:
                raise OSError(*self._refused.args)  # a new one: its traceback holds the frames of the save
            return self.path.stat().st_size if self.path.exists() else 0

    def _flush(self) -> None:
        while self._unwritten:
            path, line = self._unwritten[0]
            try:
                if self._refused is not None:
                    _cut_off(path, self._size.get(path))  # the disk may have taken part of the line, or all of it
                data = line.encode(errors="backslashreplace") + b"\n"
                with path.open("ab") as file:
                    self._size[path] = file.tell()
                    file.write(data)
                self._size[path] += len(data)
                self._refused = None
            except OSError as error:
                self._refused = error.with_traceback(None)
                too_many = max(0, len(self._unwritten) - MAX_UNWRITTEN)
                del self._unwritten[:too_many]
                self._num_lost += too_many
                return
            del self._unwritten[0]
            if self._num_lost and not self._unwritten:
                self._num_lost, text = 0, f"the disk was away for so long that {self._num_lost:,} lines of this log are lost"
                self._append(self._clock(), {"event": "lines_lost", "text": text})


def _cut_off(path: Path, size: int | None) -> None:
    """Take from the file what lies beyond `size`, if that is known."""
    if size is not None and path.exists() and path.stat().st_size > size:
        os.truncate(path, size)


def _end_torn_line(path: Path) -> None:
    """A process that died in the middle of a line left it unfinished; the next one must not be glued to it."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _plain(value: Any) -> Any:
    """What JSON can hold: NaN and infinity become null, numbers of numpy and torch plain ones, all else its text."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class Tail:
    """Reader of a growing diary. Each call of new() gives the events since the last one."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0

    def new(self) -> list[Event]:
        """Whole lines only; a line that is not a JSON object (torn by a crash) is skipped."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [event for line in data[:end].splitlines() if (event := _parse(line)) is not None]


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def current(events: Iterable[Event]) -> list[Event]:
    """`events` without the steps and evaluations that a resume went back behind."""
    kept: list[Event] = []
    for event in events:
        if event["event"] == "resumed":
            kept = [old for old in kept if old["event"] not in ("step", "evaluation") or old["step"] <= event["step"]]
        kept.append(event)
    return kept


def history(events: Iterable[Event]) -> dict[str, list[Any]]:
    """Columns over the steps: step, epoch, seconds, ..., and `loss/full`, `parts/full/log`, `lr/lora` for nested ones."""
    rows = [_flat(event) for event in current(events) if event["event"] == "step"]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names if name not in ("event", "text")}


def _flat(value: Event, prefix: str = "") -> Event:
    flat: Event = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}{key}/") if isinstance(item, dict) else {prefix + key: item}
    return flat


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s` or `2 h 07 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
