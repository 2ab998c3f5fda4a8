"""The files of tests/saved: a state of every method that has one, and a run of the simulator, in every format so far.

PYTHONPATH=.:tests python -m helpers.saved_states     adds what is not there yet of today's format

A file that is there is never written again: it is what a released version wrote. If a state changes, the format's
number grows (fastagg/_engine/saved.py), this command makes a new folder, and the older folders stay for as long as the
policy in CONTRIBUTING.md says.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

import fastagg
from fastagg._engine import saved
from fastagg.sim import run
from fastagg.sim.config import Config, from_dict
from helpers.every_method import IDS, METHODS, OPTIONS, cohort, round_inputs
from helpers.states import same

FOLDER = Path(__file__).parents[1] / "saved"
ROUNDS = 2  # of the run that is kept
# By the name of the file: methods whose state has another form with other options
VARIANTS = {
    "fedawa": ("fedawa", {"variant": "released"}),
    "fedawa-layerwise": ("fedawa", {"variant": "released", "layerwise": True}),
    "centred_clipping-previous": ("centred_clipping", {"center": "previous"}),
    "fedadam-fedawa": ("fedadam", {"weights": {"method": "fedawa", "variant": "released"}}),
    "median-bucketing": ("median", {"pre": "bucketing s=2"}),
}


def cases() -> dict[str, tuple[str, dict]]:
    """Name of the file: method and options, of all that remember something after a round"""
    every = {name: case(name) for name in [*METHODS, *VARIANTS]}
    return {name: found for name, found in every.items() if _remembers(*found)}


def case(name: str) -> tuple[str, dict]:
    """By the name of the file"""
    return VARIANTS.get(name) or (name, OPTIONS[name])


def _remembers(method: str, options: dict) -> bool:
    server = fastagg.aggregator(method, **options)
    before = server.state_dict()
    return not same(before, played(method, options, server).state_dict())


def played(method: str, options: dict, server: fastagg.Aggregator | None = None, seed: int = 0) -> fastagg.Aggregator:
    """After the round whose state is kept"""
    server = server or fastagg.aggregator(method, **options)
    g, clients = cohort(seed=seed)
    server.aggregate(g, clients, client_ids=IDS, **round_inputs(method))
    return server


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def config(rounds: int) -> Config:
    """A run whose checkpoint has all that there can be: the server's state, the clients' memory and momentum"""
    return from_dict({
        "method": "fedadam", "options": {"lr": 0.01}, "algorithm": "feddyn", "keep_momentum": True,
        "model": "helpers.saved_states:net", "clients": 3, "samples": 300, "partition": "iid", "rounds": rounds,
        "epochs": 1, "batched": False,
    })  # fmt: skip


def write() -> list[Path]:
    """What was added"""
    folder, added = FOLDER / str(saved.FORMAT), []
    folder.mkdir(parents=True, exist_ok=True)
    for name, (method, options) in cases().items():
        path = folder / f"{name}.safetensors"
        if not path.exists():
            played(method, options).save(path)
            added.append(path)
    if not (folder / "run").exists():
        with tempfile.TemporaryDirectory() as made:
            run.simulate(config(ROUNDS), Path(made) / "run")
            shutil.copytree(Path(made) / "run", folder / "run")
        added.append(folder / "run")
    return added


if __name__ == "__main__":
    for path in write():
        print(path)
