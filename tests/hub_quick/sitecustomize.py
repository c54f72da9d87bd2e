"""For the Hub's process under test_hub_fuzz.py alone: shorter waits of the client between its tries, and mutants of the product."""

from __future__ import annotations

import os
import time
from typing import Any

LONGEST_WAIT_SECONDS = 0.05
MUTANT = os.environ.get("HUB_FUZZ_MUTANT", "")

real_sleep = time.sleep
time.sleep = lambda seconds: real_sleep(min(seconds, LONGEST_WAIT_SECONDS))

if MUTANT == "no parent_commit":
    from huggingface_hub import HfApi

    create_commit: Any = HfApi.create_commit

    def unconditional(*given: Any, parent_commit: str | None = None, **named: Any) -> Any:
        return create_commit(*given, **named)

    HfApi.create_commit = unconditional
elif MUTANT:
    raise ValueError(f"no mutant is called {MUTANT!r}")
