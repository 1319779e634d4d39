"""Executes the notebooks, and leaves in them only what is the same on every machine.

python -m tests.notebooks.executing            # all, in place: their outputs are committed
python -m tests.notebooks.executing 03_clocks

06_docker_cluster wants a Docker engine and the image; without them its outputs only say so.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))

_WIDGET = "application/vnd.jupyter.widget-view+json"
_CELL_SECONDS = 110


def execute(name: str) -> nbformat.NotebookNode:
    """Execute a notebook from top to bottom, in a folder of its own, and return it with its outputs.

    Raises:
        CellExecutionError: a cell has raised, an assertion among them; with the cell and its traceback.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=_CELL_SECONDS, kernel_name="python3", resources=resources).execute()
    return tidy(notebook)


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove when it was run, by which Python, progress bars, and widgets: a web page cannot show those."""
    notebook.metadata = {
        "kernelspec": notebook.metadata["kernelspec"],
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _lasts(output)]
    return notebook


def _lasts(output: dict[str, Any]) -> bool:
    return output.get("name") != "stderr" and _WIDGET not in output.get("data", {})


def main() -> None:
    """Execute the notebooks that are named, or all, in place."""
    for name in sys.argv[1:] or NAMES:
        print(name, flush=True)
        nbformat.write(execute(name), FOLDER / f"{name}.ipynb")
    shutil.rmtree(FOLDER / ".ipynb_checkpoints", ignore_errors=True)


if __name__ == "__main__":
    main()
