from __future__ import annotations

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: make test-integrations")
import run_benchmark

pytestmark = pytest.mark.integration


def test_the_benchmark_runs(capsys):
    lines = run_benchmark.rows(capsys)
    assert len(lines) == 4
    assert all(line.count("|") == 10 and " ms " in line for line in lines)
