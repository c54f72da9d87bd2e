"""Train in a notebook, in the background, and survive the machine.

The public names are imported when first used, so that what only looks at a run needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colabtrain.api import start as start
    from colabtrain.config import RunConfig as RunConfig
    from colabtrain.config import SubnetConfig as SubnetConfig
    from colabtrain.config import TrainConfig as TrainConfig
    from colabtrain.mmjev.model import MMJev as MMJev
    from colabtrain.records import Record as Record
    from colabtrain.records import Seg as Seg
    from colabtrain.records import load_records as load_records
    from colabtrain.runtime.lock import AlreadyRunning as AlreadyRunning
    from colabtrain.runtime.run import Run as Run
    from colabtrain.runtime.run import RunFailed as RunFailed
    from colabtrain.task import StepReport as StepReport
    from colabtrain.task import Task as Task

__version__ = "0.1.0"

_HOMES = {
    "start": "colabtrain.api",
    "RunConfig": "colabtrain.config",
    "SubnetConfig": "colabtrain.config",
    "TrainConfig": "colabtrain.config",
    "MMJev": "colabtrain.mmjev.model",
    "Record": "colabtrain.records",
    "Seg": "colabtrain.records",
    "load_records": "colabtrain.records",
    "AlreadyRunning": "colabtrain.runtime.lock",
    "Run": "colabtrain.runtime.run",
    "RunFailed": "colabtrain.runtime.run",
    "StepReport": "colabtrain.task",
    "Task": "colabtrain.task",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'colabtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
