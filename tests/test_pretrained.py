"""Loading a published Gemma 3n: a small checkpoint in the Hub's layout, from a folder and from a Hub on loopback."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import threading
import weakref
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from small_tokenizer import write_tokenizer
from torch import nn

import colabtrain
from colabtrain import device
from colabtrain.__main__ import main
from colabtrain.mmjev import pretrained, tiny
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.hub_files import ModelAccessError
from colabtrain.mmjev.model import MMJev
from colabtrain.mmjev.pretrained import Pretrained, ple_fits
from colabtrain.records.schema import Question, Seg
from colabtrain.runtime.diary import Tail

pytestmark = pytest.mark.colab

PREFIX = "model.language_model."
INDEX = "model.safetensors.index.json"
TOWERS = {"model.vision_tower.stem.weight": [8, 4], "model.audio_tower.norm.weight": [8], "model.embed_vision.embedding.weight": [4, 8]}
QUESTIONS = [
    Question(type="choice", instructions="which one", criteria={"red": None, "dark green": "as grass"}),
    Question(type="noul", instructions="is it large", criteria=None),
]


def source() -> Any:
    """The text model that the checkpoint is made of: widths of its own in each layer, as E2B has, and shared keys."""
    return tiny.language_model(5, intermediate_size=[128, 128, 256, 256, 256, 64])


def write_checkpoint(folder: Path) -> None:
    """As google/gemma-3n-E4B-it: shards with an index, towers, and the unused keys and values that older releases wrote."""
    lm = source()
    write_tokenizer(folder, [("Y", "e"), ("Ye", "s"), ("N", "o")])
    text = lm.config.to_dict()
    for new in ("rope_parameters", "dtype", "transformers_version"):
        text.pop(new, None)
    text |= {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "rope_scaling": None, "torch_dtype": "bfloat16"}
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {PREFIX + name: tensor for name, tensor in lm.state_dict().items()}
    tensors |= {f"{PREFIX}layers.5.self_attn.{part}.weight": torch.zeros(64, 128) for part in ("k_proj", "v_proj")}
    names = sorted(tensors)
    shards = [dict.fromkeys(names[i::3]) for i in range(3)] + [dict.fromkeys(TOWERS)]
    tensors |= {name: torch.zeros(shape) for name, shape in TOWERS.items()}
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-00004.safetensors"
        save_file({name: tensors[name].contiguous() for name in shard}, folder / file)
        where |= dict.fromkeys(shard, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "gemma"
    folder.mkdir()
    write_checkpoint(folder)
    return folder


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil; what it does not touch is shared."""
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def rewrite(path: Path, text: str | bytes) -> None:
    path.unlink()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes.pop("text", {})
    rewrite(folder / "config.json", json.dumps(config | changes))


def logits(model: MMJev) -> list[torch.Tensor]:
    fc = model.default_subnets()["fast"]
    plan = model.plan(model.encode_state([Seg("text", "a state of things")], fc), QUESTIONS, fc)
    return [question for record in model.run(model.pack([plan]), fc) for question in record]


def same(loaded: MMJev, lm: Any) -> None:
    other = MMJev(lm, lm, loaded.tokenizer, loaded.yes_id, loaded.no_id, loaded.name, start_ids=loaded.start_ids)
    for mine, theirs in zip(logits(loaded), logits(other), strict=True):
        assert torch.equal(mine, theirs)
    buffers = dict(lm.named_buffers())
    for name, buffer in loaded.lm.named_buffers():
        assert torch.equal(buffer, buffers[name].to(buffer.dtype)), name
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        states = [m(input_ids=ids, use_cache=False).last_hidden_state for m in (loaded.lm, lm)]
    assert torch.equal(*states)


