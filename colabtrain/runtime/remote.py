"""Remote: what a run has to do with its Hub repo, from its first look at it to its last word.

open() on the thread of start(); bring() before the task is prepared; claim() before the first step, so that a start that is refused
fences nobody; then everything goes through the Publisher.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from colabtrain.config import RunConfig
from colabtrain.device import sync_to_disk
from colabtrain.hub_token import HubError
from colabtrain.runtime import disk, manifest
from colabtrain.runtime.diary import DIARY_FILE, Diary, duration
from colabtrain.runtime.hub_access import HubAccess
from colabtrain.runtime.hub_process import HubFailure, HubProcess
from colabtrain.runtime.lineage import Lineage
from colabtrain.runtime.manifest import CheckpointError
from colabtrain.runtime.publisher import Publisher
from colabtrain.runtime.resume import refuse_state

FOLDER = ".hub"  # in the run folder: what is being downloaded
OPEN_SECONDS, OPEN_TRIES = 30.0, 2  # a Hub that says nothing for so long is out of reach: a person waits
TRIES, WAIT_SECONDS, MAX_WAIT_SECONDS = 4, 2.0, 60.0  # of a download or claim
DRAIN_SECONDS = 120.0
RECENT_SECONDS = 900.0  # a session that was there so shortly before may be alive
REPORT_BYTES = 64 * 2**20
Hold = Callable[[Path], AbstractContextManager[object]]


class Remote:
    """One run's side of a Hub repo. card: "module:function" that makes the repo's card, see hub_card.py; facts: what it is told."""

    def __init__(self, access: HubAccess, folder: Path, config: RunConfig, card: str = "", facts: Mapping[str, Any] | None = None) -> None:
        self.repo, self.config, self._folder = access.repo, config, folder
        self._card, self._facts = card, dict(facts or {})
        self._lineage, self._writer = Lineage(folder, self.repo), uuid.uuid4().hex
        self._process = HubProcess(access, self._writer, folder / FOLDER / "cache")
        self._seen: dict[str, Any] | None = None  # the newest answer to `open`
        self._fallback: tuple[str, int] | None = None
        self._displaces: Mapping[str, Any] | None = None  # the pointer of another session, which this one is about to fence
        self._offline = ""  # why the Hub was left out at the start
        self._publisher: Publisher | None = None
        self._end_at = math.inf  # monotonic: nothing is published any more

    # On the thread of start()

    def open(self, resumes: bool = True, identity: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Look at the repo, made if there is none. Raises HubError, unless the Hub is not required; ValueError where the repo
        holds something else, another experiment than identity(), or, without `resumes`, a checkpoint."""
        shutil.rmtree(self._folder / FOLDER, ignore_errors=True)
        try:
            self._look()
        except HubFailure as failure:
            self._process.kill()
            if failure.kind == "not ours":
                raise ValueError(f"hub={self.repo!r}: {failure}") from None
            self._offline = str(failure)
            if self.config.hub_required:
                raise HubError(
                    f"hub={self.repo!r}: {failure}. Put that right and run the same line again, or give hub_required=False to go on from "
                    "what is on this machine, and to publish as soon as it works"
                ) from None
        state = self._seen and self._seen["state"]
        if state and not resumes:
            raise ValueError(f"resume=False, but {self.repo} has checkpoints; name another repo, or leave resume out")
        if state:
            refuse_state(state, f"of step {state.get('step')!r} in {self.repo}", identity, self.config.allow_mismatch)

    def _look(self) -> None:
        self._seen = self._insist("open", OPEN_TRIES, private=self.config.private, quiet_seconds=OPEN_SECONDS)
        assert self._seen is not None
        before = self._seen["pointer"]
        self._displaces = before if before and before["writer"] and not self._lineage.includes(before) else None

    def _insist(self, job: str, tries: int = TRIES, diary: Diary | None = None, **given: Any) -> Any:
        wait = WAIT_SECONDS
        for attempt in range(1, tries + 1):
            try:
                return self._process.ask(job, **given)
            except HubFailure as failure:
                if failure.kind not in ("retry", "conflict") or attempt == tries:
                    raise
                if diary is not None:
                    diary.log(f"{self.repo}: {failure}; tried again")
                time.sleep(max(wait, min(failure.wait or 0.0, MAX_WAIT_SECONDS)))
                wait *= 2
        raise AssertionError("unreachable")

    # On the training thread, before the first step

    def bring(self, checkpoints: Path, diary: Diary) -> None:
        """Put the repo's newest checkpoint into the run folder, unless what is there comes after it; what is there is moved aside.

        Raises HubError where it cannot be had, ValueError where none in the repo can be used.
        """
        if self._seen is None:
            self._leave_out(diary)
            return
        if self._seen["created"]:
            diary.log(f"made the {'private' if self._seen['private'] else 'public'} repo {self.repo}")
        elif self.config.private and not self._seen["private"]:
            diary.log(f"{self.repo} is public: anybody can read what is published there")
        pointer = self._seen["pointer"]
        if not (pointer and pointer["checkpoint"]):
            return
        step = _newest_whole_step(checkpoints)
        if self._lineage.includes(pointer) and step and (step >= pointer["step"] or self._lineage.is_base(pointer)):
            return
        why = "" if not step else f" (what is on this machine, up to step {step:,}, does not come after it)"
        diary.log(f"{self.repo} has step {pointer['step']:,}, published {_ago(pointer['time'])}: downloading it{why}")
        try:
            self._download(pointer, checkpoints, diary)
        except HubFailure as failure:
            if failure.kind == "changed" and self._look_again():  # the session before this one is alive
                self.bring(checkpoints, diary)
                return
            self._give_up(failure, f"step {pointer['step']:,} of {self.repo} could not be downloaded")
            self._leave_out(diary)
        except OSError as error:
            why = disk.explain(error, self._folder)
            raise HubError(f"step {pointer['step']:,} of {self.repo} was downloaded, but cannot be put in place: {why}") from None
        finally:
            shutil.rmtree(self._folder / FOLDER, ignore_errors=True)

    def _give_up(self, failure: HubFailure, what: str) -> None:
        """Raise HubError, unless the run may go on without the Hub."""
        self._seen, self._offline = None, f"{what}: {failure}"
        if self.config.hub_required:
            raise HubError(f"{self._offline}. Run the same line again when that is put right") from None

    def _leave_out(self, diary: Diary) -> None:
        text = f"{self.repo} is left out: {self._offline}; going on from what is on this machine, it is published when that works"
        diary.write("hub_error", text, repo=self.repo, step=0, kind="retry", reason=self._offline)

    def _download(self, pointer: Mapping[str, Any], checkpoints: Path, diary: Diary) -> None:
        assert self._seen is not None
        started, arrived = time.monotonic(), self._folder / FOLDER / "checkpoint"
        answer = self._insist("fetch", sha=self._seen["sha"], folder=str(arrived), diary=diary, hear=_Progress(diary))
        for text in answer["rejected"]:
            diary.write("checkpoint_rejected", text, name=self.repo, reason=text)
        if not answer["path"]:
            raise ValueError(f"no checkpoint in {self.repo} can be used (see the log); name another repo to start anew")
        step = int(answer["step"])
        self._fallback = None if answer["path"] == pointer["checkpoint"] else (answer["path"], step)
        size = manifest.num_bytes(arrived)
        diary.log(f"downloaded step {step:,} in {duration(time.monotonic() - started)} ({size / 1e6:,.1f} MB); every hash is right")
        diary.adopt(arrived / DIARY_FILE, f"what follows, up to step {step:,}, was downloaded with it")
        if manifest.listed(checkpoints):
            aside = _free(self._folder / time.strftime("checkpoints-aside-%Y%m%d-%H%M%S"))
            os.rename(checkpoints, aside)
            diary.log(f"the checkpoints that were on this machine are in {aside} now; remove them when nobody needs them")
        checkpoints.mkdir(parents=True, exist_ok=True)
        os.replace(arrived, checkpoints / f"{manifest.PREFIX}{step:08d}")
        sync_to_disk(checkpoints)
        self._lineage.adopt(pointer)

    def claim(self, diary: Diary, hold: Hold) -> bool:
        """Make this session the one that publishes. False: the repo has changed; bring() again. Raises HubError."""
        pointer = None
        try:
            if self._seen is not None:
                pointer = self._claim(diary)
        except HubFailure as failure:
            if failure.kind == "changed" and self._look_again():
                return False
            self._give_up(failure, f"{self.repo} cannot be claimed")
            self._leave_out(diary)
        self._publisher = Publisher(self._process, diary, self.config, hold, functools.partial(self._join, diary), self._card, self._told)
        self._publisher.start(pointer, pointer["step"] if pointer else 0)
        return True

    def _look_again(self) -> bool:
        try:
            self._look()
        except HubFailure:
            return False
        return True

    def _claim(self, diary: Diary) -> Mapping[str, Any]:
        assert self._seen is not None
        self._lineage.claiming(self._writer)
        pointer = self._insist("claim", diary=diary, seen=self._seen["pointer"], fallback=self._fallback)
        self._say_claimed(diary, pointer)
        return pointer

    def _say_claimed(self, diary: Diary, pointer: Mapping[str, Any]) -> None:
        text, before = f"this session publishes to {self.repo} from here on", self._displaces
        if before and time.time() - before["time"] < RECENT_SECONDS:
            who = f"another one (on {before['host'] or 'another machine'})"
            text += f"; {who} did so {_ago(before['time'])}: if it is alive, it cannot any more"
        diary.write("hub_claimed", text, repo=self.repo, claim=pointer["claim"], published_step=pointer["step"])

    def _join(self, diary: Diary) -> Mapping[str, Any]:
        """Claim late, on the publisher's thread. Raises HubFailure."""
        self._seen = self._process.ask("open", private=self.config.private)
        assert self._seen is not None
        pointer = self._seen["pointer"]
        if pointer and pointer["checkpoint"] and not self._lineage.includes(pointer):
            raise HubFailure(f"{self.repo} has step {pointer['step']:,} of a run that this one does not come after", "fenced")
        return self._claim(diary)

    def _told(self, step: int) -> dict[str, Any]:
        return {**self._facts, "repo": self.repo, "step": step}

    # While it runs

    def budget(self, num_bytes: int) -> str:
        """What publishing checkpoints of this size comes to, for people."""
        every, config = max(self.config.publish_every, 1.0), self.config
        day = f"{86400 / every * num_bytes / 1e9:,.1f} GB of uploads a day"
        kept = f"{self.repo} keeps the newest {config.keep_remote}, and up to {config.squash_every} in its history"
        return f"a checkpoint is {num_bytes / 1e6:,.1f} MB; one every {duration(every)} at most is up to {day}; {kept}"

    def offer(self, path: Path, step: int, saved_at: float) -> None:
        """A checkpoint is on the disk."""
        if self._publisher is not None:
            self._publisher.offer(path, step, saved_at)

    def offer_left_over(self, path: Path, step: int) -> None:
        """What the run goes on from; it is not on the Hub yet if an earlier process could not publish it."""
        if self._publisher is not None and step != self._publisher.published_step:
            self._publisher.offer(path, step, (path / manifest.MANIFEST).stat().st_mtime)
        elif self._publisher is not None:
            self._publisher.saved_step = step

    @property
    def published_step(self) -> int:
        return self._publisher.published_step if self._publisher else 0

    @property
    def doing(self) -> str:
        return self._publisher.doing if self._publisher else ""

    def close(self) -> None:
        """Publish what is not yet there, for two minutes at most, and end the Hub's process."""
        if self._publisher is not None:
            self._publisher.close(min(DRAIN_SECONDS, max(0.0, self._end_at - time.monotonic())))
        self.end()

    def hurry(self, seconds: float) -> None:
        """Publish for so long at most from now on: the interpreter is about to end."""
        self._end_at = time.monotonic() + seconds
        if self._publisher is not None:
            self._publisher.hurry(self._end_at)

    def end(self) -> None:
        """End the Hub's process, whatever it does."""
        self._process.kill()
        shutil.rmtree(self._folder / FOLDER, ignore_errors=True)


class _Progress:
    """Says how far a long download is."""

    def __init__(self, diary: Diary) -> None:
        self._diary, self._told = diary, 0

    def __call__(self, num_bytes: int) -> None:
        if num_bytes - self._told >= REPORT_BYTES:
            self._told = num_bytes
            self._diary.log(f"downloaded {num_bytes / 1e6:,.0f} MB so far")


def _newest_whole_step(checkpoints: Path) -> int:
    for path in manifest.listed(checkpoints):
        with contextlib.suppress(CheckpointError):
            return int(manifest.check(path)["step"])
    return 0


def _free(path: Path) -> Path:
    """`path`, or one that is named after it: two sessions may come within a second."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], others) if not one.exists())


def _ago(when: float) -> str:
    return f"{duration(time.time() - when)} ago"
