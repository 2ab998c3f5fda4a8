"""Runs the jobs of benchmarks.compare with one version of fastagg: compare_worker.py <directory> <model> ...

Speaks lines of JSON. First it tells {"jobs": {name: checksum of the result}, "missing": {name: reason}}; then every
{"run": name} is answered by {"seconds": time of one run}. It ends when its input does.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Job = Callable[[], Any]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anything else prints, native code too, goes where it cannot disturb the answers
    directory, *names = sys.argv[1:]
    # The finder of an editable install has to go: modules that this version lacks it would find in the working tree.
    sys.meta_path[:] = [f for f in sys.meta_path if "__editable___fastagg" not in getattr(f, "__module__", "")]
    sys.path.insert(0, directory)
    jobs = {f"{model} {name}": job for model in names for name, job in jobs_of(model).items()}
    hello: dict[str, dict[str, str]] = {"jobs": {}, "missing": {}}
    for name, job in jobs.items():  # this is the warm-up too
        try:
            hello["jobs"][name] = checksum(job())
        except Exception as error:  # an older version may lack a function or an option
            hello["missing"][name] = f"{type(error).__name__}: {error}"
    check_origin(Path(directory).resolve())  # only now, for some modules may be imported late
    print(json.dumps(hello), file=answers)
    for line in sys.stdin:
        print(json.dumps({"seconds": seconds(jobs[json.loads(line)["run"]])}), file=answers)


def check_origin(directory: Path) -> None:
    modules = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "fastagg"}
    if "fastagg._cpu" not in modules:
        sys.exit(f"fastagg in {directory} has no native module, so its times say nothing")
    for name, module in modules.items():
        if not Path(module.__file__ or "").resolve().is_relative_to(directory):
            sys.exit(f"{name} was imported from {module.__file__}, expected below {directory}")


def jobs_of(model: str, K: int = 20) -> dict[str, Job]:
    import fastagg  # now that it is known from where

    models = runpy.run_path(str(Path(__file__).with_name("models.py")))  # the same for both versions
    torch.manual_seed(0)
    g = models["MODELS"][model]()
    clients = list(models["clients"](g, K))
    weights = torch.arange(1.0, K + 1) / (K * (K + 1) / 2)
    out = fastagg.fedavg(g, clients)
    jobs: dict[str, Job] = {
        "fedavg": lambda: fastagg.fedavg(g, clients, out=out),
        "fedavg, fresh output": lambda: fastagg.fedavg(g, clients),
        "gram": lambda: fastagg.gram(g, clients),
        "gram_mix": lambda: fastagg.gram_mix(g, clients, weights, out=out),
        "fedawa": lambda: fastagg.FedAWA(variant="released").aggregate(g, clients, out=out),
        "fedawa layerwise": lambda: fastagg.FedAWA(variant="released", layerwise=True).aggregate(g, clients, out=out),
        "fedawa paper, 100 steps": lambda: fastagg.fedawa(g, clients, variant="paper", steps=100, out=out),
    }
    if model == "resnet18":
        h, *halves = ({k: v.bfloat16() if v.is_floating_point() else v for k, v in m.items()} for m in (g, *clients))
        out16 = fastagg.fedavg(h, halves)
        jobs["mix bf16"] = lambda: fastagg.mix(halves, weights, out=out16)
        jobs["gram bf16"] = lambda: fastagg.gram(h, halves)
    return jobs


def checksum(result: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in result if isinstance(result, tuple) else [result]:
        for tensor in [*part.values(), part.weights] if isinstance(part, dict) else [part.matrix]:
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def seconds(job: Job) -> float:
    torch.zeros(1 << 20).sum()  # PyTorch's threads are awake, as on a server that has just used them
    start = time.perf_counter()
    result = job()  # kept, for freeing it is not timed
    elapsed = time.perf_counter() - start
    del result
    return elapsed


if __name__ == "__main__":
    main()
