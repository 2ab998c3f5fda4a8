"""One run on several processes, as torchrun starts them: each trains some of a round's clients, and all aggregate.

    torchrun --nproc-per-node 2 -m fastagg sim --method fedawa --out runs/a

Models are cut between layers, so aggregation gives the bits of one process; where clients are trained one by one (not
batched), so does the whole run. Every rank keeps all models, and the first writes what one process would have written:
a run may be continued on another number of processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fastagg
from fastagg._engine import table as tables
from fastagg._engine.aggregator import Aggregator
from fastagg._engine.distributed import redistribute, sharded
from fastagg._engine.distributed.peers import Peers
from fastagg._engine.result import Result, Results
from fastagg.sim import attack
from fastagg.sim.config import Config
from fastagg.sim.local import Algorithm
from fastagg.sim.train import Job, Update


@contextmanager
def joined() -> Iterator[Peers | None]:
    """The processes that torchrun has started beside this one; None where it has not"""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        yield None
        return
    dist.init_process_group("gloo")
    try:
        yield Peers(True)
    finally:
        dist.destroy_process_group()


def check(options: Config, algorithm: Algorithm, server: Aggregator, inputs: Mapping[str, Any]) -> None:
    """inputs: those that the simulator will give the method"""
    what, alone = algorithm.name, ""
    if options.attack not in ("none", *attack.OF_OWN):
        what, alone = f"attack={options.attack}", "attackers see the updates of others"
    elif algorithm.corrects:
        alone = "it corrects the model from all updates"
    elif algorithm.remembers or options.keep_momentum:
        what = algorithm.name if algorithm.remembers else "keep_momentum"
        alone = "clients remember something from round to round"
    elif any(spec.pairwise and spec.name in inputs for spec in server.round_inputs):
        what, alone = options.method, "it tries out all models on the data of each client"
    elif alone := server.why_not_over_group(inputs):
        what = options.method
    if alone:
        raise ValueError(f"sim: {what} needs all clients in one process ({alone}); run it without torchrun")


def train(peers: Peers, jobs: Sequence[Job], work: Any) -> list[Update]:
    """The jobs' updates, of which only those that this rank has made have a state; work does some jobs.

    Ranks have runs of clients, so that their clients one behind the other are in the order of the jobs.
    """
    mine = np.array_split(np.arange(len(jobs)), peers.size)[peers.rank].tolist()
    with peers.together():
        made, diverged = [], ""
        try:
            made = work([jobs[i] for i in mine])
        except attack.Diverged as error:
            diverged = str(error)
        peers.agree({"step": "trained"})
        said = [
            json.loads(text) for text in peers.texts(json.dumps([diverged, [(u.loss, u.steps, u.heads) for u in made]]))
        ]
        for words in (words for words, _ in said if words):
            raise attack.Diverged(words)
        facts = [fact for _, facts in said for fact in facts]
    states = dict(zip(mine, made, strict=True))
    return [states.get(i) or Update(None, loss, steps, heads=heads) for i, (loss, steps, heads) in enumerate(facts)]


def aggregate(
    peers: Peers, server: Aggregator, before: Mapping[str, Any], ids: list[int], sizes: list[int],
    updates: Sequence[Update], info: dict[str, Any],
) -> Result | Results:  # fmt: skip
    """The server's result, whole on every rank, and always with a Gram"""
    mine = [i for i, update in enumerate(updates) if update.state is not None]
    part = fastagg.distribute(
        before, [updates[i].model for i in mine], peers.group, client_ids=[ids[i] for i in mine],
        sizes=[sizes[i] for i in mine], exact=True,
    )  # fmt: skip
    result = server.aggregate(part.global_sd, part.client_sds, part.sizes, part.client_ids, **info)
    if result.gram is None:
        here = [sd for k, sd in zip(ids, part.client_sds, strict=True) if k not in result.dropped]
        result.gram = sharded.gram(part.global_sd, here, peers.group, params=server.params)
    return part.gather(result)


def whole_state(peers: Peers, state: dict[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What a server remembers, with tensors by the model's keys gathered from the ranks' parts"""
    cut = cut_of(peers, model)
    return _by_key(state, lambda tensors: redistribute.gather(peers, cut, tensors, None, 64 << 20))


def part_of_state(peers: Peers, state: dict[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of it"""
    cut = cut_of(peers, model)
    return _by_key(state, lambda sd: {key: piece.clone() for key, piece in cut.part(peers.rank, sd).items()})


def _by_key(tree: Any, change: Callable[[Mapping[str, Any]], Any]) -> Any:
    """A state with what is tensors by the model's keys changed, wherever in it that is"""
    if not isinstance(tree, Mapping):
        return tree
    if all(isinstance(entry, torch.Tensor) for entry in tree.values()):
        return change(tree)
    return {name: _by_key(entry, change) for name, entry in tree.items()}


def cut_of(peers: Peers, model: Mapping[str, Any]) -> redistribute.Cut:
    """As models of this form are cut in aggregate"""
    return redistribute.Cut(tables.build(None, [model]).layout, peers.size, exact=True)
