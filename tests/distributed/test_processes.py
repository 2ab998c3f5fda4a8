"""Aggregation over several processes: real ones, which talk by gloo.

One start of four processes makes all checks (importing torch takes longer than most of them), in groups of 2, 3 and 4
ranks; each check is a test of its own here, and says what a rank said.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch is built without gloo", allow_module_level=True)

import fastagg
from fastagg._engine.distributed import redistribute
from fastagg.sim.config import from_dict
from fastagg.sim.report import read_metrics
from fastagg.sim.run import simulate
from helpers import environment
from helpers.distributed import clients, dtensors, errors  # noqa: F401  these have the checks
from helpers.distributed.checks import a_rank_that_dies
from helpers.distributed.parts import CHECKS

RANKS = 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each rank says of each check: nothing, or a traceback"""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "helpers.distributed.worker", str(rank), str(RANKS), str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(GLOO_SOCKET_IFNAME="lo"),
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], said


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_on_processes(name, size, reports):
    for rank, (report, said) in enumerate(zip(*reports, strict=True)):
        if rank < size:
            assert report.get(f"{name}-{size}", f"not reached: {said[-2000:]}") == "", f"rank {rank}"


def test_a_rank_that_dies(reports):
    survivors = reports[0][: RANKS - 1]
    assert [report.get(f"{a_rank_that_dies.__name__}-{RANKS}", "not reached") for report in survivors] == [""] * 3


def test_torchrun(tmp_path):
    options = {"method": "fedawa", "clients": 5, "rounds": 2, "epochs": 1, "samples": 300, "batched": False}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value).lower())]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fastagg", "sim",
         *words, "--out", str(tmp_path / "two")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1  # one rank speaks for both
    simulate(from_dict(options), tmp_path / "one")
    one, two = (
        [{k: v for k, v in record.items() if k != "seconds"} for record in read_metrics(folder / "metrics.jsonl")]
        for folder in (tmp_path / "one", tmp_path / "two" / "fedawa" / "seed-0")
    )
    assert one == two


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([5, 1, 1, 1], 2, [0, 1, 4]),
        ([1, 1, 1, 5], 2, [0, 3, 4]),
        ([3, 3], 4, [0, 1, 2, 2, 2]),
        ([], 2, [0, 0, 0]),
        ([0, 0, 7], 2, [0, 3, 3]),
        ([4, 3, 2, 5, 1], 3, [0, 1, 3, 5]),
    ],
)
def test_cutting_a_sequence(sizes, parts, expected):
    found = redistribute.split(sizes, parts)
    assert found[0] == 0
    assert found[-1] == len(sizes)
    assert len(found) == parts + 1
    largest, best = (max(sum(sizes[a:b]) for a, b in pairwise(at)) for at in (found, expected))
    assert largest == best


def test_without_a_group():
    g = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        fastagg.fedavg(g, [g], group=True)
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        fastagg.distribute(g, [g])
