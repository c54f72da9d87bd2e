"""The background run: state machine, controls, failure, checkpoints and resume, with a toy Task."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Halt, all_written, events
from toy_task import ToyTask

import colabtrain
from colabtrain.runtime import checkpoint, keeper, manifest, resume
from colabtrain.runtime.diary import Diary
from colabtrain.runtime.lock import AlreadyRunning
from colabtrain.runtime.recorder import Recorder
from colabtrain.runtime.run import Run, RunFailed
from colabtrain.task import StepReport

pytestmark = pytest.mark.colab

SECONDS = 30.0  # far more than anything here takes; a wait that long is a failure


def start(task: ToyTask, folder: Path, **options: Any) -> Run:
    return colabtrain.start(task=task, run_dir=folder, display=False, **options)


def until(condition: Callable[[], bool], run: Run) -> None:
    """Wait for a state that the worker reaches by itself; the run's own end bounds the wait."""
    for _ in range(int(SECONDS / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"not reached; the run is {run!r}")


def test_a_run_trains_in_the_background_and_finishes(tmp_path: Path) -> None:
    halt = Halt(3)
    task = ToyTask(10, halt)
    run = start(task, tmp_path)
    assert halt.reached.wait(SECONDS)
    assert (run.state, run.step, run.num_steps) == ("running", 3, 10)
    assert {"colabtrain-train"} <= {thread.name for thread in threading.enumerate() if thread.daemon}
    halt.go.set()
    assert run.wait(SECONDS) == "finished" and run.step == 10
    assert [event["step"] for event in events(tmp_path, "step")] == list(range(1, 11))
    assert events(tmp_path)[-1]["event"] == "finished"
    history = run.history()
    assert history["step"] == list(range(1, 11)) and len(history["loss/toy"]) == 10 and history["lr/all"] == [0.1] * 10
    assert "step 10/10: loss toy" in (tmp_path / "train.log").read_text()


def test_grad_mode_of_the_calling_cell_does_not_matter(tmp_path: Path) -> None:
    task = ToyTask(2)
    with torch.no_grad():
        run = start(task, tmp_path)
        assert run.wait(SECONDS) == "finished"
    assert task.grad_enabled is True


def test_pause_and_resume_are_idempotent(tmp_path: Path) -> None:
    halt = Halt(2)
    run = start(ToyTask(6, halt), tmp_path)
    assert halt.reached.wait(SECONDS)
    for _ in range(3):
        run.pause()
    halt.go.set()
    until(lambda: run.state == "paused", run)
    assert run.step == 3 and run.wait(0.3) == "paused" and run.step == 3
    for _ in range(3):
        run.resume()
    assert run.wait(SECONDS) == "finished"
    names = [event["event"] for event in events(tmp_path)]
    assert names.count("paused") == 1 and names.count("resumed") == 2  # one is the fresh start
    assert [event["step"] for event in events(tmp_path, "step")] == list(range(1, 7))


def test_controls_from_many_threads_at_once(tmp_path: Path) -> None:
    halt = Halt(2)
    run = start(ToyTask(1000, halt), tmp_path)
    assert halt.reached.wait(SECONDS)
    threads = [threading.Thread(target=run.stop, kwargs={"wait": False}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    halt.go.set()
    assert run.wait(SECONDS) == "stopped" and run.step == 3


def test_stop_while_paused(tmp_path: Path) -> None:
    halt = Halt(1)
    run = start(ToyTask(5, halt), tmp_path)
    assert halt.reached.wait(SECONDS)
    run.pause()
    halt.go.set()
    until(lambda: run.state == "paused", run)
    assert run.stop(timeout=SECONDS) == "stopped"


def test_stop_and_pause_files_do_the_same(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()  # a stale one must not end the new run
    halt = Halt(2)
    run = start(ToyTask(1000, halt), tmp_path)
    assert halt.reached.wait(SECONDS)
    (tmp_path / "PAUSE").touch()
    halt.go.set()
    until(lambda: run.state == "paused", run)
    (tmp_path / "PAUSE").unlink()
    until(lambda: run.state == "running", run)
    (tmp_path / "STOP").touch()
    assert run.wait(SECONDS) == "stopped" and not (tmp_path / "STOP").exists()
    assert any("removed a file STOP" in event.get("text", "") for event in events(tmp_path))


def test_a_failure_is_kept_shown_and_raised_by_wait(tmp_path: Path) -> None:
    def fail(i: int) -> None:
        if i == 7:
            raise KeyError("the seventh")

    run = start(ToyTask(10, fail), tmp_path)
    with pytest.raises(RunFailed, match="KeyError: 'the seventh'"):
        run.wait(SECONDS)
    assert run.state == "failed" and run.step == 7
    assert run.exception_text is not None and "before_step" in run.exception_text
    failed = events(tmp_path)[-1]
    assert (failed["event"], failed["error"], failed["message"], failed["step"]) == ("failed", "KeyError", "'the seventh'", 7)
    assert "Traceback" in failed["traceback"]
    assert "KeyError: 'the seventh'" in (tmp_path / "train.log").read_text()
    assert run.stop() == "failed"  # a failed run never says stopped or finished


def test_nothing_of_a_failed_step_stays_alive(tmp_path: Path) -> None:
    import gc
    import weakref

    held: list[weakref.ref[torch.Tensor]] = []

    def fail(i: int) -> None:
        large = torch.zeros(10)
        held.append(weakref.ref(large))
        try:
            raise ValueError("first")
        except ValueError as error:
            raise RuntimeError("second") from error

    run = start(ToyTask(3, fail), tmp_path)
    with pytest.raises(RunFailed):
        run.wait(SECONDS)
    gc.collect()
    assert held and held[0]() is None


def test_a_folder_has_one_live_run_and_is_free_after_it(tmp_path: Path) -> None:
    halt = Halt(1)
    run = start(ToyTask(5, halt), tmp_path)
    assert halt.reached.wait(SECONDS)
    with pytest.raises(AlreadyRunning, match="stop it"):
        start(ToyTask(5), tmp_path)
    halt.go.set()
    assert run.wait(SECONDS) == "finished"
    assert start(ToyTask(6), tmp_path).wait(SECONDS) == "finished"


def test_a_task_or_model_has_one_live_run(tmp_path: Path) -> None:
    halt = Halt(1)
    task = ToyTask(5, halt)
    run = start(task, tmp_path / "a")
    assert halt.reached.wait(SECONDS)
    with pytest.raises(AlreadyRunning, match=r"<colabtrain run .*a.: running, step 1 of 5> is alive and has this model"):
        start(task, tmp_path / "b")
    halt.go.set()
    assert run.wait(SECONDS) == "finished"
    assert start(task, tmp_path / "b").wait(SECONDS) == "finished"


def test_an_ended_run_keeps_no_task_in_memory(tmp_path: Path) -> None:
    import gc
    import weakref

    run = start(ToyTask(2), tmp_path)
    assert run.wait(SECONDS) == "finished"
    task = weakref.ref(run._task)
    del run
    gc.collect()
    assert task() is None


def test_a_step_that_stops_its_own_run_does_not_wait_for_itself(tmp_path: Path) -> None:
    runs: list[Run] = []
    known = threading.Event()

    def stop(i: int) -> None:
        if i == 2:
            assert known.wait(SECONDS)
            runs[0].stop(timeout=SECONDS)

    runs.append(start(ToyTask(5, stop), tmp_path))
    known.set()
    assert runs[0].wait(SECONDS) == "stopped" and runs[0].step == 3


def test_an_error_that_cannot_be_printed_still_ends_the_run(tmp_path: Path) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def fail(i: int) -> None:
        raise Mute

    run = start(ToyTask(3, fail), tmp_path)
    with pytest.raises(RunFailed, match="Mute"):
        run.wait(SECONDS)
    assert events(tmp_path)[-1]["error"] == "Mute"


# Checkpoints


def test_checkpoints_by_steps_on_stop_and_at_the_end(tmp_path: Path) -> None:
    halt = Halt(8)

    def before_step(i: int) -> None:
        all_written()
        halt(i)

    run = start(ToyTask(12, before_step), tmp_path, checkpoint_every=3, keep_local=2)
    assert halt.reached.wait(SECONDS)
    assert [path.name for path in manifest.listed(tmp_path / "checkpoints")] == ["step-00000006", "step-00000003"]
    run.stop(wait=False)
    halt.go.set()
    assert run.wait(SECONDS) == "stopped"
    assert [path.name for path in manifest.listed(tmp_path / "checkpoints")] == ["step-00000009", "step-00000006"]
    assert start(ToyTask(12), tmp_path).wait(SECONDS) == "finished"
    assert manifest.listed(tmp_path / "checkpoints")[0].name == "step-00000012"


def test_checkpoints_by_time_the_first_one_early(tmp_path: Path) -> None:
    assert start(ToyTask(5, all_written), tmp_path / "a", first_checkpoint_seconds=0.0).wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path / "a", "checkpoint_saved")] == [1, 5]
    options = {"first_checkpoint_seconds": 0.0, "checkpoint_seconds": 0.0}
    assert start(ToyTask(5, all_written), tmp_path / "b", **options).wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path / "b", "checkpoint_saved")] == [1, 2, 3, 4, 5]


