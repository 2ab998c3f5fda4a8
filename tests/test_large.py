"""Tensors of more than 2^31 elements. Memory that was never written costs nothing to read, so this needs little."""

from __future__ import annotations

import pytest
import torch

import fastagg

N = 2**31 + 77
NEEDS = 9 * 2**30  # bytes, for the one tensor that is written


def available() -> int:
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


@pytest.mark.skipif(available() < NEEDS, reason="needs 9 GiB of memory")
def test_more_than_two_to_the_31_elements():
    g = {"w": torch.zeros(N, dtype=torch.bfloat16)}
    clients = [{"w": torch.zeros(N, dtype=torch.bfloat16)} for _ in range(2)]
    for k, sd in enumerate(clients):
        sd["w"][k] = 1 + k
        sd["w"][2**31 + 5] = 3.0
        sd["w"][-1] = 2.0
    matrix = fastagg.gram(g, clients).matrix
    assert matrix.tolist() == [[0, 0, 0], [0, 1 + 9 + 4, 9 + 4], [0, 9 + 4, 4 + 9 + 4]]
    mixed = fastagg.mix(clients, [0.5, 0.25])["w"]
    assert mixed[[0, 1, 2, 2**31 - 1, 2**31, 2**31 + 5, -1]].tolist() == [0.5, 0.5, 0, 0, 0, 2.25, 1.5]
    assert int(torch.count_nonzero(mixed)) == 4
    clients[1]["w"][2**31 + 6] = float("nan")
    with pytest.raises(fastagg.NonFiniteError, match="client 1: key 'w' has values that are not finite"):
        fastagg.mix(clients, [0.5, 0.25], out={"w": mixed})
