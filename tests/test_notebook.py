"""The notebook of this repository, executed in a real kernel with smaller numbers."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = [
    pytest.mark.colab,
    pytest.mark.usefixtures("own_event_loop"),
    # of the notebook libraries' own making, on one lane or the other
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

NOTEBOOK = Path(__file__).parents[1] / "notebooks/first_run.ipynb"


def test_the_first_run_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(cell.get("outputs", []) == [] for cell in notebook.cells), "committed without outputs"
    for cell in notebook.cells:
        cell.source = cell.source.replace("help_desk(2400)", "help_desk(60)").replace("steps=300", "steps=5")
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]
    assert printed[1].startswith('Message: "')
    assert "finished" in printed[6] and "after 5 steps" in printed[6]
    view = next(output for output in notebook.cells[2].outputs if output.output_type == "display_data")
    assert "application/vnd.jupyter.widget-view+json" in view.data and "runs/notebook" in view.data["text/plain"]
