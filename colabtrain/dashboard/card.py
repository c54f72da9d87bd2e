"""The card of a checkpoint repo: README.md with metadata for the Hub, and a picture of the losses.

Made of the checkpoint's own diary, so it tells the step that lies beside it. What the diary and the facts say may be any
text: it is shown as code, which neither Markdown nor HTML nor formulas reach, and in the metadata only as the name of a
base model that the Hub would take, since one that it would not refuses the whole commit. Loads neither torch nor pyplot.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from colabtrain.dashboard.fields import loss_text, mapping, number, one_line, plain_lines, whole
from colabtrain.dashboard.pictures import small_loss_png
from colabtrain.dashboard.text import METRICS
from colabtrain.dashboard.view import View
from colabtrain.runtime.diary import DIARY_FILE, Event

README, PICTURE = "README.md", "losses.png"
MAX_ROWS, MAX_CODE_CHARS = 20, 120
ELASTIC = ("full", "fast")
TABLE_SIGNS = str.maketrans({"`": "'", "|": "¦"})  # what ends a code span, and what ends a cell even inside of one
HUB_NAME = re.compile(r"(?!.*(?:--|\.\.))(?!.*\.git$)[A-Za-z0-9_](?:[\w.-]{0,94}\w)?/[A-Za-z0-9_](?:[\w.-]{0,94}\w)?", re.ASCII)
TINY = re.compile(r"tiny-(-?\d{1,20})")


def files(checkpoint: Path, facts: Mapping[str, Any]) -> dict[str, bytes]:
    """README.md and losses.png for the repo that the folder `checkpoint` is published in.

    facts: repo; base_model (owner/name on the Hub, or None); name (of the model, as in its fingerprint, or of the task);
    step; num_steps; start (the whole call that goes on with the run: `run = colabtrain.start("google/gemma-3n-E4B-it", data,
    hub="me/run")`).
    """
    view = View()
    view.feed(_until(checkpoint / DIARY_FILE, whole(facts.get("step"))))
    parts = [_metadata(facts, view), *_head(facts, view), *_losses(view), *_evaluation(view.evaluation), *_how_to(facts, view)]
    return {README: ("\n\n".join(parts) + "\n").encode(), PICTURE: small_loss_png(view.curves)}


def _until(diary: Path, step: int | None) -> Iterator[Event]:
    """The events up to `step`, one line in memory at a time; a line that is damaged is skipped."""
    with diary.open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            beyond = step is not None and (whole(mapping(event).get("step")) or 0) > step
            if isinstance(event, dict) and not beyond:
                yield event


def _metadata(facts: Mapping[str, Any], view: View) -> str:
    lines = ["---"]
    if base := _base_model(facts):
        lines += [f'base_model: "{base}"', "base_model_relation: adapter"]
    lines += ["library_name: colabtrain", "tags:", "- colabtrain", "- checkpoint"]
    return "\n".join([*lines, *(["- mm-jev"] if _is_elastic(view) else []), "---"])


def _head(facts: Mapping[str, Any], view: View) -> list[str]:
    what = "A training run made with colabtrain"
    if _is_elastic(view):
        what += ": an elastic MM-Jev, a model for typed decisions whose sub-networks `full` and `fast` share every weight"
    step, num_steps = whole(facts.get("step")) or 0, whole(facts.get("num_steps"))
    of = f" of {num_steps:,}" if num_steps else ""
    when = f", made {made}" if (made := _utc(number(view.last.get("time")))) else ""
    lines = [f"{what}.", f"This repo holds its checkpoints. The newest is of **step {step:,}{of}**{when}."]
    if base := _base_model(facts):
        lines.append(f"What is trained are adapters, heads and latents on `{base}`; the weights of the base are not here.")
    return [f"# {_code(facts.get('name'))}", "\n".join(lines)]


def _losses(view: View) -> list[str]:
    if not view.curves or not view.last:
        return ["No step is in its diary yet."]
    loss, average = mapping(view.last.get("loss")), mapping(view.last.get("ema"))
    names = list(view.curves)
    rows = [(_code(name), loss_text(loss, name), loss_text(average, name)) for name in names]
    return ["## Losses", _table(("", "last step", "moving average (EMA)"), rows), f"![Losses by step]({PICTURE})"]


def _evaluation(event: Event) -> list[str]:
    """Each sub-network beside what the class prior reaches; of a task of another kind, the numbers it gave."""
    title = f"## Evaluation at step {whole(event.get('step')) or 0:,}"
    results, prior = mapping(event.get("results")), mapping(mapping(event.get("baselines")).get("prior"))
    overall = {_code(name): mapping(mapping(result).get("overall")) for name, result in results.items()}
    if any(overall.values()):
        overall |= {"class prior": mapping(prior.get("overall"))} if prior else {}
        rows = [(name, *(loss_text(values, metric) for metric in METRICS)) for name, values in overall.items()]
        return [title, f"Held out: {_code(event.get('split'))}", _table(("", *METRICS), rows)]
    numbers = [(_code(name), f"{value:.4g}") for name, given in event.items() if (value := number(given)) is not None]
    rows = [row for row in numbers if row[0] not in ("`time`", "`step`")]
    return [title, _table(("", "value"), rows)] if rows else []


def _how_to(facts: Mapping[str, Any], view: View) -> list[str]:
    start = "\n".join(plain_lines(str(facts.get("start") or ""))) or f"run = colabtrain.start(model, data, hub={_repo(facts)})"
    parts = ["## Go on with it on another machine", "With the same model and the same data:", _fenced(f"import colabtrain\n\n{start}")]
    model = _model(facts)
    if model is not None:
        return [*parts, "## Load what it has learned", _fenced(_download(facts) + _LOAD.format(model=model))]
    parts += ["## Load what it has learned", _fenced(_download(facts) + _TENSORS)]
    if _is_elastic(view):
        parts.append("An MM-Jev that is configured as it was takes them with `colabtrain.load_adapter(model, folder)`.")
    return parts


# The revision is asked for once: the newest checkpoint may be replaced between two downloads.
_DOWNLOAD = """import json
from pathlib import Path

