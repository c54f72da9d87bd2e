"""Which function answers which request, and what it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from minihub.repos import HubError, Token

if TYPE_CHECKING:
    from minihub.body import Body
    from minihub.hub import MiniHub

REPO_ID = r"(?P<repo_id>[^/]+/[^/]+)"
API = rf"/api/(?P<kind>model|dataset|space)s/{REPO_ID}"
WEB = rf"/(?:(?P<kind>dataset|space)s/)?{REPO_ID}"  # a model has no prefix outside of /api


@dataclass
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | Path = b""
    is_file: bool = False  # one whose parts may be asked for


@dataclass
class Request:
    hub: MiniHub
    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Message
    body: Body
    token: Token | None = None

    def json(self) -> Any:
        return json.loads(self.body.read() or b"null")

    def asked(self, name: str, default: str) -> str:
        return self.query.get(name, [default])[0]


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())


def as_error(error: HubError) -> Answer:
    headers = {**error.headers, "X-Error-Message": error.message}
    if error.code:
        headers["X-Error-Code"] = error.code
    return as_json({"error": error.message}, error.status, headers)


@dataclass(frozen=True)
class Route:
    method: str
    path: re.Pattern[str]
    needs: str
    serve: Callable[..., Answer]


ROUTES: list[Route] = []


def route(method: str, path: str, needs: str = "read") -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Register a function. `needs`: "signed" (the address itself is the permission), "account", "read" or "write" (of the repository)."""

    def register(serve: Callable[..., Answer]) -> Callable[..., Answer]:
        ROUTES.append(Route(method, re.compile(path), needs, serve))
        return serve

    return register


def dispatch(request: Request) -> Answer:
    method = "GET" if request.method == "HEAD" else request.method
    for candidate in ROUTES:
        match = candidate.path.fullmatch(request.path)
        if match and candidate.method == method:
            return _serve(candidate, request, match)
    raise HubError(404, f"no route for {request.method} {request.path}")


def _serve(chosen: Route, request: Request, match: re.Match[str]) -> Answer:
    named: dict[str, Any] = {name: None if value is None else unquote(value) for name, value in match.groupdict().items()}
    if chosen.needs != "signed":
        request.token = _authenticate(request)
    if chosen.needs == "account" and request.token is None:
        raise HubError(401, "Invalid username or password.")
    if "repo_id" in named:
        repo = request.hub.find(named.pop("repo_id"), named.pop("kind") or "model", request.token)
        if chosen.needs in ("read", "write"):
            repo.check_access(request.token, write=chosen.needs == "write")
        named["repo"] = repo
    return chosen.serve(request, **named)


def _authenticate(request: Request) -> Token | None:
    given = request.headers.get("Authorization")
    if given is None:
        return None
    token = request.hub.tokens.get(given.removeprefix("Bearer "))
    if token is None:
        raise HubError(401, "Invalid credentials in Authorization header")
    return token