def test_a_model_larger_than_the_host_is_refused_before_it_kills_the_kernel(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (device.host_bytes_available() or 2**30) > 2**20
    monkeypatch.setattr(pretrained, "host_bytes_available", lambda: 100_000)
    with pytest.raises(ValueError, match=r"takes 0.0 GB on the CPU, and 0.0 GB are free; .* choose a runtime with one"):
        Pretrained.open(str(checkpoint))
    monkeypatch.setattr(pretrained, "host_bytes_available", lambda: None)
    assert Pretrained.open(str(checkpoint)).num_layers == 6


# From a folder


def test_what_is_loaded_is_what_was_saved(checkpoint: Path) -> None:
    before, lines = torch.random.get_rng_state(), list[str]()
    opened = Pretrained.open(str(checkpoint))
    assert (opened.num_layers, opened.ffn_widths) == (6, [128, 128, 256, 256, 256, 64])
    loaded = opened.load(lines.append)
    assert torch.equal(before, torch.random.get_rng_state())
    same(loaded, source())
    assert loaded.name == "gemma" and loaded.start_ids == [2] and loaded.matmul_dtype is torch.float32
    assert loaded.tokenizer.encode("Yes") == [loaded.yes_id] and loaded.tokenizer.encode("No") == [loaded.no_id]
    assert [line.split(": ")[1].split(",")[0] for line in lines] == [f"shard {i} of 3" for i in (1, 1, 2, 2, 3, 3)]
    size = sum((checkpoint / f"model-{i:05}-of-00004.safetensors").stat().st_size for i in (1, 2, 3)) / 1e9
    assert lines[0].startswith("loading") and lines[0].endswith(f"0.0 of {size:.1f} GB")


def test_bf16_where_the_card_has_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "precision", lambda device: (torch.bfloat16, torch.bfloat16))
    loaded = MMJev.from_pretrained(str(checkpoint))
    assert {p.dtype for p in loaded.lm.parameters()} == {torch.bfloat16} and loaded.latents.dtype is torch.float32
    lm = source()
    for parameter in lm.parameters():
        parameter.data = parameter.data.bfloat16()
    same(loaded, lm)


def test_mixed_precision_below_8_0_equals_to_mixed_precision(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "precision", lambda device: (torch.float16, torch.float32))
    loaded = MMJev.from_pretrained(str(checkpoint))
    assert loaded.matmul_dtype is torch.float16
    lm = source()
    other = MMJev(lm, lm, loaded.tokenizer, loaded.yes_id, loaded.no_id, "x", start_ids=loaded.start_ids).to_mixed_precision()
    other.reset_trainable(0)  # heads and latents come from the embeddings
    assert {name: p.dtype for name, p in lm.named_parameters()} == {name: p.dtype for name, p in loaded.lm.named_parameters()}
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(logits(loaded), logits(other), strict=True))


def test_one_tensor_at_a_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensors read from the files at most one lives at any time, and none of them is part of the model."""
    import safetensors

    alive, most, real = list[weakref.ref[Any]](), [0], safetensors.safe_open

    class Recording:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = real(*args, **options)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> Any:
            return self.file.__exit__(*args)

        def get_tensor(self, name: str) -> Any:
            tensor = self.file.get_tensor(name)
            alive.append(weakref.ref(tensor))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
            return tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    monkeypatch.setattr(safetensors, "safe_open", Recording)
    loaded = MMJev.from_pretrained(str(checkpoint))
    assert len(alive) == len(list(loaded.lm.parameters())) > 100
    assert most[0] == 1 and all(ref() is None for ref in alive)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", ""])
def test_other_layouts_and_a_single_file(checkpoint: Path, tmp_path: Path, prefix: str) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(checkpoint / name)
    config = json.loads((checkpoint / "config.json").read_text())
    if prefix != "language_model.model.":  # Gemma3nForCausalLM and Gemma3nTextModel
        rewrite(tmp_path / "config.json", json.dumps(config["text_config"]))
    save_file({prefix + name: tensor for name, tensor in source().state_dict().items()}, tmp_path / "model.safetensors")
    same(MMJev.from_pretrained(str(tmp_path)), source())


def test_missing_and_unknown_tensors_are_named_before_anything_is_loaded(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_text())
    where = index["weight_map"]
    where[f"{PREFIX}layers.0.self_attn.z_proj.weight"] = where.pop(f"{PREFIX}layers.0.self_attn.q_proj.weight")
    rewrite(copy / INDEX, json.dumps(index))
    with pytest.raises(ValueError, match=r"missing: layers.0.self_attn.q_proj.weight; not known: layers.0.self_attn.z_proj.weight"):
        Pretrained.open(str(copy))


def test_a_wrong_shape_kind_or_file_is_named(copy: Path) -> None:
    shard = copy / "model-00002-of-00004.safetensors"
    tensors = load_file(shard)
    first, second, third = sorted(name for name in tensors if tensors[name].dim() == 2 and "layers.5" not in name)[:3]
    tensors[first], tensors[second] = torch.zeros(3, 5), tensors[second].to(torch.uint8)
    del tensors[third]
    shard.unlink()
    save_file(tensors, shard)
    opened = Pretrained.open(str(copy))
    with pytest.raises(ValueError, match="does not fit") as caught:
        opened.load()
    assert f"{first} is F32 [3, 5]" in str(caught.value)
    assert f"{second} is U8" in str(caught.value) and f"{third} is missing" in str(caught.value)
    rewrite(shard, b"\x08\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match=r"00002-of-00004.safetensors is damaged"):
        opened.load()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3"}, "type 'gemma3', not a Gemma 3n; use google/gemma-3n-E4B-it"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"quantised \(bitsandbytes\): .* packed down_proj cannot be sliced"),
        ({"text": {"quantization_config": {"quant_method": "gptq"}}}, r"quantised \(gptq\)"),
    ],
)
def test_another_kind_of_model_is_refused(copy: Path, changes: dict[str, Any], words: str) -> None:
    edit_config(copy, **changes)
    with pytest.raises(ValueError, match=words):
        Pretrained.open(str(copy))


def test_a_folder_without_its_files_and_yes_in_pieces(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    write_tokenizer(copy, [("Y", "e"), ("N", "o")])
    with pytest.raises(ValueError, match=r"makes \['Ye', 's'\] of 'Yes'"):
        Pretrained.open(str(copy))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no file tokenizer.json; a checkpoint has config.json"):
        Pretrained.open(str(copy))


class Linear4bit(nn.Linear):
    """As bitsandbytes has it: a subclass of nn.Linear whose weight is packed, two numbers a byte, in one column."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = nn.Parameter(torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)


