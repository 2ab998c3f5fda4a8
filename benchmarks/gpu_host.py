"""Python's share of a call on a GPU: kernels and transfers are stubs, so that no GPU is needed.

python -m benchmarks.gpu_host                     # 20 x ResNet-20
python -m benchmarks.gpu_host --clients 100 --model resnet18

Tensors are on the CPU and pass through everything that those on a GPU do, except torch's own calls of CUDA.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import fastagg
from benchmarks import models
from fastagg._engine import backends
from fastagg._engine import table as tables
from fastagg._engine.backends.cuda import Kernels


class Stubs:
    """The native module, with kernels that do nothing"""

    def __init__(self, native: Any) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def mix(self, *args: Any, **options: Any) -> None: ...
    def products(self, *args: Any, **options: Any) -> None: ...
    def reduce(self, *args: Any, **options: Any) -> None: ...


def microseconds(call: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds + rounds // 10):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[rounds // 10 :]) * 1e6


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=20, metavar="K")
    parser.add_argument("--model", choices=models.MODELS, default="resnet20")
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args(argv)
    try:
        from fastagg import _cuda
    except ImportError as error:
        print(f"fastagg._cuda was not built: {error}")
        return 2
    kernels, choose = Kernels(Stubs(_cuda), emulated=True), backends.choose
    g = models.MODELS[args.model]()
    clients = [{key: value.clone() for key, value in g.items()} for _ in range(args.clients)]
    weights = torch.full((args.clients,), 1 / args.clients, dtype=torch.float64)
    out = {key: value.clone() for key, value in g.items()}
    table = tables.build(g, clients)
    layout, row, outs = table.layout, np.zeros(table.T, np.int32), [[out[key] for key in table.layout.keys]]
    gram = table, layout.gram_layer, len(layout.layers), False
    jobs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "mix": (
            lambda: fastagg.mix(clients, weights, out=out, on_nonfinite="pass"),
            lambda: kernels.mix(table, weights[None, None], row, outs),
        ),
        "gram": (lambda: fastagg.gram(g, clients), lambda: kernels.gram(*gram)),
        "gram_mix": (
            lambda: fastagg.gram_mix(g, clients, weights, out=out, on_nonfinite="pass"),
            lambda: kernels.gram_mix(*gram, weights[None, None], row, outs),
        ),
    }
    backends.choose = lambda device, name=None: kernels
    try:
        print(f"{args.clients} x {args.model}, {table.T} tensors each: host time of a repeated call")
        for name, (call, of_backend) in jobs.items():
            whole, part = microseconds(call, args.rounds), microseconds(of_backend, args.rounds)
            print(f"{name:<9} {whole:7.0f} us, of which the backend {part:5.0f} us")
    finally:
        backends.choose = choose
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
