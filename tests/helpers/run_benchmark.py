"""The benchmark of a round inside a framework, with a small model: its checks of the answers, not its times."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def check(capsys, rows: int) -> None:
    from benchmarks import integrations

    assert integrations.main(["--model", "resnet20", "--clients", "3", "--rounds", "1"]) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == rows
    assert all(line.count("|") == 10 and " ms " in line for line in lines)
