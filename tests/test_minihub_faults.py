"""The Hub of the tests fails as it is told to: seen by plain HTTP, without huggingface_hub."""

from __future__ import annotations

import gc
import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from minihub import MiniHub, Seen, rate_limited
from minihub.repos import Commit, Entry, Repo

pytestmark = pytest.mark.colab
SECONDS = 60.0  # far more than anything here takes
REPO = "user/run"
INFO = f"/api/models/{REPO}"
MIB = 1 << 20


def ask(hub: MiniHub, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    with closing(HTTPConnection("127.0.0.1", hub.port, timeout=SECONDS)) as connection:
        connection.request(method, path, body, {"Authorization": "Bearer hf_write", **headers})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def create(hub: MiniHub, name: str = "run") -> int:
    return ask(hub, "POST", "/api/repos/create", json.dumps({"name": name}))[0]


def put(hub: MiniHub, content: bytes, body: Any = None, **headers: str) -> int:
    sha256 = hashlib.sha256(content).hexdigest()
    return ask(hub, "PUT", f"/_lfs/model/{REPO}/{sha256}", content if body is None else body, **headers)[0]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[MiniHub]:
    with MiniHub(tmp_path / "minihub") as hub:
        hub.repos["model", REPO] = Repo("model", REPO, private=False)
        yield hub
    gc.collect()


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_a_status_is_answered_instead_of_the_work(hub: MiniHub) -> None:
    hub.fault("POST", "/repos/create", *rate_limited(7))
    status, headers, body = ask(hub, "POST", "/api/repos/create", json.dumps({"name": "new"}))
    assert (status, headers["Retry-After"], headers["ratelimit"]) == (429, "7", '"api";r=0;t=7')
    assert json.loads(body) == {"error": "Too Many Requests"}
    assert len(hub.repos) == 1
    assert create(hub, "new") == 200 and len(hub.repos) == 2
    assert [(seen.status, seen.note) for seen in hub.take_log()] == [(429, "status 429"), (200, "")]


def test_a_lost_answer_comes_after_the_work(hub: MiniHub) -> None:
    hub.fault("POST", "/repos/create", "apply_then_status", 504, {"X-Slow": "1"})
    status, headers, _ = ask(hub, "POST", "/api/repos/create", json.dumps({"name": "a"}))
    assert (status, headers["X-Slow"]) == (504, "1") and ("model", "user/a") in hub.repos
    hub.fault("POST", "/repos/create", "apply_then_drop")
    with pytest.raises(ConnectionResetError) as lost:
        create(hub, "b")
    assert lost.type is ConnectionResetError  # a FIN would be http.client's RemoteDisconnected
    assert ("model", "user/b") in hub.repos
    assert [(seen.status, seen.note) for seen in hub.take_log()] == [(504, "apply_then_status 504"), (None, "apply_then_drop")]


def test_a_drop_comes_before_the_work_or_within_the_body(hub: MiniHub) -> None:
    hub.fault("POST", "/repos/create", "drop")
    with pytest.raises(ConnectionResetError) as dropped:
        create(hub, "a")
    assert dropped.type is ConnectionResetError and len(hub.repos) == 1
    content = bytes(64 * MIB)
    fault = hub.fault("PUT", "/_lfs/", "drop", 3 * MIB)
    with pytest.raises(ConnectionError):
        put(hub, content)
    assert fault.used == 1
    dropped_at = hub.take_log()[1]
    assert (dropped_at.size_bytes, dropped_at.status, dropped_at.note) == (3 * MIB, None, f"drop {3 * MIB}")
    assert not hub.stored_bytes(REPO)
    assert put(hub, content) == 200 and hub.stored_bytes(REPO) == len(content)


def test_a_hang_ends_when_it_is_released(hub: MiniHub, beside: ThreadPoolExecutor) -> None:
    fault = hub.fault("POST", "/repos/create", "hang")
    asked = beside.submit(create, hub, "a")
    assert fault.reached.wait(SECONDS)
    time.sleep(0.2)  # a hub that does not hang would be done
    assert not asked.done() and len(hub.repos) == 1
    assert ask(hub, "GET", INFO)[0] == 200  # the others go on
    hub.release()
    assert asked.result(SECONDS) == 200 and len(hub.repos) == 2


def test_a_hang_of_some_seconds_ends_by_itself(hub: MiniHub) -> None:
    hub.fault("GET", INFO, "hang", 0.5)
    started = time.monotonic()
    assert ask(hub, "GET", INFO)[0] == 200
    assert time.monotonic() - started >= 0.5


@pytest.mark.parametrize("how", ["hang", "hang for long", "stalled body", "idle"])
def test_the_end_of_a_hub_waits_for_no_request(tmp_path: Path, beside: ThreadPoolExecutor, how: str) -> None:
    before = set(threading.enumerate())
    with MiniHub(tmp_path) as hub, closing(HTTPConnection("127.0.0.1", hub.port, timeout=SECONDS)) as idle:
        reached = hub.fault("*", "/repos/create", *{"hang": ("hang",), "hang for long": ("hang", 600)}.get(how, ("call", lambda hub: None)))
        hub.throttle = 0 if how == "stalled body" else None
        asked: Future[Any] | None = None
        if how == "idle":
            idle.request("GET", "/api/whoami-v2", headers={"Authorization": "Bearer hf_read"})
            assert idle.getresponse().read()
        else:
            asked = beside.submit(create, hub)
            assert reached.reached.wait(SECONDS)
    assert not hub.repos and not [thread for thread in set(threading.enumerate()) - before if thread.name == "minihub"]
    if asked is not None:
        assert isinstance(asked.exception(SECONDS), ConnectionError)
    gc.collect()


def test_a_truncated_answer_promises_more_than_it_sends(hub: MiniHub) -> None:
    hub.fault("GET", INFO, "truncate", 5)
    with pytest.raises(IncompleteRead) as short:
        ask(hub, "GET", INFO)
    assert len(short.value.partial) == 5
    assert json.loads(ask(hub, "GET", INFO)[2])["id"] == REPO


def test_another_writer_commits_just_before(hub: MiniHub) -> None:
    head = hub.head(REPO)

    def other_writer(hub: MiniHub) -> None:
        hub.repos["model", REPO].advance("main", Commit(head, {"a.txt": Entry.regular(b"a")}, "of another"))

    hub.fault("POST", "/commit/", "call", other_writer)
    lines = [{"key": "header", "value": {"summary": "mine", "parentCommit": head}}]
    body = "\n".join(map(json.dumps, lines))
    assert ask(hub, "POST", f"{INFO}/commit/main", body)[0] == 412
    assert hub.read(REPO, hub.head(REPO), "a.txt") == b"a"


def test_faults_are_met_in_order_and_only_by_those_they_are_for(hub: MiniHub) -> None:
    first = hub.fault("GET", INFO, "status", 500, after=1, times=2)
    second = hub.fault("*", f"^{INFO}$", "status", 502, times=None)
    hub.fault("POST", INFO, "status", 503)
    hub.fault("GET", "/other", "status", 503)
    assert [ask(hub, "GET", INFO)[0] for _ in range(5)] == [502, 500, 500, 502, 502]
    assert (first.used, second.used) == (2, 3)
    assert [seen.note for seen in hub.take_log()] == ["status 502", "status 500", "status 500", "status 502", "status 502"]
    hub.faults.clear()
    assert ask(hub, "GET", INFO)[0] == 200
    assert hub.take_log() == [Seen("GET", INFO, "", 0, 200, "")] and not hub.take_log()
    with pytest.raises(ValueError, match="no fault is called"):
        hub.fault("GET", INFO, "explode")
    with pytest.raises(TypeError, match="truncate takes 1 to 1"):
        hub.fault("GET", INFO, "truncate")


def test_a_fault_is_met_as_often_as_it_says_however_many_ask_at_once(hub: MiniHub) -> None:
    fault = hub.fault("GET", INFO, "status", 500, times=10)
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: ask(hub, "GET", INFO)[0], range(40)))
    assert (statuses.count(500), statuses.count(200), fault.used) == (10, 30, 10)
    assert sorted(str(seen.status) for seen in hub.take_log()) == ["200"] * 30 + ["500"] * 10


