"""Files beside the checkpoints in a Hub repo, such as its card. They are made in the Hub's child process, by a function that is
named to it; one that fails is said and left out, for a checkpoint must not wait for a picture."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any



def extra_files(function: str, checkpoint: Path, facts: Mapping[str, Any]) -> tuple[dict[str, bytes], str]:
    """(file name -> content, what went wrong or ""). function: "module:name"; it is called with a checkpoint folder and facts."""
    if not function:
        return {}, ""
    try:
        module, _, name = function.partition(":")
        return dict(getattr(importlib.import_module(module), name)(checkpoint, facts)), ""
    except Exception as error:
        return {}, f"the card could not be made: {type(error).__name__}: {error}"
