"""Train in a notebook, in the background, and survive the machine.

The public names are imported when first used, so that what only looks at a run needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colabtrain.api import start as start
    from colabtrain.api import train as train
    from colabtrain.compat import add_lora as add_lora
    from colabtrain.compat import fit_temperatures as fit_temperatures
    from colabtrain.compat import load_trainable as load_trainable
    from colabtrain.compat import reset_trainable as reset_trainable
    from colabtrain.compat import save_trainable as save_trainable
    from colabtrain.compat import trainable_state as trainable_state
    from colabtrain.config import RunConfig as RunConfig
    from colabtrain.config import SubnetConfig as SubnetConfig
    from colabtrain.config import TrainConfig as TrainConfig
    from colabtrain.hub_token import HubError as HubError
    from colabtrain.mmjev.adapter import load_adapter as load_adapter
    from colabtrain.mmjev.adapter import save_adapter as save_adapter
    from colabtrain.mmjev.model import MMJev as MMJev
    from colabtrain.records import Record as Record
    from colabtrain.records import Seg as Seg
    from colabtrain.records import load_records as load_records
    from colabtrain.runtime.lock import AlreadyRunning as AlreadyRunning
    from colabtrain.runtime.run import Run as Run
    from colabtrain.runtime.run import RunFailed as RunFailed
    from colabtrain.task import StepReport as StepReport
    from colabtrain.task import Task as Task
    from colabtrain.task import inference as inference

__version__ = "0.1.0"

_HOMES = {
    "start": "colabtrain.api",
    "train": "colabtrain.api",
    "add_lora": "colabtrain.compat",
    "fit_temperatures": "colabtrain.compat",
    "load_trainable": "colabtrain.compat",
    "reset_trainable": "colabtrain.compat",
    "save_trainable": "colabtrain.compat",
    "trainable_state": "colabtrain.compat",
    "RunConfig": "colabtrain.config",
    "SubnetConfig": "colabtrain.config",
    "TrainConfig": "colabtrain.config",
    "HubError": "colabtrain.hub_token",
    "MMJev": "colabtrain.mmjev.model",
    "load_adapter": "colabtrain.mmjev.adapter",
    "save_adapter": "colabtrain.mmjev.adapter",
    "Record": "colabtrain.records",
    "Seg": "colabtrain.records",
    "load_records": "colabtrain.records",
    "AlreadyRunning": "colabtrain.runtime.lock",
    "Run": "colabtrain.runtime.run",
    "RunFailed": "colabtrain.runtime.run",
    "StepReport": "colabtrain.task",
    "Task": "colabtrain.task",
    "inference": "colabtrain.task",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'colabtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
