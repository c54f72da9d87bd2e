"""Minutes of training, so only with `pytest -m full`: that the model really learns what the README says it learns."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colabtrain.runtime.diary import Tail, history

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared/data"


def trained(folder: Path, *arguments: Any) -> dict[str, Any]:
    """The evaluation that `python -m colabtrain ARGUMENTS --run folder` ends with."""
    command = [sys.executable, "-m", "colabtrain", *map(str, arguments), "--run", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads((folder / "evaluation.json").read_text())


def test_the_demo_learns_every_type(tmp_path: Path) -> None:
    """Both sub-networks: at least 10 points of accuracy above majority, and below the class prior's NLL."""
    evaluation = trained(tmp_path / "run", "demo")
    for kind in ("choice", "score", "noul"):
        majority, prior = (evaluation["baselines"][name]["by_type"][kind] for name in ("majority", "prior"))
        for name in ("full", "fast"):
            result = evaluation["results"][name]["by_type"][kind]
            assert result["accuracy"] >= majority["accuracy"] + 0.10, (kind, name)
            assert result["nll"] < prior["nll"], (kind, name)


@pytest.mark.skipif(not DATA.exists(), reason=f"the real records are not at {DATA}")
def test_real_tweets_beat_the_class_prior_on_every_question(tmp_path: Path) -> None:
    """Human soft targets: held-out NLL of both sub-networks at least 0.02 nat below the class prior."""
    data = DATA / "vader_tweets.records.jsonl"
    options = ("--steps", 1000, "--set", "batch_size=8")
    evaluation = trained(tmp_path / "run", "train", "--model", "tiny", "--data", data, *options)
    priors = evaluation["baselines"]["prior"]["by_question"]
    assert len(priors) == 3
    for question, prior in priors.items():
        for name in ("full", "fast"):
            assert evaluation["results"][name]["by_question"][question]["nll"] <= prior["nll"] - 0.02, (question, name)


@pytest.mark.skipif(not DATA.exists(), reason=f"the real records are not at {DATA}")
@pytest.mark.parametrize("name", ["banking77_250", "query_wellformedness_2510"])
def test_the_other_text_data_sets_train(name: str, tmp_path: Path) -> None:
    """77 options a question (beyond the cap of 32), and soft yes / no targets: the loss falls, every number is finite."""
    data, folder = DATA / f"{name}.records.jsonl", tmp_path / "run"
    evaluation = trained(folder, "train", "--model", "tiny", "--data", data, "--steps", 200, "--set", "batch_size=4")
    losses = history(Tail(folder / "diary.jsonl").new())
    for subnet, result in evaluation["results"].items():
        loss = losses[f"loss/{subnet}"]
        assert sum(loss[-50:]) / 50 < sum(loss[:20]) / 20, subnet
        assert all(math.isfinite(value) for value in result["overall"].values())
