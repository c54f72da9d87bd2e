"""The protocol of one Hub repo, with the real client over HTTP: a commit is whole or not there, and one session publishes."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest
from helpers import make_checkpoint
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RevisionNotFoundError
from minihub import QUOTA_FULL, MiniHub, Token, client

from colabtrain import hub_errors
from colabtrain.runtime import manifest
from colabtrain.runtime.hub import MADE_ANEW, TRIES, Changed, Fenced, Hub, NotOurs
from colabtrain.runtime.hub_pointer import LATEST, Pointer
from colabtrain.runtime.manifest import FILES, MANIFEST

pytestmark = pytest.mark.colab
REPO = "user/run"
COMMIT = rf"/api/models/{REPO}/commit/main"


class Session:
    """One session on the repo, and its checkpoints."""

    def __init__(self, hub: MiniHub, folder: Path, name: str, token: str = "hf_write") -> None:
        self.folder = folder / name
        self.hub = Hub(REPO, token, name, self.folder / "cache", hub.url)

    def claim(self, **given: Any) -> dict[str, Any]:
        seen = self.hub.open(private=True)
        return self.hub.claim(seen["pointer"], given.get("fallback"))

    def publish(self, step: int, keep: int = 2, extra: dict[str, bytes] | None = None, nonce: str = "") -> dict[str, Any]:
        path = make_checkpoint(self.folder, step)
        return self.hub.publish(path, step, nonce or secrets.token_hex(4), keep, extra or {})


@pytest.fixture
def first(hub: MiniHub, tmp_path: Path) -> Session:
    return Session(hub, tmp_path, "first")


@pytest.fixture
def second(hub: MiniHub, tmp_path: Path) -> Session:
    return Session(hub, tmp_path, "second")


def pointer(hub: MiniHub, sha: str = "main") -> Pointer:
    return Pointer.from_json(json.loads(hub.read(REPO, sha, LATEST)))


def published(hub: MiniHub, sha: str = "main") -> dict[str, bytes]:
    """The files of the newest checkpoint."""
    path = pointer(hub, sha).checkpoint
    return {name: hub.read(REPO, sha, f"{path}/{name}") for name in (MANIFEST, *FILES)}


def commits(hub: MiniHub) -> list[Any]:
    """Newest first."""
    repo = hub.repos["model", REPO]
    return repo.history(hub.head(REPO))


def folders(hub: MiniHub) -> set[str]:
    return {"/".join(path.split("/")[:2]) for path in commits(hub)[0].tree if path.startswith("ckpt/")}


def on_disk(session: Session, step: int) -> dict[str, bytes]:
    path = session.folder / f"step-{step:08d}"
    return {name: (path / name).read_bytes() for name in (MANIFEST, *FILES)}


# The repo


@pytest.mark.parametrize("private", [True, False])
def test_a_repo_is_made_with_a_pointer_that_says_so(hub: MiniHub, first: Session, private: bool) -> None:
    seen = first.hub.open(private)
    assert hub.repos["model", REPO].private is private is seen["private"]
    assert seen["created"] and seen["pointer"]["created"] and seen["pointer"]["writer"] == "" and seen["state"] is None
    assert not first.hub.open(private)["created"], "the second look makes nothing"
    assert len(commits(hub)) == 2, "the first one is the Hub's own"


def test_a_repo_that_was_there_is_not_ours_to_squash(hub: MiniHub, first: Session) -> None:
    HfApi(hub.url, "hf_write").create_repo(REPO)
    assert first.hub.open(True)["pointer"] is None and not first.claim()["created"]


def test_a_create_whose_answer_was_lost_is_ours(hub: MiniHub, first: Session) -> None:
    fault = hub.fault("POST", "/api/repos/create", "apply_then_drop")
    assert first.hub.open(True)["created"] and fault.used == 1


def test_a_repo_with_other_files_is_refused_and_left_alone(hub: MiniHub, first: Session) -> None:
    api = HfApi(hub.url, "hf_write")
    api.create_repo(REPO)
    api.create_commit(REPO, [CommitOperationAdd("model.safetensors", b"theirs")], commit_message="theirs")
    before = hub.head(REPO)
    with pytest.raises(NotOurs, match=r"user/run is not empty and no run of colabtrain: it has model\.safetensors; name another repo"):
        first.hub.open(True)
    assert hub.head(REPO) == before


def test_an_empty_repo_with_a_card_is_taken(hub: MiniHub, first: Session) -> None:
    api = HfApi(hub.url, "hf_write")
    api.create_repo(REPO)
    api.create_commit(REPO, [CommitOperationAdd("README.md", b"# mine\n")], commit_message="card")
    assert first.claim()["claim"] == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not of format"),
        ("{", "Expecting"),
        ('{"format": 1}', "writer is None"),
        (json.dumps(Pointer("w", checkpoint="../../etc").to_json()), "'../../etc' is no checkpoint's folder"),
        (json.dumps(Pointer("w", keep=("ckpt/000001-x/../..",)).to_json()), "no checkpoint's folder"),
    ],
)
def test_a_planted_pointer_is_refused(hub: MiniHub, first: Session, text: str, why: str) -> None:
    api = HfApi(hub.url, "hf_write")
    api.create_repo(REPO)
    api.create_commit(REPO, [CommitOperationAdd(LATEST, text.encode())], commit_message="planted")
    with pytest.raises(NotOurs, match=why):
        first.hub.open(True)


@pytest.mark.parametrize(("token", "status"), [("hf_read", 403), ("hf_unknown", 401)])
def test_write_access_is_proven_before_anything_is_written(hub: MiniHub, first: Session, tmp_path: Path, token: str, status: int) -> None:
    refused = Session(hub, tmp_path, "refused", token)
    with pytest.raises(Exception) as made:
        refused.hub.open(True)
    assert hub_errors.status(made.value) == status and ("model", REPO) not in hub.repos
    first.claim()
    before = hub.head(REPO)
    with pytest.raises(Exception) as there:
        refused.hub.open(True)
    assert hub_errors.status(there.value) == status and hub_errors.kind(there.value) == hub_errors.REFUSED and hub.head(REPO) == before


# Publishing


@pytest.mark.parametrize("way", ["lfs", "multipart", "xet"])
def test_what_is_published_is_what_was_saved_to_the_byte(
    hub: MiniHub, first: Session, second: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "multipart":
        hub.multipart_chunk = 2000
    if way == "xet":
        client.use_xet(monkeypatch, True)
    first.claim()
    first.publish(7, extra={"README.md": b"# card\n", "losses.png": b"\x89PNG\0"})
    assert published(hub) == on_disk(first, 7)
    assert hub.read(REPO, "main", "README.md") == b"# card\n" and hub.read(REPO, "main", "losses.png") == b"\x89PNG\0"
    asked = [seen.path for seen in hub.take_log()]
    assert any("/part/" in path for path in asked) is (way == "multipart")
    assert any("xet-write-token" in path for path in asked) is (way == "xet")
    got = second.hub.fetch(hub.head(REPO), tmp_path / "arrived")
    assert (got["step"], got["path"], got["rejected"]) == (7, pointer(hub).checkpoint, [])
    assert {name: (tmp_path / "arrived" / name).read_bytes() for name in (MANIFEST, *FILES)} == on_disk(first, 7)
    asked = [seen.path for seen in hub.take_log()]
    assert any("xet-read-token" in path for path in asked) is (way == "xet")
    assert not any("README" in path or "png" in path for path in asked), "only what is needed"


def test_every_commit_is_whole_and_the_newest_are_kept(hub: MiniHub, first: Session) -> None:
    first.claim()
    for step in (1, 2, 3, 4):
        told = first.publish(step, keep=2)
    assert [commit.title for commit in commits(hub)][:4] == ["step 4", "step 3", "step 2", "step 1"]
    for commit, step in zip(commits(hub), (4, 3, 2, 1), strict=False):
        assert published(hub, commit.sha) == on_disk(first, step)
    assert told == pointer(hub).to_json() | {"keep": told["keep"]} and (told["seq"], told["step"]) == (4, 4)
    assert folders(hub) == {told["checkpoint"], *told["keep"]} and len(told["keep"]) == 1
    first.publish(5, keep=1)
    assert folders(hub) == {pointer(hub).checkpoint}


def test_a_checkpoint_that_a_person_removed_does_not_stop_the_next(hub: MiniHub, first: Session) -> None:
    first.claim()
    gone = first.publish(1)["checkpoint"]
    first.publish(2)
    HfApi(hub.url, "hf_write").create_commit(REPO, [CommitOperationDelete(f"{gone}/")], commit_message="tidy")
    first.publish(3), first.publish(4)
    assert pointer(hub).step == 4 and gone not in folders(hub)


LOST = [
    ("apply_then_drop",),
    ("apply_then_status", 500),
    ("apply_then_status", 504),
    ("apply_then_status", 429, {"Retry-After": "7"}),
    ("apply_then_status", 412),
]


@pytest.mark.parametrize("action", LOST, ids=str)
def test_a_commit_whose_answer_was_lost_has_landed_once(hub: MiniHub, first: Session, action: tuple[Any, ...]) -> None:
    first.claim()
    fault = hub.fault("POST", COMMIT, *action)
    told = first.publish(1)
    assert fault.used == 1 and told["step"] == 1 and [commit.title for commit in commits(hub)].count("step 1") == 1
    assert first.publish(2)["seq"] == 2


@pytest.mark.parametrize("action", [("drop",), ("status", 500), ("status", 429, {"Retry-After": "7"})], ids=str)
def test_a_commit_that_did_not_land_is_an_error_and_lands_when_asked_again(hub: MiniHub, first: Session, action: tuple[Any, ...]) -> None:
    first.claim()
    hub.fault("POST", COMMIT, *action)
    with pytest.raises(Exception) as raised:
        first.publish(1, nonce="aa")
    assert hub_errors.kind(raised.value) == hub_errors.RETRY
    assert hub_errors.wait_seconds(raised.value) == (7.0 if action[-1] == {"Retry-After": "7"} else None)
    hub.take_log()
    first.publish(1, nonce="aa")
    assert published(hub) == on_disk(first, 1)
    assert not any(seen.method == "PUT" for seen in hub.take_log()), "what was uploaded is not sent again"


def test_the_answer_that_comes_too_late_is_recognised_by_the_next_try(hub: MiniHub, first: Session) -> None:
    """The first try's commit is applied after HEAD was read again: the second one is refused with 412, and has landed."""
    first.claim()
    late: list[bytes] = []

    def apply_late(hub: MiniHub) -> None:
        Hub(REPO, "hf_write", "first", first.folder / "other", hub.url).publish(first.folder / "step-00000001", 1, "aa", 2, {})
        late.append(b"")

    hub.fault("POST", COMMIT, "call", apply_late)
    assert first.publish(1, nonce="aa")["seq"] == 1 and late and [commit.title for commit in commits(hub)].count("step 1") == 1


