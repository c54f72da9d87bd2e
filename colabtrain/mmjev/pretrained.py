"""A published Gemma 3n as an MMJev, in two phases: open() reads the small files and finds everything that a person can
put right (name, licence, token, kind of model, missing tensors); load() brings the weights.

A free Colab machine has less memory than the checkpoint has bytes. So the model is built without storage and the
tensors come one at a time, out of the mapped file, in their final dtype onto their final device. Only the text model is
taken; shards with nothing but vision and audio towers are not even fetched.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colabtrain.config import SubnetConfig, check_subnets, default_subnets
from colabtrain.device import free_bytes, host_bytes_available, precision
from colabtrain.mmjev import backbone
from colabtrain.mmjev.hub_files import ModelAccessError, ModelFiles, safetensors_file
from colabtrain.mmjev.model import NUM_LATENTS, MMJev, check_soft_tokens
from colabtrain.records.schema import Seg

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PLE_TABLE = "embed_tokens_per_layer.weight"  # the one name that every layout of the checkpoint has once, at its end
SHARED_KV = ("k_proj", "v_proj", "k_norm", "v_norm")  # older checkpoints have them, unused, in layers that reuse others'
FLOATS = ("BF16", "F16", "F32", "F64")
WORKING_BYTES = 5 * 2**30
REPORT_SECONDS = 5.0

__all__ = ["ModelAccessError", "Pretrained", "ple_fits"]


def ple_fits(free: int, weights: int) -> bool:
    """May the table of per-layer embeddings be on the GPU, too? If 5 GiB of its `free` bytes stay free of `weights`.

    weights: bytes of the whole text model, table included. E4B (12.8 GiB) on a T4 (14.6): no; on an L4 (22.0): yes.
    E2B (8.4 GiB) fits a T4.
    """
    return free - weights >= WORKING_BYTES


class HubTokenizer:
    """A transformers tokenizer without its special tokens. start_ids: what begins a text, the bos token if it has one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        bos = self._tokenizer.bos_token_id
        self.start_ids = [] if bos is None else [bos]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def single(self, word: str) -> int:
        """The id of `word`; raises ValueError where it is not one token."""
        ids = self.encode(word)
        if len(ids) != 1:
            pieces = self._tokenizer.convert_ids_to_tokens(ids)
            raise ValueError(f"the tokenizer makes {pieces} of {word!r}, but answers are read off one token; use a Gemma tokenizer")
        return ids[0]


