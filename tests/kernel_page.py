"""A real kernel and what a notebook page knows of it, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 120.0  # the longest any single wait may take
SHOWN = ("stream", "display_data", "execute_result", "error", "update_display_data", "clear_output")


class Page:
    """Outputs by the cell's message, and the state of each widget."""

    def __init__(self, client: Any, manager: Any) -> None:
        self.client, self.manager = client, manager
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

    def send(self, code: str) -> str:
        """Start a cell; its message id. Cells sent soon after one that failed are run too."""
        return self.client.execute(code, stop_on_error=False)

    def ended(self, request: str) -> dict[str, Any]:
        """Wait for the end of the cell `request`; the content of its reply."""
        self.listen(lambda m: m["parent_header"].get("msg_id") == request and m["content"].get("execution_state") == "idle")
        reply = self.client.get_shell_msg(timeout=SECONDS)
        assert reply["parent_header"]["msg_id"] == request
        return reply["content"]

    def run(self, code: str) -> str:
        """Run a cell to its end; its result as text."""
        request = self.send(code)
        reply = self.ended(request)
        assert reply["status"] == "ok", "\n".join(reply.get("traceback", []))
        results = [m for m in self.outputs if m["msg_type"] == "execute_result" and m["parent_header"]["msg_id"] == request]
        return results[-1]["content"]["data"]["text/plain"] if results else ""

    def fail(self, code: str) -> str:
        """Run a cell that must raise; `Type: message`."""
        reply = self.ended(self.send(code))
        assert reply["status"] == "error"
        return f"{reply['ename']}: {reply['evalue']}"

    def shown_by(self, code: str) -> list[str]:
        """Run a cell; the types of the messages with its outputs."""
        request = self.send(code)
        assert self.ended(request)["status"] == "ok"
        return [m["msg_type"] for m in self.outputs if m["parent_header"].get("msg_id") == request]

    def click(self, text: str) -> None:
        """What the page sends when the button `text` is clicked; its text may come after the head that it goes with."""

        def buttons() -> list[str]:
            return [key for key, state in self.widgets.items() if state.get("description") == text]

        if not buttons():
            self.listen(lambda _: bool(buttons()))
        (button,) = buttons()
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
        if kind in SHOWN:
            self.outputs.append(message)
        if kind == "comm_open" or (kind == "comm_msg" and content["data"].get("method") == "update"):
            state = content["data"]["state"]
            self.widgets.setdefault(content["comm_id"], {}).update(state)
            if "ct-top" in state.get("value", ""):
                self.heads.append(state["value"])


@contextlib.contextmanager
def kernel_page(folder: Path) -> Iterator[Page]:
    """The page of a new kernel that can import the package and the tests' helpers; `folder` for the kernel's own files."""
    manager_module = pytest.importorskip("jupyter_client").manager
    tests = Path(__file__).parent
    paths = os.pathsep.join(filter(None, (str(tests.parent), str(tests), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder)}
    with own_event_loop():
        manager, client = manager_module.start_new_kernel(kernel_name="python3", startup_timeout=SECONDS, env=env, cwd=str(folder))
        yield Page(client, manager)
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


@contextlib.contextmanager
def own_event_loop() -> Iterator[None]:
    """An event loop for jupyter_client, closed afterwards; older ones leave theirs open, which fails a later test."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)
    gc.collect()
