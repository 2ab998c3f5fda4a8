"""Rounds where Triton's kernels can read them: on a GPU, or on the CPU, where the kernels are interpreted."""

from __future__ import annotations

import numpy as np
import torch

from helpers.cohort import make

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def moved(sd, offset=0):
    """The same values on DEVICE, every tensor `offset` elements off its allocation's alignment"""
    out = {}
    for key, value in sd.items():
        memory = torch.empty(value.numel() + offset, dtype=value.dtype, device=DEVICE)
        out[key] = memory[offset:].view(value.shape).copy_(value)
    return out


def cohort(K, shapes, dtype=torch.float32, *, offset=0, **options):
    g, clients = make(K, shapes, dtype, **options)
    return moved(g, offset), [moved(sd, offset) for sd in clients]


def convert_as_gpus_do(monkeypatch):
    """The interpreter truncates to bfloat16 (triton 3.9), where every GPU rounds to nearest."""
    if DEVICE.type == "cuda":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    usual, f32, bf16 = interpreter._convert_float, tl.float32, tl.bfloat16

    def convert(x, source, target, mode):
        if (source, target) == (f32, bf16):
            return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy()
        return x.astype(np.uint32) << 16 if (source, target) == (bf16, f32) else usual(x, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def sum_as_gpus_do(monkeypatch):
    """The interpreter asks a BLAS for its products, and some (OpenBLAS for Zen 5) sum the elements of one matrix in
    different orders. A GPU's lanes all do the same."""
    if DEVICE.type == "cuda":
        return
    from triton.runtime import interpreter

    def dot(self, a, b, d, *unused):
        sums = np.zeros_like(d.data)
        for column, row in zip(a.data.T, b.data, strict=True):
            sums += np.multiply.outer(column, row)
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