def test_quantised_layers_are_refused_by_name() -> None:
    lm = tiny.language_model(0)
    lm.layers[3].mlp.down_proj = Linear4bit(lm.layers[3].mlp.down_proj)
    words = r"layers.3.mlp.down_proj \(Linear4bit\) holds a packed weight, torch.uint8 of shape \[16384, 1\] for 128 x 256"
    with pytest.raises(ValueError, match=words):
        MMJev(lm, lm, tiny.HashedWords(), 1, 2, "packed")
    lm.layers[3].mlp.down_proj = nn.Identity()
    with pytest.raises(ValueError, match=r"layers.3.mlp.down_proj is of type Identity, not torch.nn.Linear"):
        MMJev(lm, lm, tiny.HashedWords(), 1, 2, "other")


# By name


@pytest.mark.colab
def test_the_same_cell_again_finds_the_live_run_and_its_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    """What a name stands for is known in full only once its weights are there; that must not look like another experiment."""
    options: dict[str, Any] = {"run_dir": tmp_path, "display": False, "checkpoint_every": 1, "lora_r": 2}
    saved, go = threading.Event(), threading.Event()

    def hold(path: Path, step: int) -> None:
        saved.set()
        assert go.wait(60)

    run = colabtrain.start(str(checkpoint), help_desk(12), steps=2, on_checkpoint=hold, **options)
    assert saved.wait(60)
    try:
        assert colabtrain.start(str(checkpoint), help_desk(12), steps=2, **options) is run
        with pytest.raises(colabtrain.AlreadyRunning, match=r"trains something else in this folder \(config.seed"):
            colabtrain.start(str(checkpoint), help_desk(12), steps=2, seed=1, **options)
    finally:
        go.set()
    assert run.wait(60) == "finished"
    again = colabtrain.start(str(checkpoint), help_desk(12), steps=3, replace=True, **options)
    assert again.wait(60) == "finished" and again.step == 3


# Where things go


def test_the_ple_table_goes_where_it_fits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    e4b, e2b = int(12.8 * gib), int(8.4 * gib)
    cards = {"T4": 14.5 * gib, "V100": 15.6 * gib, "L4": 22.0 * gib, "A100": 39.2 * gib}
    assert {card: ple_fits(int(free), e4b) for card, free in cards.items()} == {"T4": False, "V100": False, "L4": True, "A100": True}
    assert ple_fits(int(cards["T4"]), e2b)
    lm = source()
    dtypes = dict.fromkeys(dict(lm.named_parameters()), torch.float16)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    for free, ple_device, expected in ((8 * gib, None, "cuda"), (gib, None, "cpu"), (gib, "cuda", "cuda"), (8 * gib, "cpu", "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 8 * gib))
        devices = Pretrained.open(str(checkpoint), device="cuda", ple_device=ple_device)._devices(lm, dtypes)
        assert devices.pop("embed_tokens_per_layer.weight") == torch.device(expected)
        assert set(devices.values()) == {torch.device("cuda")}


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), (torch.float16, torch.float32)), ((8, 0), (torch.bfloat16, torch.bfloat16)), ((9, 0), (torch.bfloat16, torch.bfloat16))],
)
def test_precision_is_decided_by_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    assert device.precision(torch.device("cuda")) == expected
    assert device.precision(torch.device("cpu")) == (torch.float32, torch.float32)


