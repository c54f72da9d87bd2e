"""Files beside the checkpoints in a Hub repo, such as its card. They are made in the Hub's child process, by a function that is
named to it; one that fails is said and left out, for a checkpoint must not wait for a picture."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colabtrain.runtime.manifest import STATE


def extra_files(function: str, checkpoint: Path, facts: Mapping[str, Any]) -> tuple[dict[str, bytes], str]:
    """(file name -> content, what went wrong or ""). function: "module:name"; it is called with a checkpoint folder and facts."""
    if not function:
        return {}, ""
    try:
        module, _, name = function.partition(":")
        known = {"num_steps": json.loads((checkpoint / STATE).read_text())["num_steps"], **facts}
        return dict(getattr(importlib.import_module(module), name)(checkpoint, known)), ""
    except Exception as error:
        return {}, f"the card could not be made: {type(error).__name__}: {error}"
