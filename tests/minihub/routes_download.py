"""Downloads."""

from __future__ import annotations

from minihub.repos import HubError, Repo
from minihub.routing import WEB, Answer, Request, route


@route("GET", WEB + r"/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(request: Request, repo: Repo, revision: str, path: str) -> Answer:
    hub, commit = request.hub, repo.revision(revision)
    entry = commit.tree.get(path)
    if entry is None:
        raise HubError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit.sha})
    headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{entry.sha256 or entry.oid}"'}
    if entry.content is not None:
        return Answer(headers=headers, content=entry.content, is_file=True)
    assert entry.sha256 is not None
    headers |= {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
    if entry.sha256 in hub.xet.hashes:
        headers["X-Xet-Hash"] = hub.xet.hashes[entry.sha256]
        headers["Link"] = f'<{hub.url}/api/{repo.kind}s/{repo.id}/xet-read-token/{commit.sha}>; rel="xet-auth"'
    if hub.cdn_redirect:  # a signed address on another origin, which must not see the token
        headers["Location"] = f"http://localhost:{hub.port}/_cdn/{entry.sha256}"
        return Answer(302, headers)
    return _object(request, entry.sha256, headers)


@route("GET", r"/_cdn/(?P<sha256>[0-9a-f]{64})", needs="signed")
def cdn(request: Request, sha256: str) -> Answer:
    if request.headers.get("Authorization"):
        raise HubError(400, "the token was sent to the CDN")
    return _object(request, sha256, {"ETag": f'"{sha256}"'})


def _object(request: Request, sha256: str, headers: dict[str, str]) -> Answer:
    return Answer(headers=headers, content=request.hub.store.path(sha256), is_file=True)
