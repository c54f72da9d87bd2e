"""The token is nowhere but in the memory of two processes and in the requests: no file, log, text, environment or list has it."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path

import dying_worker
import pytest
import token_child
from helpers import events
from hub_setup import TOKEN, Told, children, environment
from minihub import MiniHub

PIECE_CHARS = 8  # of the token, in a row, that nothing may show; a text may be cut off within it
ENCODED = base64.b64encode(TOKEN.encode()).decode().rstrip("=")
PIECES = {text[i : i + PIECE_CHARS].encode() for text in (TOKEN, ENCODED) for i in range(len(text) - PIECE_CHARS + 1)}
ECHO = f"authorization: Bearer {TOKEN}"
CUT = {"error": "." * (300 - len(f"authorization: Bearer {TOKEN[:12]}")) + ECHO}  # a message is cut after 300 characters


def shows(data: bytes) -> list[bytes]:
    return [piece for piece in PIECES if piece in data]


def files_with_it(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file() and shows(path.read_bytes())]


def processes_with_it(pid: int) -> list[str]:
    """Children of `pid` whose environment has the token, and processes whose command line has it."""
    found = [f"environment of {child}" for child in children(pid) if shows(Path(f"/proc/{child}/environ").read_bytes())]
    listed = subprocess.run(["ps", "axeww", "-o", "pid=,ppid=,args="], stdout=subprocess.PIPE, check=True).stdout
    return found + [line[:40].decode() for line in listed.splitlines() if int(line.split()[0]) != pid and shows(line)]


def stored(hub: MiniHub) -> Iterator[bytes]:
    """What the Hub has in its memory: what was asked for, files that are not on its disk, words about commits."""
    for seen in hub.take_log():
        yield f"{seen.path}?{seen.query}".encode()
    for repo in hub.repos.values():
        for commit in repo.commits.values():
            yield f"{commit.title} {commit.message} {list(commit.tree)}".encode()
            yield from (entry.content for entry in commit.tree.values() if entry.content is not None)


def fail_in_every_way(hub: MiniHub) -> list[int]:
    """After the two commits of the start; the statuses in their order. The client itself waits and tries again after the 429."""
    asked, committed = "/user/run/preupload/main", "/user/run/commit/main"
    long = {"X-Error-Message": ECHO, "X-Request-Id": TOKEN, "Retry-After": "0"}
    body = {"error": ECHO, "headers": {"Authorization": f"Bearer {TOKEN}"}}
    failures = [(asked, 429, long, body), (asked, 401, long, body), (asked, 403, long, body)]
    failures += [(committed, 500, long, body), (committed, 500, {}, CUT), (committed, 403, {}, CUT)]
    for path, status, headers, answer in failures:
        hub.fault("POST", path, "status", status, headers, answer, after=2)
    for repo, what, after in ((token_child.UNREACHED, "", 0), (token_child.UNCLAIMED, "/commit/main", 1)):
        hub.fault("*", f"/{repo}{what}$", "status", 403, {"X-Error-Message": ECHO}, {"error": ECHO}, times=None, after=after)
    return [status for _, status, *_ in failures[1:]]


@pytest.fixture(params=["environment", pytest.param("stored login", marks=pytest.mark.colab)])
def person(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[MiniHub, dict[str, str], list[Path]]]:
    """A Hub, the environment of a person's process, and the files of theirs that have the token."""
    home, died = tmp_path / "home", tmp_path / "died"
    (tmp_path / "tmp").mkdir()
    home.mkdir()
    more = {"PYTHONWARNINGS": "always", "HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug", "TMPDIR": str(tmp_path / "tmp")}
    with MiniHub(root=tmp_path / "hub", tokens={TOKEN: "write"}) as hub:
        theirs = environment(hub.url, home, **more, **{dying_worker.DIED: str(died)})
        if request.param == "environment":
            yield hub, {**theirs, "MY_NOTES": f"login with {TOKEN}"}, []
        else:
            (home / "token").write_text(TOKEN)
            yield hub, {name: value for name, value in theirs.items() if name != "HF_TOKEN"}, [home / "token"]


def test_the_token_is_shown_nowhere(person: tuple[MiniHub, dict[str, str], list[Path]], tmp_path: Path) -> None:
    hub, env, theirs = person
    statuses = fail_in_every_way(hub)
    with Told([token_child.__file__, tmp_path], env, tmp_path / "stderr.txt", stdin=subprocess.PIPE) as child:
        assert shows(Path(f"/proc/{child.pid}/environ").read_bytes()) or theirs, "the search finds nothing"
        for step in token_child.HELD_AT:
            child.hear(f"held {step}")
            if step != token_child.HELD_AT[0]:
                child.hear(f"checkpoint_published {token_child.SAVE_EVERY * 4}")
            assert len(children(child.pid)) == 1
            assert not processes_with_it(child.pid)
            assert files_with_it(tmp_path) == theirs
            go(child)
        assert child.end() == 0, child.errors.read_text()
    failures = events(tmp_path / "run", "hub_error")
    assert [event["status"] for event in failures] == [None, *statuses]
    assert "the Hub's process has ended (status 1: Dying: Authorization: Bearer <token>)" in failures[0]["text"]
    told = "\n".join(child.lines)
    assert "raised for user/unreached: HubError" in told and "raised for user/unclaimed: RunFailed" in told
    assert not shows(told.encode())
    assert files_with_it(tmp_path) == theirs, "a file has it: the folders are the run's, the Hub's, HF_HOME and TMPDIR"
    reprs = (tmp_path / "reprs.txt").read_text()
    assert "HubAccess(repo='user/run', endpoint=" in reprs and "UserWarning: <colabtrain run" in child.errors.read_text()
    assert not [data for data in stored(hub) if shows(data)]


def go(child: Told) -> None:
    assert child.process.stdin is not None
    child.process.stdin.write("\n")
    child.process.stdin.flush()