def test_bodies_are_read_no_faster_than_the_throttle(hub: MiniHub) -> None:
    content = bytes(MIB)
    hub.throttle = 2 * MIB
    started = time.monotonic()
    assert put(hub, content) == 200
    assert time.monotonic() - started >= 0.5


def test_the_throttle_may_be_changed_in_the_middle_of_a_body(hub: MiniHub, beside: ThreadPoolExecutor) -> None:
    content = bytes(MIB)
    for slow in (0, 10):  # 10 bytes/s: a day
        hub.throttle = slow
        sent = beside.submit(put, hub, content)
        time.sleep(0.2)  # unthrottled it would be done
        assert not sent.done() and not hub.stored_bytes(REPO)
        hub.throttle = None
        assert sent.result(SECONDS) == 200 and hub.stored_bytes(REPO) == len(content)
        hub.gc(REPO)


def test_a_large_object_takes_little_memory(tmp_path: Path) -> None:
    """One of 256 MB goes up and comes down through a hub of its own process."""
    command = [sys.executable, str(Path(__file__).parent / "minihub"), "--root", str(tmp_path)]
    piece, count = bytes(range(256)) * 4096, 256
    digest = hashlib.sha256()
    for _ in range(count):
        digest.update(piece)
    sha256 = digest.hexdigest()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        with closing(HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:

            def get(method: str, path: str, body: Any, **headers: str) -> HTTPResponse:
                connection.request(method, path, body, {"Authorization": "Bearer hf_write", **headers})
                return connection.getresponse()

            get("POST", "/api/repos/create", json.dumps({"name": "run"})).read()
            answer = get("PUT", f"/_lfs/model/{REPO}/{sha256}", (piece for _ in range(count)), **{"Content-Length": str(count * MIB)})
            assert (answer.status, answer.read()) == (200, b"")
            answer = get("GET", f"/_cdn/{sha256}", None, Authorization="")
            digest = hashlib.sha256()
            while got := answer.read(MIB):
                digest.update(got)
            assert digest.hexdigest() == sha256
        peak = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
        process.terminate()
    assert int(peak.split()[1]) < 100 * 1024, peak


def test_bodies_in_chunks_and_bodies_that_wait_to_be_asked_for(hub: MiniHub) -> None:
    content = b"".join(bytes([number]) * 1000 for number in range(200))
    pieces = [content[at : at + 777] for at in range(0, len(content), 777)]
    assert put(hub, content, iter(pieces)) == 200  # http.client sends an iterator in chunks
    assert hub.stored_bytes(REPO) == len(content) and hub.take_log()[0].size_bytes == len(content)
    hub.gc(REPO)
    path = f"/_lfs/model/{REPO}/{hashlib.sha256(content).hexdigest()}"
    head = f"PUT {path} HTTP/1.1\r\nHost: here\r\nExpect: 100-continue\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", hub.port), timeout=SECONDS) as connection, connection.makefile("rb") as answer:
        connection.sendall(head.encode())
        assert answer.readline() == b"HTTP/1.1 100 Continue\r\n" and answer.readline() == b"\r\n"
        connection.sendall(content)
        assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
    assert hub.stored_bytes(REPO) == len(content)


