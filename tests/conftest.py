"""Shared by all tests: one torch thread each (the tiny model gains nothing from more, and two lanes may run at once)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def own_event_loop() -> Iterator[None]:
    """An event loop for jupyter_client, closed after the test; older ones leave theirs open, which fails a later test."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)
    gc.collect()