def stopped_at(step: int, folder: Path, num_steps: int) -> None:
    halt = Halt(step - 1)
    run = start(ToyTask(num_steps, halt), folder)
    assert halt.reached.wait(SECONDS)
    run.stop(wait=False)
    halt.go.set()
    assert run.wait(SECONDS) == "stopped" and run.step == step


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"]["toy"] for event in events(folder, "step")}


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    """The toy's noise comes from the global generator, so this holds only if its state is saved and restored."""
    torch.manual_seed(5)
    start(ToyTask(20), tmp_path / "whole").wait(SECONDS)
    torch.manual_seed(5)
    stopped_at(7, tmp_path / "cut", 20)
    torch.manual_seed(99)
    resumed = start(ToyTask(20), tmp_path / "cut")
    assert resumed.wait(SECONDS) == "finished"
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    whole, cut = (json.loads((tmp_path / name / "checkpoints/step-00000020/manifest.json").read_text()) for name in ("whole", "cut"))
    hashes = [[entry["sha256"] for entry in found["files"] if entry["name"].endswith(".safetensors")] for found in (whole, cut)]
    assert hashes[0] == hashes[1]
    assert events(tmp_path / "whole", "step")[-1]["ema"] == events(tmp_path / "cut", "step")[-1]["ema"]
    line = next(event["text"] for event in events(tmp_path / "cut", "resumed") if event["step"] == 7)
    assert line.startswith("resumed from step 7 of checkpoint")


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    start(ToyTask(4), tmp_path).wait(SECONDS)
    again = start(ToyTask(4), tmp_path)
    assert again.wait(SECONDS) == "finished" and again.step == 4
    assert any("nothing to train" in event.get("text", "") for event in events(tmp_path))
    more = start(ToyTask(6), tmp_path)
    assert more.wait(SECONDS) == "finished"
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_resume_of_another_experiment_is_refused_with_the_differences(tmp_path: Path) -> None:
    start(ToyTask(3), tmp_path).wait(SECONDS)
    with pytest.raises(RunFailed, match="mark: checkpoint 'a', now 'b'"):
        start(ToyTask(5, mark="b"), tmp_path).wait(SECONDS)
    with pytest.raises(ValueError, match="resume=False, but"):
        start(ToyTask(5), tmp_path, resume=False)
    assert start(ToyTask(3), tmp_path).wait(SECONDS) == "finished"


