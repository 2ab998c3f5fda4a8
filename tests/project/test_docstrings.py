"""The code in docstrings that the site's pages of the API show is run, as that of the other pages is."""

from __future__ import annotations

import inspect
import pkgutil
import re
import shutil
import textwrap

import pytest
import torch

import fastagg
from helpers.page_names import IDS, given, one_rank, write_files
from helpers.pages import ROOT

ENTRY = re.compile(r"^::: (\S+)(?:\n    options: .*?members: \[(.*?)\])?", re.MULTILINE)


def shown() -> dict[str, list[str]]:
    """The code of each docstring that has any, by the name of what it is of"""
    found = {}
    for page in sorted((ROOT / "docs/api").glob("*.md")):
        for name, members in ENTRY.findall(page.read_text()):
            if not name.startswith("fastagg.integrations."):  # which need their frameworks
                for part in (name, *(f"{name}.{member}" for member in members.split(", ") if member)):
                    text = inspect.getdoc(pkgutil.resolve_name(part)) or ""
                    if parts := [code(each) for each in text.split("\n\n") if each.startswith(("    ", ">>>"))]:
                        found[part] = parts
    return found


def code(text: str) -> str:
    return textwrap.dedent(re.sub(r"^(>>>|\.\.\.) ", "", text, flags=re.MULTILINE))


@pytest.fixture
def names(tmp_path, monkeypatch):
    write_files(tmp_path)
    shutil.copy(tmp_path / f"clients/{IDS[1]}.safetensors", tmp_path)
    one_rank(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return given()


def test_what_has_code_is_known():
    assert shown().keys() == {
        "fastagg._engine.registry.aggregator", "fastagg.Aggregator.round", "fastagg.distribute"
    }  # fmt: skip


def test_an_aggregator(names):
    [block] = shown()["fastagg._engine.registry.aggregator"]
    before = names["global_sd"]
    exec(block, names)
    assert names["global_sd"].weights.sum() > 0.99
    assert names["global_sd"].keys() == before.keys()


def test_rounds(names):
    plain, asynchronous = shown()["fastagg.Aggregator.round"]
    exec(plain, names | {"server": fastagg.aggregator("fedawa")})
    server, g = fastagg.aggregator("fedbuff"), names["global_sd"]
    for number in range(3):
        g = server.aggregate(g, names["client_sds"], version=[number] * len(IDS))
    with server.round(g) as round:
        round.add("hospital-9", update=names["diff_sd"], version=3)
        exec(asynchronous, names | {"server": server, "round": round})
        assert round.clients == ["hospital-9", "hospital-3"]


def test_models_that_are_spread(names):
    torch.distributed.init_process_group("gloo")
    try:
        group = torch.distributed.group.WORLD
        server = fastagg.aggregator("fedawa", group=group)
        exec(*shown()["fastagg.distribute"], names | {"server": server, "group": group})
    finally:
        torch.distributed.destroy_process_group()
