"""The benchmark of adapters at a small size: its checks of the answers and its table, not its times."""

from __future__ import annotations

import sys

from benchmarks import lora


def test_the_table(monkeypatch, capsys, tmp_path):
    given = ["--layers", "1", "--divide", "32", "--clients", "3", "--rank", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["lora", *given, "--json", str(tmp_path / "numbers.json")])
    lora.main()
    said = capsys.readouterr().out
    assert said.startswith("7 modules, 3 clients")
    assert [line.count("|") for line in said.splitlines() if line.startswith("|")] == [5] * 9
    assert (tmp_path / "numbers.json").exists()
