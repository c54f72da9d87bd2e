"""The Hub of the tests is one for the real client: what goes up comes down, and what the Hub refuses it refuses."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from minihub import QUOTA_FULL, MiniHub, Token, client, rate_limited

pytestmark = pytest.mark.colab
REPO = "user/run"
MIB = 1 << 20


def tensors(seed: int, size_bytes: int) -> bytes:
    """A file of safetensors: a header, then bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(size_bytes)


@pytest.fixture
def api(hub: MiniHub) -> HfApi:
    api = HfApi(token="hf_write")
    api.create_repo(REPO, private=True)
    hub.take_log()
    return api


def commit(api: HfApi, files: dict[str, bytes], parent: str | None = None) -> str:
    operations = [CommitOperationAdd(path, content) for path, content in files.items()]
    return api.create_commit(REPO, operations, commit_message="files", parent_commit=parent).oid


def download(path: str, sha: str) -> bytes:
    return Path(hf_hub_download(REPO, path, revision=sha, token="hf_write")).read_bytes()


def status_of(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return error.value.response.status_code


def test_a_repository_is_made_once(hub: MiniHub) -> None:
    api = HfApi(token="hf_write")
    assert api.create_repo(REPO, private=True).repo_id == REPO
    assert hub.repos["model", REPO].private
    with pytest.raises(HfHubHTTPError) as twice:
        api.create_repo(REPO, private=True)
    assert status_of(twice) == 409
    assert api.create_repo(REPO, private=True, exist_ok=True).repo_id == REPO
    assert api.repo_info(REPO).sha == hub.head(REPO)
    api.delete_repo(REPO)
    assert not hub.repos


@pytest.mark.parametrize("way", ["lfs", "multipart", "xet", "cdn"])
def test_what_goes_up_comes_down(hub: MiniHub, api: HfApi, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    hub.multipart_chunk = 6 * MIB if way == "multipart" else None
    hub.cdn_redirect = way == "cdn"
    client.use_xet(monkeypatch, way == "xet")
    files = {"config.json": b'{"a": 1}\n', "model.safetensors": tensors(1, 20 * MIB)}
    sha = commit(api, files, parent=hub.head(REPO))
    assert hub.head(REPO) == sha
    uploaded = [seen.path.rsplit("/", 2)[-2:] for seen in hub.take_log() if seen.method == "PUT"]
    parts = [["part", str(number)] for number in range(1, 5)]
    assert {"multipart": uploaded == parts, "xet": not uploaded}.get(way, len(uploaded) == 1), uploaded
    for path, content in files.items():
        assert hub.read(REPO, sha, path) == content
        assert download(path, sha) == content
    fetched = {seen.path for seen in hub.take_log() if seen.method == "GET"}
    assert any("xet-read-token" in path for path in fetched) == (way == "xet")
    assert any(path.startswith("/_cdn/") for path in fetched) == (way == "cdn")
    assert hub.stored_bytes(REPO) == len(files["model.safetensors"])
    listed = {file.rfilename: file.size for file in api.repo_info(REPO, files_metadata=True).siblings or []}
    assert listed.items() >= {path: len(content) for path, content in files.items()}.items()


def test_a_commit_on_an_old_parent_is_refused(hub: MiniHub, api: HfApi) -> None:
    old = hub.head(REPO)
    new = commit(api, {"a.txt": b"a"}, parent=old)
    with pytest.raises(HfHubHTTPError) as refused:
        commit(api, {"b.txt": b"b"}, parent=old)
    assert status_of(refused) == 412
    assert hub.head(REPO) == new and "b.txt" not in hub.repos["model", REPO].head().tree


def test_deleting_what_is_not_there_is_refused_and_a_folder_goes_as_a_whole(hub: MiniHub, api: HfApi) -> None:
    before = commit(api, {"1/a.txt": b"a", "1/b.txt": b"b", "2/a.txt": b"a"})
    for gone in (CommitOperationDelete("none.txt"), CommitOperationDelete("3/", is_folder=True)):
        with pytest.raises(HfHubHTTPError) as refused:
            api.create_commit(REPO, [CommitOperationAdd("new.txt", b"n"), gone], commit_message="both or none")
        assert status_of(refused) == 404
    assert hub.head(REPO) == before
    api.create_commit(REPO, [CommitOperationDelete("1/", is_folder=True)], commit_message="one folder")
    assert set(api.list_repo_files(REPO)) == {".gitattributes", "2/a.txt"}


def test_a_squash_keeps_the_tree_and_frees_the_rest_later(hub: MiniHub, api: HfApi) -> None:
    old = commit(api, {"model.safetensors": tensors(1, MIB), "a.txt": b"1"})
    last = commit(api, {"model.safetensors": tensors(2, MIB), "a.txt": b"2"})
    stored = hub.stored_bytes(REPO)
    api.super_squash_history(REPO, commit_message="squashed")
    head = hub.head(REPO)
    assert head not in (old, last)
    assert [(each.commit_id, each.title) for each in api.list_repo_commits(REPO)] == [(head, "squashed")]
    assert [each.sha for each in hub.repos["model", REPO].history(head)] == [head]
    assert download("a.txt", last) == b"2"  # old commits stay until they are collected
    hub.gc(REPO)
    assert hub.stored_bytes(REPO) == stored // 2
    for sha in (old, last):
        with pytest.raises(HfHubHTTPError) as gone:
            api.repo_info(REPO, revision=sha)
        assert status_of(gone) == 404
    assert download("model.safetensors", head) == tensors(2, MIB) == hub.read(REPO, head, "model.safetensors")


def test_an_lfs_object_is_sent_once_and_may_be_deleted_for_good(hub: MiniHub, api: HfApi) -> None:
    content = tensors(1, MIB)
    commit(api, {"a.safetensors": content})
    hub.take_log()
    sha = commit(api, {"b.safetensors": content})
    assert not [seen for seen in hub.take_log() if seen.method == "PUT"]
    [file] = api.list_lfs_files(REPO)
    api.permanently_delete_lfs_files(REPO, [file], rewrite_history=False)
    assert hub.head(REPO) == sha and hub.stored_bytes(REPO) == 0


def test_a_download_that_ends_early_is_resumed(hub: MiniHub, api: HfApi) -> None:
    content = tensors(1, 20 * MIB)
    sha = commit(api, {"model.safetensors": content})
    hub.take_log()
    hub.fault("GET", "/resolve/", "truncate", 15 * MIB)  # the client keeps what it has by 10 MB
    assert download("model.safetensors", sha) == content
    met = [(seen.status, seen.note) for seen in hub.take_log() if seen.method == "GET"]
    assert met == [(200, f"truncate {15 * MIB}"), (206, "")]


def test_the_client_waits_as_long_as_a_429_says(hub: MiniHub, api: HfApi) -> None:
    hub.fault("POST", "/preupload/", *rate_limited(2))
    started = time.monotonic()
    commit(api, {"a.txt": b"a"})
    assert time.monotonic() - started > 2  # without the headers it waits 1 s
    assert [seen.status for seen in hub.take_log()] == [429, 200, 200]


def test_a_full_quota_and_a_lost_answer(hub: MiniHub, api: HfApi) -> None:
    hub.fault("POST", "/objects/batch", *QUOTA_FULL)
    with pytest.raises(HfHubHTTPError, match="storage limit") as full:
        commit(api, {"model.safetensors": tensors(1, MIB)})
    assert status_of(full) == 403 and hub.stored_bytes(REPO) == 0
    before = hub.head(REPO)
    hub.fault("POST", "/commit/", "apply_then_status", 504)
    with pytest.raises(HfHubHTTPError) as lost:
        commit(api, {"a.txt": b"a"})
    assert status_of(lost) == 504
    assert [each.sha for each in hub.repos["model", REPO].history(hub.head(REPO))][1:2] == [before]


def test_what_a_token_may_do(hub: MiniHub, api: HfApi) -> None:
    hub.tokens["hf_other"] = Token("write", user="other")
    roles = {token: HfApi(token=token).whoami() for token in ("hf_write", "hf_read", "hf_other")}
    assert [(who["name"], who["auth"]["accessToken"]["role"]) for who in roles.values()] == [
        ("user", "write"),
        ("user", "read"),
        ("other", "write"),
    ]
    api.auth_check(REPO)
    api.auth_check(REPO, write=True)
    reader, other, nobody, wrong = (HfApi(token=token) for token in ("hf_read", "hf_other", False, "hf_wrong"))
    reader.auth_check(REPO)
    assert reader.repo_info(REPO).private
    for refused, status in ((reader, 403), (other, 404), (nobody, 401), (wrong, 401)):
        with pytest.raises(HfHubHTTPError) as error:
            refused.auth_check(REPO, write=True)
        assert status_of(error) == status
        with pytest.raises(HfHubHTTPError) as error:
            commit(refused, {"a.txt": b"a"})
        assert status_of(error) == status
    for refused in (other, nobody, wrong):
        with pytest.raises(HfHubHTTPError):
            refused.repo_info(REPO)
    with pytest.raises(HfHubHTTPError) as error:
        reader.create_repo("user/another")
    assert status_of(error) == 403
    api.create_repo("user/open", private=False)
    assert other.repo_info("user/open").id == nobody.repo_info("user/open").id == "user/open"
    with pytest.raises(HfHubHTTPError) as error:
        other.auth_check("user/open", write=True)
    assert status_of(error) == 403


def test_the_client_has_nothing_of_the_person(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "token"
    stored.write_text("hf_stored")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(stored))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert huggingface_hub.get_token() == "hf_stored"
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    assert huggingface_hub.get_token() == "hf_environment"
    hub: MiniHub = request.getfixturevalue("hub")
    here = "import huggingface_hub as h; print(h.get_token(), h.constants.HF_HUB_OFFLINE, h.constants.ENDPOINT, h.constants.HF_HUB_CACHE)"
    child = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["None", "False", hub.url, str(tmp_path / "huggingface" / "hub")]
    assert huggingface_hub.get_token() is None and not constants.is_offline_mode()
    assert HfApi().endpoint == hub.url and str(tmp_path / "huggingface" / "hub") == constants.HF_HUB_CACHE


def test_a_hub_of_another_process(online_client: None) -> None:
    command = [sys.executable, str(Path(__file__).parent / "minihub"), "--token", "hf_a=write"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        api = HfApi(endpoint=process.stdout.readline().strip(), token="hf_a")
        api.create_repo(REPO)
        assert commit(api, {"model.safetensors": tensors(1, MIB)}) == api.repo_info(REPO).sha
        process.terminate()
        rest, errors = process.communicate()
    assert (process.returncode, rest, errors) == (0, "", "")
    gc.collect()
