"""Methods of other packages in the simulator: what it knows of them is what they declare."""

from __future__ import annotations

import pytest

from fastagg._engine import registry
from fastagg.extend import GlobalAggregator, RoundInput
from fastagg.sim import data
from fastagg.sim.config import from_dict
from fastagg.sim.simulation import Simulation

SMALL = {"clients": 4, "rounds": 1, "epochs": 1, "alpha": 0.5, "samples": 200}


class BySize(GlobalAggregator):
    """The mean by data size."""

    name, paper = "by_size", "a test"
    reads, needs_global = "weights", False

    def weigh(self, cohort):
        return cohort.shares


class NeedsMoods(BySize):
    """Takes what no program has."""

    name = "needs_moods"
    round_inputs = (RoundInput("moods", required=True, kind="mood"),)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for cls in (BySize, NeedsMoods):
        monkeypatch.setitem(registry.registry(), cls.name, cls)


@pytest.mark.parametrize(
    ("method", "algorithm", "equal"),
    [("by_size", "feddyn", True), ("fedavg", "feddyn", True), ("by_size", "sgd", False), ("fedavgm", "feddyn", False)],
)
def test_feddyn_takes_the_plain_mean_of_methods_that_weigh_by_size(method, algorithm, equal):
    sim = Simulation(from_dict(SMALL | {"method": method, "algorithm": algorithm}), data.load("digits"))
    weights = sim.next_round()["weights"]
    assert (len(set(weights)) == 1) == equal


def test_an_input_of_an_unknown_kind():
    words = "needs moods, which the simulator does not have: its kind is 'mood', expected one of 'labels', 'entropies'"
    with pytest.raises(ValueError, match=words):
        Simulation(from_dict(SMALL | {"method": "needs_moods"}), data.load("digits"))
