"""The tables: times of every job, the work of gram, registers and occupancy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from benchmarks.gpu_model.costs import one_read, predict
from benchmarks.gpu_model.counts import REGISTERS
from benchmarks.gpu_model.cuts import pairs, shape, tiles
from benchmarks.gpu_model.devices import A100, GPU, GPUS
from benchmarks.gpu_model.jobs import CLIENTS, MODELS, Job, jobs

DTYPES = ("float32", "bfloat16")
Row, Column = TypeVar("Row"), TypeVar("Column")


def _table(
    head: list[str], rows: Iterable[Row], first: Callable[[Row], list[str]], columns: Sequence[Column],
    cell: Callable[[Row, Column], str],
) -> list[str]:  # fmt: skip
    """Markdown: a row's first cells, then a cell for each of the columns, which are GPUs or what runs on them"""
    cells = [[*first(row), *(cell(row, column) for column in columns)] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *cells]]


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def _room(blocks: int, threads: int) -> str:
    """Blocks on an SM x warps of each"""
    return f"{blocks} x {threads // 32}"


def times_table(model: str) -> list[str]:
    def first(job: Job) -> list[str]:
        return ["mix to K" if job.kernel == "mix" and job.M > 1 else job.kernel, str(job.K)]

    def cell(plain: Job, column: tuple[GPU, str]) -> str:
        gpu, dtype = column
        job = replace(plain, dtype=dtype)
        cost, R = predict(gpu, job), one_read(gpu, job)
        low, high = _ms(cost.seconds), _ms(1.5 * cost.seconds)
        return f"{low} to {high} ms, {cost.seconds / R:.1f} R, {cost.limit}"

    columns = [(gpu, dtype) for gpu in GPUS for dtype in DTYPES]
    head = ["job", "K", *(f"{gpu.name}, {dtype}" for gpu, dtype in columns)]
    return _table(head, jobs(model, "float32"), first, columns, cell)


def work_table() -> list[str]:
    def first(K: int) -> list[str]:
        s = shape(K + 1, K > 64)
        counts = [tiles(s, *pair) for pair in pairs(s, K + 1)]
        cost = predict(A100, Job("gram", K))
        facts = cost.facts
        return [f"{K} x float32", str(s.pairs), str(sum(map(sum, counts))), f"{facts['multiply-adds']:.0f}",
                str((K + 1) * (K + 2) // 2), f"{facts['staged']:.0f}", str(K + 1), f"{facts['bytes']:.0f}",
                f"{facts['L2 bytes']:.0f}", f"{facts['shared bytes']:.0f}", f"{facts['instructions']:.0f}",
                str(cost.blocks)]  # fmt: skip

    def cell(K: int, gpu: GPU) -> str:
        cost = predict(gpu, Job("gram", K))
        return _room(cost.blocks_per_sm, cost.threads)

    head = ["gram of", "pairs", "tiles", "multiply-adds", "needed", "rows staged", "rows read", "HBM bytes", "L2 bytes",
            "shared bytes", "instructions", "blocks", "A100: blocks x warps per SM", "H100"]  # fmt: skip
    return _table(head, CLIENTS, first, GPUS, cell)


def registers_table() -> list[str]:
    def block(name: str) -> tuple[int, int]:
        """Threads and bytes of shared memory"""
        if name.startswith("mix"):
            return 128, 0
        s = shape(21 if name.startswith("alone") else 65, name.startswith("tensor"))
        return s.threads, 25_000 if name.endswith("again") else s.shared

    def first(name: str) -> list[str]:
        threads, shared = block(name)
        return [name.replace(" float32", ""), str(threads), f"{shared / 1024:.0f} KB"]

    def cell(name: str, gpu: GPU) -> str:
        threads, shared = block(name)
        registers = REGISTERS[gpu.arch][name]
        return f"{registers}, {_room(gpu.blocks(threads, registers, shared), threads)}"

    head = ["kernel, float32", "threads", "shared", "A100: registers, blocks x warps per SM", "H100"]
    return _table(head, [name for name in REGISTERS[80] if "bfloat16" not in name], first, GPUS, cell)


def every_resource() -> str:
    """The time of every part of the GPU, of every job"""
    lines = []
    for gpu in GPUS:
        for model in MODELS:
            for dtype in DTYPES:
                lines += ["", f"{gpu.name}, {MODELS[model].name}, {dtype} (ms)"]
                for job in jobs(model, dtype):
                    cost = predict(gpu, job)
                    parts = ", ".join(f"{name} {_ms(t)}" for name, t in cost.times.items())
                    said = f"  {job.name:<11} K={job.K:<4} R {_ms(one_read(gpu, job))}: {_ms(cost.seconds)} = "
                    lines.append(f"{said}{parts}; on top {_ms(cost.on_top)}")
    return "\n".join(lines[1:])
