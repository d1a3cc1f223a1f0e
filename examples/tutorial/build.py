"""Build the notebook and the page of the tutorial from distributed_training.py, which is their source.

    python examples/tutorial/build.py

The notebook is executed, so that it and the page show what the cells printed and drew.
"""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
SOURCE, NOTEBOOK = HERE / "distributed_training.py", HERE / "distributed_training.ipynb"
DOCS = HERE.parents[1] / "docs"
PAGE = DOCS / "tutorial" / "distributed_training.md"
HEADER = (
    "<!-- Built from examples/tutorial/distributed_training.py by examples/tutorial/build.py: edit that file. -->\n"
)


def read_source() -> NotebookNode:
    """The notebook without outputs."""
    notebook = jupytext.read(SOURCE)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # nbformat would choose another one every time
    return without_facts_of_a_run(notebook)


def without_facts_of_a_run(notebook: NotebookNode) -> NotebookNode:
    """Without version numbers and times, which would differ with every build."""
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def execute(notebook: NotebookNode) -> None:
    """Run all cells from top to bottom, in a kernel of their own. An error in a cell is raised here."""
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    without_facts_of_a_run(notebook)


def to_page(notebook: NotebookNode) -> tuple[str, dict[str, str]]:
    """The page, and the pictures that its cells drew, by name."""
    parts, pictures = [HEADER], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"\]\(\.\./\.\./docs/tutorial/", "](", cell.source)
            parts.append(re.sub(r"\]\(\.\./\.\./docs/", "](../", text) + "\n")
            continue
        parts.append(f"```python\n{cell.source}\n```\n")
        printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```\n")
        drawn = [output.data["image/svg+xml"] for output in cell.outputs if "image/svg+xml" in output.get("data", {})]
        for name, picture in zip(re.findall(r'^show\("(\w+)"', cell.source, re.M), drawn, strict=True):
            title = re.findall(r"<title>(.*?)</title>", picture)[0]
            parts.append(f"![{title}]({name}.svg)\n")
            pictures[name] = picture.rstrip() + "\n"
    return "\n".join(parts), pictures


def main() -> None:
    notebook = read_source()
    execute(notebook)
    nbformat.write(notebook, NOTEBOOK)
    page, pictures = to_page(notebook)
    PAGE.write_text(page)
    for name, picture in pictures.items():
        (PAGE.parent / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
