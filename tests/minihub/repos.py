"""What a Hub stores: commits over trees of entries, branches, tags, and who may read or write them."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any


class HubError(Exception):
    """An answer of 4xx: `code` becomes X-Error-Code, `message` X-Error-Message, `body` is added to the JSON."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {message}")
        self.status, self.message, self.code, self.headers = status, message, code, dict(headers or {})


@dataclass(frozen=True)
class Token:
    """What a token may do: `role` "write" or "read", as the account `user`."""

    role: str
    user: str = "user"


def timestamp(seconds: float | None = None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def git_blob_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A file of a tree: a regular one has its `content` here, an LFS one has its sha256."""

    size: int
    content: bytes | None = None
    sha256: str | None = None
    oid: str = field(init=False)

    def __post_init__(self) -> None:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()
        object.__setattr__(self, "oid", git_blob_oid(pointer if self.content is None else self.content))

    @staticmethod
    def regular(content: bytes) -> Entry:
        return Entry(len(content), content=content)

    @staticmethod
    def lfs(sha256: str, size: int) -> Entry:
        return Entry(size, sha256=sha256)


class Commit:
    def __init__(self, parent: str | None, tree: Mapping[str, Entry], title: str, message: str = "", user: str = "user") -> None:
        self.parent, self.title, self.message, self.user = parent, title, message, user
        self.tree: Mapping[str, Entry] = MappingProxyType(dict(tree))
        self.date = timestamp()
        named = [(path, entry.oid) for path, entry in sorted(tree.items())]
        self.sha = hashlib.sha1(repr((parent, named, title, secrets.token_hex())).encode()).hexdigest()


class Repo:
    def __init__(self, kind: str, repo_id: str, private: bool) -> None:
        self.kind, self.id, self.private = kind, repo_id, private
        self.lock = threading.RLock()
        self.commits: dict[str, Commit] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.lfs: dict[str, float] = {}  # sha256 of each object this repository knows -> when it was pushed
        attributes = Entry.regular(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        self.advance("main", Commit(None, {".gitattributes": attributes}, "initial commit"))

    @property
    def url_path(self) -> str:
        return ("" if self.kind == "model" else f"{self.kind}s/") + self.id

    def advance(self, branch: str, commit: Commit) -> None:
        with self.lock:
            self.commits[commit.sha] = commit
            self.branches[branch] = commit.sha

    def head(self, branch: str = "main") -> Commit:
        if branch not in self.branches:
            raise HubError(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        return self.commits[self.branches[branch]]

    def revision(self, name: str) -> Commit:
        """The commit of a branch, of a tag or of a sha (7 digits are enough)."""
        name = name.removeprefix("refs/heads/")
        with self.lock:
            for names in (self.branches, self.tags):
                if name in names:
                    return self.commits[names[name]]
            hits = [commit for sha, commit in self.commits.items() if len(name) >= 7 and sha.startswith(name)]
        if len(hits) != 1:
            raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return hits[0]

    def history(self, sha: str | None) -> list[Commit]:
        """The commit and its ancestors, newest first."""
        found: list[Commit] = []
        while sha:
            found.append(self.commits[sha])
            sha = found[-1].parent
        return found

    def reachable(self) -> dict[str, Commit]:
        with self.lock:
            return {commit.sha: commit for sha in {*self.branches.values(), *self.tags.values()} for commit in self.history(sha)}

    def check_access(self, token: Token | None, write: bool) -> None:
        """Like the Hub: a private repository does not exist for those who may not read it."""
        owner = token is not None and token.user == self.id.split("/")[0]
        if token is None and (self.private or write):
            raise HubError(401, "Invalid username or password.")
        if self.private and not owner:
            raise HubError(404, "Repository not found", "RepoNotFound")
        if write and not (owner and token is not None and token.role == "write"):
            raise HubError(403, "Forbidden: you must use a write token to upload to a repository.")


def apply_operation(tree: dict[str, Entry], key: str, value: dict[str, Any], entry: Entry | None) -> None:
    """Change `tree` by one line of a commit; `entry` is what an added file becomes."""
    path = value["path"]
    if key in ("file", "lfsFile"):
        assert entry is not None
        tree[path] = entry
        return
    if key not in ("deletedFile", "deletedFolder"):
        raise HubError(400, f"unknown operation {key}")
    folder = path.rstrip("/") + "/"
    gone = [name for name in tree if (name == path if key == "deletedFile" else name.startswith(folder))]
    if not gone:
        raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
    for name in gone:
        del tree[name]
