from __future__ import annotations

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: make test-integrations")
from helpers import run_benchmark

pytestmark = pytest.mark.integration


def test_the_benchmark_runs(capsys):
    run_benchmark.check(capsys, rows=6)
