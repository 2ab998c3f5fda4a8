"""Thousands of rounds in one process: does memory grow, does the state that methods carry drift?

python -m benchmarks.soak --rounds 2000

Cohorts change: 2 to 30 of 60 clients, in any order, and now and then in another dtype. Checked are
  memory   resident after a tenth of the rounds and at the end: within 5 %
  twins    of every method with state: an aggregator that is made anew for every round from state_dict() of the round
           before must give the same bits as the one that lives through all rounds
  state    against a slow recomputation in float64 over all rounds, to tolerances that follow from the dtypes
Exits with 1 where one fails.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import fastagg
from benchmarks.soak_state import CLIENTS, PARAMS, SIZES, Angles, Clusters, Logits, Moments, Round

MOST = 30  # clients in a round
DTYPES = (torch.float64, torch.bfloat16, torch.float16)  # besides float32, which most rounds are in
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "fedawa": ("fedawa", {"variant": "released"}),
    "fedawa, sgd": ("fedawa", {"variant": "released", "optimizer": "sgd"}),
    "fedawa, layerwise": ("fedawa", {"variant": "released", "layerwise": True}), "fedadp": ("fedadp", {}),
    "cfl": ("cfl", {"eps1": 0.5, "eps2": 0.4}), "fedadam": ("fedadam", {}), "fedavgm": ("fedavgm", {}),
}  # fmt: skip
STATELESS = ("fedavg", "simprox", "weiavg", "ldawa", "krum", "geometric_median", "centred_clipping", "fedamp")


class Clients:
    """Makes rounds. A client's updates are noise and the direction of its group: there are three, and they cancel."""

    def __init__(self, seed: int) -> None:
        self.rng, self.torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        total = sum(SIZES.values())
        self.g = 0.5 * torch.randn(total, dtype=torch.float64, generator=self.torch_rng)
        a, b = 0.01 * torch.randn(2, total, dtype=torch.float64, generator=self.torch_rng)
        self.groups = torch.stack([a, b, -a - b])

    def next(self) -> Round:
        rng = self.rng
        who = rng.permutation(CLIENTS)[: rng.integers(2, MOST + 1)]
        dtype = torch.float32 if rng.random() < 0.85 else DTYPES[rng.integers(len(DTYPES))]
        noise = torch.randn(len(who), len(self.g), dtype=torch.float64, generator=self.torch_rng)
        w = (self.g + self.groups[torch.from_numpy(who % 3)] + 0.01 * noise).to(dtype)
        g, sizes = self.g.to(dtype), rng.integers(1, 500, len(who))
        models = [self.state_dict(row, t) for t, row in enumerate([g, *w])]
        n = torch.from_numpy(sizes / sizes.sum())
        ids = [f"client-{k}" for k in who]
        return Round(models[0], models[1:], sizes.tolist(), ids, dtype, n, g.double(), w.double())

    def state_dict(self, flat: torch.Tensor, t: int) -> dict[str, torch.Tensor]:
        parts = zip(SIZES, flat.split(list(SIZES.values())), strict=True)
        state = {key: part.view(PARAMS[key]) for key, part in parts}
        state |= {"bn.running_mean": flat[:8] + 1, "bn.running_var": flat[8:16].abs() + 0.5}
        state["bn.num_batches_tracked"] = torch.tensor(t)
        keys = list(state) if t == 0 else self.rng.permutation(list(state))  # clients may have any order
        return {str(key): state[str(key)] for key in keys}


class Twin:
    """A method that lives through all rounds, one that is made anew from its state before each, and a recomputation"""

    def __init__(self, label: str, recomputed: Any) -> None:
        name, options = STATEFUL[label]
        self.make: Callable[[], Any] = lambda: fastagg.aggregator(name, **options)
        self.label, self.server, self.recomputed = label, self.make(), recomputed
        self.saved = self.server.state_dict()
        self.unequal = 0

    def next(self, r: Round) -> None:
        again = self.make()
        again.load_state_dict(self.saved)
        result, other = (s.aggregate(r.global_sd, r.clients, r.sizes, client_ids=r.ids) for s in (self.server, again))
        self.saved = again.state_dict()
        self.unequal += not (same(result, other) and same(self.server.state_dict(), self.saved))
        if self.recomputed is not None:
            self.recomputed.see(r, result)


def same(a: Any, b: Any) -> bool:
    """The same bits, in trees of dicts, lists, tensors and plain values"""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def resident() -> int | None:
    """Bytes of this process in memory; None where the system does not say"""
    gc.collect()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def soak(rounds: int, seed: int, growth: float) -> list[str]:
    """What failed, in words"""
    recomputed = {
        "fedadp": Angles(rounds), "fedadam": Moments("fedadam"), "fedavgm": Moments("fedavgm"),
        "fedawa, sgd": Logits(), "cfl": Clusters(**STATEFUL["cfl"][1]),
    }  # fmt: skip
    clients, twins = Clients(seed), [Twin(label, recomputed.get(label)) for label in STATEFUL]
    others = [fastagg.aggregator(name, **({"f": 0} if name == "krum" else {})) for name in STATELESS]
    before, threads = None, torch.get_num_threads()
    for t in tqdm(range(rounds), unit="round", disable=None):
        torch.set_num_threads(threads if t % 20 == 0 else 1)  # such small models gain nothing by more than one
        r = clients.next()
        for twin in twins:
            twin.next(r)
        for server in others:
            if server.name != "krum" or len(r.ids) >= 3:
                server.aggregate(r.global_sd, r.clients, r.sizes, client_ids=r.ids)
        clients.g = clients.g + r.n @ r.d
        if t == rounds // 10:
            before = resident()
    torch.set_num_threads(threads)
    after, failed = resident(), []
    print("| method | rounds whose twin differs | state: largest error | in tolerances |\n|---|---:|---:|---:|")
    for twin in twins:
        shown = "- | -"
        if twin.recomputed is not None:
            error, tolerance = (np.asarray(x) for x in twin.recomputed.errors(twin.server.state_dict()))
            shown = f"{error.max():.2g} | {(error / tolerance).max():.2g}"
            failed += [] if (error <= tolerance).all() else [f"{twin.label}: the state has drifted"]
        print(f"| {twin.label} | {twin.unequal} | {shown} |")
        failed += [f"{twin.label}: {twin.unequal} rounds of the twin differ"] if twin.unequal else []
    if before is None or after is None:
        print("\nmemory: this system does not say")
    else:
        change = after / before - 1
        print(f"\nmemory: {before / 1e6:.1f} MB after {rounds // 10 + 1} rounds, {after / 1e6:.1f} MB after {rounds}: "
              f"{100 * change:+.1f} %")  # fmt: skip
        failed += [f"memory grew by {100 * change:.1f} %"] if change > growth else []
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=5.0, help="%% that memory may grow by (default: %(default)g)")
    args = parser.parse_args(argv)
    failed = soak(args.rounds, args.seed, args.growth / 100)
    print("\n" + ("\n".join(f"FAILED {text}" for text in failed) or f"{args.rounds} rounds, nothing failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
