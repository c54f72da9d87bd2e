"""Shared by all tests: one torch thread each (the tiny model gains nothing from more, and two lanes may run at once)."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import kernel_page
import pytest
import torch

torch.set_num_threads(1)
# A shell that starts the tests in its background has interrupts ignored, which children inherit; some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def own_event_loop() -> Iterator[None]:
    with kernel_page.own_event_loop():
        yield
