"""The example notebook: run from its cells, and stored with outputs that have no names of this machine.

``python -m tests.support.notebook`` runs it and stores it anew.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
CELL_S = 300
# What differs from run to run or names this machine, and what is stored in its place.
_CLEANED = (
    (re.compile(r"http://127\.0\.0\.1:\d+/open\?key=[\w-]+"), "http://127.0.0.1:7778/open?key=KEY"),
    (re.compile(r"127\.0\.0\.1:(?!7778)\d+"), "127.0.0.1:7777"),
    (re.compile(r"\S+/nfdt-\w+/state/logs"), "/tmp/nfdt/state/logs"),
    (re.compile(r"job-[0-9a-f]{10}"), "job-0123456789"),
)


def run_notebook(folder: Path) -> Any:
    """Return the notebook after all its cells have run in a folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute(env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    return notebook


def outputs_of(notebook: Any) -> list[str]:
    """Return the text and the HTML of all outputs."""
    found: list[str] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found += [output.text] if "text" in output else [str(value) for value in output.get("data", {}).values()]
    return found


def clean(notebook: Any) -> None:
    """Remove from the outputs what names this machine, and the counters and times of the run."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if "outputs" in cell:
            cell.outputs = joined(cell.outputs)
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = cleaned(output.text)
            for kind, value in output.get("data", {}).items():
                output.data[kind] = cleaned(value)


def joined(outputs: list[Any]) -> list[Any]:
    """Return outputs in which consecutive pieces of one stream are one."""
    found: list[Any] = []
    for output in outputs:
        if found and "text" in output and output.get("name") == found[-1].get("name"):
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def cleaned(text: str) -> str:
    """Return a text of an output as it is stored: of a progress bar, its last state."""
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    text = re.sub(r"[^\n]*\x08+", "", text)
    for pattern, stored in _CLEANED:
        text = pattern.sub(stored, text)
    return re.sub(r"\x1b\[[\d;]*m", "", text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = run_notebook(Path(folder))
    clean(found)
    nbformat.write(found, NOTEBOOK)
