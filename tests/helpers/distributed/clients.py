"""Checks of whole clients spread over ranks: distribute(), and the simulator."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import fastagg
from fastagg._engine.distributed.peers import Peers
from helpers.cohort import assert_same_bits, assert_unchanged, snapshot
from helpers.distributed.parts import (
    IDS,
    SIZES,
    check,
    everyone,
    raises,
    round_of,
    same_everywhere,
    same_state,
    server_of,
)
from helpers.every_method import cohort, models, run


def share_of(items, rank, ranks):
    """Unequal shares, of which rank 1 of more than two has none"""
    at = {2: [0, 5, 7], 3: [0, 2, 2, 7], 4: [0, 3, 3, 4, 7]}[ranks]
    return items[at[rank] : at[rank + 1]]


@check
def distribute(group, rank, ranks):
    """Whole clients on each rank give what one process gives: its bits where the cut is between layers"""
    big = {"big.weight": torch.arange(500.0).cos(), "big.bias": torch.ones(3)}  # most of the model is one layer
    for dtype, more, bucket in ((torch.float32, {}, 500), (torch.bfloat16, {}, 1 << 20), (torch.float32, big, 3000)):
        g, *clients = (
            {k: v.to(dtype) if v.is_floating_point() else v for k, v in sd.items()}
            | {k: v + 0.1 * n + 0.01 * (n % 3) * torch.arange(len(v)) for k, v in more.items()}
            for n, sd in enumerate(everyone())
        )
        mine, ids, sizes = (share_of(x, rank, ranks) for x in (clients, IDS, SIZES))
        before = snapshot(g, *mine)
        for exact in (False, True):
            part = fastagg.distribute(g, mine, group, client_ids=ids, sizes=sizes, exact=exact, bucket_bytes=bucket)
            assert part.client_ids == IDS
            assert part.sizes == SIZES
            between_layers = all(b - a == part.cut.numel[key] for pieces in part.cut.pieces for key, a, b in pieces)
            assert between_layers or not exact
            for case in ("fedawa", "fedamp", "cfl") if exact else ("fedawa", "fedadam"):
                whole = round_of(server_of(case), g, clients)
                result = run(case, part.global_sd, part.client_sds, part.sizes, ids=IDS, server=server_of(case, group))
                got = part.gather(result)
                for a, b in zip(models(whole), models(got), strict=True):
                    assert isinstance(b, fastagg.Result)
                    close = 0 if between_layers else 1e-4
                    torch.testing.assert_close(b.weights, a.weights, rtol=close, atol=close)
                    assert list(a) == list(b)
                    for key in a:
                        torch.testing.assert_close(b[key], a[key], rtol=close, atol=close)
                one = part.gather(result, dst=ranks - 1)
                assert (one is None) == (rank != ranks - 1)
                if one is not None:
                    for a, b in zip(models(got), models(one), strict=True):
                        assert_same_bits(a, b)
            if more and not exact:
                sizes_of_parts = [part.cut.bytes(r) for r in range(ranks)]
                assert max(sizes_of_parts) - min(sizes_of_parts) <= 8
        assert_unchanged([g, *mine], before)


@check
def distribute_arrays(group, rank, ranks):
    g, clients = cohort()
    g, *clients = ({key: value.numpy() for key, value in sd.items()} for sd in (g, *clients))
    whole = fastagg.fedavg(g, clients)
    part = fastagg.distribute(g, share_of(clients, rank, ranks), group, exact=True)
    assert part.client_ids is None
    assert part.sizes is None
    got = part.gather(fastagg.fedavg(part.global_sd, part.client_sds, part.sizes, group=group))
    assert all(type(value) is np.ndarray for value in got.values())
    assert all(np.array_equal(got[key], whole[key]) for key in whole)


@check
def distribute_what_is_wrong(group, rank, ranks):
    g, clients = cohort()
    bad = ranks - 1

    def refuse(words, mine=None, g=g, **more):
        mine = share_of(clients, rank, ranks) if mine is None else mine
        same_everywhere(
            group, raises(fastagg.InputError, words, lambda: fastagg.distribute(g, mine, group, **more))
        )  # fmt: skip

    wrong = [{**clients[0], "fc.bias": torch.ones(9)}] if rank == bad else None
    refuse(f"rank {bad}: client 0: key 'fc.bias' has shape (9,), expected (4,)", wrong)
    refuse("client_ids: clients 0 and 1 have the same id 'x'", clients[:1], client_ids=["x"])
    refuse("sizes: rank 0 gave none, other ranks did", sizes=None if rank == 0 else share_of(SIZES, rank, ranks))
    refuse("no clients: no rank has any", [])
    other = {**g, "fc.bias": torch.ones(5)} if rank == bad else g
    refuse("the ranks differ in the global model's shapes", [], g=other)
    other = {key: value.clone() for key, value in g.items()}
    other["fc.bias"][1] += 0.25 * (rank == bad)
    refuse("the ranks differ in the global model's values of 'fc.bias': checksum", g=other)
    refuse("bucket_bytes=0; expected", bucket_bytes=0)
    part = fastagg.distribute(g, share_of(clients, rank, ranks), group)
    raises(fastagg.InputError, "dst=9; expected a rank", lambda: part.gather(part.global_sd, dst=9))
    if rank == bad:
        raises(
            fastagg.InputError,
            f"rank {bad}: the result: key 'more' is not in",
            lambda: part.gather({"more": torch.ones(1)}),
        )
    else:
        raises(fastagg.InputError, f"rank {bad}: the result: key 'more' is not in", lambda: part.gather(part.global_sd))


@check
def the_simulator(group, rank, ranks):
    """Has the curve of one process, bit for bit where clients are trained one by one; also if continued by another"""
    if ranks != 2:
        return
    from fastagg.sim import data
    from fastagg.sim import run as simulator
    from fastagg.sim.config import from_dict
    from fastagg.sim.report import read_metrics

    digits, peers = data.load("digits"), Peers(group)
    small = {"clients": 5, "rounds": 3, "epochs": 1, "alpha": 0.5, "samples": 300, "batched": False, "dropout": 0.2}
    folder = Path(sys.argv[3]) / "runs"

    def curve(where):
        return [{k: v for k, v in r.items() if k != "seconds"} for r in read_metrics(where / "metrics.jsonl")]

    for method in ("fedadam", "fedamp", "cfl", "fednova", "fedawa"):
        more = {"attack": "backdoor", "attackers": 0.4} if method == "fedawa" else {}
        options = from_dict(small | more | {"method": method})
        alone, spread = folder / f"{method}-alone-{rank}", folder / f"{method}-spread"
        simulator.simulate(options, alone, dataset=digits)
        short = from_dict(small | more | {"method": method, "rounds": 2})
        simulator.simulate(short, spread, dataset=digits, peers=peers)
        if method == "fednova":  # another number of processes goes on
            dist.barrier(group)
            if rank == 0:
                simulator.simulate(options, spread, dataset=digits, resume=True)
        else:
            simulator.simulate(options, spread, dataset=digits, resume=True, peers=peers)
        dist.barrier(group)
        assert curve(alone) == curve(spread), method
        saved = [fastagg._engine.saved.load(where / "checkpoint.safetensors") for where in (alone, spread)]
        assert same_state(*({k: v for k, v in state.items() if k != "models"} for state in saved))
        assert all(same_state(a, b) for a, b in zip(*(state["models"] for state in saved), strict=True))
    batched = from_dict(small | {"method": "fedavg", "batched": True})
    simulator.simulate(batched, folder / f"batched-{rank}", dataset=digits)
    simulator.simulate(batched, folder / "batched", dataset=digits, peers=peers)
    dist.barrier(group)
    for a, b in zip(curve(folder / f"batched-{rank}"), curve(folder / "batched"), strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-4
    sim = simulator.Simulation(options, digits, peers)
    if rank == 1:
        sim.trainer.train = None
    raises(TypeError, "rank 1: 'NoneType' object is not callable", sim.next_round)
    raises(ValueError, "sim: fedlaw needs all clients in one process", lambda: simulator.Simulation(
        from_dict(small | {"method": "fedlaw"}), digits, peers))  # fmt: skip
    raises(ValueError, "sim: attack=alie needs all clients in one process", lambda: simulator.Simulation(
        from_dict(small | {"attack": "alie", "attackers": 0.4}), digits, peers))  # fmt: skip
    attacked = from_dict(small | {"attack": "scale", "attackers": 0.4, "attack_strength": 1e18, "lr": 1.0})
    ended = simulator.simulate(attacked, folder / "attacked", dataset=digits, peers=peers)
    assert ended.get("diverged", rank != 0)