def test_a_head_that_moved_without_a_new_owner_is_followed(hub: MiniHub, first: Session) -> None:
    first.claim()

    def edit(hub: MiniHub) -> None:
        HfApi(hub.url, "hf_write").create_commit(REPO, [CommitOperationAdd("README.md", b"# mine\n")], commit_message="edit")

    hub.fault("POST", COMMIT, "call", edit, after=0)
    first.publish(1)
    assert [commit.title for commit in commits(hub)][:2] == ["step 1", "edit"] and published(hub) == on_disk(first, 1)


def test_an_upload_that_the_hub_lost_is_sent_again(hub: MiniHub, first: Session) -> None:
    first.claim()
    hub.fault("POST", COMMIT, "call", lambda hub: hub.forget(hub.repos["model", REPO], set(hub.repos["model", REPO].lfs)))
    first.publish(1)
    assert published(hub) == on_disk(first, 1)


def test_quota_is_refused_and_nothing_is_lost(hub: MiniHub, first: Session) -> None:
    first.claim(), first.publish(1)
    before = hub.head(REPO)
    hub.fault("POST", "/info/lfs/objects/batch", *QUOTA_FULL)
    with pytest.raises(Exception) as raised:
        first.publish(2)
    assert hub_errors.kind(raised.value) == hub_errors.REFUSED and hub.head(REPO) == before
    assert "storage" in hub_errors.explain(raised.value) and "HTTP 403" in hub_errors.explain(raised.value)


