"""The card of a checkpoint repo: what the Hub reads of it, what people do, and that no text of a diary is more than text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.utils import validate_repo_id
from markdown_it import MarkdownIt
from safetensors.torch import load_file
from toy_task import ToyTask

import colabtrain
from colabtrain.config import SubnetConfig
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.runtime.hub import MADE_ANEW

with warnings.catch_warnings():  # an older matplotlib and a newer pyparsing
    warnings.simplefilter("ignore", DeprecationWarning)
    from colabtrain.dashboard import card

pytestmark = [pytest.mark.colab, pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")]
BASE = "google/gemma-3n-E4B-it"
START = f'run = colabtrain.start("{BASE}", data, hub="me/run")'
EVIL = (
    "</code><script>alert(1)</script> `<u>x</u>` | [a](javascript:b) $x$ <!-- \r\n---\nlicense: mit\n# big\n```\n\u202e**bold** www.x.org"
)


def step(i: int, loss: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    loss = {"full": 1.0 / i, "fast": 2.0 / i} if loss is None else loss
    return {"time": 1_700_000_000.0 + i, "event": "step", "step": i, "loss": loss, "ema": {name: 0.5 for name in loss}, **fields}


def evaluation(at: int, accuracy: float = 0.9) -> dict[str, Any]:
    def scores(accuracy: float) -> dict[str, Any]:
        return {"overall": {"n": 60, "accuracy": accuracy, "nll": 0.31, "brier": 0.2, "ece": 0.05}}

    results = {"full": scores(accuracy), "fast": scores(0.8)}
    return {"event": "evaluation", "step": at, "split": "test", "results": results, "baselines": {"prior": scores(0.3)}}


def made(folder: Path, events: list[Any], **facts: Any) -> dict[str, bytes]:
    """The files of a checkpoint in `folder`; an event that is a string is a line of its own."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (folder / "diary.jsonl").write_text("".join(f"{line}\n" for line in lines))
    known = {"repo": "me/run", "base_model": BASE, "name": BASE, "step": 10, "num_steps": 100, "start": START}
    return card.files(folder, known | facts)


def text(folder: Path, events: list[Any], **facts: Any) -> str:
    return made(folder, events, **facts)["README.md"].decode()


def metadata(readme: str) -> dict[str, Any]:
    """As the Hub reads it: by huggingface_hub's classes, which must agree with plain YAML."""
    found = huggingface_hub.ModelCard(readme)
    plain = yaml.safe_load(readme.split("---\n")[1])
    assert isinstance(found.data, huggingface_hub.ModelCardData)
    assert found.data.to_dict() == plain
    assert huggingface_hub.RepoCard(str(found)).data.to_dict() == plain, "written back it says the same"
    return plain


def code_blocks(readme: str) -> list[str]:
    return [token.content for token in MarkdownIt().enable("table").parse(readme) if token.type == "fence"]


def is_picture(data: bytes) -> bool:
    return data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")


# What it says


def test_it_tells_what_the_diary_tells(tmp_path: Path):
    readme = text(tmp_path, [step(i) for i in range(1, 11)] + [evaluation(5, 0.1), evaluation(10)])
    assert "sub-networks `full` and `fast` share every weight" in readme
    assert "The newest is of **step 10 of 100**, made 2023-11-14 22:13 UTC." in readme
    assert "| `full` | 0.100 | 0.500 |\n| `fast` | 0.200 | 0.500 |" in readme
    assert "## Evaluation at step 10\n\nHeld out: `test`" in readme
    assert "| `full` | 0.900 | 0.310 | 0.200 | 0.050 |" in readme and "| class prior | 0.300 |" in readme
    assert code_blocks(readme)[0] == f"import colabtrain\n\n{START}\n"


def test_what_lies_beyond_the_step_or_was_made_anew_is_not_told(tmp_path: Path):
    attempt = [*(step(i, {"full": 7.0, "fast": 7.0}) for i in range(1, 9)), evaluation(8, 0.777)]
    events = [*attempt, {"event": "resumed", "step": 4}, *(step(i) for i in range(5, 13)), evaluation(12, 0.666)]
    readme = text(tmp_path, events)
    assert "| `full` | 0.100 | 0.500 |" in readme
    assert "0.777" not in readme and "0.666" not in readme and "Evaluation" not in readme


def test_a_run_without_a_step_has_a_card(tmp_path: Path):
    for events in ([], [{"event": "run_started", "text": "started"}], [step(3), {"event": "resumed", "step": 0}]):
        files = made(tmp_path, events, step=0, num_steps=None)
        readme = files["README.md"].decode()
        assert "No step is in its diary yet." in readme and "**step 0**." in readme and "losses.png" not in readme
        assert is_picture(files["losses.png"]) and metadata(readme)["library_name"] == "colabtrain"


