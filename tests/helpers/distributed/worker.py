"""One of the processes of tests/distributed: makes every check, in groups of 2, 3 and 4 ranks, and reports."""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from helpers.distributed import clients, dtensors, errors  # noqa: F401  these have the checks
from helpers.distributed.checks import a_rank_that_dies
from helpers.distributed.parts import CHECKS, MESHES

PATIENCE = timedelta(minutes=30)  # of the groups, with ranks that are slow; one that has died is noticed at once


def main(rank, ranks, folder):
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    torch.set_num_threads(1)
    report = {}
    MESHES.update({n: DeviceMesh("cpu", list(range(n))) for n in (2, 3, 4)})  # groups, which all ranks have to make
    MESHES.update(square=DeviceMesh("cpu", [[0, 1], [2, 3]]), inner=DeviceMesh("cpu", [1, 2]))
    groups = {n: dist.new_group(list(range(n)), timeout=PATIENCE) for n in (2, 3)}
    groups[4] = dist.group.WORLD

    def attempt(name, function, *args):
        try:
            function(*args)
            report[name] = ""
        except BaseException:
            report[name] = traceback.format_exc()
            (folder / f"{rank}.json").write_text(json.dumps(report))
            os._exit(1)  # the others will wait for this rank in vain, and say so

    for size, group in groups.items():
        for name, function in CHECKS.items():
            if rank < size:
                attempt(f"{name}-{size}", function, group, rank, size)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    attempt("a_rank_that_dies-4", a_rank_that_dies, dist.group.WORLD, rank, ranks)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    os._exit(0)  # the group is broken: there is nothing to put away in order


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