def test_a_broken_newest_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    start(ToyTask(4, all_written), tmp_path, checkpoint_every=2).wait(SECONDS)
    whole = losses(tmp_path)
    (tmp_path / "checkpoints/step-00000004/optimizer.safetensors").write_bytes(b"")
    assert start(ToyTask(4), tmp_path).wait(SECONDS) == "finished"
    rejected = events(tmp_path, "checkpoint_rejected")
    assert [event["name"] for event in rejected] == ["step-00000004"] and "optimizer.safetensors has 0 bytes" in rejected[0]["reason"]
    assert losses(tmp_path) == whole
    assert checkpoint.read(tmp_path / "checkpoints/step-00000004").step == 4  # written anew over the broken one


def test_only_broken_checkpoints_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    start(ToyTask(2), tmp_path).wait(SECONDS)
    (tmp_path / "checkpoints/step-00000002/manifest.json").write_text("{")
    with pytest.raises(RunFailed, match=r"no checkpoint in .* can be used"):
        start(ToyTask(2), tmp_path).wait(SECONDS)


def test_a_full_disk_is_said_and_retried_and_never_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = checkpoint.save_file, [2]

    def save_file(*arguments: Any) -> None:
        if failures[0]:
            failures[0] -= 1
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    assert start(ToyTask(9, all_written), tmp_path, checkpoint_every=3).wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "checkpoint_failed")] == [3, 6]
    assert [event["step"] for event in events(tmp_path, "checkpoint_saved")] == [9]
    assert not list((tmp_path / "checkpoints").glob(".staging-*"))


def test_a_folder_that_came_without_its_diary_gets_the_checkpoints_history(tmp_path: Path) -> None:
    start(ToyTask(4), tmp_path).wait(SECONDS)
    whole = losses(tmp_path)
    for name in ("diary.jsonl", "train.log"):
        (tmp_path / name).unlink()
    run = start(ToyTask(6), tmp_path)
    assert run.wait(SECONDS) == "finished"
    assert run.history()["step"] == [1, 2, 3, 4, 5, 6] and {step: losses(tmp_path)[step] for step in whole} == whole


