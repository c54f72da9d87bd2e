"""The Hub's child process: it cannot hang for ever, says what went wrong, and has the token from its pipe alone."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import HOLD_SECONDS, make_checkpoint
from minihub import MiniHub, rate_limited

from colabtrain.runtime import hub_process
from colabtrain.runtime.hub_access import HubAccess
from colabtrain.runtime.hub_process import HubFailure, HubProcess, environment

pytestmark = pytest.mark.colab
REPO, TOKEN = "user/run", "hf_write"


def publish(process: HubProcess, folder: Path, step: int, size: int = 1000, card: str = "", **options: Any) -> dict[str, Any]:
    path = make_checkpoint(folder, step, size)
    return process.ask("publish", path=str(path), step=step, nonce=f"{step:08x}", keep=2, card=card, facts={"step": step}, **options)


def claim(process: HubProcess) -> dict[str, Any]:
    return process.ask("claim", seen=process.ask("open", private=True)["pointer"], fallback=None)


def made(hub: MiniHub, folder: Path, **access: Any) -> HubProcess:
    process = HubProcess(HubAccess(REPO, TOKEN, hub.url, **access), "me", folder / "cache")
    process.with_xet = False
    return process


@pytest.fixture
def process(hub: MiniHub, tmp_path: Path) -> Iterator[HubProcess]:
    process = made(hub, tmp_path)
    yield process
    process.kill()


def test_jobs_are_done_one_after_the_other_in_one_process(process: HubProcess, tmp_path: Path) -> None:
    claim(process)
    child = process.pid
    answer = publish(process, tmp_path, 1)
    assert answer["pointer"]["step"] == 1 and answer["bytes"] > 8000 and answer["complaint"] == ""
    assert process.ask("squash") is None and process.pid == child


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MY_SECRET"])
def test_the_child_has_the_token_neither_in_its_environment_nor_on_its_command_line(
    process: HubProcess, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, TOKEN)
    process.ask("open", private=True)
    for what in ("environ", "cmdline"):
        assert TOKEN.encode() not in Path(f"/proc/{process.pid}/{what}").read_bytes()
    assert TOKEN not in repr(process.access)


def test_the_child_has_the_modules_of_its_parent_and_not_those_of_the_working_directory(
    process: HubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd/json.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own_card.py").write_text("def files(path, facts): return {'README.md': b'# of step %d' % facts['step']}")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    claim(process)
    assert publish(process, tmp_path, 3, card="own_card:files")["complaint"] == ""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("no_such_module:files", "No module named 'no_such_module'"),
        ("os:no_such_function", "no_such_function"),
        ("bad_card:files", "the card is left out: .*[Ii]nvalid metadata"),
    ],
)
def test_a_card_that_cannot_be_made_or_is_refused_does_not_cost_the_checkpoint(
    process: HubProcess, hub: MiniHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, why: str
) -> None:
    (tmp_path / "bad_card.py").write_text("def files(path, facts): return {'README.md': b'---\\nlicense: [\\n---\\n'}")
    monkeypatch.syspath_prepend(tmp_path)
    if function.startswith("bad_card"):
        hub.fault("POST", "/api/validate-yaml", "status", 400, {}, {"errors": [{"message": "license is wrong"}], "warnings": []})
        hub.fault("POST", "/api/validate-yaml", "status", 400, {}, {"errors": [{"message": "license is wrong"}], "warnings": []})
    claim(process)
    answer = publish(process, tmp_path, 1, card=function)
    assert answer["pointer"]["step"] == 1
    assert re.search(why, answer["complaint"]), answer["complaint"]


def test_a_failure_says_what_and_how(process: HubProcess, hub: MiniHub, tmp_path: Path) -> None:
    claim(process)
    hub.fault("POST", "/commit/main", *rate_limited(17))
    with pytest.raises(HubFailure, match="the Hub asks to wait") as raised:
        publish(process, tmp_path, 1)
    assert (raised.value.kind, raised.value.status, raised.value.wait) == ("retry", 429, 17.0)
    assert "create_commit" in raised.value.traceback


def test_a_child_that_makes_no_progress_is_killed_and_the_next_one_does_without_xet(hub: MiniHub, tmp_path: Path) -> None:
    process = made(hub, tmp_path, quiet_seconds=1.5)
    process.with_xet = True
    process.ask("open", private=True)
    first = process.pid
    hub.fault("GET", "/api/models/user/run", "hang")
    with pytest.raises(HubFailure, match="no byte went over the network for 2 s; the next try does without Xet") as raised:
        process.ask("open", private=True)
    assert raised.value.kind == "retry" and process.pid is None
    hub.release()
    assert process.ask("open", private=True) and process.pid != first
    assert b"HF_HUB_DISABLE_XET=1" in Path(f"/proc/{process.pid}/environ").read_bytes()
    process.kill()


def test_a_slow_upload_is_progress(hub: MiniHub, tmp_path: Path) -> None:
    """Of 3 s, with patience for 1.2: bytes are counted as the kernel moves them."""
    process = made(hub, tmp_path, quiet_seconds=1.5)
    claim(process)
    hub.throttle = 3e6
    heard: list[int] = []
    try:
        assert publish(process, tmp_path, 1, size=2_250_000 // 2, hear=heard.append)["pointer"]["step"] == 1
    finally:
        process.kill()
    assert len(heard) >= 2 and heard == sorted(heard) and heard[-1] > 5e6


def test_a_wait_of_the_client_itself_is_no_hang(hub: MiniHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = made(hub, tmp_path, quiet_seconds=1.5)
    claim(process)
    hub.fault("POST", "/info/lfs/objects/batch", *rate_limited(2))
    assert publish(process, tmp_path, 1)["pointer"]["step"] == 1, "it waited for 3 s"
    process.kill()


def test_a_child_that_dies_is_told_with_its_last_words_and_replaced(
    process: HubProcess, hub: MiniHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(process)
    fault = hub.fault("POST", "/commit/main", "hang")
    failed: list[HubFailure] = []

    def attempt() -> None:
        try:
            publish(process, tmp_path, 1)
        except HubFailure as failure:
            failed.append(failure)

    thread = threading.Thread(target=attempt)
    thread.start()
    assert fault.reached.wait(HOLD_SECONDS) and process.pid
    os.kill(process.pid, signal.SIGKILL)
    thread.join(HOLD_SECONDS)
    hub.release()
    assert failed[0].kind == "retry" and "status -9" in str(failed[0])
    assert publish(process, tmp_path, 1)["pointer"]["step"] == 1


def test_what_a_library_prints_is_no_answer_and_a_traceback_has_no_token(
    process: HubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loud_card.py").write_text(
        "import os, sys\n"
        "def files(path, facts):\n"
        "    print('{\"done\": 1}'); os.write(1, b'{\"done\": 2}\\n')\n"
        "    if facts['step'] == 2: sys.stderr.write('so long, hf_write'); sys.stderr.flush(); os._exit(7)\n"
        "    return {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    claim(process)
    assert publish(process, tmp_path, 1, card="loud_card:files")["pointer"]["step"] == 1
    with pytest.raises(HubFailure, match="status 7: so long, <token>"):
        publish(process, tmp_path, 2, card="loud_card:files")


def test_a_process_that_cannot_be_made_is_a_failure_to_try_again(process: HubProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(HubFailure, match="the Hub's process cannot be used: FileNotFoundError") as raised:
        process.ask("open", private=True)
    assert raised.value.kind == "retry"


def test_an_interrupt_ends_the_job_and_the_next_one_gets_its_own_answer(process: HubProcess, hub: MiniHub, tmp_path: Path) -> None:
    claim(process)
    fault = hub.fault("POST", "/commit/main", "hang")
    threading.Thread(target=lambda: (fault.reached.wait(HOLD_SECONDS), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        publish(process, tmp_path, 1)
    hub.release()
    assert process.ask("open", private=True)["pointer"]["claim"] == 1


def test_the_environment_of_the_child() -> None:
    kept = environment("hf_secret", with_xet=False)
    assert kept["HF_HUB_DISABLE_XET"] == "1" and "HF_HUB_DISABLE_XET" not in environment("hf_secret", with_xet=True)
    assert kept["PYTHONPATH"].split(os.pathsep)[0] == str(Path(hub_process.__file__).parents[2])
    assert "" not in kept["PYTHONPATH"].split(os.pathsep), "the working directory is nobody's module path"