def test_a_checkpoint_that_is_gone_from_this_disk_is_no_fault_of_the_hub(hub: MiniHub, first: Session) -> None:
    first.claim()
    with pytest.raises(FileNotFoundError) as raised:
        first.hub.publish(first.folder / "step-00000009", 9, "aa", 2, {})
    assert hub_errors.kind(raised.value) == hub_errors.LOCAL


def test_a_card_is_made_anew_until_a_person_takes_it_over(hub: MiniHub, first: Session) -> None:
    def made(step: int) -> dict[str, bytes]:
        return {"README.md": f"<!-- {MADE_ANEW}; ... -->\nstep {step}\n".encode(), "losses.png": b"%d" % step}

    api = HfApi(hub.url, "hf_write")
    first.claim()
    first.publish(1, extra=made(1)), first.publish(2, extra=made(2))
    assert b"step 2" in hub.read(REPO, "main", "README.md")
    api.create_commit(REPO, [CommitOperationAdd("README.md", b"# mine\n")], commit_message="mine")
    first.publish(3, extra=made(3))
    assert hub.read(REPO, "main", "README.md") == b"# mine\n" and hub.read(REPO, "main", "losses.png") == b"3"
    api.create_commit(REPO, [CommitOperationDelete("README.md")], commit_message="yours again")
    first.publish(4, extra=made(4))
    assert b"step 4" in hub.read(REPO, "main", "README.md")


