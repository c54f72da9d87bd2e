"""The command line as a person runs it: a child process, its output, its exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colabtrain.__main__ import main
from colabtrain.mmjev.demo_data import help_desk

ROOT = Path(__file__).parents[1]
SECONDS = 180.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def colabtrain(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "colabtrain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=SECONDS, check=False, env=ENVIRONMENT)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "desk.records.jsonl"
    path.write_text("".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in help_desk(40)))
    return path


@pytest.mark.colab
def test_demo_shows_a_record_progress_a_table_and_a_picture(tmp_path: Path) -> None:
    done = colabtrain("demo", "--steps", 6, "--run", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ('Message: "', "choice: Which team", "fresh start", "step 6/6: loss full", "held out: test", "noul: fast", "score: prior"):
        assert words in done.stdout
    assert (tmp_path / "run/loss.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "run/evaluation.json").read_text())["results"]
    assert results["full"]["overall"]["n"] == 900 and "Traceback" not in done.stderr


def test_train_on_a_file_and_the_same_line_again(tmp_path: Path, data: Path) -> None:
    line = ["train", "--model", "tiny", "--data", data, "--run", "run", "--steps", 4, "--set", "batch_size=2", "--seed", 3]
    first = colabtrain(*line, cwd=tmp_path)
    assert first.returncode == 0 and "step 4/4" in first.stdout, first.stderr
    again = colabtrain(*line, cwd=tmp_path)
    assert again.returncode == 0 and "resumed from step 4" in again.stdout and "nothing to train" in again.stdout
    other = colabtrain(*line, "--set", "batch_size=3", cwd=tmp_path)
    assert other.returncode == 2 and "config.batch_size: checkpoint 2, now 3" in other.stderr.splitlines()[-1]


def test_interrupt_saves_and_the_same_line_goes_on(tmp_path: Path, data: Path) -> None:
    command = [sys.executable, "-m", "colabtrain", "train", "--model", "tiny", "--data", str(data), "--run", "run", "--steps", "40"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        for line in child.stdout:
            if line.startswith("step 1/40"):
                child.send_signal(signal.SIGINT)
                break
        _, errors = child.communicate(timeout=SECONDS)
    assert child.returncode == 130, errors
    assert "run the same line again to go on" in errors and "Traceback" not in errors
    stopped = int(errors.split("stopped at step ")[1].split(";")[0])
    assert f"the checkpoint of step {stopped} is safe" in errors
    assert 1 <= stopped < 40 and f"saved step {stopped}" in (tmp_path / "run/train.log").read_text()


def test_config_file_and_set(tmp_path: Path, data: Path) -> None:
    (tmp_path / "options.toml").write_text("batch_size = 5\nlog_every = 1\n")
    line = ["train", "--model", "tiny", "--data", data, "--run", "run", "--steps", 2, "--config", "options.toml", "--set", "batch_size=4"]
    done = colabtrain(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "run/checkpoints/step-00000002/state.json").read_text())
    assert state["fingerprint"]["config.batch_size"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "tiny", "--data", "missing.jsonl"], "data file 'missing.jsonl' does not exist"),
        (["--model", "large", "--data", "DATA"], "--model 'large' is unknown"),
        (["--model", "json:nothing", "--data", "DATA"], "module 'json' has no function 'nothing'"),
        (["--model", "platform:machine", "--data", "DATA"], "machine() returned"),
        (["--model", "no_such_module:make", "--data", "DATA"], "no_such_module"),
        (["--model", "tiny", "--data", "DATA", "--set", "batch_size"], "write --set name=value"),
        (["--model", "tiny", "--data", "DATA", "--set", "batch_sizes=3"], "did you mean batch_size?"),
        (["--model", "tiny", "--data", "DATA", "--set", "batch_size=many"], "batch_size='many' is of type str"),
        (["--model", "tiny", "--data", "DATA", "--steps", "0"], "steps=0 is too small"),
        (["--model", "tiny", "--data", "DATA", "--steps", "3", "--epochs", "1"], "contradict"),
        (["--model", "tiny", "--data", "DATA", "--config", "none.toml"], "--config 'none.toml' cannot be read"),
        (["--model", "tiny", "--data", "DATA", "--config", "DATA"], "cannot be read"),
        (["--model", "tiny", "--data", "DATA", "--set", "run_dir=x"], "run_dir='x' is no option of --set"),
        (["--model", "tiny", "--data", "DATA", "--set", "lr=0.1"], "did you mean lr_heads or lr_lora?"),
        (["--model", "tiny", "--data", "DATA", "--set", "subnets={'full': {'exit_layer': 9}}"], "exit_layer=9, but the model has 6"),
        (["--model", "tiny", "--data", "DATA", "--set", "exclude_tasks=('help_desk',)"], "no record is left to train on"),
    ],
)
def test_wrong_arguments_name_what_is_wrong_and_train_nothing(
    arguments: list[str], words: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["train", *[str(data) if a == "DATA" else a for a in arguments], "--run", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert code == 2 and words in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [[], ["train"], ["retrain"]])
def test_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2 and "usage: colabtrain" in capsys.readouterr().err


@pytest.mark.colab
def test_verify_says_a_line_for_each_checkpoint(tmp_path: Path, data: Path) -> None:
    options = ["--set", "checkpoint_every=2", "--set", "max_eval_records=2"]
    done = colabtrain("train", "--model", "tiny", "--data", data, "--run", "run", "--steps", 6, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = sorted((path.name for path in (tmp_path / "run/checkpoints").iterdir()), reverse=True)
    assert names[0] == "step-00000006" and len(names) >= 2  # a save that comes due while another is written is left out

    def verified(folder: str = "run") -> tuple[int, list[str]]:
        done = colabtrain("verify", folder, cwd=tmp_path)
        return done.returncode, done.stdout.splitlines()

    status, lines = verified()
    assert status == 0 and [line.split()[:2] for line in lines] == [[name, "good"] for name in names]
    assert ["the next start goes on from here" in line for line in lines] == [True] + [False] * (len(names) - 1)
    assert " step 6, " in lines[0] and " MB, 20" in lines[0]

    status, one = verified(f"run/checkpoints/{names[-1]}")
    assert status == 0 and one == lines[-1:], "the next start goes on from another one"

    optimizer = tmp_path / "run/checkpoints" / names[0] / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    status, lines = verified("run/checkpoints")
    size = optimizer.stat().st_size
    assert status == 0 and lines[0] == f"{names[0]}  BAD   optimizer.safetensors has {size} bytes, not the {size + 1} of the manifest"
    assert "goes on from here" in lines[1]

    for name in names:
        (tmp_path / "run/checkpoints" / name / "manifest.json").unlink()
    done = colabtrain("verify", "run", cwd=tmp_path)
    assert done.returncode == 1 and "no good checkpoint in 'run'" in done.stderr and done.stdout.count("BAD") == len(names)


@pytest.mark.parametrize(("folder", "status", "words"), [(".", 1, "no good checkpoint in '.'"), ("absent", 2, "'absent' is no folder")])
def test_verify_where_there_is_nothing(folder: str, status: int, words: str, tmp_path: Path) -> None:
    done = colabtrain("verify", folder, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "") and words in done.stderr


@pytest.mark.colab
def test_verify_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from colabtrain.__main__ import main; main(['verify', '.']); print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False, env=ENVIRONMENT)
    assert done.stdout == "False False\n", done.stderr
