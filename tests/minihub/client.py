"""huggingface_hub in a test: away from what the person has, with no token but the one it is given, and not offline."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils._xet import abort_xet_session

NOWHERE = "http://127.0.0.1:9"  # nothing listens there
OWN_VARIABLES = ("HF_", "HUGGING_FACE_", "HUGGINGFACE_", "TRANSFORMERS_OFFLINE")


def isolate(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The environment for processes that the test starts, the constants (read at import) for this one."""
    for name in [name for name in os.environ if name.startswith(OWN_VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    places = {
        "HF_HOME": home,
        "HF_HUB_CACHE": home / "hub",
        "HUGGINGFACE_HUB_CACHE": home / "hub",
        "HF_ASSETS_CACHE": home / "assets",
        "HF_XET_CACHE": home / "xet",
        "HF_TOKEN_PATH": home / "token",
        "HF_STORED_TOKENS_PATH": home / "stored_tokens",
    }
    for name, path in places.items():
        monkeypatch.setattr(constants, name, str(path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    use_xet(monkeypatch, False)
    point_at(monkeypatch, NOWHERE)
    # The client looks who runs it in a list that it would fetch otherwise.
    agents = home / ".agent_harnesses.json"
    home.mkdir(exist_ok=True)
    agents.write_text(json.dumps({"standardEnvVars": [], "harnesses": {}}))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(agents), raising=False)


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def use_xet(monkeypatch: pytest.MonkeyPatch, use: bool) -> None:
    """Xet or plain LFS: the client alone decides, at each call."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "0" if use else "1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not use)


def forget_connections() -> None:
    """The client keeps its connections, and Xet's session with its caches, from call to call."""
    huggingface_hub.close_session()
    abort_xet_session()
