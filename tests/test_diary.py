"""The diary: whole lines whatever happens to the process, the disk or the threads around it."""

from __future__ import annotations

import errno
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from colabtrain.runtime import diary as diary_module
from colabtrain.runtime.diary import DIARY_FILE, LOG_FILE, Diary, Event, Tail, current, history


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict_lines(path: Path) -> list[Event]:
    """Every line of the file as strict JSON (no NaN, no infinity); the file ends with a whole line."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line, parse_constant=refuse_constant) for line in data.splitlines()]


def step_event(step: int, loss: float) -> Event:
    return {"time": 0.0, "event": "step", "step": step, "loss": {"full": loss}}


class FailingDisk:
    """Path.open for appending, that fails while `full`; it can write a part of the line before it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: int = 0) -> None:
        self.full, self.refused = True, 0
        real_open = Path.open
        disk = self

        def open_(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not (disk.full and mode.startswith("a")):
                return real_open(path, mode, *args, **kwargs)
            disk.refused += 1
            if not part:
                raise OSError(errno.ENOSPC, "No space left on device")
            return TornFile(real_open(path, "ab", buffering=0), part)

        monkeypatch.setattr(Path, "open", open_)


class TornFile:
    def __init__(self, file: Any, part: int) -> None:
        self.file, self.part = file, part

    def __enter__(self) -> TornFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        self.file.write(data[: self.part])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_write_appends_one_json_line_with_time_and_event(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "a" / "run", clock=lambda: 1234.5)
    diary.write("step", step=1, loss={"full": 0.1 + 0.2, "fast": 1})
    diary.log("two\nlines")
    events = strict_lines(diary.path)
    assert events == [
        {"time": 1234.5, "event": "step", "step": 1, "loss": {"full": 0.30000000000000004, "fast": 1}},
        {"time": 1234.5, "event": "log", "text": "two\nlines"},
    ]
    log = (tmp_path / "a" / "run" / LOG_FILE).read_text().splitlines()
    assert [line[20:] for line in log] == ["two", "lines"], "machines' events leave no line in the log"
    assert diary.size() == diary.path.stat().st_size


def test_size_of_a_diary_without_lines_is_zero(tmp_path: Path) -> None:
    assert Diary(tmp_path).size() == 0


def test_existing_lines_are_never_rewritten(tmp_path: Path) -> None:
    Diary(tmp_path).write("first")
    before = (tmp_path / DIARY_FILE).read_bytes()
    again = Diary(tmp_path)
    again.write("second")
    assert again.path.read_bytes().startswith(before)
    assert [event["event"] for event in strict_lines(again.path)] == ["first", "second"]


@pytest.mark.parametrize("torn", [b'{"time": 1, "eve', b"{", b'"', b"\xc3"])
def test_torn_last_line_costs_only_itself(tmp_path: Path, torn: bytes) -> None:
    Diary(tmp_path).write("first", "hello")
    for name in (DIARY_FILE, LOG_FILE):
        with (tmp_path / name).open("ab") as file:
            file.write(torn)
    diary = Diary(tmp_path)
    diary.write("second", "world")
    assert [event["event"] for event in Tail(diary.path).new()] == ["first", "second"]
    log = (tmp_path / LOG_FILE).read_bytes().splitlines()
    assert len(log) == 3 and log[0].endswith(b"hello") and log[1] == torn and log[2].endswith(b"world")


def test_tail_reads_whole_lines_only_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / DIARY_FILE
    tail = Tail(path)
    assert tail.new() == [], "no file yet"
    lines = b"".join(json.dumps({"event": "step", "step": i, "text": "\u00e9"}, ensure_ascii=False).encode() + b"\n" for i in range(3))
    seen: list[int] = []
    for i in range(len(lines)):
        with path.open("ab") as file:
            file.write(lines[i : i + 1])
        seen.extend(event["step"] for event in tail.new())
        assert len(seen) == lines[: i + 1].count(b"\n")
    assert seen == [0, 1, 2] and tail.new() == []


def test_tail_does_not_read_again_what_it_has_read(tmp_path: Path) -> None:
    path = tmp_path / DIARY_FILE
    path.write_bytes(b'{"event": "a"}\n{"event": "b"}\n')
    tail = Tail(path)
    assert len(tail.new()) == 2
    path.write_bytes(b"x" * path.stat().st_size + b'{"event": "c"}\n')  # only a reader by offset is blind to the change before
    assert [event["event"] for event in tail.new()] == ["c"]


@pytest.mark.parametrize("line", [b"[1, 2]", b'"text"', b"12", b"null", b'{"no": "event"}', b"\xff\xfe", b"", b"{} {}"])
def test_tail_skips_lines_that_are_no_event(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / DIARY_FILE
    path.write_bytes(b'{"event": "a"}\n' + line + b'\n{"event": "b"}\n')
    assert [event["event"] for event in Tail(path).new()] == ["a", "b"]


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    diary = Diary(tmp_path, clock=lambda: 1.0)
    diary.write("step", loss={"full": math.nan, 3: [math.inf, (-math.inf, 1.5)]}, grad_norm=-math.inf, step=2, ok=True, none=None)
    assert strict_lines(diary.path) == [
        {
            "time": 1.0,
            "event": "step",
            "loss": {"full": None, "3": [None, [None, 1.5]]},
            "grad_norm": None,
            "step": 2,
            "ok": True,
            "none": None,
        }
    ]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 123456789.12345679])
def test_floats_are_written_in_full(tmp_path: Path, value: float) -> None:
    diary = Diary(tmp_path)
    diary.write("step", loss=value)
    (event,) = Tail(diary.path).new()
    assert event["loss"] == value and math.copysign(1, event["loss"]) == math.copysign(1, value)


