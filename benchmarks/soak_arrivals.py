"""Rounds whose clients arrive one by one, late, twice, damaged or never; and a server of such rounds that is killed.

python -m benchmarks.soak_arrivals --rounds 200 --kills 50

Checked are
  rounds   each gives the bits of server.aggregate() for those who were in time, and the same memory of the method; a
           running sum to the last bit of its dtype. Clients come from several threads, to rounds that keep them in
           memory, on the disk, or in part; some send updates, some files. Who is refused, and for what, is known
  memory   resident after a fifth of the rounds and at the end: within 5 %; no file is left on the disk
  kills    a server is killed (SIGKILL) at random moments and started again, which resumes its round: the model after
           the last round has the bits of one that was left alone, so no client was lost, or counted twice
Exits with 1 where one fails.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tqdm import tqdm

import fastagg
from benchmarks.killed_rounds import rounds_of
from benchmarks.soak import resident, same

SHAPES = {"a.weight": (60, 300), "a.bias": (60,), "bn.running_mean": (60,), "b.weight": (20, 60)}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedawa": {"variant": "released"}, "fedadp": {}, "fedadam": {}, "median": {}, "krum": {"f": 1},
    "simprox": {}, "ldawa": {},
}  # fmt: skip
THREADS = 4
BYTES = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())  # of a model, about


class Late:
    """A client that is done after the deadline, or twice, or never; what it sends, and what is to become of it"""

    def __init__(self, name: str, rng: random.Random, g: dict[str, torch.Tensor], folder: Path) -> None:
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        noise = {key: torch.randn(value.shape, generator=generator) for key, value in g.items() if key != "seen"}
        self.name, self.size = name, rng.randint(1, 500)
        self.model = {key: g[key] + 0.1 * value for key, value in noise.items()}
        self.model["seen"] = torch.tensor(rng.randint(0, 1000))
        self.fate = rng.choices(("well", "twice", "damaged", "late", "never", "discarded"), (60, 10, 10, 8, 7, 5))[0]
        self.sent: dict[str, Any] = {"model": self.model}
        if rng.random() < 0.2:
            path = folder / f"{name}.safetensors"
            save_file(self.model, path)
            self.sent = {"model": path}
        if self.fate == "damaged":
            bad: dict[str, Any] = dict(self.model)
            path = folder / f"{name}-half.safetensors"
            key = rng.choice(list(SHAPES))
            how = rng.randrange(4)
            if how == 0:
                bad[key] = bad[key] * float("nan")
            elif how == 1:
                bad[key] = bad[key][:-1]
            elif how == 2:
                del bad[key]
            else:  # a file of which the end was not received
                save_file(self.model, path)
                path.write_bytes(path.read_bytes()[: -rng.randint(1, 999)])
            self.sent = {"model": path if how == 3 else bad}

    def send(self, round: Any) -> None:
        """What a thread of the server does with it before the deadline"""
        if self.fate in ("late", "never"):
            return
        taken = round.add(self.name, **self.sent, size=self.size)
        assert taken == (self.fate != "damaged"), (self.name, self.fate)
        if self.fate == "twice":
            assert not round.add(self.name, self.model, size=self.size + 1)
        if self.fate == "discarded":
            assert round.discard(self.name)

    @property
    def is_in(self) -> bool:
        return self.fate in ("well", "twice")


def one_round(t: int, rng: random.Random, servers: dict[str, tuple[Any, Any]], work: Path, fates: Counter) -> str:
    """What failed, in words"""
    name = rng.choice(list(METHODS))
    server, whole = servers[name]
    generator = torch.Generator().manual_seed(t)
    g = {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()} | {"seen": torch.tensor(t)}
    folder = work / "sent"
    folder.mkdir()
    clients = [Late(f"client-{k}", rng, g, folder) for k in sorted(rng.sample(range(60), rng.randint(8, 30)))]
    fates.update(client.fate for client in clients)
    running = name == "fedavg" and rng.random() < 0.5
    options: dict[str, Any] = {"running": True} if running else {"memory": rng.choice((None, 1, 5 * BYTES))}
    if options.get("memory") and rng.random() < 0.5:
        options["spill"] = work / "spill"
    if running:
        for client in clients:
            client.fate = "well" if client.fate == "discarded" else client.fate
    there = [client for client in clients if client.is_in]
    with server.round(g, **options) as round:
        waiting = clients.copy()
        rng.shuffle(waiting)
        queue, faults = iter(waiting), []
        lock = threading.Lock()

        def receive() -> None:
            try:
                while True:
                    with lock:
                        client = next(queue, None)
                    if client is None:
                        return
                    client.send(round)
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=receive) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            return f"{name}: {type(faults[0]).__name__}: {faults[0]}"
        if round.clients != [c for c in round.clients if c in {client.name for client in there}]:
            return f"{name}: who is in the round is wrong"
        result = round.finish(client_ids=[client.name for client in there])
    sizes, ids = [client.size for client in there], [client.name for client in there]
    expected = whole.aggregate(g, [client.model for client in there], sizes, ids)
    for client in clients:
        if client.fate == "late":
            try:
                round.add(client.name, client.model, size=client.size)
                return f"{name}: a client that came too late was taken"
            except fastagg.InputError:
                pass
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    left = [path.name for path in work.rglob("*") if path.is_file()]
    if left:
        return f"{name}: files were left: {left[:3]}"
    refused = {client.name for client in clients if client.fate == "damaged"}
    if set(result.dropped) != refused:
        return f"{name}: refused {sorted(result.dropped)}, expected {sorted(refused)}"
    if running:
        bit = 2 * torch.finfo(torch.float32).eps
        good = all(torch.allclose(result[key], expected[key], rtol=bit, atol=bit) for key in SHAPES)
        return "" if good and torch.equal(result["seen"], expected["seen"]) else f"{name}: a running sum differs"
    if not same(dict(result), dict(expected)) or not torch.equal(result.weights, expected.weights):
        return f"{name} {options}: not the bits of a whole round"
    states = [{k: v for k, v in each.state_dict().items() if k != "finished_round"} for each in (server, whole)]
    return "" if same(*states) else f"{name}: another memory of the method"


def soak(rounds: int, seed: int, growth: float) -> list[str]:
    """What failed, in words"""
    rng, fates, failed, before = random.Random(seed), Counter(), [], None
    make = fastagg.aggregator
    servers = {
        name: (make(name, on_bad_client="drop", **options), make(name, on_bad_client="drop", **options))
        for name, options in METHODS.items()
    }  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small models gain nothing by more, and there are threads of our own
    with tempfile.TemporaryDirectory() as work:
        for t in tqdm(range(rounds), unit="round", disable=None):
            fault = one_round(t, rng, servers, Path(work), fates)
            failed += [f"round {t}: {fault}"] if fault else []
            if fault:
                break
            if t == rounds // 5:
                before = resident()
    torch.set_num_threads(threads)
    after = resident()
    print("clients: " + ", ".join(f"{count} {fate}" for fate, count in fates.most_common()))
    if before is None or after is None:
        print("memory: this system does not say")
    else:
        change = after / before - 1
        print(f"memory: {before / 1e6:.1f} MB after {rounds // 5 + 1} rounds, {after / 1e6:.1f} MB after {rounds}: "
              f"{100 * change:+.1f} %")  # fmt: skip
        failed += [f"memory grew by {100 * change:.1f} %"] if change > growth else []
    return failed


def kill(kills: int, rounds: int, clients: int, seed: int) -> list[str]:
    """What failed, in words. A server that comes to its end before its moment is followed by another."""
    rng, failed, met = random.Random(seed), [], []
    with tempfile.TemporaryDirectory() as work:
        whole, _ = rounds_of(Path(work) / "whole", rounds, clients, [])
        runs = 0
        with tqdm(total=kills, unit="kill", disable=None) as bar:
            while len(met) < kills:
                runs += 1
                moments = [rng.random() * 0.5 for _ in range(min(10, kills - len(met)))]
                model, found = rounds_of(Path(work) / str(runs), rounds, clients, moments)
                met += found
                bar.update(len(found))
                failed += [] if same(model, whole) else [f"run {runs}, with {len(found)} kills: another model"]
    inside = sum(0 < k.waiting < clients for k in met)
    all_there, nobody = (sum(k.waiting == count for k in met) for count in (clients, 0))
    print(f"{len(met)} kills in {runs} runs of {rounds} rounds with {clients} clients: {inside} while clients arrived, "
          f"{all_there} when all were there, {nobody} between")  # fmt: skip
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8, help="of the server that is killed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=5.0, help="%% that memory may grow by (default: %(default)g)")
    args = parser.parse_args(argv)
    logging.getLogger("fastagg").setLevel(logging.ERROR)  # it says who is refused
    try:
        failed = soak(args.rounds, args.seed, args.growth / 100) if args.rounds else []
        failed += kill(args.kills, 30, args.clients, args.seed) if args.kills else []
    finally:
        logging.getLogger("fastagg").setLevel(logging.NOTSET)
    print("\n" + ("\n".join(f"FAILED {text}" for text in failed) or "nothing failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