def test_a_task_with_other_losses_is_no_mm_jev(tmp_path: Path):
    events = [step(i, {"generator": 3.0, "critic": None}) for i in range(1, 11)]
    readme = text(
        tmp_path, [*events, {"event": "evaluation", "step": 10, "time": 5.0, "fid": 12.3456, "note": "x"}], base_model=None, name="gan"
    )
    assert "| `generator` | 3.000 | 0.500 |\n| `critic` | not finite | 0.500 |" in readme
    assert "| `fid` | 12.35 |" in readme and "`time`" not in readme
    assert "MM-Jev" not in readme and "load_adapter" not in readme and "share every weight" not in readme
    assert metadata(readme) == {"library_name": "colabtrain", "tags": ["colabtrain", "checkpoint"]}


def test_damaged_lines_and_odd_events_are_passed_over(tmp_path: Path):
    odd: list[Any] = [
        '{"event": "step", "st',
        "\x00\xff",
        "[1]",
        "null",
        "[" * 100_000,
        '{"step": NaN}',
        '{"event": "step", "step": 1e999}',
    ]
    odd += [
        {"event": "step"},
        {"event": "step", "step": "x", "loss": 3},
        {"event": "resumed"},
        {"event": "evaluation", "results": {"full": 3}},
    ]
    odd += [
        {"event": ["step"], "step": 2, "text": 7, "time": "late"},
        step(1, time=1e99),
        {"event": "evaluation", "step": 2, "results": []},
    ]
    files = made(tmp_path, [*odd, *(step(i) for i in range(1, 11)), *odd[:7]])
    assert "| `full` | 0.100 | 0.500 |" in files["README.md"].decode()
    assert is_picture(files["losses.png"])


@pytest.mark.parametrize("value", [0.0, 1e-300, -3.0, 1e299, None])
def test_the_picture_takes_any_number(tmp_path: Path, value: float | None):
    events = [step(i, {"one": value, "two": 1.0 if i % 2 else 1e299}) for i in range(1, 11)]
    assert is_picture(made(tmp_path, events)["losses.png"])


def test_the_picture_shows_the_curves(tmp_path: Path):
    some, others = (made(tmp_path, [step(i, {"full": value * i}) for i in range(1, 11)])["losses.png"] for value in (1.0, -1.0))
    assert some != others and some != made(tmp_path, [])["losses.png"]
    assert len(some) < 60_000


# What the Hub reads


def test_metadata_is_what_the_hub_takes(tmp_path: Path):
    assert metadata(text(tmp_path, [step(1)])) == {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "colabtrain",
        "tags": ["colabtrain", "checkpoint", "mm-jev"],
    }


NAMES = [BASE, "a/b", "1/2", "Foo-BAR_1.x/y", "a" * 96 + "/b", "_a/b_", "no/off", "a.b/1e5"]
NO_NAMES = [None, "", "tiny", "/content/model", "../model", "./a", "a/b/c", "a--b/c", "a/b..c", "a/b.git", "-a/b", "a/b-", "a/b.", "a/b\n"]
NO_NAMES += ["a/b: c", "a /b", "caf\u00e9/b", "a" * 97 + "/b", 'a/"b', EVIL, 7]


@pytest.mark.parametrize("name", NAMES + NO_NAMES)
def test_a_base_model_is_named_only_where_the_hub_knows_such_names(tmp_path: Path, name: Any):
    found = metadata(text(tmp_path, [step(1)], base_model=name)).get("base_model")
    assert found == (name if name in NAMES else None)
    validate_repo_id(found)  # of the older client, which lets more pass, too


# Text is text


def test_no_text_is_markup(tmp_path: Path):
    events = [step(i, {EVIL: 1.0, "_hidden": 2.0, "$\\frac{$": 3.0, "\u65e5\u672c": 4.0}) for i in range(1, 11)]
    results = {EVIL: evaluation(1)["results"]["full"]}
    files = made(
        tmp_path, [*events, {**evaluation(10), "split": EVIL, "results": results}], name=EVIL, repo=EVIL, base_model=EVIL, start=EVIL
    )
    readme = files["README.md"].decode()
    assert set(metadata(readme)) == {"library_name", "tags"}
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(huggingface_hub.ModelCard(readme).text)
    tags = set(re.findall(r"<(/?\w+)", page))
    shown = {"h1", "h2", "p", "strong", "code", "pre", "table", "thead", "tbody", "tr", "th", "td"}
    assert tags <= shown | {f"/{tag}" for tag in shown} | {"img"}
    assert page.count("<img") == page.count("<h1") == 1 and page.count("<strong") == 1
    assert [row.count("<td") for row in page.split("<tr>")[1:]] == [0, 3, 3, 3, 3, 0, 5, 5], "no cell was broken"
    assert "\u202e" not in readme and "$" not in re.sub(r"<code.*?</code>", "", page, flags=re.DOTALL)
    assert 'repo = "owner/name"\n' in code_blocks(readme)[1]