@pytest.mark.parametrize(
    "text", ["caf\u00e9 \u4e2d\u6587", "a\u2028b", 'tab\tquote"back\\slash', "\x00\x1b[31m", "surrogate \udcff escape"]
)
def test_any_text_can_be_written_and_does_not_block_later_lines(tmp_path: Path, text: str) -> None:
    diary = Diary(tmp_path)
    diary.log(text)
    diary.log("after")
    assert [event["text"] for event in Tail(diary.path).new()] == [text, "after"]
    assert (tmp_path / LOG_FILE).read_bytes().endswith(b" after\n")


def test_full_disk_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Diary(tmp_path)
    diary.write("before", "before")
    disk = FailingDisk(monkeypatch)
    for i in range(20):
        diary.write("step", f"step {i}", step=i)
    assert [event["event"] for event in strict_lines(diary.path)] == ["before"]
    assert disk.refused >= 20, "each write tried again"
    disk.full = False
    diary.write("after", "after")
    events = strict_lines(diary.path)
    assert [event["event"] for event in events] == ["before"] + ["step"] * 20 + ["after"]
    assert [event["step"] for event in events[1:-1]] == list(range(20))
    log = (tmp_path / LOG_FILE).read_text().splitlines()
    assert [line[20:] for line in log] == ["before", *(f"step {i}" for i in range(20)), "after"]


@pytest.mark.parametrize("part", [1, 10, 1000])
def test_disk_that_fills_up_within_a_line_loses_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """A short write leaves a part of the line in the file; the retry must not be glued to it."""
    diary = Diary(tmp_path)
    diary.write("before")
    disk = FailingDisk(monkeypatch, part)
    diary.write("step", step=1)
    diary.write("step", step=2)
    disk.full = False
    diary.write("step", step=3)
    steps = [event.get("step") for event in Tail(diary.path).new()]
    assert list(dict.fromkeys(steps)) == [None, 1, 2, 3]


def test_lines_kept_in_memory_are_bounded_and_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diary_module, "MAX_UNWRITTEN", 5)
    diary = Diary(tmp_path)
    disk = FailingDisk(monkeypatch)
    for i in range(12):
        diary.write("step", step=i)
    disk.full = False
    diary.write("step", step=12)
    written = strict_lines(diary.path)
    steps = [event["step"] for event in written if event["event"] == "step"]
    assert steps == list(range(13))[-len(steps) :] and 5 <= len(steps) <= 6
    assert written[-1]["event"] == "lines_lost" and f"{13 - len(steps)} lines of this log are lost" in written[-1]["text"]
    diary.write("step", step=13)
    assert len(strict_lines(diary.path)) == len(written) + 1, "it is said once"


def test_writing_from_many_threads_gives_whole_lines(tmp_path: Path) -> None:
    diary = Diary(tmp_path)
    start = threading.Barrier(8)

    def work(worker: int) -> None:
        start.wait()
        for i in range(50):
            diary.write("step", f"{worker}/{i}", worker=worker, step=i, padding="x" * (i * 40))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = strict_lines(diary.path)
    assert len(events) == 400
    for worker in range(8):
        assert [event["step"] for event in events if event["worker"] == worker] == list(range(50))
    log = (tmp_path / LOG_FILE).read_text().splitlines()
    assert sorted(line[20:] for line in log) == sorted(f"{worker}/{i}" for worker in range(8) for i in range(50))


def test_history_is_columns_with_nested_names() -> None:
    events: list[Event] = [
        {"time": 1.0, "event": "run_started", "text": "go"},
        {
            "time": 2.0,
            "event": "step",
            "step": 1,
            "loss": {"full": 0.5},
            "parts": {"full": {"log": 0.25}},
            "lr": {"lora": 1e-3},
            "text": "x",
        },
        {"time": 3.0, "event": "step", "step": 2, "loss": {"full": 0.4, "fast": 0.6}},
    ]
    assert history(events) == {
        "time": [2.0, 3.0],
        "step": [1, 2],
        "loss/full": [0.5, 0.4],
        "parts/full/log": [0.25, None],
        "lr/lora": [1e-3, None],
        "loss/fast": [None, 0.6],
    }
    assert history([]) == {}


def test_history_drops_steps_beyond_a_resume() -> None:
    events = [step_event(i, 1.0) for i in range(1, 6)]
    events += [{"time": 0.0, "event": "evaluation", "step": 3}, {"time": 0.0, "event": "evaluation", "step": 5}]
    events += [{"time": 0.0, "event": "oom", "step": 5}, {"time": 0.0, "event": "resumed", "step": 3}]
    events += [step_event(i, 2.0) for i in range(4, 7)]
    assert history(events)["step"] == [1, 2, 3, 4, 5, 6]
    assert history(events)["loss/full"] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    kept = [(event["event"], event.get("step")) for event in current(events) if event["event"] != "step"]
    assert kept == [("evaluation", 3), ("oom", 5), ("resumed", 3)]


def test_history_after_resumes_one_behind_the_other() -> None:
    events: list[Event] = []
    for start, stop, loss in ((0, 10, 1.0), (6, 9, 2.0), (2, 4, 3.0), (0, 1, 4.0)):
        events.append({"time": 0.0, "event": "resumed", "step": start})
        events += [step_event(i, loss) for i in range(start + 1, stop + 1)]
    assert history(events[:-2])["loss/full"] == [1.0, 1.0, 3.0, 3.0]
    assert history(events)["step"] == [1] and history(events)["loss/full"] == [4.0], "a fresh start drops all"
