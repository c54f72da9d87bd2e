"""What must hold of a Hub repo, whatever went wrong: checked on the Hub's own data and on what the sessions said."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from minihub import Commit, Entry, MiniHub, Repo

from colabtrain.runtime.hub_pointer import LATEST, Pointer
from colabtrain.runtime.manifest import FILES, MANIFEST

JOURNAL = "journal"  # attribute of a Repo: every commit on main in order, those that a squash took from the history too


def keeps_journal(advance: Callable[[Repo, str, Commit], None]) -> Callable[[Repo, str, Commit], None]:
    """Repo.advance, that writes the journal."""

    def advance_and_note(repo: Repo, branch: str, commit: Commit) -> None:
        with repo.lock:
            advance(repo, branch, commit)
            repo.__dict__.setdefault(JOURNAL, []).append(commit)

    return advance_and_note


def journal(repo: Repo) -> list[Commit]:
    return list(repo.__dict__[JOURNAL])


def pointer_of(commit: Commit) -> Pointer | None:
    entry = commit.tree.get(LATEST)
    return None if entry is None or entry.content is None else Pointer.from_json(json.loads(entry.content))


def broken_history(repo: Repo) -> Iterator[str]:
    """(1) and (3): each commit holds what it names, and comes after the one before it."""
    before: Commit | None = None
    for number, commit in enumerate(journal(repo)):
        for path in named(commit):
            yield from (f"commit {number} ({commit.title}): {text}" for text in incomplete(commit.tree, path))
        if before is not None:
            if commit.parent not in (None, before.sha):
                yield f"commit {number} ({commit.title}) was not made on the one before it"
            if text := wrong_turn(pointer_of(before), pointer_of(commit)):
                yield f"commit {number} ({commit.title}): {text}: {pointer_of(before)} -> {pointer_of(commit)}"
        before = commit


def named(commit: Commit) -> list[str]:
    pointer = pointer_of(commit)
    return pointer.candidates() if pointer else []


def incomplete(tree: Mapping[str, Entry], path: str) -> Iterator[str]:
    """What `tree` lacks of the checkpoint `path`; of files in LFS, which are checked when they are sent, the name is the hash."""
    if f"{path}/{MANIFEST}" not in tree:
        yield f"{path} has no manifest"
        return
    told = {entry["name"]: entry for entry in json.loads(tree[f"{path}/{MANIFEST}"].content or b"")["files"]}
    there = {name.removeprefix(f"{path}/") for name in tree if name.startswith(f"{path}/")}
    if there != {MANIFEST, *FILES} or set(told) != set(FILES):
        yield f"{path} has {sorted(there)}, its manifest {sorted(told)}"
        return
    for name, entry in told.items():
        found = tree[f"{path}/{name}"]
        sha256 = found.sha256 if found.content is None else hashlib.sha256(found.content).hexdigest()
        if (sha256, found.size) != (entry["sha256"], entry["size"]):
            yield f"{path}/{name} is not what the manifest says"


def wrong_turn(old: Pointer | None, new: Pointer | None) -> str:
    """Why no commit may lead from `old` to `new`; "" if one may."""
    if new == old:
        return ""  # a squash, somebody's README
    if new is None:
        return "the pointer is gone"
    if old is None:
        return "" if new.claim <= 1 and not new.checkpoint else "the first pointer is not of a repo just made"
    if new.claim == old.claim + 1:
        return wrong_claim(old, new)
    if (new.writer, new.claim) != (old.writer, old.claim):
        return "a commit of a session that does not own the repo"
    if new.seq != old.seq + 1 or new.step <= old.step:
        return "seq and step do not follow"
    alive = [*old.keep, old.checkpoint] if old.checkpoint else []
    kept = list(new.keep)
    return "" if kept == alive[len(alive) - len(kept) :] and (kept or not alive) else "kept is not the newest of what there was"


def wrong_claim(old: Pointer, new: Pointer) -> str:
    if new.writer == old.writer or new.seq != old.seq:
        return "no claim of another session"
    if (new.checkpoint, new.keep, new.step) == (old.checkpoint, old.keep, old.step):
        return ""
    falls_back = new.checkpoint in old.keep and new.keep == old.keep[: old.keep.index(new.checkpoint)]
    return "" if falls_back else "a claim changed what is kept"


def damaged_now(hub: MiniHub, repo: Repo, damaged: Collection[str]) -> Iterator[str]:
    """(1) on the disk: every object of every commit that main reaches is there and has its hash, but for those the test damaged."""
    objects = {entry.sha256 for commit in repo.reachable().values() for entry in commit.tree.values() if entry.sha256}
    for sha256 in objects - set(damaged):
        if not hub.store.has(sha256) or hashlib.sha256(hub.store.path(sha256).read_bytes()).hexdigest() != sha256:
            yield f"object {sha256} is named by the history of main, and is not there or not whole"


def lost(repo: Repo, acked: list[tuple[str, int, int]]) -> Iterator[str]:
    """(2): what was said to be published is in the history, once. acked: (writer, step, seq)."""
    published = {(pointer.writer, pointer.step, pointer.seq) for commit in journal(repo) if (pointer := pointer_of(commit))}
    for one in acked:
        if one not in published:
            yield f"{one} was acknowledged, and is in no commit"
    seqs = [seq for _, _, seq in acked]
    if len(set(seqs)) != len(seqs):
        yield f"a seq was acknowledged twice: {sorted(seqs)}"
    head = pointer_of(repo.head())
    if seqs and (head is None or head.seq < max(seqs)):
        yield f"seq {max(seqs)} was acknowledged, HEAD has {head}"


def claims_after(repo: Repo, writer: str) -> bool:
    """Whether another session claimed after `writer` did."""
    writers = [pointer.writer for commit in journal(repo) if (pointer := pointer_of(commit))]
    return writer in writers and writers[-1] != writer


def told_token(hub: MiniHub, repo: Repo, token: str) -> Iterator[str]:
    """(6) on the Hub."""
    for commit in journal(repo):
        told = f"{commit.title} {commit.message}"
        files = [(path, entry.content or hub.store.path(entry.sha256 or "").read_bytes()) for path, entry in present(hub, commit)]
        if token in told or any(token.encode() in content for _, content in files):
            yield f"the token is in commit {commit.title}"


def present(hub: MiniHub, commit: Commit) -> list[tuple[str, Any]]:
    return [(path, entry) for path, entry in commit.tree.items() if entry.content is not None or hub.store.has(entry.sha256 or "")]