{imports}
from huggingface_hub import hf_hub_download, model_info, snapshot_download

repo = {repo}
revision = model_info(repo).sha
latest = json.loads(Path(hf_hub_download(repo, "colabtrain/latest.json", revision=revision)).read_text())
newest = "ckpt/" + latest["checkpoint"].removeprefix("ckpt/").strip("/")
wanted = [newest + "/trainable.safetensors", newest + "/state.json"]
folder = Path(snapshot_download(repo, revision=revision, allow_patterns=wanted), newest)
"""
_LOAD = """
saved = json.loads((folder / "state.json").read_text())["fingerprint"]
subnets = {{name: colabtrain.SubnetConfig(**subnet) for name, subnet in saved["config.subnets"].items()}}
model = {model}
model.configure(subnets, saved["config.lora_r"], saved["config.lora_alpha"])
colabtrain.load_adapter(model, folder)"""
_TENSORS = """
tensors = load_file(folder / "trainable.safetensors")"""


def _download(facts: Mapping[str, Any]) -> str:
    imports = "import colabtrain" if _model(facts) is not None else "from safetensors.torch import load_file"
    return _DOWNLOAD.format(imports=imports, repo=_repo(facts))


def _model(facts: Mapping[str, Any]) -> str | None:
    """The call that makes the model again, where a line can."""
    if base := _base_model(facts):
        return f'colabtrain.MMJev.from_pretrained("{base}")'
    tiny = TINY.fullmatch(str(facts.get("name")))
    return f"colabtrain.MMJev.tiny({tiny[1]})" if tiny else None


def _base_model(facts: Mapping[str, Any]) -> str | None:
    base = facts.get("base_model")
    return base if isinstance(base, str) and HUB_NAME.fullmatch(base) else None


def _repo(facts: Mapping[str, Any]) -> str:
    """As a Python string."""
    repo = str(facts.get("repo"))
    return f'"{repo}"' if HUB_NAME.fullmatch(repo) else '"owner/name"'


def _is_elastic(view: View) -> bool:
    return all(name in view.curves for name in ELASTIC)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows[:MAX_ROWS]]
    more = [f"| and {len(rows) - MAX_ROWS:,} more |{' |' * (len(titles) - 1)}"] if len(rows) > MAX_ROWS else []
    return "\n".join([*(f"| {' | '.join(row)} |" for row in shown), *more])


def _fenced(code: str) -> str:
    """A block of code that no line of it can end."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", code)), default=0))
    return f"{fence}python\n{code}\n{fence}"


def _code(text: object) -> str:
    """Any text as a span of code that fits a cell of a table."""
    return f"`{one_line(text)[:MAX_CODE_CHARS].translate(TABLE_SIGNS).strip() or '?'}`"


def _utc(seconds: float | None) -> str:
    try:
        return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""
