"""Measures the GPU backends: gram, mix and gram_mix against one read of memory, PyTorch, and what was predicted.

python -m benchmarks.gpu                                       # 5 to 100 clients, ResNet-18 and ViT-B: some minutes
python -m benchmarks.gpu --clients 20 --models resnet18        # one round, seconds
python -m benchmarks.gpu --backends cuda --json results.json

Answers are checked before any time is taken. Every job is captured as a CUDA graph and replayed between two events, so
that `device` is the GPU's time alone; `call` is the whole call as Python sees it, until the GPU is done. Contestants
take turns in random order and medians are shown. R is one read of the clients' bytes: a sum or a maximum, whichever is
faster, over a flat float32 buffer of up to 1 GB, scaled to their size; both are PyTorch's 16-byte reductions.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

import fastagg
from benchmarks import gpu_model, models
from fastagg._engine import backends

NO_GPU = (
    "There is no CUDA GPU that this PyTorch can use, so nothing can be measured here; "
    "python -m benchmarks.gpu_model shows what is predicted."
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cohort(name: str, K: int, dtype: torch.dtype) -> tuple[dict, list[dict]]:
    """A global model and K clients near it, made on the device"""
    torch.manual_seed(0)
    g = {k: v.cuda().to(dtype) if v.is_floating_point() else v.cuda() for k, v in models.MODELS[name]().items()}
    moved = lambda v: v + 0.01 * torch.randn_like(v) if v.is_floating_point() else v.clone()  # noqa: E731
    return g, [{k: moved(v) for k, v in g.items()} for _ in range(K)]


def check(backend: str, K: int, dtype: torch.dtype) -> float:
    """Compares a small model's results with the reference; returns the Gram's error in units of its lengths."""
    g, clients = cohort("resnet20", K, dtype)
    weights = torch.rand(K, dtype=torch.float64)
    expected = fastagg.gram(g, clients, backend="reference").matrix
    lengths = expected.diagonal().sqrt()
    matrix, mixed = fastagg.gram_mix(g, clients, weights, backend=backend)
    again = fastagg.mix(clients, weights, backend=backend)
    plain = fastagg.mix(clients, weights, backend="reference")
    on_cpu = (
        fastagg.mix([{k: v.cpu() for k, v in sd.items()} for sd in clients], weights) if backend == "cuda" else None
    )
    for key, value in plain.items():
        assert torch.equal(mixed[key], again[key]), f"{key}: gram_mix and mix differ"
        torch.testing.assert_close(again[key], value, msg=lambda m, key=key: f"{key}: {m}")
        assert on_cpu is None or torch.equal(again[key].cpu(), on_cpu[key]), f"{key}: not the CPU's bits"
    error = 0.0
    for got in (matrix.matrix, fastagg.gram(g, clients, backend=backend).matrix):
        error = max(error, ((got - expected).abs() / (lengths[:, None] * lengths)).max().item())
    assert error < 2e-6, f"{backend}: inner products are off by {error:.1e} of the vectors' lengths"
    return error


def foreach_mix(clients: list[dict], weights: list[float]) -> list[torch.Tensor]:
    """FedAvg in PyTorch at its best: K fused multiply-adds over all floating-point tensors"""
    tensors = [[v for v in sd.values() if v.is_floating_point()] for sd in clients]
    out = torch._foreach_mul(tensors[0], weights[0])
    for values, w in zip(tensors[1:], weights[1:], strict=True):
        torch._foreach_add_(out, values, alpha=w)
    return out


def stacked_gram(g: dict, clients: list[dict]) -> torch.Tensor:
    """The Gram in PyTorch: flatten, stack, subtract, one float32 matmul"""
    keys = [k for k, v in g.items() if v.is_floating_point() and "running" not in k]
    rows = torch.stack([torch.cat([sd[k].reshape(-1) for k in keys]) for sd in (g, *clients)]).float()
    rows[1:] -= rows[0]
    return rows @ rows.T


def captured(job: Callable[[], object]) -> Callable[[], object]:
    """The job as a CUDA graph, after two calls that upload and compile what it needs"""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        job(), job()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = job()
    return lambda: (graph.replay(), kept)[0]


def on_device(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds between two events around each job, jobs taking turns in random order"""
    events = {name: [] for name in jobs}
    order = random.Random(0)
    for _ in range(rounds + 2):
        for name in order.sample(list(jobs), len(jobs)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            jobs[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {n: statistics.median(s.elapsed_time(e) for s, e in pairs[2:]) / 1e3 for n, pairs in events.items()}


def as_called(job: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        job()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(name: str, K: int, dtype: str, names: list[str], rounds: int) -> list[dict]:
    g, clients = cohort(name, K, DTYPES[dtype])
    size = K * sum(v.numel() * v.element_size() for v in g.values())
    flat = torch.ones(min(size, 1 << 30) // 4, device=next(iter(g.values())).device)
    one, many = torch.full((K,), 1 / K, dtype=torch.float64), torch.rand(K, K, dtype=torch.float64)
    out, outs = (
        fastagg.mix(clients, one),
        fastagg.mix(clients, many) if 3 * size < torch.cuda.mem_get_info()[1] else None,
    )
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for b in names:
        calls["mix to 1", b] = lambda b=b: fastagg.mix(clients, one, out=out, backend=b)
        calls["gram", b] = lambda b=b: fastagg.gram(g, clients, backend=b)
        calls["gram_mix", b] = lambda b=b: fastagg.gram_mix(g, clients, one, out=out, backend=b)
        if outs is not None:
            calls[f"mix to {K}", b] = lambda b=b: fastagg.mix(clients, many, out=outs, backend=b)
    calls["mix to 1", "torch._foreach_"] = lambda: foreach_mix(clients, one.tolist())
    if 3.5 * size * 4 / g[next(iter(g))].element_size() < torch.cuda.mem_get_info()[1]:
        calls["gram", "stack + matmul"] = lambda: stacked_gram(g, clients)
    jobs = {f"{job}/{who}": captured(call) for (job, who), call in calls.items()}
    reads = {"sum": captured(lambda: flat.sum()), "maximum": captured(lambda: flat.amax())}
    times = on_device(jobs | reads, rounds)
    R = min(times[r] for r in reads) * size / (4 * flat.numel())
    gpu = next((x for x in gpu_model.GPUS if x.name in torch.cuda.get_device_name()), None)
    rows = []
    for (job, who), call in calls.items():
        row = {"round": f"{K} x {name}, {dtype}", "job": job, "who": who, "R": R, "device": times[f"{job}/{who}"]}
        row["call"] = as_called(call, rounds) if who in names else None
        kernel, _, M = job.partition(" to ")
        known = gpu is not None and who == "cuda" and name in gpu_model.MODELS
        row["predicted"] = (
            gpu_model.predict(gpu, gpu_model.Job(kernel, K, dtype, name, int(M or 1))).seconds if known else None
        )
        rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    head = ["round", "job", "who", "R, ms", "device, ms", "in R", "call, ms", "predicted, ms", "measured / predicted"]
    ms = lambda seconds: "" if seconds is None else f"{seconds * 1e3:.3f}"  # noqa: E731
    cells = [
        [r["round"], r["job"], r["who"], ms(r["R"]), ms(r["device"]), f"{r['device'] / r['R']:.2f}", ms(r["call"]),
         ms(r["predicted"]), f"{r['device'] / r['predicted']:.2f}" if r["predicted"] else ""]
        for r in rows
    ]  # fmt: skip
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join(" | ".join(line) for line in [head, *cells]))
        return
    table = Table(title=torch.cuda.get_device_name())
    for i, column in enumerate(head):
        table.add_column(column, justify="left" if i < 3 else "right")
    for line in cells:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20, 64, 100], metavar="K")
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=["resnet18", "vit_b"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--backends", nargs="+", choices=["cuda", "triton"], default=["cuda", "triton"])
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds (default 20)")
    parser.add_argument("--json", metavar="FILE", help="also write what was measured, in seconds, to FILE")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    device, names, rows = torch.device("cuda", torch.cuda.current_device()), [], []
    for b in args.backends:
        why = backends.why_not(b, device)
        if why:
            print(f"{b} is left out: {why}")
            continue
        errors = [check(b, K, DTYPES[dtype]) for K in sorted({3, *args.clients}) for dtype in args.dtypes]
        print(f"{b} agrees with the reference; its inner products are off by at most {max(errors):.1e}")
        names.append(b)
    for name in args.models:
        for K in args.clients:
            for dtype in args.dtypes:
                try:
                    rows += measure(name, K, dtype, names, max(args.rounds, 1))
                except torch.cuda.OutOfMemoryError:
                    print(f"{K} x {name}, {dtype} is left out: it does not fit into the device's memory")
                torch.cuda.empty_cache()
    show(rows)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
