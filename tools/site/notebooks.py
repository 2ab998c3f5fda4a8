"""Runs notebooks and stores what they put out, without what differs from run to run for no reason.

python -m tools.site.notebooks docs/notebooks/*.ipynb       # or: make notebooks
"""

from __future__ import annotations

import sys

import nbformat
from nbclient import NotebookClient


def main() -> None:
    for path in sys.argv[1:]:
        print(path, flush=True)
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, record_timing=False).execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
                for output in cell.outputs:
                    if "image/png" in output.get("data", {}):
                        output.data = {"image/png": output.data["image/png"]}
        notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
