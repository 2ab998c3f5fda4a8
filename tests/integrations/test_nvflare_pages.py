"""What the documentation shows of NVFlare, as it stands there."""

from __future__ import annotations

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: make test-integrations")

from helpers.page_names import given
from helpers.pages import ROOT, blocks, run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("page", ["docs/integrations.md", "docs/guides/nvflare.md"])
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client.py").write_text("")  # what sites would run
    names = given()
    found = [block for block in blocks(ROOT / page) if block.mark and block.mark[2] == "nvflare"]
    assert found
    for block in found:
        run(block, names)
    assert names["recipe"]