# Two sessions


def test_a_new_session_fences_the_old_one(hub: MiniHub, first: Session, second: Session) -> None:
    first.claim(), first.publish(1)
    claimed = second.claim()
    assert (claimed["claim"], claimed["step"], claimed["writer"]) == (2, 1, "second")
    before = hub.head(REPO)
    hub.take_log()
    with pytest.raises(Fenced, match=r"another session .* has taken over user/run"):
        first.publish(2)
    assert hub.head(REPO) == before and not any(seen.method in ("PUT", "POST") for seen in hub.take_log()), "not even uploaded"
    second.publish(3)
    assert published(hub) == on_disk(second, 3)


def test_a_session_that_is_fenced_between_its_look_and_its_commit_changes_nothing(hub: MiniHub, first: Session, second: Session) -> None:
    first.claim(), first.publish(1)
    hub.fault("POST", COMMIT, "call", lambda _: second.claim())
    with pytest.raises(Fenced):
        first.publish(2)
    assert pointer(hub).writer == "second" and published(hub) == on_disk(first, 1)


def test_a_claim_is_refused_where_somebody_published_since_the_look(hub: MiniHub, first: Session, second: Session) -> None:
    first.claim(), first.publish(1)
    seen = second.hub.open(True)
    first.publish(2)
    with pytest.raises(Changed):
        second.hub.claim(seen["pointer"], None)
    hub.fault("POST", COMMIT, "call", lambda _: first.publish(3))
    with pytest.raises(Changed):
        second.hub.claim(second.hub.open(True)["pointer"], None)
    assert pointer(hub).writer == "first" and second.claim()["step"] == 3


@pytest.mark.parametrize("action", LOST, ids=str)
def test_a_claim_whose_answer_was_lost_is_made_once(hub: MiniHub, first: Session, second: Session, action: tuple[Any, ...]) -> None:
    first.claim(), first.publish(1)
    fault = hub.fault("POST", COMMIT, *action)
    assert second.claim()["claim"] == 2 == pointer(hub).claim and fault.used == 1


def test_a_pointer_that_somebody_removed_fences(hub: MiniHub, first: Session) -> None:
    first.claim(), first.publish(1)
    HfApi(hub.url, "hf_write").create_commit(REPO, [CommitOperationDelete(LATEST)], commit_message="oops")
    with pytest.raises(Fenced, match="somebody removed"):
        first.publish(2)


# Squashing


def test_a_squash_leaves_the_newest_and_the_session_goes_on(hub: MiniHub, first: Session) -> None:
    first.claim(), first.publish(1), first.publish(2), first.publish(3)
    first.hub.squash()
    assert len(commits(hub)) == 1 and published(hub) == on_disk(first, 3) and len(folders(hub)) == 2
    hub.gc(REPO)
    first.publish(4)
    assert published(hub) == on_disk(first, 4) and len(commits(hub)) == 2


def test_a_squash_that_meets_a_new_session_harms_nothing_and_is_told(hub: MiniHub, first: Session, second: Session) -> None:
    first.claim(), first.publish(1)
    hub.fault("POST", "/super-squash/main", "call", lambda _: (second.claim(), second.publish(2)))
    with pytest.raises(Fenced):
        first.hub.squash()
    assert pointer(hub).writer == "second" and published(hub) == on_disk(second, 2)
    second.publish(3)


def test_a_resume_at_a_commit_that_was_squashed_away_looks_again(hub: MiniHub, first: Session, second: Session, tmp_path: Path) -> None:
    first.claim(), first.publish(1), first.publish(2)
    seen = second.hub.open(True)
    first.hub.squash()
    hub.gc(REPO)
    with pytest.raises(Changed):
        second.hub.fetch(seen["sha"], tmp_path / "arrived")
    assert second.hub.fetch(second.hub.open(True)["sha"], tmp_path / "arrived")["step"] == 2