def test_a_task_of_very_many_losses_stays_readable(tmp_path: Path):
    files = made(tmp_path, [step(i, {f"loss{k}": 1.0 for k in range(60)}) for i in range(1, 4)])
    readme = files["README.md"].decode()
    assert "| `loss19` |" in readme and "`loss20`" not in readme and "| and 40 more | | |" in readme


# What people do with it


def as_repo(checkpoint: Path, repo: Path) -> None:
    """`repo` as a run publishes it, with two checkpoints of which latest.json names one."""
    for name in ("00000001-aaaa", "00000002-bbbb"):
        shutil.copytree(checkpoint, repo / "ckpt" / name)
    (repo / "ckpt/00000001-aaaa/trainable.safetensors").write_bytes(b"older")
    (repo / "colabtrain").mkdir()
    (repo / "colabtrain/latest.json").write_text(json.dumps({"checkpoint": "ckpt/00000002-bbbb"}))


def executed(code: str, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that `code` leaves, the Hub being the folder `repo`."""

    def one(name: str, file: str, revision: str) -> str:
        assert (name, revision) == ("me/run", "abc")
        return str(repo / file)

    def several(name: str, revision: str, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("me/run", "abc")
        for path in (path for path in repo.rglob("*") if path.is_file()):
            relative = path.relative_to(repo)
            if any(relative.match(pattern) for pattern in allow_patterns):
                (tmp_path / "cache" / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, tmp_path / "cache" / relative)
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "model_info", lambda name: SimpleNamespace(sha="abc"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", several)
    names: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), names)
    assert not list((tmp_path / "cache").rglob("optimizer*")), "what is not needed is not fetched"
    return names


def test_its_lines_load_what_was_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    subnets = {"full": SubnetConfig(exit_layer=6, sibling_from=2), "fast": SubnetConfig(exit_layer=4, media_exit=1, ffn_width=64)}
    options: dict[str, Any] = {"lora_r": 3, "lora_alpha": 6.0, "subnets": subnets, "steps": 2, "batch_size": 2}
    colabtrain.train(colabtrain.MMJev.tiny(5), help_desk(40), run_dir=tmp_path / "run", **options)
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step-00000002")
    facts = {"repo": "me/run", "name": "tiny-5", "step": 2, "num_steps": 2, "start": 'run = colabtrain.start("tiny", data, hub="me/run")'}
    readme = card.files(checkpoint, facts)["README.md"].decode()
    assert "base_model" not in metadata(readme) and "**step 2 of 2**" in readme and "| `fast` | " in readme
    as_repo(checkpoint, tmp_path / "repo")
    model = executed(code_blocks(readme)[1], tmp_path / "repo", tmp_path, monkeypatch)["model"]
    trained = load_file(checkpoint / "trainable.safetensors")
    assert model.name == "tiny-5" and set(model.trainable()) == set(trained)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in model.trainable().items())
    # The same lines for a published base: only how the model is made is another.
    monkeypatch.setattr(colabtrain.MMJev, "from_pretrained", lambda name: colabtrain.MMJev.tiny(5) if name == BASE else None)
    readme = card.files(checkpoint, {**facts, "base_model": BASE, "name": BASE})["README.md"].decode()
    again = executed(code_blocks(readme)[1], tmp_path / "repo", tmp_path, monkeypatch)["model"]
    assert all(torch.equal(parameter, trained[name]) for name, parameter in again.trainable().items())


def test_its_lines_load_the_tensors_of_an_own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = ToyTask(num_steps=3)
    colabtrain.train(task=task, run_dir=tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    readme = card.files(checkpoint, {"repo": "me/run", "name": "ToyTask", "step": 3, "num_steps": 3})["README.md"].decode()
    assert code_blocks(readme)[0] == 'import colabtrain\n\nrun = colabtrain.start(model, data, hub="me/run")\n'
    as_repo(checkpoint, tmp_path / "repo")
    tensors = executed(code_blocks(readme)[1], tmp_path / "repo", tmp_path, monkeypatch)["tensors"]
    assert torch.equal(tensors["weight"], task.weight) and set(tensors) == set(load_file(checkpoint / "trainable.safetensors"))


def test_a_card_is_made_without_torch(tmp_path: Path):
    made(tmp_path, [step(1)])
    code = (
        "import sys; from pathlib import Path; from colabtrain.dashboard import card; "
        "print(sorted(card.files(Path(sys.argv[1]), {'repo': 'me/run', 'step': 1}))); print(*sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, modules = done.stdout.splitlines()
    assert first == "['README.md', 'losses.png']" and not done.stderr
    assert not {"torch", "transformers", "huggingface_hub", "ipywidgets", "matplotlib.pyplot"} & set(modules.split())


def test_the_card_says_that_it_is_made_anew_in_the_words_that_publishing_looks_for() -> None:
    assert MADE_ANEW in card.MARK