# From a Hub


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub that a download asks: HEAD and GET of files. gated/gemma wants a token, and a good one."""

    folder: Path
    log: list[str]
    commit = "0123456789" * 4

    def refusal(self) -> tuple[int, str] | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        repo = "/".join(self.path.split("/")[1:3])
        if repo == "gated/gemma" and token != "hf_good":
            return (403, "GatedRepo") if token else (401, "GatedRepo")
        if repo == "plain/gemma":
            return (403, "") if token else (401, "")
        return None if repo in ("open/gemma", "gated/gemma") else (404, "RepoNotFound")

    def do_HEAD(self) -> None:
        name = self.path.split("/")[-1]
        refused = self.refusal()
        if refused is None and not (self.folder / name).exists():
            refused = (404, "EntryNotFound")
        body = b"" if refused else (self.folder / name).read_bytes()
        part = self.headers.get("Range", "")
        self.log.append(f"{self.command} {name} {part}".strip())
        if part:
            first, last = (int(n) for n in part.removeprefix("bytes=").split("-"))
            body = body[first : last + 1]
        self.send_response(refused[0] if refused else 206 if part else 200)
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{name}"')
        self.send_header("Content-Length", str(len(body)))
        if refused and refused[1]:
            self.send_header("X-Error-Code", refused[1])
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Its request log. What HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE set when huggingface_hub is imported is set here."""
    Hub.folder, Hub.log = checkpoint, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    yield Hub.log
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()
    gc.collect()


