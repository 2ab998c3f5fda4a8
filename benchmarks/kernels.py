"""Every kernel and method next to its roofs: R, one read of the clients; F, the Gram's multiply-adds at peak.

python -m benchmarks.kernels [--model resnet18] [--clients 20] [--dtype float32]
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
from benchmarks import measure, models, torch_code
from fastagg.table import build

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models.MODELS, action="append", help="default: all")
    parser.add_argument("--clients", type=int, default=20, metavar="K")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: float32 and bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "kernels.json")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    results = []
    for name in args.model or models.MODELS:
        for dtype in args.dtype or ("float32", "bfloat16"):
            results.append(measure_one(name, DTYPES[dtype], args.clients, args.rounds))
            console.print(shown(results[-1]))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"Written to {args.json}")
    return 0


def measure_one(model: str, dtype: torch.dtype, K: int, rounds: int) -> dict:
    torch.manual_seed(0)
    cast = lambda sd: {k: v.to(dtype) if v.is_floating_point() else v for k, v in sd.items()}  # noqa: E731
    center = models.MODELS[model]()
    clients = [cast(sd) for sd in models.clients(center, K)]
    g = cast(center)
    check(g, clients)
    weights = torch.full((K,), 1 / K)
    out = fastagg.fedavg(g, clients)
    jobs = {
        "read": measure.read_once(clients),
        "fma": measure.multiply_adds(g, K),
        "mix": lambda: fastagg.mix(clients, weights, out=out),
        "gram": lambda: fastagg.gram(g, clients),
        "gram_mix": lambda: fastagg.gram_mix(g, clients, weights, out=out),
        "fedavg": lambda: fastagg.fedavg(g, clients, out=out),
        "fedavg, fresh output": lambda: fastagg.fedavg(g, clients),
        "fedawa": lambda: fastagg.fedawa(g, clients, out=out),
        "fedawa layerwise": lambda: fastagg.fedawa(g, clients, layerwise=True, out=out),
        "fedawa paper, 100 steps": lambda: fastagg.fedawa(g, clients, variant="paper", steps=100, out=out),
        "table alone": lambda: build(g, clients),
        "torch._foreach_ fedavg": lambda: torch_code.fedavg_foreach(g, clients),
    }
    times = measure.interleaved(jobs, track(range(rounds), f"{model} {dtype}", transient=True))
    return {
        "model": model, "dtype": str(dtype), "K": K, "numel": sum(v.numel() for v in g.values()),
        "bytes": K * sum(v.numel() * v.element_size() for v in g.values()), "threads": torch.get_num_threads(),
        "simd": fastagg.info()["simd"], "cpu": measure.cpu_name(), "date": str(datetime.date.today()),
        "median_ms": {name: t.median * 1e3 for name, t in times.items()},
        "best_ms": {name: t.best * 1e3 for name, t in times.items()},
    }  # fmt: skip


def check(g, clients) -> None:
    """The native kernels against the float64 reference, before anything is timed"""
    weights = torch.rand(len(clients))
    for layerwise in (False, True):
        got, expected = (fastagg.gram(g, clients, layerwise=layerwise, backend=b).matrix for b in ("cpu", "reference"))
        norms = expected.diagonal(dim1=-2, dim2=-1).sqrt()
        scale = (norms[..., :, None] * norms[..., None, :]).clamp(min=1e-300)
        assert ((got - expected).abs() / scale).max() < 1e-6
    native, reference = (fastagg.mix(clients, weights, backend=b) for b in ("cpu", "reference"))
    for key, value in reference.items():
        torch.testing.assert_close(native[key], value, msg=lambda m, key=key: f"{key}: {m}")


def shown(result: dict) -> Table:
    ms = result["median_ms"]
    R, F = ms["read"], ms["fma"]
    title = f"\n{result['K']} x {result['model']} {result['dtype']}: {result['bytes'] / 1e6:.0f} MB"
    table = Table(
        title=title, title_style="bold", title_justify="left",
        caption=f"R = {R:.2f} ms ({result['bytes'] / R / 1e6:.0f} GB/s), F = {F:.2f} ms, roof = max(R, F); "
        f"{result['threads']} threads, {result['simd']}, {result['cpu']}, {result['date']}; medians",
        caption_justify="left",
    )  # fmt: skip
    table.add_column("job")
    for heading in ("median", "best", "in R", "in roofs"):
        table.add_column(heading, justify="right")
    for name, value in ms.items():
        if name not in ("read", "fma"):
            best = result["best_ms"][name]
            table.add_row(name, f"{value:.2f} ms", f"{best:.2f} ms", f"{value / R:.2f}", f"{value / max(R, F):.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
