"""A real kernel: a cell starts a training and returns, the kernel stays free, and the page hears how it goes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_page import Page, kernel_page

from colabtrain.mmjev.demo_data import help_desk

pytestmark = [pytest.mark.colab, pytest.mark.filterwarnings("default")]  # jupyter_client's own warnings are not ours

NUM_STEPS = 60


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with kernel_page(tmp_path) as page:
        yield page


def test_a_cell_trains_while_the_kernel_is_free(page: Page, tmp_path: Path):
    data, folder = tmp_path / "tickets.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in help_desk(40)))
    page.run("import sys\nfrom colabtrain import MMJev, start\nfrom colabtrain.dashboard import widgets")
    page.run("widgets.LOOK_SECONDS, widgets.REFRESH_SECONDS = 0.1, 0.3")  # so that few steps are enough
    page.run(f"run = start(MMJev.tiny(0), {str(data)!r}, run_dir={str(folder)!r}, steps={NUM_STEPS})")
    assert page.run("run.state") in ("'starting'", "'running'")  # the cell did not wait

    first = int(page.wait_for_head(r"Training.*step (\d+) of 60 ")[1])
    assert page.run("1 + 1, run.state") == "(2, 'running')"
    page.listen(lambda _: int(re.findall(r"step (\d+) of", page.heads[-1])[0]) > first)

    page.click("Pause")
    held = int(page.wait_for_head(r"Paused.*step (\d+) of 60 ")[1])
    assert first < held < NUM_STEPS
    assert page.run("run.state, run.step") == f"('paused', {held})"
    page.click("Resume")

    assert page.run("run.wait()") == "'finished'"
    page.wait_for_head(r"Finished.*step 60 of 60 \(100 %\)")
    assert page.run("'matplotlib.pyplot' in sys.modules") == "False"
    assert page.run("run") == f"<colabtrain run {str(folder)!r}: finished, step 60 of 60>"

    shown = [m for m in page.outputs if m["msg_type"] != "execute_result"]
    assert [m["msg_type"] for m in shown] == ["display_data"]  # one view, and nothing under later cells
    assert any("<polyline" in state.get("value", "") for state in page.widgets.values())
    assert any("class prior" in state.get("value", "") for state in page.widgets.values())
    disabled = {
        state["description"]: state["disabled"] for state in page.widgets.values() if "description" in state and "disabled" in state
    }
    assert disabled["Pause"] and disabled["Stop"]