def test_a_download_is_the_checkpoint_and_small_files_come_first(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setattr(pretrained, "REPORT_SECONDS", 0.0)
    opened, lines = Pretrained.open("gated/gemma"), list[str]()
    assert opened.files.revision == Hub.commit
    assert not [line for line in hub if "of-00004" in line] and "hf_good" not in repr(opened)
    monkeypatch.delenv("HF_TOKEN")  # it was read once
    loaded = opened.load(lines.append)
    same(loaded, source())
    assert loaded.name == "gated/gemma"
    assert not [line for line in hub if "00004-of" in line]  # nothing but towers in there
    assert len([line for line in lines if line.startswith("downloading gated/gemma: shard")]) >= 3
    asked = len(hub)
    same(opened.load(), source())  # all in the cache now
    assert len(hub) == asked


def test_a_single_file_is_not_fetched_to_be_looked_at(hub: list[str], copy: Path) -> None:
    (copy / INDEX).unlink()
    save_file({f"model.{name}": tensor for name, tensor in source().state_dict().items()}, copy / "model.safetensors")
    Hub.folder = copy
    opened = Pretrained.open("open/gemma")
    assert [line for line in hub if " model.safetensors" in line and "index" not in line] == ["GET model.safetensors bytes=0-100000"]
    same(opened.load(), source())


def test_no_token_and_no_access_are_told_apart(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("gated/gemma", "is open only to those who"), ("plain/gemma", "is gated, private or misspelt")):
        monkeypatch.delenv("HF_TOKEN", raising=False)
        with pytest.raises(ModelAccessError, match="no token was found") as caught:
            Pretrained.open(name)
        for words in (kind, f"https://huggingface.co/{name}", "HF_TOKEN", "Colab's Secrets", "huggingface_hub.login()", "licence"):
            assert words in str(caught.value)
        monkeypatch.setenv("HF_TOKEN", "hf_other")
        with pytest.raises(ModelAccessError, match=r"the token that was found has no access \(HTTP 403\)") as caught:
            Pretrained.open(name)
        assert "hf_other" not in str(caught.value)


def test_a_broken_token_is_not_printed(hub: list[str]) -> None:
    with pytest.raises(ValueError, match="the Hugging Face token has characters") as caught:
        Pretrained.open("gated/gemma", token="hf_go\nod")
    assert "hf_go" not in str(caught.value)
    assert Pretrained.open("gated/gemma", token=" hf_good\n").files.revision == Hub.commit


def test_a_wrong_name_and_a_wrong_kind_of_name(hub: list[str]) -> None:
    with pytest.raises(ModelAccessError, match=r"there is no model open/gema on the Hub \(check the spelling\)"):
        Pretrained.open("open/gema")
    with pytest.raises(ValueError, match="no folder here and no name on the Hub"):
        Pretrained.open("./models/gemma/final")


def test_a_hub_out_of_reach(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with pytest.raises(ModelAccessError, match=r"is the Hub in reach\? \(ConnectionRefusedError"):
        Pretrained.open("open/gemma")


def test_a_full_disk_is_called_that(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Pretrained.open("open/gemma")

    def no_space(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", no_space)
    with pytest.raises(ModelAccessError, match=r"the disk is full: model-00001-of-00004.safetensors of open/gemma does not fit"):
        opened.load()


# Through start()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # matplotlib 3.10's use of pyparsing
def test_start_takes_a_name_and_loads_in_the_background(checkpoint: Path, tmp_path: Path) -> None:
    """The weights come while the run is `starting`, shard by shard, in the log; the same cell again finds the same run."""
    records = help_desk(12)
    options = {"run_dir": tmp_path, "steps": 3, "batch_size": 4, "lora_r": 4, "display": False}
    run = colabtrain.start(str(checkpoint), records, **options)
    again = colabtrain.start(str(checkpoint), records, **options)
    assert run.wait(120) == "finished" and (again is run or again.wait(120) == "finished")
    lines = [event["text"] for event in Tail(tmp_path / "diary.jsonl").new() if event["event"] == "log"]
    shards = [line for line in lines if line.startswith(f"loading {checkpoint}: shard")]
    assert [line.split(": ")[1].split(",")[0] for line in shards[:6]] == [f"shard {i} of 3" for i in (1, 1, 2, 2, 3, 3)]
    first_step = next(i for i, line in enumerate((tmp_path / "train.log").read_text().splitlines()) if "step 1/3" in line)
    assert first_step > len(shards[:6])
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert (
        main(
            ["train", "--model", str(checkpoint), "--data", str(written(records, tmp_path)), "--run", str(tmp_path / "cli"), "--steps", "2"]
        )
        == 0
    )


def test_a_model_folder_is_found_wherever_later_cells_go(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    opened = Pretrained.open("gemma")
    monkeypatch.chdir(tmp_path)
    assert opened.load().name == "gemma"


def test_a_folder_whose_weights_were_replaced_is_another_experiment(checkpoint: Path, tmp_path: Path) -> None:
    """The folder's name is the same; the checkpoint knows the weights that were trained upon."""
    folder = tmp_path / "gemma"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    options = {"run_dir": tmp_path / "run", "steps": 1, "lora_r": 4, "display": False}
    assert colabtrain.start(str(folder), help_desk(12), **options).wait(120) == "finished"
    table = f"{PREFIX}embed_tokens.weight"
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][table]
    tensors = load_file(shard)
    save_file(tensors | {table: tensors[table] + 0.1}, shard)
    run = colabtrain.start(str(folder), help_desk(12), **{**options, "steps": 2})
    with pytest.raises(colabtrain.RunFailed, match=r"another experiment \(model.weights: checkpoint '\w+', now '\w+'\)"):
        run.wait(120)


def written(records: list[Any], folder: Path) -> Path:
    path = folder / "desk.jsonl"
    path.write_text("".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in records))
    return path


def test_start_refuses_before_anything_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    records = help_desk(6)
    with pytest.raises(ValueError, match="sub-network 'deep': exit_layer=7, but the model has 6"):
        colabtrain.start(str(checkpoint), records, run_dir=tmp_path / "a", subnets={"deep": (0, 7)}, display=False)
    photo = dataclasses.replace(records[0], state=(Seg("image", "a.jpg"),), modality="image", id="the-photo", split="train")
    with pytest.raises(ValueError, match="record 'the-photo' of task 'help_desk': gemma cannot read a segment of kind 'image'"):
        colabtrain.start(str(checkpoint), [*records, photo], run_dir=tmp_path / "a", display=False)
    assert not (tmp_path / "a").exists()
