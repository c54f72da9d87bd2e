"""Uploads: what goes how, LFS objects (whole, in parts, through Xet), commits."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from minihub.repos import Commit, Entry, HubError, Repo, apply_operation, timestamp
from minihub.routing import API, WEB, Answer, Request, as_json, route

LFS_SUFFIXES = (".bin", ".ckpt", ".gz", ".h5", ".model", ".npy", ".npz", ".onnx", ".parquet", ".pkl", ".pt", ".pth", ".safetensors", ".zip")
LFS_BYTES = 10 << 20
OBJECT = r"/_lfs/(?P<kind>\w+)/(?P<repo_id>[^/]+/[^/]+)/(?P<sha256>[0-9a-f]{64})"


@route("POST", API + r"/preupload/(?P<revision>.+)", needs="write")
def preupload(request: Request, repo: Repo, revision: str) -> Answer:
    tree, modes = repo.revision(revision).tree, list[dict[str, Any]]()
    for file in request.json()["files"]:
        sample = base64.b64decode(file.get("sample") or "")
        lfs = file["path"].endswith(LFS_SUFFIXES) or file["size"] >= LFS_BYTES or b"\0" in sample
        mode = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
        if file["path"] in tree:
            entry = tree[file["path"]]
            mode["oid"] = entry.sha256 or entry.oid
        modes.append(mode)
    return as_json({"files": modes})


@route("POST", WEB + r"\.git/info/lfs/objects/batch", needs="write")
def batch(request: Request, repo: Repo) -> Answer:
    asked = request.json()
    multipart = "multipart" in asked.get("transfers", [])
    return as_json({"transfer": "basic", "objects": [_upload_of(request, repo, wanted, multipart) for wanted in asked["objects"]]})


def _upload_of(request: Request, repo: Repo, wanted: dict[str, Any], multipart: bool) -> dict[str, Any]:
    """How to send an object; without `actions` there is nothing to send."""
    sha256, size, chunk = wanted["oid"], wanted["size"], request.hub.multipart_chunk
    shown: dict[str, Any] = {"oid": sha256, "size": size}
    if sha256 in repo.lfs and request.hub.store.has(sha256):
        return shown
    address = f"{request.hub.url}/_lfs/{repo.kind}/{repo.id}/{sha256}"
    if not (multipart and chunk and size > chunk):
        return {**shown, "actions": {"upload": {"href": address}, "verify": {"href": f"{address}/verify"}}}
    parts = {str(number): f"{address}/part/{number}" for number in range(1, -(-size // chunk) + 1)}
    return {**shown, "actions": {"upload": {"href": f"{address}/complete", "header": {"chunk_size": str(chunk), **parts}}}}


@route("PUT", OBJECT, needs="signed")
def put_object(request: Request, repo: Repo, sha256: str) -> Answer:
    md5 = request.hub.store.put(sha256, request.body.pieces())
    repo.lfs[sha256] = time.time()
    return Answer(headers={"ETag": f'"{md5}"'})


@route("PUT", OBJECT + r"/part/(?P<number>\d+)", needs="signed")
def put_part(request: Request, repo: Repo, sha256: str, number: str) -> Answer:
    md5 = request.hub.store.put_part(sha256, int(number), request.body.pieces())
    return Answer(headers={"ETag": f'"{md5}"'})


@route("POST", OBJECT + "/complete", needs="signed")  # the client sends no token here
def complete(request: Request, repo: Repo, sha256: str) -> Answer:
    request.hub.store.join_parts(sha256, [part["partNumber"] for part in request.json()["parts"]])
    repo.lfs[sha256] = time.time()
    return as_json({})


@route("POST", OBJECT + "/verify", needs="signed")
def verify(request: Request, repo: Repo, sha256: str) -> Answer:
    if sha256 not in repo.lfs or request.hub.store.size(sha256) != request.json()["size"]:
        raise HubError(404, "object not uploaded")
    return as_json({})


@route("GET", API + r"/xet-(?:read|write)-token/(?P<revision>.+)")
def xet_token(request: Request, repo: Repo, revision: str) -> Answer:
    if "/xet-write-token/" in request.path:
        repo.check_access(request.token, write=True)
    cas = request.hub.xet_cas
    if cas is None:
        raise HubError(404, "Xet is not enabled on this server")
    expires = int(time.time()) + 3600
    headers = {"X-Xet-Cas-Url": cas, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expires)}
    return as_json({"accessToken": "xet", "exp": expires, "casUrl": cas}, headers=headers)


@route("POST", API + r"/commit/(?P<branch>.+)", needs="write")
def commit(request: Request, repo: Repo, branch: str) -> Answer:
    lines = [json.loads(line) for line in request.body.read().splitlines() if line.strip()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    # Deletes before adds, as the client's delete_patterns assume.
    operations = sorted((line for line in lines if line["key"] != "header"), key=lambda line: not line["key"].startswith("deleted"))
    for line in operations:
        if line["key"] == "lfsFile" and request.hub.xet.fetch(line["value"]["oid"]):
            repo.lfs.setdefault(line["value"]["oid"], time.time())
    with repo.lock:
        head = repo.head(branch)
        if not head.sha.startswith(header.get("parentCommit") or ""):
            raise HubError(412, "The branch was updated since you opened this page. Please refresh and try again.")
        tree = dict(head.tree)
        for line in operations:
            apply_operation(tree, line["key"], line["value"], _entry(request, repo, line))
        assert request.token is not None
        made = Commit(head.sha, tree, header["summary"], header.get("description") or "", request.token.user)
        repo.advance(branch, made)
    url = f"{request.hub.url}/{repo.url_path}/commit/{made.sha}"
    return as_json({"success": True, "commitOid": made.sha, "commitUrl": url, "hookOutput": ""})


def _entry(request: Request, repo: Repo, line: dict[str, Any]) -> Entry | None:
    value = line["value"]
    if line["key"] == "file":
        return Entry.regular(base64.b64decode(value["content"]))
    if line["key"] != "lfsFile":
        return None
    if value["oid"] not in repo.lfs or not request.hub.store.has(value["oid"]):
        raise HubError(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
    return Entry.lfs(value["oid"], request.hub.store.size(value["oid"]))


@route("GET", API + "/lfs-files", needs="write")
def lfs_files(request: Request, repo: Repo) -> Answer:
    names = {entry.sha256: path for commit in list(repo.commits.values()) for path, entry in commit.tree.items()}
    shown = [
        {
            "fileOid": sha256,
            "oid": sha256,
            "filename": names.get(sha256, "?"),
            "size": request.hub.store.size(sha256),
            "ref": "main",
            "pushedAt": timestamp(pushed),
        }
        for sha256, pushed in list(repo.lfs.items())
    ]
    return as_json(shown)


@route("POST", API + "/lfs-files/batch", needs="write")
def delete_lfs_files(request: Request, repo: Repo) -> Answer:
    deletions = request.json()["deletions"]
    gone = set(deletions["sha"])
    with repo.lock:
        request.hub.forget(repo, gone)
        if deletions.get("rewriteHistory"):
            for branch in list(repo.branches):
                _rewrite(repo, branch, gone)
    return as_json({})


def _rewrite(repo: Repo, branch: str, gone: set[str]) -> None:
    """The same history without the objects: all its commits get another id, the head's included."""
    parent: str | None = None
    for old in reversed(repo.history(repo.branches[branch])):
        kept = {path: entry for path, entry in old.tree.items() if entry.sha256 not in gone}
        new = Commit(parent, kept, old.title, old.message, old.user)
        repo.advance(branch, new)
        parent = new.sha
