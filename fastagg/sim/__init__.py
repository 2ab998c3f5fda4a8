"""The simulator: real federated training on one machine, with any method, model and data.

    run = fastagg.sim.simulate(model=make_net, data=(x, y, test_x, test_y), method="fedawa", clients=20, rounds=100)
    run.accuracy, run.model, run.report("report.html")

    runs = fastagg.sim.compare({"fedavg": {}, "fedawa": {"steps": 5}}, seeds=3, grid={"alpha": [0.1, 0.5]})
    print(runs)                     # a table, with differences to the baseline seed by seed

The command `fastagg sim` is the same from a shell.

library.py      simulate() and compare()
config.py       every option of a run; objects.py: what a user brings of their own in the place of a name
data.py         data sets from files, never downloaded, with a reader for each format in datasets/; own.py: a user's own
partition.py    who has which samples; domains.py: where each client has samples of one domain; divide.py: all of it
models.py       the networks of the papers, with their layers in networks/, and those of a user
attack          what malicious clients do
local.py        what clients do; train.py: how that is computed, one by one or all at once
devices.py      where
simulation.py   the rounds: choose, train, aggregate, evaluate
run.py          a whole run; stores.py: what is written of it; jobs.py: several in processes
comparison.py   runs side by side; statistics.py: differences over the same seeds, with confidence intervals
reproduce.py    the papers' tables again; recipe.py: what is in a file of recipes/
report, plots   tables and pictures; page.py: report.html; archive.py: runs in one small file, for documents
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastagg.sim.config import Config
    from fastagg.sim.data import Dataset
    from fastagg.sim.library import Run, Runs, compare, simulate
    from fastagg.sim.local import Algorithm, Client

__all__ = ["Algorithm", "Client", "Config", "Dataset", "Run", "Runs", "compare", "simulate"]
_PLACES = {"Algorithm": "local", "Client": "local", "Config": "config", "Dataset": "data", "Run": "library",
           "Runs": "library", "compare": "library", "simulate": "library"}  # fmt: skip


def __getattr__(name: str) -> Any:  # torch is imported when there is work to do, not to print help
    if name in _PLACES:
        return getattr(import_module(f"fastagg.sim.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'fastagg.sim' has no attribute {name!r}")
