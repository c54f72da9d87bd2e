"""One round of test_hub_fuzz.py: a fresh repo, sessions one after the other or at the same time, faults, and what must hold then."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_truth
from hub_driver import Server, Session
from hub_faults import BIT_FLIP, MAKERS, WEIGHTS, Planned, draw
from minihub import MiniHub, Repo

from colabtrain.runtime.hub_pointer import Pointer
from colabtrain.runtime.manifest import TENSOR_FILES

REPO = "user/run"
BOUND_SECONDS = 60.0  # of a session: far more than one takes
ORPHAN_SECONDS = 10.0  # until a Hub's process notices that its session is gone: a second or two
SHAPES = [[1], [1, 1], [1, 1], [1, 1, 1], [2], [2], [2, 1], [3]]  # how many sessions at a time
IN_A_HURRY, PATIENT = 0.0, 5.0


class Round:
    def __init__(self, seed: int, server: Server, folder: Path, mutant: str = "") -> None:
        self.seed, self.server, self.folder, self.mutant = seed, server, folder, mutant
        self.rng = random.Random(seed)
        self.token = f"hf_{self.rng.randbytes(12).hex()}"
        self.hub = MiniHub(root=folder / "hub", tokens={self.token: "write"})
        self.is_stuck = self.rng.random() < 0.1
        self.timeout_seconds, self.quiet_seconds = (20.0, 2.0) if self.is_stuck else (1.5, 6.0)
        self.config = {"keep_remote": self.rng.choice([2, 2, 3]), "squash_every": self.rng.choice([2, 3, 25]), "publish_every": 0.0}
        self.faults: list[Planned] = []
        self.sessions: list[Session] = []
        self.live: list[Session] = []
        self.damaged = set[str]()  # sha256 of objects with a flipped bit
        self.counts = Counter[str]()
        self.problems: list[str] = []

    # What faults act on

    def repo(self) -> Repo | None:
        return self.hub.repos.get(("model", REPO))

    def pointer(self) -> Pointer | None:
        repo = self.repo()
        return hub_truth.pointer_of(repo.head()) if repo else None

    def kill(self, number: int) -> bool:
        return bool(self.live) and self.live[number % len(self.live)].kill()

    def kill_worker(self, number: int) -> bool:
        return bool(self.live) and self.live[number % len(self.live)].kill_worker()

    # The round

    def run(self) -> Round:
        with self.hub:
            for number in self.rng.choice(SHAPES):
                self._arm(number)
                self._together(number)
                self.hub.faults.clear()
                self.hub.release()
                self._between()
            self._last()
            self._check()
            self._count()
        return self

    def _arm(self, number: int) -> None:
        usual = {kind: WEIGHTS[kind] for kind in MAKERS if kind != "commit race" and (kind != "stuck" or self.is_stuck)}
        kinds = list(usual)
        turn = kinds[self.seed % len(kinds)]  # so that none is left out in a few rounds
        chosen = [turn, *self.rng.choices(kinds, [*usual.values()], k=self.rng.choice([0, 1, 2, 3, 5]))]
        chosen += ["stuck"] * (self.is_stuck and "stuck" not in chosen)
        chosen += ["commit race"] * (number > 1 and self.rng.random() < 0.6)
        planned = [draw(kind, self, self.rng) for kind in chosen]
        self.faults += planned
        for one in planned:
            one.arm(self.hub)

    def _together(self, number: int) -> None:
        before = self.sessions[-1].folder if self.sessions else None
        folders = [self.folder / f"run{len(self.sessions) + i}" for i in range(number)]
        if before and self.rng.random() < 0.5:
            folders[0] = before
        least_step, before_faults = self._least_step(), sum(one.count for one in self.faults)
        few = [2, 3, 4] if number == 1 else [4, 5, 6]
        together = [self._start(folder, self.rng.choice(few)) for folder in folders]
        self.live = together
        for session in together:
            self._end(session)
        has_faults = sum(one.count for one in self.faults) > before_faults
        for session in together:
            self._check_end(session, has_faults)
            self._check_going_on(session, least_step)
        self.live = []

    def _start(self, folder: Path, num_steps: int) -> Session:
        patience = [self.rng.choice([IN_A_HURRY, 0.1, PATIENT, PATIENT]) for _ in range(num_steps)]
        job = {
            **{"name": f"s{len(self.sessions)}", "seed": self.seed, "folder": str(folder), "mutant": self.mutant},
            **{"repo": REPO, "token": self.token, "endpoint": self.hub.url, "config": self.config, "patience_seconds": patience},
            **{"timeout_seconds": self.timeout_seconds, "quiet_seconds": self.quiet_seconds},
            **{"with_xet": self.rng.random() < 0.1, "hub_required": self.rng.random() < 0.85},
        }
        session = Session(self.server, job)
        self.sessions.append(session)
        return session

    def _end(self, session: Session) -> None:
        """(5): it ends by itself and says how, or was killed by a fault."""
        if not session.join(BOUND_SECONDS):
            self.problems.append(f"session {session.name} did not end in {BOUND_SECONDS:g} s")
        if session.noise:
            self.problems.append(f"session {session.name} said {session.noise[-1]}")
        if not session.killed and not session.events("end"):
            self.problems.append(f"session {session.name} died by itself")
        if session.leaves_worker(ORPHAN_SECONDS):
            self.problems.append(f"session {session.name} left its Hub's process behind")

    def _check_end(self, session: Session, has_faults: bool) -> None:
        """(5): what is not published has a reason, and so has a session that did not begin."""
        if session.killed or not (end := session.events("end")):
            return
        refused = end[-1].get("refused", "")
        is_slow = "Timeout" in refused  # of this machine, the sessions wait for 1.5 s
        is_plain = (refused.startswith("HubError: ") and (has_faults or is_slow)) or ("can be used" in refused and bool(self.damaged))
        if refused and not is_plain:
            self.problems.append(f"session {session.name} was refused without need: {refused}")
        offered = [event["step"] for event in session.events("offered")]
        if not refused and offered and end[-1]["published_step"] != offered[-1] and not session.events("not_published"):
            self.problems.append(f"session {session.name} has not published step {offered[-1]}, and does not say so")

    def _least_step(self) -> int:
        """(4): what whoever comes now has to go on from at least."""
        acked = [step for session in self.sessions for _, step, _ in session.acked()]
        best = self._whole_candidates()[:1]
        return max([0, *([] if self.damaged else acked), *map(self._step_of, best)])

    def _check_going_on(self, session: Session, least_step: int) -> None:
        """(4): where a session went on is what some session made, byte for byte, and nothing acknowledged before it is lost."""
        offered = {(event["step"], event["digest"]) for other in self.sessions for event in other.events("offered")}
        for event in session.events("going_on"):
            is_left_out = any("is left out" in (error.get("text") or "") for error in session.events("hub_error"))
            if event["step"] and (event["step"], event["digest"]) not in offered:
                self.problems.append(f"session {session.name} went on from a step {event['step']} that nobody made")
            if event["step"] < least_step and not is_left_out:
                self.problems.append(f"session {session.name} went on from step {event['step']}, {least_step} was acknowledged before")

    def _between(self) -> None:
        """What happens to a repo that nobody uses."""
        repo, pointer = self.repo(), self.pointer()
        wants_gc, wants_flip = self.rng.random() < 0.3, self.rng.random() < 0.3
        if repo and wants_gc:
            self.hub.gc(REPO)
        if repo and pointer and pointer.checkpoint and wants_flip:
            self._flip(repo, f"{pointer.checkpoint}/{self.rng.choice(TENSOR_FILES)}")

    def _flip(self, repo: Repo, path: str) -> None:
        sha256 = repo.head().tree[path].sha256
        assert sha256 is not None
        if sha256 in self.damaged:
            return  # the same bit once more would heal it
        stored = self.hub.store.path(sha256)
        data = bytearray(stored.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        stored.write_bytes(data)
        self.damaged.add(sha256)
        self.counts[BIT_FLIP] += 1

    def _last(self) -> None:
        """(4): nothing goes wrong any more; a new machine goes on from the best there is, and publishes."""
        candidates = self._whole_candidates()
        wanted = candidates[0] if candidates else None
        pointer = self.pointer()
        is_hopeless = wanted is None and pointer is not None and bool(pointer.checkpoint)
        least_step = self._least_step()
        self.timeout_seconds = self.quiet_seconds = BOUND_SECONDS / 2  # a machine that is slow is no fault
        session = self._start(self.folder / "last", 1)
        self._end(session)
        self._check_going_on(session, least_step)
        refused, going_on = session.events("end")[-1:], session.events("going_on")
        if is_hopeless:
            if not refused or "can be used" not in refused[0].get("refused", ""):
                self.problems.append("no checkpoint was whole, and the last session did not say so")
            return
        step = int(going_on[-1]["step"]) if going_on else -1
        if step != (self._step_of(wanted) if wanted else 0):
            self.problems.append(f"the last session went on from step {step}, not from {wanted}")
        if pointer and wanted != (pointer.checkpoint or None) and not session.events("checkpoint_rejected"):
            self.problems.append("the newest checkpoint is damaged, and nobody said so")
        if [event["step"] for event in session.events("checkpoint_published")] != [step + 1]:
            self.problems.append("nothing went wrong, and the last session did not publish")

    def _whole_candidates(self) -> list[str]:
        pointer, repo = self.pointer(), self.repo()
        if not pointer or not repo:
            return []
        tree = repo.head().tree
        names = pointer.candidates()
        return [path for path in names if not any(tree[f"{path}/{name}"].sha256 in self.damaged for name in TENSOR_FILES)]

    def _step_of(self, path: str) -> int:
        repo = self.repo()
        assert repo is not None
        return int(json.loads(repo.head().tree[f"{path}/state.json"].content or b"")["step"])

    # What must hold at the end

    def _check(self) -> None:
        repo = self.repo()
        assert repo is not None
        acked = [one for session in self.sessions for one in session.acked()]
        self.problems += hub_truth.broken_history(repo)
        self.problems += hub_truth.damaged_now(self.hub, repo, self.damaged)
        self.problems += hub_truth.lost(repo, acked)
        self.problems += hub_truth.told_token(self.hub, repo, self.token)
        for session in self.sessions:
            self.problems += [f"the token of session {session.name} is in {where}" for where in session.shows_token()]
            self.problems += self._fencing(repo, session)

    def _fencing(self, repo: Repo, session: Session) -> Iterator[str]:
        """(3): fenced are those that another session came after, and they say so."""
        is_displaced = hub_truth.claims_after(repo, session.writer)
        claimed, fenced = bool(session.events("hub_claimed")), bool(session.events("fenced"))
        if fenced and claimed and not is_displaced:
            yield f"session {session.name} says it is fenced, and nobody claimed after it"
        errors = [str(event.get("text")) for event in session.events("hub_error")]
        knows = not errors or any("taken over" in text for text in errors)
        if is_displaced and session.events("not_published") and knows and not fenced:
            yield f"session {session.name} lost the repo to another, and does not say that it is fenced"

    def _count(self) -> None:
        repo = self.repo()
        assert repo is not None
        for one in self.faults:
            self.counts[one.kind] += one.count
            if one.kind == "lost answer" and one.path == "/commit/main$":
                self.counts["(lost successes)"] += one.count
        said = Counter(event["event"] for session in self.sessions for event in session.heard)
        self.counts["(sessions)"] += len(self.sessions)
        self.counts["(publishes)"] += said["checkpoint_published"]
        self.counts["(fenced)"] += said["fenced"]
        self.counts["(rejected)"] += said["checkpoint_rejected"]
        self.counts["(skipped)"] += said["publish_skipped"]
        self.counts["(errors said)"] += said["hub_error"]
        self.counts["(resumes)"] += sum(event["step"] > 0 for session in self.sessions for event in session.events("going_on"))
        self.counts["(refused)"] += sum("refused" in event for session in self.sessions for event in session.events("end"))
        self.counts["(not published)"] += said["not_published"]

    def report(self) -> str:
        log = [f"{seen.method} {seen.path}?{seen.query} {seen.size_bytes} -> {seen.status} {seen.note}" for seen in self.hub.take_log()]
        history = [] if (repo := self.repo()) is None else [f"{c.title}: {hub_truth.pointer_of(c)}" for c in hub_truth.journal(repo)]
        parts: list[Any] = [f"seed {self.seed}", *self.problems, "-- faults", *self.faults, f"bit flips: {self.counts[BIT_FLIP]}"]
        return "\n".join(map(str, [*parts, "-- history", *history, "-- requests", *log, *self.sessions]))