def test_an_exit_of_the_interpreter_saves_and_does_not_hang(tmp_path: Path) -> None:
    """With the tiny model, whose steps are in C++ when the interpreter ends."""
    code = (
        "import sys, colabtrain; from colabtrain.mmjev.demo_data import help_desk;"
        "run = colabtrain.start(colabtrain.MMJev.tiny(0), help_desk(40), run_dir=sys.argv[1], steps=10**6)\n"
        "while run.step < 2: run.wait(0.05)\n"
        "print('ending')"
    )
    root = Path(colabtrain.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=3 * SECONDS, check=False, cwd=root
    )
    assert (done.returncode, done.stdout) == (0, "ending\n"), done.stderr
    assert events(tmp_path)[-1]["event"] == "stopped" and manifest.listed(tmp_path / "checkpoints")


# What used to cost a run


def test_a_change_of_the_working_directory_does_not_move_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    halt = Halt(2)
    run = start(ToyTask(4, halt), Path("runs/here"))
    assert halt.reached.wait(SECONDS)
    monkeypatch.chdir(tmp_path / "elsewhere")
    halt.go.set()
    assert run.wait(SECONDS) == "finished"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert [event["step"] for event in events(tmp_path / "runs/here", "step")] == [1, 2, 3, 4]
    assert manifest.listed(tmp_path / "runs/here/checkpoints")[0].name == "step-00000004"


class Measured(ToyTask):
    """A Task whose evaluation is whatever the test says."""

    def __init__(self, num_steps: int, result: Callable[[], dict[str, Any]]) -> None:
        super().__init__(num_steps)
        self.evaluate = result


def test_an_evaluation_that_fails_costs_nothing(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise KeyError("no such metric")

    assert start(Measured(4, fail), tmp_path, eval_every=2).wait(SECONDS) == "finished"
    failed = events(tmp_path, "evaluation_failed")
    assert [event["step"] for event in failed] == [2, 4] and "no such metric" in failed[0]["text"]
    assert manifest.listed(tmp_path / "checkpoints")[0].name == "step-00000004"


def test_an_evaluation_may_hold_numbers_of_numpy_and_torch(tmp_path: Path) -> None:
    import numpy

    result = {"score": numpy.float32(0.5), "n": numpy.int64(3), "loss": torch.tensor(2.0), "path": Path("a"), "text": "fine"}
    assert start(Measured(2, lambda: dict(result)), tmp_path).wait(SECONDS) == "finished"
    (event,) = events(tmp_path, "evaluation")
    assert (event["score"], event["n"], event["loss"], event["path"]) == (0.5, 3, 2.0, "a")
    assert event["text"] == "evaluation at step 2: fine"


def test_the_last_save_comes_before_the_evaluation(tmp_path: Path) -> None:
    saved: list[str] = []

    def look() -> dict[str, Any]:
        saved.extend(path.name for path in manifest.listed(tmp_path / "checkpoints"))
        return {}

    assert start(Measured(3, look), tmp_path).wait(SECONDS) == "finished"
    assert saved == ["step-00000003"]


def test_a_run_whose_end_cannot_be_saved_is_not_called_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "RETRY_SECONDS", 0.0)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    assert start(ToyTask(3), tmp_path).wait(SECONDS) == "finished"
    monkeypatch.setattr(checkpoint, "save_file", full)
    run = start(ToyTask(6), tmp_path)
    with pytest.raises(RunFailed, match=r"step 6 could not be saved; the newest checkpoint is of step 3"):
        run.wait(SECONDS)
    assert run.saved_step == 3 and len(events(tmp_path, "checkpoint_failed")) == 3
    monkeypatch.undo()
    assert start(ToyTask(6), tmp_path).wait(SECONDS) == "finished"