@dataclass
class Pretrained:
    """A checkpoint that can be loaded. config: its Gemma3nTextConfig; shards: file -> {tensor there: parameter here}."""

    files: ModelFiles
    config: Any
    tokenizer: HubTokenizer
    yes_id: int
    no_id: int
    shards: Mapping[str, Mapping[str, str]]
    device: torch.device
    ple_device: torch.device | None

    @classmethod
    def open(
        cls,
        name: str,
        *,
        device: str | torch.device | None = None,
        token: str | None = None,
        revision: str | None = None,
        ple_device: str | torch.device | None = None,
    ) -> Pretrained:
        """Look at `name`, owner/model on the Hub or a folder, without its weights.

        device: the GPU if there is one. ple_device: where the table of per-layer embeddings goes; by default beside the
        other weights if ple_fits(), else on the CPU. token: instead of the one huggingface_hub finds.
        Raises ModelAccessError where it cannot be had, ValueError where it is not an unquantised Gemma 3n.
        """
        files = ModelFiles(name, token, revision)
        try:
            config = _text_config(name, json.loads(files.fetch("config.json").read_text()))
            lm = _skeleton(config)
            shards = _shards(files, lm)
            files.fetch("tokenizer_config.json")
            tokenizer = HubTokenizer(files.fetch("tokenizer.json").parent)
        except FileNotFoundError as error:
            raise ValueError(
                f"{error}; a checkpoint has config.json, tokenizer.json, tokenizer_config.json and safetensors files"
            ) from error
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        _check_host_memory(name, lm, target)
        table = None if ple_device is None else torch.device(ple_device)
        return cls(files, config, tokenizer, tokenizer.single("Yes"), tokenizer.single("No"), shards, target, table)

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def ffn_widths(self) -> list[int]:
        """The feed-forward width of each layer."""
        return list(self.config.intermediate_size)

    # What start() asks of a model before its weights are there

    @property
    def name(self) -> str:
        return self.files.name if self.files.folder is None else self.files.folder.resolve().name  # a folder may move

    def default_subnets(self) -> dict[str, SubnetConfig]:
        return default_subnets(self.num_layers, max(self.ffn_widths))

    def validate(self, subnets: Mapping[str, SubnetConfig]) -> None:
        check_subnets(subnets, exit_layer=self.num_layers, ffn_width=max(self.ffn_widths), n_latents=NUM_LATENTS)

    def check_state(self, state: Sequence[Seg]) -> None:
        check_soft_tokens(state, self.config.hidden_size, self.name)

    def fingerprint(self) -> dict[str, Any]:
        """The model's, as far as it is known before the weights are there."""
        return {"name": self.name, "revision": self.files.revision}

    def load(self, progress: Callable[[str], None] | None = None) -> MMJev:
        """The model with its weights, in the precision that suits the device. progress: gets lines of text.

        Raises ModelAccessError where a shard cannot be had, ValueError where one does not fit the config.
        """
        lm, matmul_residual = _skeleton(self.config), precision(self.device)
        dtypes = {name: backbone.weight_dtype(name, *matmul_residual) for name, _ in lm.named_parameters()}
        devices = self._devices(lm, dtypes)
        _make_buffers(lm, {name.rpartition(".")[0]: device for name, device in devices.items()}, self.device)
        report = _Progress(self.files, list(self.shards), progress)
        for shard, names in self.shards.items():
            path = report.fetch(shard)
            with safetensors_file(path) as file:
                _check_shapes(file, names, lm, path)
                for key, name in names.items():
                    _assign(lm, name, file.get_tensor(key), devices[name], dtypes[name])
            report.done(shard)
        return MMJev(lm, lm, self.tokenizer, self.yes_id, self.no_id, self.name, start_ids=self.tokenizer.start_ids)

    def _devices(self, lm: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.device]:
        table = self.ple_device
        if table is None and self.device.type == "cuda":
            weights = sum(parameter.numel() * dtypes[name].itemsize for name, parameter in lm.named_parameters())
            fits = ple_fits(free_bytes(self.device) or 0, weights)
            table = self.device if fits else torch.device("cpu")
        return {name: table or self.device if name == PLE_TABLE else self.device for name in dtypes}


def _text_config(name: str, settings: dict[str, Any]) -> Any:
    """Raises ValueError where `settings` (config.json) are not those of an unquantised Gemma 3n."""
    from transformers import Gemma3nTextConfig

    kind = settings.get("model_type")
    if kind not in ("gemma3n", "gemma3n_text"):
        raise ValueError(f"{name} is a model of type {kind!r}, not a Gemma 3n; use google/gemma-3n-E4B-it or google/gemma-3n-E2B-it")
    text = settings if kind == "gemma3n_text" else settings.get("text_config") or {}
    if quantised := settings.get("quantization_config") or text.get("quantization_config"):
        raise ValueError(
            f"{name} is quantised ({quantised.get('quant_method', 'unknown method')}): the fast sub-network is a slice of each "
            "feed-forward, and a packed down_proj cannot be sliced; use the unquantised model, such as google/gemma-3n-E4B-it"
        )
    return Gemma3nTextConfig.from_dict(text)


def _skeleton(config: Any) -> Any:
    """The text model without storage."""
    from transformers import Gemma3nTextModel

    with torch.device("meta"):
        return Gemma3nTextModel(config).eval()


def _check_host_memory(name: str, lm: nn.Module, device: torch.device) -> None:
    """A process that takes more than there is gets killed, with all that the kernel holds."""
    if device.type != "cpu":
        return
    needed = sum(parameter.numel() for parameter in lm.parameters()) * precision(device)[0].itemsize
    available = host_bytes_available()
    if available is not None and needed > available:
        raise ValueError(
            f"{name} takes {needed / 1e9:.1f} GB on the CPU, and {available / 1e9:.1f} GB are free; there is no GPU in use: choose a "
            "runtime with one (in Colab: Runtime, Change runtime type)"
        )


