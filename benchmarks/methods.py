"""Every method on a round of real size, in reads of the clients' memory; and its K x K arithmetic alone at K = 100.

python -m benchmarks.methods [--model resnet18] [--clients 20]
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fastagg
from benchmarks import measure, models

CLASSES = 10
OPTIONS = {
    "krum": {"f": 2},
    "multi_krum": {"f": 2},
    "fedawa": {"variant": "paper", "steps": 10},
    "cwfedavg": {"head": "fc.weight"},
}
NOT_GRAM_SPACE = {"fedlaw"}  # trains on a proxy set: its cost is the training


def round_info(name: str, K: int) -> dict:
    return {
        "feddisco": {"label_dist": torch.rand(K, CLASSES)},
        "cwfedavg": {"class_dist": torch.rand(K, CLASSES)},
        "fednova": {"local_steps": [1 + k for k in range(K)]},
    }.get(name, {})


def rounds_of(g: dict, clients: list[dict], reuse: bool) -> dict:
    """name -> a call of its aggregator, on this round"""
    jobs = {}
    for method in fastagg.methods():
        if method.name in NOT_GRAM_SPACE:
            continue
        server = fastagg.aggregator(method.name, **OPTIONS.get(method.name, {}))
        info = round_info(method.name, len(clients))
        out = {"out": server.aggregate(g, clients, **info)} if reuse and method.gives != "clusters" else {}
        jobs[method.name] = lambda server=server, info=info, out=out: server.aggregate(g, clients, **info, **out)
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models.MODELS, default="resnet18")
    parser.add_argument("--clients", type=int, default=20, metavar="K")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "methods.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    g = models.MODELS[args.model]()
    clients = list(models.clients(g, args.clients))
    jobs = {"read": measure.read_once(clients), "gram": lambda: fastagg.gram(g, clients)} | rounds_of(g, clients, True)
    times = measure.interleaved(jobs, track(range(args.rounds), "Timing rounds", transient=True))
    del jobs  # and with it the outputs that were written in place
    fresh = {"gram": lambda: fastagg.gram(g, clients)} | rounds_of(g, clients, False)
    memory = {
        name: measure.peak_extra_memory(job) for name, job in track(fresh.items(), "Measuring memory", transient=True)
    }

    small = {"fc.weight": torch.randn(CLASSES, 8)}
    crowd = [{"fc.weight": small["fc.weight"] + 0.1 * torch.randn(CLASSES, 8)} for _ in range(100)]
    tiny = {"gram": lambda: fastagg.gram(small, crowd)} | rounds_of(small, crowd, False)
    alone = measure.interleaved(tiny, track(range(9), "Timing K x K arithmetic", transient=True))

    R, base = times["read"].median, alone["fedavg"].median + alone["gram"].median
    table = Table(title=f"\n{args.clients} x {args.model}", title_style="bold", title_justify="left")
    for heading in ("method", "time", "reads of memory", "extra memory\nwithout out=", "K x K arithmetic,\nK = 100"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    rows = {}
    for name in fresh:
        extra = max(alone[name].median - (base if name not in ("gram", "fedavg") else alone[name].median), 0)
        rows[name] = {"ms": times[name].median * 1e3, "reads": times[name].median / R, "kxk_ms": extra * 1e3}
        rows[name]["extra_bytes"] = memory[name]
        shown = "?" if memory[name] is None else f"{memory[name] / 1e6:.0f} MB"
        row = rows[name]
        table.add_row(name, f"{row['ms']:.1f} ms", f"{row['reads']:.2f}", shown, f"{row['kxk_ms']:.2f} ms")
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(
        f"R = {R * 1e3:.1f} ms; {torch.get_num_threads()} threads, {fastagg.info()['simd']}, {measure.cpu_name()}; "
        "medians, methods take turns. The last column is a round of 100 tiny models less its FedAvg and its Gram.\n"
        f"One model is {sum(v.numel() * v.element_size() for v in g.values()) / 1e6:.0f} MB; server optimisers keep "
        "moments of that size. FedAWA: the paper's variant with 10 steps.\n"
        "Personalised methods write a model per client, also in the last column."
    )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"model": args.model, "K": args.clients, "date": str(datetime.date.today()), "cpu": measure.cpu_name()}
    args.json.write_text(json.dumps({**about, "methods": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
