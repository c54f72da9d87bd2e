"""Accounts, repositories, their refs, history and trees."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import parse_qs

from minihub.repos import Commit, Entry, HubError, Repo
from minihub.routing import API, Answer, Request, as_json, route

TREE_PAGE = 1000


@route("GET", "/api/whoami-v2", needs="account")
def whoami(request: Request) -> Answer:
    assert request.token is not None
    access = {"displayName": "test token", "role": request.token.role}
    name = request.token.user
    return as_json({"type": "user", "id": name, "name": name, "orgs": [], "auth": {"type": "access_token", "accessToken": access}})


@route("POST", "/api/repos/create", needs="account")
def create(request: Request) -> Answer:
    asked, hub, token = request.json(), request.hub, request.token
    assert token is not None
    kind, owner = asked.get("type") or "model", asked.get("organization") or token.user
    repo_id = f"{owner}/{asked['name']}"
    if owner != token.user or token.role != "write":
        raise HubError(403, f'You don\'t have the rights to create a {kind} under the namespace "{owner}"')
    private = asked.get("visibility") == "private" or bool(asked.get("private"))
    with hub.lock:
        exists = (kind, repo_id) in hub.repos
        repo = hub.repos.setdefault((kind, repo_id), Repo(kind, repo_id, private))
    url = f"{hub.url}/{repo.url_path}"
    if exists:
        text = f"You already created this {kind} repo"
        return as_json({"error": text, "url": url}, 409, {"X-Error-Message": text})
    return as_json({"url": url, "name": repo_id})


@route("DELETE", "/api/repos/delete", needs="account")
def delete(request: Request) -> Answer:
    asked = request.json()
    assert request.token is not None
    kind, owner = asked.get("type") or "model", asked.get("organization") or request.token.user
    with request.hub.lock:
        repo = request.hub.find(f"{owner}/{asked['name']}", kind, request.token)
        repo.check_access(request.token, write=True)
        request.hub.forget(repo, set(repo.lfs))
        del request.hub.repos[kind, repo.id]
    return as_json({})


@route("POST", "/api/validate-yaml", needs="account")
def validate_yaml(request: Request) -> Answer:
    return as_json({"errors": [], "warnings": []})


@route("GET", API + "/auth-check")
def may_read(request: Request, repo: Repo) -> Answer:
    return as_json({})


@route("GET", API + "/auth-check/write", needs="write")
def may_write(request: Request, repo: Repo) -> Answer:
    return as_json({})


@route("GET", API + r"(?:/revision/(?P<revision>.+))?")
def info(request: Request, repo: Repo, revision: str | None) -> Answer:
    commit = repo.revision(revision or "main")
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(commit.tree)]
    if request.asked("blobs", "").lower() in ("true", "1"):
        for file in siblings:
            entry = commit.tree[file["rfilename"]]
            file |= {"size": entry.size, "blobId": entry.oid}
            if entry.sha256:
                file["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": 134}
    return as_json(
        {
            "_id": "1",
            "id": repo.id,
            "modelId": repo.id,
            "sha": commit.sha,
            "private": repo.private,
            "lastModified": commit.date,
            "createdAt": commit.date,
            "disabled": False,
            "gated": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
            "usedStorage": request.hub.stored_bytes(repo.id, repo.kind),
        }
    )


def _entry_json(request: Request, path: str, entry: Entry) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path}
    if entry.sha256:
        shown["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": 134}
        if entry.sha256 in request.hub.xet.hashes:
            shown["xetHash"] = request.hub.xet.hashes[entry.sha256]
    return shown


def _folder_json(path: str) -> dict[str, Any]:
    return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}


def _listing(request: Request, commit: Commit, prefix: str, recursive: bool) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path, entry in sorted(commit.tree.items()):
        if not path.startswith(prefix):
            continue
        folders = path[len(prefix) :].split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            folder = prefix + "/".join(folders[:depth])
            if recursive or depth == 1:
                found.setdefault(folder, _folder_json(folder))
        if recursive or not folders:
            found[path] = _entry_json(request, path, entry)
    return list(found.values())


@route("GET", API + r"/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?")
def tree(request: Request, repo: Repo, revision: str, folder: str | None) -> Answer:
    prefix = folder.strip("/") + "/" if folder else ""
    recursive = request.asked("recursive", "false").lower() in ("true", "1")
    found = _listing(request, repo.revision(revision), prefix, recursive)
    if prefix and not found:
        raise HubError(404, f'{folder} does not exist on "{revision}"', "EntryNotFound")
    start = int(request.asked("cursor", "0"))
    end, headers = start + TREE_PAGE, {}
    if end < len(found):
        headers["Link"] = f'<{request.hub.url}{request.path}?recursive={recursive}&expand=False&cursor={end}>; rel="next"'
    return as_json(found[start:end], headers=headers)


@route("POST", API + r"/paths-info/(?P<revision>.+)")
def paths_info(request: Request, repo: Repo, revision: str) -> Answer:
    commit, found = repo.revision(revision), list[dict[str, Any]]()
    for asked in parse_qs(request.body.read().decode()).get("paths", []):
        path = asked.rstrip("/")
        if path in commit.tree:
            found.append(_entry_json(request, path, commit.tree[path]))
        elif any(name.startswith(path + "/") for name in commit.tree):
            found.append(_folder_json(path))
    return as_json(found)


@route("GET", API + r"/commits/(?P<revision>.+)")
def commits(request: Request, repo: Repo, revision: str) -> Answer:
    history = repo.history(repo.revision(revision).sha)
    page, limit = int(request.asked("p", "0")), int(request.asked("limit", "50"))
    end, headers = (page + 1) * limit, {}
    if end < len(history):
        headers["Link"] = f'<{request.hub.url}{request.path}?p={page + 1}&limit={limit}>; rel="next"'
    shown = [
        {"id": commit.sha, "title": commit.title, "message": commit.message, "authors": [{"user": commit.user}], "date": commit.date}
        for commit in history[page * limit : end]
    ]
    return as_json(shown, headers=headers)


@route("GET", API + "/refs")
def refs(request: Request, repo: Repo) -> Answer:
    branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in repo.branches.items()]
    tags = [{"name": name, "ref": f"refs/tags/{name}", "targetCommit": sha} for name, sha in repo.tags.items()]
    return as_json({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})


@route("POST", API + r"/branch/(?P<name>.+)", needs="write")
def create_branch(request: Request, repo: Repo, name: str) -> Answer:
    asked = request.json() or {}
    with repo.lock:
        if name in repo.branches:
            raise HubError(409, f"Reference already exists: refs/heads/{name}")
        repo.branches[name] = repo.revision(asked.get("startingPoint") or "main").sha
    return as_json({})


@route("POST", API + r"/tag/(?P<revision>.+)", needs="write")
def create_tag(request: Request, repo: Repo, revision: str) -> Answer:
    name = request.json()["tag"]
    with repo.lock:
        if name in repo.tags:
            raise HubError(409, "Tag reference exists already")
        repo.tags[name] = repo.revision(revision).sha
    return as_json({})


@route("DELETE", API + r"/(?P<what>branch|tag)/(?P<name>.+)", needs="write")
def delete_ref(request: Request, repo: Repo, what: str, name: str) -> Answer:
    refs = repo.branches if what == "branch" else repo.tags
    with repo.lock:
        if refs.pop(name, None) is None:
            raise HubError(404, f"no such {what}", "RevisionNotFound")
    return as_json({})


@route("POST", API + r"/super-squash/(?P<branch>.+)", needs="write")
def super_squash(request: Request, repo: Repo, branch: str) -> Answer:
    title = (request.json() or {}).get("message") or "Super-squash branch"
    with repo.lock:
        repo.advance(branch, Commit(None, repo.head(branch).tree, title))
    return as_json({})
