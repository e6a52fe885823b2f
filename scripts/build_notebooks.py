"""Build executed notebooks from the scripts in notebooks/, in the format of Jupyter (4.5).

    python scripts/build_notebooks.py                    # all of them, into notebooks/*.ipynb
    python scripts/build_notebooks.py tour --out folder

A script is in percent format: `# %%` begins a cell of code, `# %% [markdown]` one of text. jupytext reads it,
and nbclient runs it in a kernel of this interpreter; an error in a cell ends the build.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parents[1] / "notebooks"
METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}


def build(script: Path) -> nbformat.NotebookNode:
    """Return the executed notebook of a script; nothing in it depends on when it was run."""
    notebook = jupytext.read(script)
    notebook.metadata = nbformat.from_dict(METADATA)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
    NotebookClient(notebook, timeout=None, record_timing=False, store_widget_state=False).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="scripts in notebooks/, without .py; all by default")
    parser.add_argument("--out", type=Path, default=HERE, help="where to write the .ipynb files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or sorted(path.stem for path in HERE.glob("*.py")):
        target = args.out / f"{name}.ipynb"
        nbformat.write(build(HERE / f"{name}.py"), target)
        print(target)


if __name__ == "__main__":
    main()
