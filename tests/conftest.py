"""Shared by all tests: one torch thread each (the tiny model gains nothing from more, and two lanes may run at once)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import kernel_page
import pytest
import torch
from minihub import MiniHub, client

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and each process that a test starts
# A shell that starts the tests in its background has interrupts ignored, which children inherit; some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def own_event_loop() -> Iterator[None]:
    with kernel_page.own_event_loop():
        yield


@pytest.fixture
def online_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """huggingface_hub asks servers (HF_HUB_OFFLINE=1 is CI's) but knows none, and sees neither the person's files nor tokens."""
    client.forget_connections()
    client.isolate(monkeypatch, tmp_path / "huggingface")
    yield
    client.forget_connections()


@pytest.fixture
def hub(online_client: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniHub]:
    """A Hub of the test's own, where huggingface_hub goes by default. LFS unless the test asks for Xet (`client.use_xet`)."""
    with MiniHub(tmp_path / "minihub", xet_cas=f"local://{tmp_path}/xet-cas") as hub:
        client.point_at(monkeypatch, hub.url)
        yield hub
        client.forget_connections()
