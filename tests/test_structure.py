"""The shape of the house: which room may import which, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import colabtrain

PACKAGE = Path(colabtrain.__file__).parent
ROOT = PACKAGE.parent
LEAVES = {"config", "task", "device", "hub_token", "hub_errors"}
MAY_IMPORT = {
    "config": set[str](),
    "task": set[str](),
    "device": set[str](),
    "hub_token": set[str](),
    "hub_errors": set[str](),
    "records": LEAVES,
    "mmjev": LEAVES | {"records"},
    "elastic": LEAVES | {"records", "mmjev"},
    "runtime": LEAVES,
    "dashboard": LEAVES | {"runtime.diary"},
}  # api, compat, __main__ and __init__ know every room


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Names of colabtrain modules that `path` imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("colabtrain.") for name in found if name.startswith("colabtrain.")}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room in ("api", "compat", "__main__", "__init__"):
        return
    for name in imports(path):
        allowed = name.split(".")[0] == room or any(name == other or name.startswith(other + ".") for other in MAY_IMPORT[room])
        assert allowed, f"{path.relative_to(PACKAGE)} imports {name}"


def test_the_rule_can_fail() -> None:
    """The walk sees imports inside functions too, and names what the rooms really use."""
    assert "dashboard.widgets.show" in imports(PACKAGE / "api.py")
    assert "records.schema.Record" in imports(PACKAGE / "elastic/batches.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is too long"
    assert ast.get_docstring(ast.parse(text)), "a module says what it is for"


def loaded_after(code: str) -> set[str]:
    code += "; import sys; print(*sorted(name.split('.')[0] for name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


@pytest.mark.colab
def test_importing_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "matplotlib", "ipywidgets", "IPython", "huggingface_hub", "safetensors"}
    light = "config", "runtime.diary", "runtime.disk", "runtime.verify", "dashboard.text", "__main__"
    code = "import colabtrain, " + ", ".join(f"colabtrain.{name}" for name in light)
    assert not loaded_after(code) & heavy
    child = loaded_after("import colabtrain.hub_token, colabtrain.runtime.hub_worker, colabtrain.dashboard.card")
    assert not child & {"torch", "transformers", "IPython", "ipywidgets"} and "huggingface_hub" in child
    assert "torch" in loaded_after("import colabtrain; colabtrain.Run")


@pytest.mark.colab
def test_every_public_name_is_there() -> None:
    assert {"start", "MMJev", "TrainConfig", "RunConfig", "Run", "Task", "load_records"} <= set(colabtrain.__all__)
    for name in colabtrain.__all__:
        assert getattr(colabtrain, name).__module__.startswith("colabtrain")
    with pytest.raises(AttributeError, match="no attribute 'strat'"):
        colabtrain.strat  # noqa: B018


def test_the_top_level_is_what_the_design_says() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in tracked.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= {
        "pyproject.toml",
        "colabtrain",
        "notebooks",
        "tests",
        "README.md",
        "LICENSE",
    }