def test_a_drive_that_drops_out_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.exists

    def exists(self: Path, **options: Any) -> bool:
        if self.name in ("STOP", "PAUSE"):
            raise OSError(107, "Transport endpoint is not connected")
        return real(self, **options)

    halt = Halt(2)
    run = start(ToyTask(5, halt), tmp_path)
    assert halt.reached.wait(SECONDS)
    monkeypatch.setattr(Path, "exists", exists)
    halt.go.set()
    assert run.wait(SECONDS) == "finished"


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def flock(*arguments: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert start(ToyTask(2), tmp_path).wait(SECONDS) == "finished"
    assert any("has no locks" in event["text"] for event in events(tmp_path, "log"))


@pytest.mark.parametrize("part", ["a missing tensor", "a weight that is not finite", "no totals"])
def test_a_checkpoint_with_right_hashes_and_wrong_content_gives_way(part: str, tmp_path: Path) -> None:
    start(ToyTask(4, all_written), tmp_path, checkpoint_every=2).wait(SECONDS)
    whole, newest = losses(tmp_path), tmp_path / "checkpoints/step-00000004"
    if part == "no totals":
        state = json.loads((newest / "state.json").read_text())
        del state["totals"]
        (newest / "state.json").write_text(json.dumps(state))
    else:
        wrong = {"other": torch.zeros(3)} if part == "a missing tensor" else {"weight": torch.tensor([1.0, float("nan"), 2.0])}
        checkpoint.save_file(wrong, newest / "trainable.safetensors")
    manifest = json.loads((newest / "manifest.json").read_text())
    for entry in manifest["files"]:
        content = (newest / entry["name"]).read_bytes()
        entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert start(ToyTask(4), tmp_path).wait(SECONDS) == "finished"
    assert [event["name"] for event in events(tmp_path, "checkpoint_rejected")] == ["step-00000004"]
    assert losses(tmp_path) == whole and checkpoint.read(newest).step == 4


def test_too_many_steps_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    recorder = Recorder(Diary(tmp_path), 50, 200)
    bad = StepReport(loss={"a": float("nan")}, skipped=True)
    recorder.add(1, StepReport(loss={"a": 2.0}), 0.1)
    for i in range(2, 22):
        recorder.add(i, bad, 0.1)
    with pytest.raises(FloatingPointError, match=r"21 steps in a row .* the weights are those of step 1"):
        recorder.add(22, bad, 0.1)
    assert recorder.totals["skipped"] == 21 and recorder.totals["ema"] == {"a": 2.0}
    assert "step 2/200 skipped" in events(tmp_path, "step")[1]["text"]
    resumed = Recorder(Diary(tmp_path), 50, 200)
    resumed.totals |= {**recorder.totals, "skipped_in_a_row": 20}
    with pytest.raises(FloatingPointError, match="21 steps in a row"):
        resumed.add(22, bad, 0.1)


def test_more_steps_than_before_are_said(tmp_path: Path) -> None:
    start(ToyTask(2), tmp_path).wait(SECONDS)
    start(ToyTask(4), tmp_path).wait(SECONDS)
    assert any("the run has 4 steps now, 2 before" in event["text"] for event in events(tmp_path, "log"))


# start() itself


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "start() needs jev"),
        ({"jev": object()}, "start() needs data"),
        ({"task": ToyTask(1), "data": []}, "task= is given together with"),
        ({"task": ToyTask(1), "batchsize": 3}, "did you mean batch_size"),
        ({"task": ToyTask(1), "batch_size": 3}, "batch_size=3 is given together with task="),
        ({"jev": object(), "data": []}, "jev is a object without base, lm, heads"),
        ({"task": ToyTask(1), "steps": 3, "epochs": 1}, "contradict"),
        ({"task": ToyTask(1), "config": 3}, "config=3"),
    ],
)
def test_wrong_calls_are_refused_before_anything_starts(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(), pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        colabtrain.start(**arguments, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Averages


def test_the_moving_average_starts_as_a_mean_and_skips_what_is_not_finite(tmp_path: Path) -> None:
    recorder = Recorder(Diary(tmp_path), 50, 200)
    for i, loss in enumerate([4.0, 2.0, float("nan"), 3.0], 1):
        recorder.add(i, StepReport(loss={"a": loss}), 0.1)
    assert [event["ema"]["a"] for event in events(tmp_path, "step")] == [4.0, 3.0, 3.0, pytest.approx(3.0)]
    assert events(tmp_path, "step")[2]["loss"]["a"] is None  # NaN is no JSON
    for i in range(5, 300):
        recorder.add(i, StepReport(loss={"a": 3.0}), 0.1)
    recorder.add(300, StepReport(loss={"a": 103.0}), 0.1)
    assert recorder.totals["ema"]["a"] == pytest.approx(5.0)  # 0.98 of the average, 0.02 of the new loss


def test_another_machine_is_said_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(ToyTask(2), tmp_path).wait(SECONDS)
    assert json.loads((tmp_path / "checkpoints/step-00000002/state.json").read_text())["machine"]["torch"] == torch.__version__
    real = resume.machine()
    monkeypatch.setattr(resume, "machine", lambda: {**real, "threads": 64})
    assert start(ToyTask(3), tmp_path).wait(SECONDS) == "finished"
    said = [event["text"] for event in events(tmp_path, "log") if "another machine" in event["text"]]
    assert len(said) == 1 and f"threads: checkpoint {real['threads']!r}, now 64" in said[0]
