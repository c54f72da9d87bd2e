"""What goes wrong in a round of test_hub_fuzz.py, drawn from its seed: each kind waits for a request and then happens."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minihub import Commit, Entry, Fault, MiniHub, Repo

from colabtrain.runtime.hub_pointer import LATEST

if TYPE_CHECKING:
    from hub_rounds import Round

COMMIT, PREUPLOAD, BATCH, OBJECT, READ = "/commit/main$", "/preupload/main$", "/objects/batch$", "/_lfs/", "/resolve/"
LOOK, TREE, SQUASH, CREATE, ANY = "/revision/main$", "/tree/", "/super-squash/", "/repos/create$", ""
RACE_SECONDS = 1.2  # a request waits so long for one of another session


@dataclass
class Planned:
    """A fault as it was drawn. happened: of those that are a call of the hub, which may find nothing to do."""

    kind: str
    method: str
    path: str
    action: tuple[Any, ...]
    times: int
    after: int
    happened: int = 0
    fault: Fault | None = None

    def arm(self, hub: MiniHub) -> None:
        self.fault = hub.fault(self.method, self.path, *self.action, times=self.times, after=self.after)

    @property
    def count(self) -> int:
        if self.fault is None:
            return 0
        return self.happened if self.action[0] == "call" else self.fault.used

    def __str__(self) -> str:
        shown = [part for part in self.action if isinstance(part, str | int | float | dict)]
        return f"{self.kind}: {self.method} {self.path or 'anything'} {shown} times={self.times} after={self.after}: {self.count}"


def draw(kind: str, round_: Round, rng: random.Random) -> Planned:
    method, path, action, times, after = MAKERS[kind](round_, rng)
    planned = Planned(kind, method, path, action, times, after)
    if action[0] == "call":
        happens = action[1]

        def call(hub: MiniHub) -> None:
            planned.happened += bool(happens(hub))

        planned.action = ("call", call)
    return planned


Made = tuple[str, str, tuple[Any, ...], int, int]


def _writes(rng: random.Random) -> tuple[str, str]:
    path = rng.choice([COMMIT, COMMIT, COMMIT, PREUPLOAD, BATCH, OBJECT])
    return ("PUT" if path == OBJECT else "POST"), path


def _anything(rng: random.Random) -> tuple[str, str]:
    return rng.choice([("*", ANY), ("GET", LOOK), ("GET", TREE), ("*", READ), ("POST", SQUASH), _writes(rng), _writes(rng)])


def _after(rng: random.Random, path: str) -> int:
    return rng.randrange(40 if path == ANY else 4)


def lost_answer(round_: Round, rng: random.Random) -> Made:
    action = rng.choice([("apply_then_drop",), ("apply_then_status", 500), ("apply_then_status", 504)])
    path = rng.choice([COMMIT, COMMIT, COMMIT, COMMIT, SQUASH, SQUASH if round_.repo() else CREATE])
    return "POST", path, action, rng.choice([1, 1, 2, 3]), _after(rng, path) if path == COMMIT else 0


def reset(round_: Round, rng: random.Random) -> Made:
    method, path = _anything(rng)
    return method, path, rng.choice([("drop",), ("drop", 0), ("drop", 700)]), rng.choice([1, 1, 2, 4]), _after(rng, path)


def server_error(round_: Round, rng: random.Random) -> Made:
    method, path = _anything(rng)
    return method, path, ("status", rng.choice([500, 502, 503, 504])), rng.choice([1, 1, 2, 4, 8]), _after(rng, path)


def rate_limit(round_: Round, rng: random.Random) -> Made:
    method, path = _anything(rng)
    headers = rng.choice([{"Retry-After": "0"}, {"Retry-After": "1"}, {"RateLimit": '"api";r=0;t=1'}])
    return method, path, ("status", 429, headers), rng.choice([1, 2, 3]), _after(rng, path)


def truncated(round_: Round, rng: random.Random) -> Made:
    path = rng.choice([READ, READ, READ, LOOK, TREE])
    return "GET", path, ("truncate", rng.choice([0, 1, 100, 600])), rng.choice([1, 2]), rng.randrange(6)


def hang(round_: Round, rng: random.Random) -> Made:
    method, path = _anything(rng)
    return method, path, ("hang", round_.timeout_seconds + 0.5), 1, _after(rng, path)


def stuck(round_: Round, rng: random.Random) -> Made:
    """For longer than anybody waits."""
    method, path = rng.choice([_writes(rng), _writes(rng), ("GET", LOOK), ("GET", READ)])
    return method, path, ("hang",), 1, rng.randrange(3)


def forbidden(round_: Round, rng: random.Random) -> Made:
    body = {"error": f"the token {round_.token} may not do that"}  # a server that tells too much
    return "POST", rng.choice([COMMIT, PREUPLOAD]), ("status", 403, {}, body), rng.choice([1, 2, 3]), rng.randrange(1, 4)


def quota(round_: Round, rng: random.Random) -> Made:
    return (
        "POST",
        BATCH,
        ("status", rng.choice([403, 413]), {}, {"error": "storage limit reached"}),
        rng.choice([1, 2]),
        rng.randrange(2),
    )


def squash_race(round_: Round, rng: random.Random) -> Made:
    """By somebody else, and the Hub cleans up at once or later."""
    gc = rng.random() < 0.7

    def squash(hub: MiniHub) -> bool:
        repo = round_.repo()
        if repo is None:
            return False
        with repo.lock:
            repo.advance("main", Commit(None, repo.head().tree, "squashed by somebody"))
        if gc:
            hub.gc(repo.id)
        return True

    path = rng.choice([COMMIT, PREUPLOAD, TREE, READ, READ])
    return "POST" if path in (COMMIT, PREUPLOAD) else "GET", path, ("call", squash), rng.choice([1, 1, 2]), rng.randrange(8)


def foreign_commit(round_: Round, rng: random.Random) -> Made:
    """The README is edited in the browser."""
    number = rng.random()

    def edit(hub: MiniHub) -> bool:
        return _commit(round_.repo(), "Update README.md", "README.md", lambda repo: f"# {number} {time.time()}\n".encode())

    path = rng.choice([COMMIT, COMMIT, PREUPLOAD, TREE])
    return "GET" if path == TREE else "POST", path, ("call", edit), rng.choice([1, 1, 2, 6]), _after(rng, path)


def take_over(round_: Round, rng: random.Random) -> Made:
    """A session on another machine claims while a request is on its way."""
    writer = f"elsewhere{rng.randrange(10**9)}"

    def pointer(repo: Repo) -> bytes | None:
        mine = round_.pointer()
        return json.dumps(mine.claimed(writer, "elsewhere", None).to_json()).encode() if mine else None

    def claim(hub: MiniHub) -> bool:
        return _commit(round_.repo(), "claimed elsewhere", LATEST, pointer)

    path = rng.choice([COMMIT, COMMIT, PREUPLOAD, BATCH])
    return "POST", path, ("call", claim), 1, rng.randrange(1, 4)


def _commit(repo: Repo | None, title: str, path: str, content: Callable[[Repo], bytes | None]) -> bool:
    if repo is None:
        return False
    with repo.lock:
        head, data = repo.head(), content(repo)
        if data is None:
            return False
        repo.advance("main", Commit(head.sha, {**head.tree, path: Entry.regular(data)}, title))
    return True


def commit_race(round_: Round, rng: random.Random) -> Made:
    """The commits of two sessions wait for each other, and go at the same time."""
    both = threading.Barrier(2)

    def meet(hub: MiniHub) -> bool:
        try:
            both.wait(RACE_SECONDS)
        except threading.BrokenBarrierError:
            both.reset()
            return False
        return True

    return "POST", COMMIT, ("call", meet), rng.choice([4, 6]), rng.randrange(3)


def worker_killed(round_: Round, rng: random.Random) -> Made:
    number = rng.randrange(3)
    method, path = rng.choice([_writes(rng), _writes(rng), ("GET", LOOK), ("GET", READ)])
    return method, path, ("call", lambda hub: round_.kill_worker(number)), 1, _after(rng, path)


def session_killed(round_: Round, rng: random.Random) -> Made:
    number = rng.randrange(3)
    method, path = rng.choice([_writes(rng), _writes(rng), ("GET", LOOK), ("GET", READ), ("POST", SQUASH)])
    return method, path, ("call", lambda hub: round_.kill(number)), 1, _after(rng, path)


MAKERS: dict[str, Callable[[Round, random.Random], Made]] = {
    "lost answer": lost_answer,
    "reset": reset,
    "server error": server_error,
    "rate limit": rate_limit,
    "truncated": truncated,
    "hang": hang,
    "stuck": stuck,
    "forbidden": forbidden,
    "quota": quota,
    "squash race": squash_race,
    "foreign commit": foreign_commit,
    "take-over": take_over,
    "commit race": commit_race,
    "worker killed": worker_killed,
    "session killed": session_killed,
}
WEIGHTS = {kind: 3 if kind in ("lost answer", "worker killed", "session killed", "squash race") else 1 for kind in MAKERS}
BIT_FLIP = "bit flip"  # between two sessions
