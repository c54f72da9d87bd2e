"""The hub as a test sees it."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from minihub.body import Throttle
from minihub.faults import Fault, Faults
from minihub.repos import HubError, Repo, Token
from minihub.server import Hold, Seen, Server
from minihub.store import Store
from minihub.xet import XetObjects

TOKENS = {"hf_write": "write", "hf_read": "read"}


class MiniHub:
    """A Hub on 127.0.0.1 between `__enter__` and `__exit__`.

    `tokens`: token -> "write", "read" or a `Token` of another account. `multipart_chunk`: bytes above which an LFS file is sent in
    parts. `xet_cas`: "local:///folder" serves Xet's token routes; hf_xet keeps the bytes there. `cdn_redirect`: LFS files are read
    from another origin, as on the Hub. `throttle`: bytes per second of request bodies; it may be changed at any time.
    """

    def __init__(
        self,
        root: Path | str | None = None,
        tokens: Mapping[str, str | Token] = TOKENS,
        multipart_chunk: int | None = None,
        xet_cas: str | None = None,
        cdn_redirect: bool = False,
        throttle: float | None = None,
        port: int = 0,
    ) -> None:
        self._own_root = root is None
        self.root = Path(tempfile.mkdtemp(prefix="minihub-") if root is None else root)
        self.tokens = {name: token if isinstance(token, Token) else Token(token) for name, token in tokens.items()}
        self.multipart_chunk, self.cdn_redirect = multipart_chunk, cdn_redirect
        self.repos: dict[tuple[str, str], Repo] = {}  # (kind, id) -> repository
        self.lock = threading.RLock()
        self.store = Store(self.root)
        self.xet = XetObjects(self.store, xet_cas)
        self.faults = Faults()
        self.errors: list[BaseException] = []  # bugs of the server itself
        self.pace = Throttle()
        self.pace.bytes_per_second = throttle
        self._hold = Hold(self.pace.closing)
        self._log: list[Seen] = []
        self._server = Server(self, port)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> MiniHub:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.pace.closing.set()
        self.release()
        self._server.close()
        if self._own_root:
            shutil.rmtree(self.root)
        if self.errors and error is None:
            raise self.errors[0]

    @property
    def xet_cas(self) -> str | None:
        return self.xet.cas

    @xet_cas.setter
    def xet_cas(self, cas: str | None) -> None:
        self.xet.cas = cas

    @property
    def throttle(self) -> float | None:
        return self.pace.bytes_per_second

    @throttle.setter
    def throttle(self, bytes_per_second: float | None) -> None:
        self.pace.bytes_per_second = bytes_per_second

    def fault(self, method: str, path_regex: str, *action: Any, times: int | None = 1, after: int = 0) -> Fault:
        """The next `times` requests (None: all) after `after` others fare as `action` says; see faults.ACTIONS."""
        return self.faults.add(method, path_regex, action, times, after)

    def release(self) -> None:
        """Let all requests go that hang now."""
        self._hold.release()

    def hold(self, seconds: float | None = None) -> None:
        self._hold.wait(seconds)

    def note(self, seen: Seen) -> None:
        with self.lock:
            self._log.append(seen)

    def take_log(self) -> list[Seen]:
        """What was asked since the last call."""
        with self.lock:
            taken, self._log = self._log, []
        return taken

    def find(self, repo_id: str, kind: str = "model", token: Token | None = None) -> Repo:
        """A repository; an error for a client if there is none (without a token it hears 401, as on the Hub)."""
        repo = self.repos.get((kind, repo_id))
        if repo is None:
            raise HubError(401, "Invalid username or password.") if token is None else HubError(404, "Repository not found", "RepoNotFound")
        return repo

    def head(self, repo_id: str, kind: str = "model", branch: str = "main") -> str:
        """The sha of a branch."""
        return self.repos[kind, repo_id].head(branch).sha

    def read(self, repo_id: str, revision: str, path: str, kind: str = "model") -> bytes:
        """The bytes of a file at a sha or branch, regular or LFS."""
        entry = self.repos[kind, repo_id].revision(revision).tree[path]
        if entry.content is not None:
            return entry.content
        assert entry.sha256 is not None
        return self.store.path(entry.sha256).read_bytes()

    def stored_bytes(self, repo_id: str, kind: str = "model") -> int:
        """What counts against the quota: the LFS objects that the repository knows."""
        return sum(self.store.size(sha256) for sha256 in list(self.repos[kind, repo_id].lfs))

    def forget(self, repo: Repo, objects: set[str]) -> None:
        """Take LFS objects from a repository, and from the disk if no other one has them."""
        with self.lock:
            for sha256 in objects:
                repo.lfs.pop(sha256, None)
                if not any(sha256 in other.lfs for other in self.repos.values()):
                    self.store.delete(sha256)

    def gc(self, repo_id: str, kind: str = "model") -> None:
        """What the Hub does some time after a squash: commits that no branch reaches go, and the LFS objects that only they name."""
        repo = self.repos[kind, repo_id]
        with repo.lock:
            repo.commits = repo.reachable()
            live = {entry.sha256 for commit in repo.commits.values() for entry in commit.tree.values()}
            self.forget(repo, set(repo.lfs) - live)
