"""The benchmark of adapters at a small size: its checks of the answers and its table, not its times."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import lora


def test_the_table(monkeypatch, capsys, tmp_path):
    given = ["--layers", "1", "--divide", "32", "--clients", "3", "--rank", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["lora", *given, "--json", str(tmp_path / "numbers.json")])
    lora.main()
    said = capsys.readouterr().out
    assert said.startswith("7 modules, 3 clients")
    tables = [block.splitlines() for block in said.split("\n\n") if block.startswith("|")]
    assert [len(rows) for rows in tables] == [10, 9]
    assert {row.count("|") for row in tables[0]} == {5}
    assert {row.count("|") for row in tables[1]} == {6}
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    whole = numbers["seconds"]["FedAWA of the updates, best rank 4"]
    assert sum(numbers["parts"].values()) == pytest.approx(whole)


def test_how_many_multiply_adds_the_parts_need():
    """Of 16 rows with each other, and of 4 new rows with the 12 of the clients, over all columns of A and rows of B"""
    g, clients = lora.cohort(1, 3, 4, torch.float32, 32)
    parts = lora.parts_of(g, clients, 4)
    wide = sum(value.numel() // 4 for value in g.values())
    assert parts["products of all rows"].multiplied == wide * 16 * 17 / 2
    assert parts["new factors"].multiplied == wide * 4 * 12
    parts = lora.parts_of(*lora.cohort(1, 9, 8, torch.float32, 32), 8)  # narrow modules: products are computed again
    wide = sum(value.numel() // 8 for value in lora.cohort(1, 1, 8, torch.float32, 32)[0].values())
    assert parts["products of the clients' rows"].multiplied == wide * 72 * 73 / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_a_llamas_adapters_are_computed_once(dtype):
    """The same parts of the memory as 20 clients of rank 16 have of modules eight times as wide"""
    parts = lora.parts_of(*lora.cohort(1, 20, 2, dtype, 8), 2)
    assert [name for name in parts if "products" in name] == ["products of all rows", "Gram, from the products"]
