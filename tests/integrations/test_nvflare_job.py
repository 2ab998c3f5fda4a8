"""examples/nvflare run by NVFlare's own simulator. The jobs run at the same time, for each mostly waits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: make test-integrations")
pytest.importorskip("sklearn", reason="needs scikit-learn: make test-integrations")

import psutil
import torch

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples/nvflare/job.py"
SECONDS = 3600  # before a job counts as hung, however slow the machine is
OPTIONS = {"variant": "paper", "steps": 5, "lr": 0.1}


class Job:
    """A process, all it starts, and what it wrote"""

    def __init__(self, folder: Path, *command: object) -> None:
        self.folder, self.output = folder, folder.with_suffix(".log")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)], stdout=file, stderr=subprocess.STDOUT, env=env, cwd=folder.parent
            )

    def finish(self, until: float) -> tuple[int, str]:
        code = self.process.wait(max(until - time.monotonic(), 0))
        return code, self.output.read_text()

    def end(self) -> None:
        """The simulator's processes are in sessions of their own: ending ours would leave them"""
        if self.process.poll() is None:
            ours = psutil.Process(self.process.pid)
            for process in [*ours.children(recursive=True), ours]:
                process.kill()
            self.process.wait()

    @property
    def server(self) -> Path:
        [log] = self.folder.rglob("server/log.txt")
        return log.parent

    def weights(self) -> list[dict[str, float]]:
        """Of every round, as the server's log has them"""
        found = re.findall(r"weights (\{.*?\}), left out", (self.server / "log.txt").read_text())
        return [json.loads(text.replace("'", '"')) for text in found]

    def saved(self) -> dict:
        [path] = self.server.rglob("FL_global_model.pt")
        return torch.load(path, weights_only=True)

    def rounds(self) -> list[dict]:
        lines = (self.server / "simulate_job/metrics/round_metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def accuracies(self) -> list[float]:
        return [metrics["aggregated_metrics"][0]["value"] for metrics in self.rounds()]


# The simulator's server has two cells, and 2.9.0 tells the one that receives no models to leave tensors on disk.
SIMULATOR = """
import runpy
from nvflare.app_common.utils import tensor_disk_offload_context as offload
offload._get_cell = lambda engine: engine.server.job_cell
runpy.run_module("nvflare.private.fed.app.simulator.simulator", run_name="__main__")
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    top, until = tmp_path_factory.mktemp("nvflare"), time.monotonic() + SECONDS
    started = {}
    try:
        started["drop"] = Job(
            top / "drop", JOB, "--workspace", top / "drop", "--rounds", 3, "--dtype", "bfloat16", "--broken", "site-2",
            "--on-bad-client", "drop",
        )  # fmt: skip
        export = ("--sites", 2, "--rounds", 2, "--offload", "--export", "--export-dir")
        for name, options in {
            "diff": ("--diff", "--options", json.dumps(OPTIONS)),
            "raise": ("--method", "fedavg", "--broken", "site-2"),
        }.items():
            started[f"{name}-job"] = Job(top / f"{name}-job", JOB, *options, *export, top / f"{name}-job")
        for name in ("diff", "raise"):
            code, output = started[f"{name}-job"].finish(until)
            assert code == 0, output
            exported = top / f"{name}-job/digits"
            started[name] = Job(top / name, "-c", SIMULATOR, exported, "-w", top / name, "-n", 2, "-t", 2)
        yield {"until": until, "config": top / "diff-job/digits", **started}
    finally:
        for job in started.values():
            job.end()


def test_bfloat16_with_a_broken_client_left_out(jobs):
    job = jobs["drop"]
    code, output = job.finish(jobs["until"])
    assert code == 0, output[-3000:]
    assert output.count("'site-2'): key 'body.0.weight' has values that are not finite") == 3
    weights = job.weights()
    assert [sorted(w) for w in weights] == [["site-1", "site-3"]] * 3
    assert weights[0] != weights[1]  # FedAWA learned in between
    saved = job.saved()
    assert list(saved["meta_props"]["fastagg_dropped"]) == ["site-2"]
    dtypes = {key: value.dtype for key, value in saved["model"].items()}
    assert dtypes.pop("body.1.num_batches_tracked") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}
    assert all(value.isfinite().all() for value in saved["model"].values())
    accuracies = job.accuracies()
    assert len(accuracies) == 3
    assert accuracies[-1] > accuracies[0] + 0.2
    assert "round 2: accuracy of the model that was sent out" in output


def test_an_exported_job_keeps_method_and_options(jobs):
    config = json.loads((jobs["config"] / "app/config/config_fed_server.json").read_text())
    [workflow] = config["workflows"]
    assert workflow["args"]["aggregator"] == {
        "path": "fastagg.integrations.nvflare.FastAggAggregator",
        "args": {"method": "fedawa", "options": OPTIONS},
    }
    copied = [
        path.relative_to(jobs["config"] / "app/custom/fastagg") for path in jobs["config"].rglob("fastagg/**/*.py")
    ]
    assert copied == [Path("integrations/nvflare.py")]  # with an __init__.py it would hide the installed package


def test_an_exported_job_runs_with_them_on_diffs_from_disk(jobs):
    job = jobs["diff"]
    code, output = job.finish(jobs["until"])
    assert code == 0, output[-3000:]
    assert output.count("tensors are on disk: read piece by piece") == 2
    first, second = job.weights()
    [said, _] = job.rounds()
    sizes = {site["name"]: site["weight"] for site in said["sites"]}
    share = sizes["site-1"] / sum(sizes.values())
    assert abs(first["site-1"] - share) > 0.02  # five large steps away; the defaults would stay at the first weights
    assert sum(first.values()) == pytest.approx(1)
    assert second != first
    assert job.accuracies()[1] > job.accuracies()[0] + 0.1  # the DIFF was added to the global model
    assert job.saved()["meta_props"]["fastagg_weights"] == pytest.approx(second)


def test_a_broken_client_ends_the_job_by_name(jobs):
    job = jobs["raise"]
    code, output = job.finish(jobs["until"])
    assert code != 0
    assert "tensors are on disk: read piece by piece" in output
    assert "NonFiniteError: client 1 (id 'site-2'): key 'body.0.weight' has values that are not finite" in output
