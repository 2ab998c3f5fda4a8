"""A round of LoRA adapters of a Llama-7B's shapes: updates B A compared and truncated without forming them, against
forming them, and against averaging A and B separately. The measurements of docs/lora.md.

python -m benchmarks.lora                              # 32 layers, 20 clients, rank 16: 3.4 GB of adapters, 5 GB in all
python -m benchmarks.lora --layers 2 --divide 8        # the same at a small size

Answers are compared with dense ones in float64 before anything is timed. Then come the parts of a round with the best
rank, each module by module on the threads that the round uses: next to one read of the clients' adapters (R) where they
read, and to as many float64 multiply-adds on registers alone, at the cores' peak, where they multiply. A part that
multiplies what it reads is timed with and without the products; what it says is the difference.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import fastagg
from benchmarks import measure
from fastagg import _cpu
from fastagg._engine.adapters.access import KEPT, InAdapters
from fastagg._engine.adapters.factors import Core, Factors, chunks, combined, core_of
from fastagg._engine.adapters.side_by_side import side_by_side
from fastagg._engine.adapters.truncated import Small, combinations

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


def dense(K: int, rank: int, layers: int, divide: int) -> dict[str, float]:
    """Seconds for forming all B A, their Gram and the weighted sum, and for its rank (torch.svd_lowrank, which
    approximates), from one module of each shape: computed for all modules of the model"""
    forming, truncating = "forming B A, their Gram and the sum", "the best rank of the sum formed"
    seconds = dict.fromkeys((forming, truncating), 0.0)
    for shape in dict.fromkeys(LAYER.values()):
        out, into = (n // divide for n in shape)
        B = [torch.randn(out, rank) for _ in range(K + 1)]
        A = [torch.randn(rank, into) for _ in range(K + 1)]
        weights, total = torch.full((K,), 1 / K), torch.empty(out, into)

        def form(A=A, B=B, weights=weights, total=total) -> None:
            D = torch.empty(K, total.numel())
            for k in range(K):
                torch.mm(B[k], A[k], out=D[k].view(total.shape)).sub_(B[K] @ A[K])
            _ = D @ D.T
            torch.mv(D.T, weights, out=total.view(-1)).view(total.shape).add_(B[K] @ A[K])

        modules = list(LAYER.values()).count(shape) * layers
        seconds[forming] += measure.timed(form) * modules
        seconds[truncating] += measure.timed(lambda total=total: torch.svd_lowrank(total, q=rank, niter=2)) * modules
    return seconds


@dataclass
class Part:
    """Of a round with the best rank, of all modules. multiplied: how many multiply-adds it needs; 0: it reads"""

    job: Callable[[], object]
    without: Callable[[], object] | None = None  # what of it is another part
    multiplied: int = 0
    floor: bool = True  # whether it has one


def parts_of(g: Adapter, clients: list[Adapter], rank: int) -> dict[str, Part]:
    """What lora.aggregate calls for each module, in its order"""
    table = InAdapters().build(g, clients, params=None, layers=None, client_ids=None, bad=None)
    K, modules = len(clients), range(len(table.modules))
    given: list[tuple[Factors, list[Factors]]] = [
        (table.global_model[t], [client[t] for client in table.clients])  # type: ignore[misc]
        for t in modules
    ]
    cores = [core_of(center, factors) for center, factors in given]

    def each(work: Callable[[int], object]) -> Callable[[], object]:
        return lambda: side_by_side(work, modules, torch.device("cpu"))

    def read(center: Factors | None, factors: Sequence[Factors]) -> None:
        widths, ratios = [f.rank for f in factors], [1.0] * K
        for _ in chunks(None if center is None else center.A, [f.A for f in factors], ratios, widths):
            pass
        for _ in chunks(None if center is None else center.B.T, [f.B.T for f in factors], ratios, widths):
            pass

    def small(t: int) -> Small:
        factors = given[t][1]
        core = cores[t].of(factors)
        assert isinstance(core, Core)
        found = combinations(core, [1 / K] * len(core.A), rank)
        assert found is not None
        return found

    def new(t: int) -> None:
        factors = given[t][1]
        combined([f.A for f in factors], [1.0] * K, found[t].of_A)
        combined([f.B.T for f in factors], [1.0] * K, found[t].of_B)

    found = [small(t) for t in modules]
    wide = sum(f.A.shape[1] + f.B.shape[0] for f, _ in given)  # columns of A and rows of B, of all modules
    rows = (K + 1) * given[0][0].rank
    first, again = each(lambda t: read(*given[t])), each(lambda t: read(None, given[t][1]))
    those = rows - given[0][0].rank  # of the clients
    parts = {
        "factors to float64, less the global ones": Part(first),
        "products of all rows": Part(each(lambda t: core_of(*given[t])), first, wide * rows * (rows + 1) // 2),
        "Gram, from the products": Part(each(lambda t: cores[t].gram()), floor=False),
    }
    if cores[0].bytes * len(cores) > KEPT * table.bytes:  # narrow modules, or many clients
        multiplied = wide * those * (those + 1) // 2
        parts |= {
            "factors to float64, as products were not kept": Part(again),
            "products of the clients' rows": Part(each(lambda t: core_of(None, given[t][1])), again, multiplied),
        }
    return parts | {
        "eigenvectors of small matrices": Part(each(small), floor=False),
        "factors to float64, again": Part(again),
        "new factors": Part(each(new), again, wide * rank * those),
    }


def multiply_add() -> float:
    """Seconds of a float64 multiply-add at the peak of all cores: vectors hold half as many as of float32"""
    threads = torch.get_num_threads()
    iterations = 10_000_000
    done = _cpu.fma_peak(iterations, threads)
    return sorted(measure.timed(lambda: _cpu.fma_peak(iterations, threads)) for _ in range(5))[2] / (done / 2 / 2)


def table_of_parts(parts: dict[str, Part], rounds: int, R: float, whole: float) -> dict[str, float]:
    """Prints the parts of a round that takes `whole` seconds"""
    both = {name: (part.job, part.without) for name, part in parts.items()}
    jobs = {f"{name} {at}": job for name, pair in both.items() for at, job in enumerate(pair) if job is not None}
    times = {name: time.median for name, time in measure.interleaved(jobs, range(rounds)).items()}
    seconds = {name: times[f"{name} 0"] - times.get(f"{name} 1", 0.0) for name in parts}
    seconds["everything else"] = whole - sum(seconds.values())
    peak = multiply_add()
    print("\n| part of FedAWA, best rank | seconds | reads of the adapters | multiply-adds | times its floor |")
    print("| --- | --- | --- | --- | --- |")
    for name, took in seconds.items():
        part = parts.get(name)
        many, least = "", ""
        if part is not None and part.floor:
            many = f"{part.multiplied:.2g}" if part.multiplied else ""
            least = f"{took / (part.multiplied * peak if part.multiplied else R):.2g}"
        print(f"| {name} | {took:.3g} | {took / R:.3g} | {many} | {least} |")
    eigen = seconds["eigenvectors of small matrices"]
    print(f"\nWithout eigenvectors: {(whole - eigen) / R:.3g} reads. A float64 multiply-add at the peak: {peak:.3g} s.")
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
    times |= {f"{name} (computed from one module of each shape)": seconds for name, seconds in formed.items()}
    print("\n| job | seconds | reads of the adapters | extra memory |\n| --- | --- | --- | --- |")
    for name, seconds in times.items():
        extra = memory.get(name)
        text = "" if extra is None else f"{extra / 1e6:.0f} MB"
        print(f"| {name} | {seconds:.3g} | {seconds / times['R']:.3g} | {text} |")
    whole = times[f"FedAWA of the updates, best rank {args.rank}"]
    parts = table_of_parts(parts_of(g, clients, args.rank), args.rounds, times["R"], whole)
    if args.json is not None:
        facts = {"arguments": {k: str(v) for k, v in vars(args).items()}, "seconds": times, "parts": parts}
        args.json.write_text(json.dumps({**facts, "memory": memory, "at": time.strftime("%Y-%m-%d")}, indent=1))


if __name__ == "__main__":
    main()