def _make_buffers(lm: Any, devices: Mapping[str, torch.device], default: torch.device) -> None:
    """Real buffers (scales, rotary frequencies: none is in a checkpoint), set by the model's own initialisation."""
    for owner, module in lm.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.full_like(buffer, torch.nan, device=devices.get(owner, default)))
        lm._init_weights(module)  # moves no generator: the parameters have no storage yet
    if unset := [name for name, buffer in lm.named_buffers() if bool(buffer.isnan().any())]:
        raise RuntimeError(f"this release of transformers leaves buffers of Gemma 3n unset: {unset}; use the newest one")


def _shards(files: ModelFiles, lm: nn.Module) -> dict[str, dict[str, str]]:
    """Where each parameter of `lm` is: file -> {tensor name: parameter name}. Raises ValueError where the two differ."""
    try:
        where: dict[str, str] = json.loads(files.fetch(INDEX).read_text())["weight_map"]
    except FileNotFoundError:
        where = dict.fromkeys(files.tensor_names(SINGLE), SINGLE)
    prefixes = [key.removesuffix(PLE_TABLE) for key in where if key.endswith(PLE_TABLE)]
    if len(prefixes) != 1:
        raise ValueError(f"{files.name} has {len(prefixes)} tensors named {PLE_TABLE}, where a Gemma 3n has one; use another checkpoint")
    text = {key: key.removeprefix(prefixes[0]) for key in where if key.startswith(prefixes[0])}
    wanted = {name for name, _ in lm.named_parameters()}
    roles = backbone.kv_roles(lm.config)
    unused = {f"layers.{i}.self_attn.{part}.weight" for i, role in enumerate(roles) if role == "reuse" for part in SHARED_KV}
    missing, extra = sorted(wanted - set(text.values())), sorted(set(text.values()) - wanted - unused)
    if missing or extra:
        raise ValueError(f"the tensors of {files.name} do not fit its config.json; missing: {_some(missing)}; not known: {_some(extra)}")
    shards: dict[str, dict[str, str]] = {}
    for key, name in text.items():
        if name in wanted:
            shards.setdefault(where[key], {})[key] = name
    return dict(sorted(shards.items()))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"


def _check_shapes(file: Any, names: Mapping[str, str], lm: nn.Module, path: Path) -> None:
    there, wrong = set(file.keys()), list[str]()
    for key, name in names.items():
        if key not in there:
            wrong.append(f"{key} is missing")
            continue
        found, shape = file.get_slice(key), list(lm.get_parameter(name).shape)
        if found.get_shape() != shape or found.get_dtype() not in FLOATS:
            wrong.append(f"{key} is {found.get_dtype()} {found.get_shape()}, not floats {shape}")
    if wrong:
        raise ValueError(f"{path} does not fit the model's config.json: {_some(wrong)}; download it anew")


def _assign(lm: nn.Module, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    value = tensor.to(device).to(dtype)
    if value is tensor:  # still a view of the file
        value = tensor.clone()
    owner, _, attribute = name.rpartition(".")
    setattr(lm.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


class _Progress:
    """Fetches the shards and says so in lines such as "loading NAME: shard 2 of 4, 7.9 of 15.7 GB"."""

    def __init__(self, files: ModelFiles, shards: list[str], progress: Callable[[str], None] | None) -> None:
        self._files, self._shards, self._progress = files, shards, progress
        self._sizes = {shard: files.size(shard) for shard in shards}
        self._said = 0.0

    def fetch(self, shard: str) -> Path:
        self._say("loading", shard)
        written = 0

        def report(num_bytes: int) -> None:
            nonlocal written
            written += num_bytes
            if time.monotonic() - self._said >= REPORT_SECONDS:
                self._say("downloading", shard, written)

        return self._files.fetch(shard, report)

    def done(self, shard: str) -> None:
        self._say("loading", shard, self._sizes[shard])

    def _say(self, verb: str, shard: str, num_bytes: int = 0) -> None:
        if self._progress is not None:
            number = self._shards.index(shard)
            so_far = sum(self._sizes[earlier] for earlier in self._shards[:number]) + num_bytes
            total = sum(self._sizes.values())
            self._said = time.monotonic()
            self._progress(
                f"{verb} {self._files.name}: shard {number + 1} of {len(self._shards)}, {so_far / 1e9:.1f} of {total / 1e9:.1f} GB"
            )
