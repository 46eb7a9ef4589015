"""Run the notebooks of docs/notebooks, each in a kernel of its own, and print what they print.

    python -m scripts.notebooks offline study  # these two; without names, all of them
    python -m scripts.notebooks --write        # and store the outputs in the files

Needs `nbclient` and `ipykernel` (the extra `demo`).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def text_of(lines: str | list[str]) -> str:
    """A text of a notebook, which the file may hold line by line."""
    return "".join(lines)


def cells_of(path: Path) -> list[Any]:
    """The cells of a notebook, as its file has them."""
    cells: list[Any] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def code_of(path: Path) -> list[str]:
    """The code cells of a notebook, without the line of a cell magic (`%%writefile`)."""
    sources = [text_of(cell["source"]) for cell in cells_of(path) if cell["cell_type"] == "code"]
    return [source.partition("\n")[2] if source.startswith("%%") else source for source in sources]


def outputs_of(cells: list[Any]) -> list[list[str]]:
    """The texts that each code cell printed or returned, ends of lines included."""
    return [
        [text_of(one["text"] if "text" in one else one["data"]["text/plain"]) for one in cell["outputs"]]
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def execute(path: Path) -> Any:
    """Run a notebook in an empty folder, and return it with its outputs, except stderr (progress, warnings).

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised an exception.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # Not the settings and the history of the user.
            "IPYTHONDIR": f"{folder}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{folder}/runtime",
        }
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": str(work)}},
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Run notebooks by name."""
    parser = argparse.ArgumentParser(description="Run the notebooks of docs/notebooks.")
    parser.add_argument("names", nargs="*", help="which; without names all of them")
    parser.add_argument("--write", action="store_true", help="store the outputs in the files")
    chosen = parser.parse_args()
    for path in [FOLDER / f"{name}.ipynb" for name in chosen.names] or NOTEBOOKS:
        print(f"--- {path.name}", flush=True)
        notebook = execute(path)
        print("".join(text for texts in outputs_of(notebook.cells) for text in texts), flush=True)
        if chosen.write:
            import nbformat

            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
