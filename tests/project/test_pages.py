"""Every code block of the README and of the site is run, in the order of its page."""

from __future__ import annotations

import json
import re

import pytest
import torch

import fastagg
from helpers.page_names import few_rounds, given, one_rank, write_files
from helpers.pages import ROOT, blocks, run

PAGES = [ROOT / "README.md", ROOT / "examples/nvflare/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
METHODS = ROOT / "docs/methods.md"
MARKED = {
    "README.md": ["needs flwr"],
    "docs/gpu.md": ["not run"],
    "docs/guides/flower.md": ["needs flwr", "needs flwr"],
    "docs/guides/nvflare.md": ["needs nvflare"],
    "docs/integrations.md": ["needs flwr", "needs nvflare"],
}
ELSEWHERE = {  # pages of the site whose blocks other tests run
    "CONTRIBUTING.md": "tests/project/test_recipe.py",
    "examples/flower/README.md": "tests/integrations/test_flower_app.py",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_run(page, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[sim]'")
    matplotlib.use("Agg")
    write_files(tmp_path)
    one_rank(monkeypatch)
    few_rounds(monkeypatch)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    names = given()
    try:
        for block in blocks(page):
            if not block.mark:
                run(block, names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_notebook_runs(tmp_path, monkeypatch):
    """docs/notebooks/flower.ipynb runs in Flower's environment"""
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[sim]'").use("Agg")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    names = {"__name__": "notebook"}
    for cell in blocks(ROOT / "docs/notebooks/compare.ipynb"):
        run(cell, names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_as_they_ran(notebook):
    """make notebooks"""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) <= 10
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert notebook.stat().st_size < 200_000


def test_what_is_not_run_is_known():
    marked = {page.relative_to(ROOT).as_posix(): [b.mark[1] for b in blocks(page) if b.mark] for page in PAGES}
    assert {page: marks for page, marks in marked.items() if marks} == MARKED


def test_no_mark_is_lost():
    """Each stands before a block"""
    for page in PAGES:
        assert len(re.findall(r"<!-- (?:not run|needs)\b", page.read_text())) == sum(bool(b.mark) for b in blocks(page))


def test_pages_from_elsewhere_are_run_elsewhere():
    for page in ROOT.glob("*.md"):
        name = page.relative_to(ROOT).as_posix()
        assert name in ("README.md", *ELSEWHERE) or not list(blocks(page)), name
    for name, test in ELSEWHERE.items():
        assert name.rsplit("/")[-1] in (ROOT / test).read_text()


def test_every_method_has_its_formula():
    sections = re.split(r"^### ", METHODS.read_text(), flags=re.MULTILINE)[1:]
    without = [text.splitlines()[0] for text in sections if "```math" not in text]
    assert without == ["SCAFFOLD", "Server optimisers: the weights of the mean update"]  # which are no methods


def test_every_method_is_on_its_pages():
    names = {method.name for method in fastagg.list_methods()}
    table = set(re.findall(r"^\| `(\w+)` \|", METHODS.read_text(), re.MULTILINE))
    assert names <= table
    api = re.findall(r"^::: fastagg\.(\w+)$", (ROOT / "docs/api/methods.md").read_text(), re.MULTILINE)
    assert sorted(api) == sorted(names)