def test_a_head_that_is_squashed_away_while_it_is_read_is_read_again(hub: MiniHub, first: Session, second: Session) -> None:
    first.claim(), first.publish(1)

    def squash(hub: MiniHub) -> None:
        first.hub.squash()
        hub.gc(REPO)

    hub.fault("HEAD", f"/{REPO}/resolve/.*/{LATEST}", "call", squash)
    assert second.hub.open(True)["pointer"]["step"] == 1
    first.publish(2)
    hub.fault("HEAD", f"/{REPO}/resolve/.*/{LATEST}", "status", 404, {"X-Error-Code": "RevisionNotFound"}, times=TRIES)
    with pytest.raises(RevisionNotFoundError) as caught:
        second.hub.open(True)
    assert hub_errors.kind(caught.value) == hub_errors.CONFLICT
    assert "the repo has changed meanwhile (HTTP 404" in hub_errors.explain(caught.value)


# Going on


def damage(hub: MiniHub, path: str) -> None:
    """The bytes on the Hub's disk, or in its commits, are others of the same number."""
    for commit in commits(hub):
        entry = commit.tree.get(path)
        if entry is None:
            continue
        if entry.content is not None:
            object.__setattr__(entry, "content", bytes([entry.content[0] ^ 1]) + entry.content[1:])
        else:
            file = hub.store.path(entry.sha256)
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return


@pytest.mark.parametrize("name", [MANIFEST, *FILES])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    hub: MiniHub, first: Session, second: Session, tmp_path: Path, name: str
) -> None:
    first.claim(), first.publish(1)
    bad = first.publish(2)["checkpoint"]
    damage(hub, f"{bad}/{name}")
    got = second.hub.fetch(hub.head(REPO), tmp_path / "arrived")
    assert got["step"] == 1 and len(got["rejected"]) == 1 and f"checkpoint {bad} of user/run cannot be used: {name}" in got["rejected"][0]
    assert manifest.check(tmp_path / "arrived")["step"] == 1
    claimed = second.claim(fallback=(got["path"], 1))
    assert (claimed["checkpoint"], claimed["step"], claimed["keep"]) == (got["path"], 1, []), "the next resume does not try it again"
    second.publish(3)
    assert folders(hub) == {got["path"], pointer(hub).checkpoint}, "and it goes"


def test_a_missing_file_is_said_and_no_checkpoint_is_no_error(hub: MiniHub, first: Session, second: Session, tmp_path: Path) -> None:
    first.claim()
    path = first.publish(1)["checkpoint"]
    HfApi(hub.url, "hf_write").create_commit(REPO, [CommitOperationDelete(f"{path}/state.json")], commit_message="oops")
    got = second.hub.fetch(hub.head(REPO), tmp_path / "arrived")
    assert got["path"] == "" and "state.json is missing" in got["rejected"][0]
    assert second.hub.open(True)["state"] is None


def test_a_download_that_breaks_off_is_an_error_to_try_again(hub: MiniHub, first: Session, second: Session, tmp_path: Path) -> None:
    first.claim(), first.publish(1)
    hub.fault("GET", "/resolve/.*/trainable.safetensors", "drop")
    with pytest.raises(Exception) as raised:
        second.hub.fetch(hub.head(REPO), tmp_path / "arrived")
    assert hub_errors.kind(raised.value) == hub_errors.RETRY
    hub.take_log()
    assert second.hub.fetch(hub.head(REPO), tmp_path / "arrived")["step"] == 1
    asked = {seen.path.rpartition("/")[2] for seen in hub.take_log() if seen.method == "GET"}
    assert {"trainable.safetensors", "optimizer.safetensors"} <= asked and "diary.jsonl" not in asked, (
        "what had come is not asked for again"
    )


def test_a_token_that_is_another_account_s_cannot_take_the_repo(hub: MiniHub, first: Session, tmp_path: Path) -> None:
    hub.tokens["hf_other"] = Token("write", "other")
    first.claim()
    with pytest.raises(Exception) as raised:
        Session(hub, tmp_path, "third", "hf_other").hub.open(True)
    assert hub_errors.status(raised.value) in (403, 404, 409)
