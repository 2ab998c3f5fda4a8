"""A round of 20 ResNet-18s, aggregated by fastagg and by the PyTorch code people have today.

python -m benchmarks.demo            # about a minute, under 4 GB
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import fastagg
from benchmarks import measure, models
from benchmarks.torch_code import CONTESTANTS

NAMES = {
    "fedavg": "FedAvg",
    "fedawa": "FedAWA (paper)",
    "fedawa_layerwise": "FedAWA-L (paper, per layer)",
    "fedawa_released": "FedAWA (released)",
}
console = Console(width=None if sys.stdout.isatty() else 120)


def progress() -> Progress:
    columns = TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models.MODELS, default="resnet18")
    parser.add_argument("--clients", type=int, default=20, metavar="K")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    args = parser.parse_args()
    K = args.clients
    torch.manual_seed(0)
    global_sd = models.MODELS[args.model]()
    with progress() as bar:
        client_sds = list(bar.track(models.clients(global_sd, K), K, description="Making client models"))
        contests = [CONTESTANTS[name] for name in NAMES]
        for contest in bar.track(contests, description="Checking that the answers agree"):
            contest.agree(contest.fastagg(global_sd, client_sds), contest.usual(global_sd, client_sds))
        read = measure.read_once(client_sds)
        former = fastagg.fedavg(global_sd, client_sds)
        foreach = CONTESTANTS["fedavg"].best["torch._foreach_"]
        jobs = {"read": read, "foreach": lambda: foreach(global_sd, client_sds)}
        for c in contests:
            jobs[c.name] = lambda c=c: c.fastagg(global_sd, client_sds)
            jobs[c.name + " out"] = lambda c=c: c.fastagg(global_sd, client_sds, out=former)
            jobs[c.name + " torch"] = lambda c=c: c.usual(global_sd, client_sds)
        times = measure.interleaved(jobs, bar.track(range(args.rounds), description="Timing, in turns"))
        memory = {
            c.name: tuple(measure.peak_extra_memory(lambda f=f: f(global_sd, client_sds)) for f in (c.fastagg, c.usual))
            for c in bar.track(contests, description="Measuring memory")
        }
    report(args.model, global_sd, K, contests, times, memory)
    return 0


def report(model, global_sd, K, contests, times, memory) -> None:
    R = times["read"].median
    D = sum(v.numel() for v in global_sd.values())
    size = sum(v.numel() * v.element_size() for v in global_sd.values())
    table = Table(
        title=f"\n{K} clients x {model} ({D / 1e6:.1f} M values, {K * size / 1e9:.2f} GB)", title_style="bold"
    )
    table.add_column("method")
    for heading in ("fastagg", "reads of\nmemory", "with out=", "reads of\nmemory", "PyTorch", "reads of\nmemory"):
        table.add_column(heading, justify="right")
    table.add_column("faster", justify="right", style="bold green")
    table.add_column("extra memory\nfastagg / PyTorch", justify="right")
    for c in contests:
        ours, reuse, theirs = (times[c.name + kind].median for kind in ("", " out", " torch"))
        table.add_row(
            NAMES[c.name], _ms(ours), f"{ours / R:.1f}", _ms(reuse), f"{reuse / R:.1f}", _ms(theirs),
            f"{theirs / R:.0f}", f"{measure.faster(theirs, ours)} x", " / ".join(map(_mb, memory[c.name])),
        )  # fmt: skip
    console.print(table)
    foreach = times["foreach"].median
    console.print(
        f"One read of the clients' memory takes {_ms(R)} here ({K * size / R / 1e9:.0f} GB/s, "
        f"{torch.get_num_threads()} threads, {fastagg.info()['simd']}, {measure.cpu_name()}).\n"
        f"FedAvg with torch._foreach_, the best PyTorch has for it, takes {_ms(foreach)} "
        f"({foreach / R:.1f} reads).\n"
        "Answers were checked against each other first. Medians; contestants take turns in one process.\n"
        "Faster is PyTorch over fastagg, both with a new model as result; `make bench` measures it with more rounds."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def _mb(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e6:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
