"""A whole run, from the start or continued after a stop: in memory, or in a folder with all that is known of it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fastagg._engine import atomic
from fastagg._engine.distributed.peers import Peers
from fastagg.sim import attack, data, report
from fastagg.sim.config import Config
from fastagg.sim.objects import Own
from fastagg.sim.simulation import Simulation
from fastagg.sim.stores import InFolder, InMemory, check_folder

OnRound = Callable[[dict[str, Any]], None]


def simulate(
    options: Config, out: Path, *, resume: bool = False, dataset: data.Dataset | None = None, own: Own | None = None,
    on_round: OnRound | None = None, peers: Peers | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Runs to the end, or to Ctrl-C, and returns the summary. Everything is in the folder `out`, which is locked
    meanwhile; a crash loses at most one round. resume continues what is there, to the curve that an undisturbed run
    would have had. With peers, all of them call this; the first one records, and returns the summary."""
    out = Path(out)
    with torch_threads(options.threads), ExitStack() as held:
        if peers is None:
            sim, store = _begin(options, out, resume, dataset, own, held)
            return _simulate(options, sim, store, on_round)
        with peers.together():  # nobody goes on, and writes, before all have read
            sim, store = _begin(options, out, resume, dataset, own, held, peers)
            peers.agree({"step": "begin", "round": str(sim.round)})
        try:
            ended = _simulate(options, sim, store, on_round) if sim.first else _follow(options, sim, store)
        except Exception as error:
            peers.tell(error)
        if not ended["interrupted"]:
            peers.agree({"step": "end"})  # all is written
        return ended


def in_memory(options: Config, own: Own | None, on_round: OnRound | None) -> tuple[report.Run, Simulation]:
    """The same without a folder: nothing is written"""
    with torch_threads(options.threads):
        sim, store = Simulation(options, own=own), InMemory()
        summary = _simulate(options, sim, store, on_round)
    return report.Run(None, options.to_json(), summary, store.partition, store.metrics), sim


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    former = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _begin(
    options: Config, out: Path, resume: bool, dataset: data.Dataset | None, own: Own | None, held: ExitStack,
    peers: Peers | None = None,
) -> tuple[Simulation, InFolder]:  # fmt: skip
    """The run at its beginning, or where a former one ended. Nothing is written; the process that will write has locked
    the folder."""
    check_folder(options, out, resume)  # before data are read, which may take a while
    sim = Simulation(options, dataset, peers, own=own)
    if sim.first:
        out.mkdir(parents=True, exist_ok=True)
        held.enter_context(atomic.Lock(out / "run.lock", "this run"))
        check_folder(options, out, resume)  # again: it may have been begun meanwhile
    store = InFolder(out, resume)
    if store.resumed:
        store.load(sim)
    return sim, store


def _follow(options: Config, sim: Simulation, store: InFolder) -> dict[str, Any]:
    """What the other processes do while the first is in _simulate"""
    if not store.resumed:
        sim.state_dict()
    try:
        while not sim.is_over:
            sim.next_round()
            sim.state_dict()
    except KeyboardInterrupt:
        return {"interrupted": True}
    except attack.Diverged:
        pass
    return {"interrupted": False}


def _simulate(
    options: Config, sim: Simulation, store: InFolder | InMemory, on_round: OnRound | None
) -> dict[str, Any]:  # fmt: skip
    planned = store.begin(options, sim)

    def conclude(**more: Any) -> dict[str, Any]:
        summary = {
            "label": options.label, "method": options.method, "seed": options.seed,
            **report.summarise(store.metrics, planned, options.metric_best),
            "training": "batched" if sim.trainer.batched else "one by one",
            "versions": {
                "fastagg": version("fastagg"), "torch": torch.__version__, "python": platform.python_version(),
            },
        } | more  # fmt: skip
        store.conclude(summary)
        return summary

    conclude()  # so that a run that is killed has a name
    ended: dict[str, Any] = {"interrupted": False}
    try:
        while not sim.is_over:
            record = sim.next_round()
            store.add(record, sim)
            if on_round is not None:
                on_round(record)
        if sim.round < options.rounds:  # in time
            ended |= {"finished": True}
    except KeyboardInterrupt:
        ended = {"interrupted": True}
    except attack.Diverged:  # a result too: this attack ends training, and leaves no accuracy to speak of
        ended |= {"finished": True, "diverged": True, "accuracy": None, "attack_success": None}
    return conclude(**ended)
