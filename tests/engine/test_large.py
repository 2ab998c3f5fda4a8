"""Tensors of more than 2^31 elements. Memory that was never written costs nothing to read, so this needs little."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastagg
from helpers.profiles import PROFILE

N = 2**31 + 77
NEEDS = 9 * 2**30  # bytes, for the one tensor that is written


def available() -> int:
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def zeros() -> torch.Tensor:
    return torch.from_numpy(np.zeros(N, np.int16)).view(torch.bfloat16)  # NumPy asks for huge pages, torch does not


@pytest.mark.skipif(PROFILE != "nightly", reason="takes half a minute: make test-nightly runs it")
@pytest.mark.skipif(available() < NEEDS, reason="needs 9 GiB of memory")
def test_more_than_two_to_the_31_elements():
    g, clients = {"w": zeros()}, [{"w": zeros()} for _ in range(2)]
    for k, sd in enumerate(clients):
        sd["w"][k] = 1 + k
        sd["w"][2**31 + 5] = 3.0
        sd["w"][-1] = 2.0
    matrix = fastagg.gram(g, clients).matrix
    assert matrix.tolist() == [[0, 0, 0], [0, 1 + 9 + 4, 9 + 4], [0, 9 + 4, 4 + 9 + 4]]
    mixed = fastagg.mix(clients, [0.5, 0.25], out={"w": zeros()})["w"]
    assert mixed[[0, 1, 2, 2**31 - 1, 2**31, 2**31 + 5, -1]].tolist() == [0.5, 0.5, 0, 0, 0, 2.25, 1.5]
    assert np.count_nonzero(mixed.view(torch.int16).numpy()) == 4
    clients[1]["w"][2**31 + 6] = float("nan")
    with pytest.raises(fastagg.NonFiniteError, match="client 1: key 'w' has values that are not finite"):
        fastagg.mix(clients, [0.5, 0.25], out={"w": mixed})
