"""A round of LoRA adapters of a Llama-7B's shapes: updates B A compared and truncated without forming them, against
forming them, and against averaging A and B separately. The measurements of docs/lora.md.

python -m benchmarks.lora                              # 32 layers, 20 clients, rank 16: 3.4 GB of adapters, 5 GB in all
python -m benchmarks.lora --layers 2 --divide 8        # the same at a small size

Answers are compared with dense ones in float64 before anything is timed. R is one read of the clients' adapters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fastagg
from benchmarks import measure

LAYER = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (4096, 4096)),
    **dict.fromkeys(("gate_proj", "up_proj"), (11008, 4096)),
    "down_proj": (4096, 11008),
}  # out, in
Adapter = dict[str, torch.Tensor]


def adapter(
    layers: int, rank: int, dtype: torch.dtype, seed: int, start: Adapter | None = None, divide: int = 1
) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(layers):
        for name, (out, into) in LAYER.items():
            for side, shape in (("A", (rank, into // divide)), ("B", (out // divide, rank))):
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"
                values = torch.randn(shape, generator=generator).mul_(0.02 if start is None else 0.002)
                found[key] = (values if start is None else values.add_(start[key])).to(dtype)
    return found


def cohort(layers: int, K: int, rank: int, dtype: torch.dtype, divide: int = 1) -> tuple[Adapter, list[Adapter]]:
    g = adapter(layers, rank, dtype, 0, divide=divide)
    return g, [adapter(layers, rank, dtype, 1 + k, g, divide) for k in range(K)]


def updates(sd: Adapter) -> list[torch.Tensor]:
    """B A of each module, in the order of the keys"""
    return [sd[key.replace("lora_A", "lora_B")] @ sd[key] for key in sd if "lora_A" in key]


def check(K: int, rank: int, dtype: torch.dtype) -> None:
    """The Gram, and the error that the new rank leaves, of modules an eighth as wide"""
    g, clients = cohort(1, K, rank, dtype, divide=8)
    found = fastagg.lora.aggregate(g, clients, rank=rank)
    center, *each = (updates({key: value.double() for key, value in sd.items()}) for sd in (g, *clients))
    rows = torch.stack([torch.cat([(u - c).reshape(-1) for u, c in zip(sd, center, strict=True)]) for sd in each])
    expected = rows @ rows.T
    torch.testing.assert_close(found.gram.updates(), expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))
    for m, left in enumerate(found.truncation[key] for key in _modules(g)):
        values = torch.linalg.svdvals(sum(w * sd[m] for w, sd in zip(found.weights, each_whole(clients), strict=True)))
        torch.testing.assert_close(left, float(values[rank:].norm() / values.norm()), rtol=1e-6, atol=1e-6)


def each_whole(clients: list[Adapter]) -> list[list[torch.Tensor]]:
    return [updates({key: value.double() for key, value in sd.items()}) for sd in clients]


def _modules(sd: Adapter) -> list[str]:
    return [key.removesuffix(".lora_A.weight") for key in sd if "lora_A" in key]


def dense(K: int, rank: int, layers: int, divide: int) -> float:
    """Seconds for forming all B A, their Gram, the weighted sum and its rank (torch.svd_lowrank, which approximates),
    from one module of each shape: computed for all modules of the model"""
    seconds = 0.0
    for shape in dict.fromkeys(LAYER.values()):
        out, into = (n // divide for n in shape)
        B = [torch.randn(out, rank) for _ in range(K + 1)]
        A = [torch.randn(rank, into) for _ in range(K + 1)]
        weights = torch.full((K,), 1 / K)

        def job(A=A, B=B, weights=weights) -> None:
            D = torch.empty(K, len(B[0]) * A[0].shape[1])
            for k in range(K):
                torch.mm(B[k], A[k], out=D[k].view(len(B[0]), -1)).sub_(B[K] @ A[K])
            _ = D @ D.T
            total = (weights @ D).view(len(B[0]), -1).add_(B[K] @ A[K])
            torch.svd_lowrank(total, q=rank, niter=2)

        seconds += measure.timed(job) * list(LAYER.values()).count(shape) * layers
    return seconds


def jobs_of(g: Adapter, clients: list[Adapter], rank: int) -> dict[str, Callable[[], object]]:
    K = len(clients)

    def loop() -> Adapter:
        return {key: sum(sd[key] / K for sd in clients) for key in g}

    return {
        f"FedAWA of the updates, best rank {rank}": lambda: fastagg.lora.aggregate(g, clients, rank=rank),
        "FedAWA of the updates, exact": lambda: fastagg.lora.aggregate(g, clients, form="exact"),
        f"FedAvg, best rank {rank}": lambda: fastagg.lora.aggregate(g, clients, method="fedavg", rank=rank),
        "FedAvg, A and B separately": lambda: fastagg.fedavg(g, clients),
        "the same in PyTorch": loop,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--clients", type=int, default=20)
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--divide", type=int, default=1, help="modules are so many times narrower")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    p.add_argument("--rounds", type=int, default=3, help="measured runs of each job; their median is shown")
    p.add_argument("--json", type=Path, help="where to write the numbers to")
    args = p.parse_args()
    dtype = getattr(torch, args.dtype)
    check(args.clients, args.rank, dtype)
    formed = dense(args.clients, args.rank, args.layers, args.divide)
    g, clients = cohort(args.layers, args.clients, args.rank, dtype, args.divide)
    size = sum(value.nbytes for value in g.values())
    print(f"{len(g) // 2} modules, {args.clients} clients of {size / 1e6:.0f} MB, {args.dtype}, "
          f"{torch.get_num_threads()} threads, {measure.cpu_name()}")  # fmt: skip
    jobs = {"R": measure.read_once(clients), **jobs_of(g, clients, args.rank)}
    times = {name: time.median for name, time in measure.interleaved(jobs, range(args.rounds)).items()}
    memory = {name: measure.peak_extra_memory(job) for name, job in jobs.items()}
    times["forming B A (computed from one module of each shape)"] = formed
    print("\n| job | seconds | reads of the adapters | extra memory |\n| --- | --- | --- | --- |")
    for name, seconds in times.items():
        extra = memory.get(name)
        text = "" if extra is None else f"{extra / 1e6:.0f} MB"
        print(f"| {name} | {seconds:.3g} | {seconds / times['R']:.3g} | {text} |")
    if args.json is not None:
        facts = {"arguments": {k: str(v) for k, v in vars(args).items()}, "seconds": times, "memory": memory}
        args.json.write_text(json.dumps({**facts, "at": time.strftime("%Y-%m-%d")}, indent=1))


if __name__ == "__main__":
    main()
