"""The tables of docs/results.md, from the runs beside it."""

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import results

pytest.importorskip("scipy")
DOCS = Path(__file__).parents[2] / "docs"


def test_tables_of_the_page_are_made_of_the_files_beside_it(tmp_path):
    shutil.copytree(DOCS / "results", tmp_path / "results")
    page, text = tmp_path / "results.md", (DOCS / "results.md").read_text()
    page.write_text(re.sub(r"(<!-- results: .*? -->).*?(<!-- end of results -->)", r"\1\n\2", text, flags=re.DOTALL))
    assert results.publish(page) == text.count("<!-- results: ") > 0
    assert page.read_text() == text


def test_a_run_that_is_too_short_does_not_count():
    runs = results.read([DOCS / "results" / "fashion-e1.xz"])
    whole, half = results.gain(runs, 200), results.gain(runs, 100)
    assert sum("| fedawa" in line for line in whole) == 2
    assert sum("| fedawa" in line for line in half) == 19
