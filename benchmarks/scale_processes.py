"""A round of FedAWA on 1, 2 and 4 processes of this machine: time, and bytes on the wire.

    python -m benchmarks.scale_processes                 4 million parameters, 20 clients, under a minute
    python -m benchmarks.scale_processes --million 40

The model is the same for any number of ranks, cut between layers; every rank has one thread. The ranks' results are
compared with those of one process, bit for bit, before any time is taken. CPU time is that of the busiest rank: what a
round would take if each rank had a core to itself. Bytes are counted as the collectives are asked for, and as the
loopback device counted them, with the headers of packets and what others sent meanwhile: the least of all rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fastagg
from benchmarks.measure import cpu_name
from fastagg._engine.distributed.peers import Peers

SIZES, LAYERS, K = (1, 2, 4), 16, 20


def model(layer: int, client: int, numel: int) -> dict[str, torch.Tensor]:
    """One layer of a client, or of the global model (client -1): every rank makes its own, and all make the same"""
    g = torch.randn(numel, generator=torch.Generator().manual_seed(layer))
    if client >= 0:
        seed = 1000 * (client + 1) + layer
        g += 0.01 * (1 + client % 5) * torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return {f"layer{layer:02}.weight": g}


def part(rank: int, ranks: int, numel: int) -> list[dict[str, torch.Tensor]]:
    """A rank's part of the global model and of the clients"""
    mine = range(LAYERS * rank // ranks, LAYERS * (rank + 1) // ranks)
    return [{k: v for layer in mine for k, v in model(layer, client, numel).items()} for client in range(-1, K)]


class Counter:
    """Bytes that the ranks' collective calls send, all ranks together, by kind"""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        really = Peers.call

        def counted(peers: Peers, collective, *args, **more) -> None:
            tensor, n = args[-1], peers.size
            sent = {"all_reduce": 2 * (n - 1), "all_gather": n * (n - 1), "broadcast": n - 1}[collective.__name__]
            name = "all_reduce" if collective.__name__ == "all_reduce" else "agreeing"
            self.bytes[name] = self.bytes.get(name, 0) + sent * tensor.numel() * tensor.element_size()
            really(peers, collective, *args, **more)

        Peers.call = counted


def on_loopback() -> int | None:
    """Bytes that went through the loopback device so far"""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
        return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))
    except (OSError, StopIteration):
        return None


def worker(rank: int, store: str, numel: int, rounds: int) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, max(SIZES)), rank=rank, world_size=max(SIZES), timeout=timedelta(minutes=5)
    )
    torch.set_num_threads(1)
    groups = {n: dist.new_group(list(range(n))) for n in SIZES}
    parts = {n: part(rank, n, numel) for n in SIZES if rank < n}

    def run(n: int):
        g, *clients = parts[n]
        return fastagg.FedAWA(variant="released", group=None if n == 1 else groups[n]).aggregate(g, clients)

    alone = run(1) if rank == 0 else None
    for n in SIZES[1:]:
        if rank < n:
            mine = {key: hashlib.sha256(value.numpy()).hexdigest() for key, value in run(n).items()}
            said = Peers(groups[n]).texts(json.dumps(mine))
            if rank == 0:
                whole = {key: digest for text in said for key, digest in json.loads(text).items()}
                assert whole == {key: hashlib.sha256(value.numpy()).hexdigest() for key, value in alone.items()}
    counter, order = Counter(), random.Random(0)
    seen: dict[int, list[tuple[float, float, int | None, dict[str, int]]]] = {n: [] for n in SIZES}
    for _ in range(rounds):
        for n in order.sample(SIZES, len(SIZES)):
            dist.barrier()
            if rank < n:
                dist.barrier(groups[n])
                counter.bytes, before = {}, on_loopback()
                start, cpu = time.perf_counter(), time.process_time()
                run(n)
                cpu = time.process_time() - cpu
                dist.barrier(groups[n])  # the slowest rank's time, and all traffic has come in
                seconds, after = time.perf_counter() - start, on_loopback()
                sent, lo = dict(counter.bytes), None if before is None else after - before
                cpu = max(t.item() for t in Peers(groups[n]).gather(torch.tensor([cpu])))
                seen[n].append((seconds, cpu, lo, sent))
    if rank == 0:
        print(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def one_process(numel: int, rounds: int, threads: int) -> float:
    torch.set_num_threads(threads)
    g, *clients = part(0, 1, numel)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        fastagg.FedAWA(variant="released").aggregate(g, clients)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=4, help="parameters of the model, in millions")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    numel = int(args.million * 1e6 / LAYERS)
    if args.worker:
        worker(int(args.worker[0]), args.worker[1], numel, args.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.scale_processes", "--million", str(args.million)]
        command += ["--rounds", str(args.rounds), "--worker"]
        ranks = [
            subprocess.Popen([*command, str(rank), f"{folder}/store"], stdout=subprocess.PIPE, text=True)
            for rank in range(max(SIZES))
        ]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    seen = {int(n): rows for n, rows in json.loads(said[0]).items()}
    print(f"FedAWA, {K} clients x {numel * LAYERS / 1e6:g} million float32 in {LAYERS} layers, cut between layers")
    print(
        f"{cpu_name()}, {os.cpu_count()} cores, gloo on loopback, one thread a rank; median of {args.rounds} rounds\n"
    )
    print("| ranks | time, ms | CPU time, ms | Gram sent, bytes | formula | agreement, bytes | loopback, bytes |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for n, rows in seen.items():
        seconds, cpu = (statistics.median(row[i] for row in rows) for i in range(2))
        sent = rows[0][3]
        formula = 2 * (n - 1) * 8 * LAYERS * ((K + 1) ** 2 + 1)
        loopback = min((row[2] for row in rows if row[2] is not None), default=None)
        assert sent.get("all_reduce", 0) == formula
        print(
            f"| {n} | {1e3 * seconds:.1f} | {1e3 * cpu:.1f} | {sent.get('all_reduce', 0):,} | {formula:,} | "
            f"{sent.get('agreeing', 0):,} | {'-' if loopback is None else f'{loopback:,}'} |"
        )
    print(
        f"\nOne process with {os.cpu_count()} threads: {1e3 * one_process(numel, args.rounds, os.cpu_count()):.1f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
