"""A real kernel: a cell starts a training and returns, the kernel stays free, and the page hears how it goes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from colabtrain.mmjev.demo_data import help_desk

jupyter_client = pytest.importorskip("jupyter_client")
pytestmark = [pytest.mark.colab, pytest.mark.filterwarnings("default")]  # jupyter_client's own warnings are not ours

SECONDS = 120.0  # the longest any single wait may take
NUM_STEPS = 60


class Page:
    """What a notebook page knows: outputs by the cell's message, and the state of each widget."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.widgets: dict[str, dict[str, Any]] = {}
        self.heads: list[str] = []  # each text that the head of the view ever had
        self.outputs: list[dict[str, Any]] = []

    def listen(self, until: Callable[[dict[str, Any]], bool]) -> None:
        """Take in messages until one (or what it changed) makes `until` true."""
        deadline = time.monotonic() + SECONDS
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            self._take(message)
            if until(message):
                return

    def run(self, code: str) -> str:
        """Run a cell to its end; its result as text."""
        request = self.client.execute(code)
        self.listen(lambda m: m["parent_header"].get("msg_id") == request and m["content"].get("execution_state") == "idle")
        reply = self.client.get_shell_msg(timeout=SECONDS)
        assert reply["content"]["status"] == "ok", "\n".join(reply["content"].get("traceback", []))
        results = [m for m in self.outputs if m["msg_type"] == "execute_result" and m["parent_header"]["msg_id"] == request]
        return results[-1]["content"]["data"]["text/plain"] if results else ""

    def click(self, text: str) -> None:
        """What the page sends when the button `text` is clicked."""
        button = next(key for key, state in self.widgets.items() if state.get("description") == text)
        content = {"comm_id": button, "data": {"method": "custom", "content": {"event": "click"}}}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))

    def wait_for_head(self, pattern: str) -> re.Match[str]:
        if not (self.heads and re.search(pattern, self.heads[-1])):  # it may have come with what an earlier cell waited for
            self.listen(lambda _: bool(self.heads and re.search(pattern, self.heads[-1])))
        found = re.search(pattern, self.heads[-1])
        assert found is not None
        return found

    def _take(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind in ("stream", "display_data", "execute_result", "error", "update_display_data", "clear_output"):
            self.outputs.append(message)
        if kind == "comm_open" or (kind == "comm_msg" and content["data"].get("method") == "update"):
            state = content["data"]["state"]
            self.widgets.setdefault(content["comm_id"], {}).update(state)
            if "ct-top" in state.get("value", ""):
                self.heads.append(state["value"])


@pytest.fixture
def page(tmp_path: Path, own_event_loop: None) -> Iterator[Page]:
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "IPYTHONDIR": str(tmp_path / "ipython"), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3", startup_timeout=SECONDS, env=env)
    yield Page(client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


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
