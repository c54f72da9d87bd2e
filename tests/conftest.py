"""Shared by all tests: one torch thread each (the tiny model gains nothing from more, and two lanes may run at once)."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