def test_a_client_that_leaves_in_its_body_stores_nothing(hub: MiniHub) -> None:
    head = f"PUT /_lfs/model/{REPO}/{'0' * 64} HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", hub.port), timeout=SECONDS) as connection:
        connection.sendall(head.encode() + b"some")
        connection.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    [seen] = hub.take_log()
    assert (seen.status, seen.note) == (None, "the client went away in its body")
    assert [path for path in hub.root.rglob("*") if path.is_file()] == []
    assert put(hub, b"wrong", b"bytes") == 400 and not hub.stored_bytes(REPO)


def test_parts_of_a_file(hub: MiniHub) -> None:
    repo = hub.repos["model", REPO]
    repo.advance("main", Commit(None, {"a.txt": Entry.regular(b"0123456789"), "empty": Entry.regular(b"")}, "files"))
    path = f"/{REPO}/resolve/main/a.txt"
    answers = [ask(hub, "GET", path, Range=f"bytes={asked}") for asked in ("0-3", "4-", "-3", "8-99", "10-")]
    assert [(status, body) for status, _, body in answers] == [(206, b"0123"), (206, b"456789"), (206, b"789"), (206, b"89"), (416, b"")]
    assert [headers["Content-Range"] for _, headers, _ in answers[::4]] == ["bytes 0-3/10", "bytes */10"]
    assert ask(hub, "HEAD", path)[1]["Content-Length"] == "10" and ask(hub, "GET", f"/{REPO}/resolve/main/empty")[2] == b""


def test_a_bug_of_the_hub_is_not_kept_to_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(json.JSONDecodeError), MiniHub(tmp_path) as hub:
        assert ask(hub, "POST", "/api/repos/create", "no JSON")[0] == 500
    assert capfd.readouterr() == ("", "")
