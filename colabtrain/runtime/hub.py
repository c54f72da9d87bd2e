"""One Hub repo as the home of one run: who may publish, what is published, what a new machine goes on from.

Runs in the Hub's child process. On branch main of the repo, `ckpt/<seq>-<nonce>/` is one checkpoint, written once;
`colabtrain/latest.json` (Pointer) names the newest one and the session that may publish, and changes in every commit. A commit
is made on the condition that HEAD is still the one it was made for, so of two sessions one is refused. An answer that does not
come says nothing: HEAD is read again, and only its pointer says what happened.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RevisionNotFoundError

from colabtrain import hub_errors
from colabtrain.runtime import manifest
from colabtrain.runtime.hub_pointer import CHECKPOINT, FOLDER, LATEST, Pointer
from colabtrain.runtime.manifest import FILES, MANIFEST, STATE, CheckpointError

BRANCH = "main"
NOBODYS = {".gitattributes", "README.md"}  # what an empty repo may have
TRIES = 5  # at one commit while HEAD moves, or at reading a HEAD that is squashed away
Adds = list[CommitOperationAdd]
Build = Callable[[Pointer | None], tuple[Pointer, Adds] | None]


class Fenced(Exception):
    """Another session has the repo. The text names it."""


class Changed(Exception):
    """Somebody claimed, published or squashed since the caller looked."""


class NotOurs(Exception):
    """The repo holds something else."""


class Hub:
    """writer: names this session. cache: a folder for what is downloaded."""

    def __init__(self, repo: str, token: str, writer: str, cache: Path, endpoint: str | None = None) -> None:
        self.repo, self.writer, self._cache = repo, writer, cache
        self._api = HfApi(endpoint=endpoint, token=token)
        self._host = platform.node()

    # Looking

    def open(self, private: bool) -> dict[str, Any]:
        """Make the repo if there is none, prove that it can be written, and say what is in it: {sha, pointer (None: nothing),
        state (state.json of its newest checkpoint, or None), private, created (just now)}. Raises NotOurs."""
        created = self._create(private)
        if created:
            self._commit(lambda pointer: None if pointer else (Pointer(created=True, time=time.time()), []), "made by colabtrain")
        info = self._api.model_info(self.repo, revision=BRANCH)
        sha, pointer = self._head()
        if pointer is None and (foreign := sorted({file.rfilename for file in info.siblings or ()} - NOBODYS)):
            raise NotOurs(f"{self.repo} is not empty and no run of colabtrain: it has {foreign[0]}; name another repo")
        if not created:
            self._prove_write_access()
        state = self._json(sha, f"{pointer.checkpoint}/{STATE}") if pointer and pointer.checkpoint else None
        told = pointer.to_json() if pointer else None
        return {"sha": sha, "pointer": told, "state": state, "private": bool(info.private), "created": created}

    def _create(self, private: bool) -> bool:
        """True if there was none."""
        if self._exists():
            return False
        try:
            self._api.create_repo(self.repo, private=private)
        except Exception as error:
            if hub_errors.status(error) == 409:  # another session was faster, or the repo is there but not for this token
                return False
            if hub_errors.kind(error) != hub_errors.RETRY or not self._exists():  # else only the answer was lost
                raise
        return True

    def _exists(self) -> bool:
        try:
            self._api.model_info(self.repo)
        except Exception as error:
            if hub_errors.status(error) != 404:
                raise
            return False
        return True

    def _prove_write_access(self) -> None:
        try:
            self._api.auth_check(self.repo, write=True)
        except Exception as error:
            if hub_errors.status(error) != 404:  # a Hub without this route: the claim is the proof
                raise

    def _head(self) -> tuple[str, Pointer | None]:
        """HEAD, and the pointer at that commit; never at "main", for which the client may serve what is old."""
        for _ in range(TRIES - 1):
            sha = str(self._api.model_info(self.repo, revision=BRANCH).sha)
            try:
                return sha, self._pointer(sha)
            except RevisionNotFoundError:  # squashed in between
                continue
        sha = str(self._api.model_info(self.repo, revision=BRANCH).sha)
        return sha, self._pointer(sha)

    def _pointer(self, sha: str) -> Pointer | None:
        file = self._fetch(sha, LATEST)
        if file is None:
            return None
        try:
            return Pointer.from_json(json.loads(file.read_bytes()))
        except ValueError as error:
            raise NotOurs(f"{LATEST} of {self.repo} cannot be understood: {error}; put it right, or name another repo") from None

    def _json(self, sha: str, path: str) -> Any:
        """None if there is no such file, or it holds no JSON."""
        file = self._fetch(sha, path)
        try:
            return None if file is None else json.loads(file.read_bytes())
        except ValueError:
            return None

    def _fetch(self, sha: str, path: str) -> Path | None:
        try:
            return Path(self._api.hf_hub_download(self.repo, path, revision=sha, cache_dir=self._cache))
        except LocalEntryNotFoundError:  # not on this machine, and the Hub is out of reach
            raise
        except EntryNotFoundError:
            return None

    # Going on

    def fetch(self, sha: str, folder: Path) -> dict[str, Any]:
        """Download the newest checkpoint at `sha` that is whole into `folder`: {path (in the repo; "" if none is), step, rejected
        (texts)}. Raises Changed if that commit is no more."""
        rejected: list[str] = []
        try:
            pointer = self._pointer(sha)
            for path in pointer.candidates() if pointer else ():
                try:
                    step = self._download(sha, path, folder)
                except CheckpointError as error:
                    rejected.append(f"checkpoint {path} of {self.repo} cannot be used: {error}")
                else:
                    return {"path": path, "step": step, "rejected": rejected}
        except RevisionNotFoundError as error:
            raise Changed(str(error)) from None
        return {"path": "", "step": 0, "rejected": rejected}

    def _download(self, sha: str, path: str, folder: Path) -> int:
        """The step of checkpoint `path`, now in `folder` and checked against its manifest. Raises CheckpointError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in (MANIFEST, *FILES):
            file = self._fetch(sha, f"{path}/{name}")
            if file is None:
                raise CheckpointError(f"{name} is missing")
            os.replace(os.path.realpath(file), folder / name)  # out of the cache, which must not serve a damaged one again
            file.unlink(missing_ok=True)
        return int(manifest.check(folder)["step"])

    # Changing

    def claim(self, seen: Mapping[str, Any] | None, fallback: Sequence[Any] | None) -> dict[str, Any]:
        """Make this session the one that publishes; the pointer. seen: the pointer that the caller decided on; fallback: as in
        Pointer.claimed(). Raises Changed where HEAD has another one."""
        known = Pointer.from_json(seen) if seen else None

        def build(pointer: Pointer | None) -> tuple[Pointer, Adds] | None:
            if pointer is not None and pointer.writer == self.writer:
                return None
            if pointer != known:
                raise Changed(f"{self.repo} has changed since it was looked at")
            before = pointer or Pointer()
            return before.claimed(self.writer, self._host, (str(fallback[0]), int(fallback[1])) if fallback else None), []

        return self._commit(build, "claimed by a new session").to_json()

    def publish(self, checkpoint: Path, step: int, nonce: str, keep: int, extra: Mapping[str, bytes]) -> dict[str, Any]:
        """Commit a checkpoint folder, and `extra` files, at once; older checkpoints go, but for `keep` in all. nonce: hexadecimal,
        this checkpoint's own. Raises Fenced. Returns the pointer."""
        if not (checkpoint / MANIFEST).exists():
            raise FileNotFoundError(2, "is not there any more", str(checkpoint))
        made: dict[str, Adds] = {}

        def build(pointer: Pointer | None) -> tuple[Pointer, Adds] | None:
            mine = self._mine(pointer)
            if mine.checkpoint.endswith(f"-{nonce}"):
                return None
            new = mine.published(step, nonce, keep)
            if new.checkpoint not in made:  # else only the commit is made again: the operations know what is uploaded
                made[new.checkpoint] = [CommitOperationAdd(f"{new.checkpoint}/{name}", checkpoint / name) for name in (MANIFEST, *FILES)]
                made[new.checkpoint] += [CommitOperationAdd(name, data) for name, data in extra.items()]
            return new, made[new.checkpoint]

        return self._commit(build, f"step {step}", made.clear).to_json()

    def squash(self) -> None:
        """Make one commit of the history. Raises Fenced; what another session committed meanwhile stays."""
        self._mine(self._head()[1])
        self._api.super_squash_history(self.repo, branch=BRANCH)
        self._mine(self._head()[1])

    def _mine(self, pointer: Pointer | None) -> Pointer:
        if pointer is None:
            raise Fenced(f"somebody removed {LATEST} from {self.repo}")
        if pointer.writer != self.writer:
            raise Fenced(f"another session (on {pointer.host or 'another machine'}) has taken over {self.repo}")
        return pointer

    def _commit(self, build: Build, message: str, forget: Callable[[], object] = lambda: None) -> Pointer:
        """Compare and swap: build(HEAD's pointer) gives the next pointer and what goes with it, None where that is there already.
        forget(): what was uploaded is not there any more."""
        for attempt in range(1, TRIES + 1):
            sha, pointer = self._head()
            if (built := build(pointer)) is None:
                assert pointer is not None
                return pointer
            try:
                return self._commit_on(sha, *built, message)
            except Exception as error:
                kind = hub_errors.kind(error)
                gone = hub_errors.status(error) == 400 and attempt == 1
                if gone:
                    forget()
                elif kind not in (hub_errors.CONFLICT, hub_errors.RETRY):
                    raise
                elif kind == hub_errors.RETRY or attempt == TRIES:
                    landed = self._head()[1]
                    if build(landed) is not None:
                        raise
                    assert landed is not None
                    return landed
        raise AssertionError("unreachable")

    def _commit_on(self, sha: str, new: Pointer, adds: Adds, message: str) -> Pointer:
        self._api.preupload_lfs_files(self.repo, adds, free_memory=False)  # long; nobody sees it yet
        latest = CommitOperationAdd(LATEST, json.dumps(new.to_json(), sort_keys=True).encode())
        about = json.dumps({"writer": new.writer, "seq": new.seq})
        operations = [*adds, latest, *(CommitOperationDelete(f"{path}/", is_folder=True) for path in self._dropped(sha, new))]
        self._api.create_commit(self.repo, operations, commit_message=message, commit_description=about, parent_commit=sha)
        return new

    def _dropped(self, sha: str, new: Pointer) -> list[str]:
        """Folders of checkpoints that are there and not kept: not all that ever were, a person may have removed some."""
        try:
            found = [entry.path for entry in self._api.list_repo_tree(self.repo, FOLDER, revision=sha)]
        except EntryNotFoundError:
            return []
        return [path for path in found if CHECKPOINT.fullmatch(path) and path not in new.candidates()]
