"""What this installation can do on this machine."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

from fastagg._engine import backends, scanner


def info() -> dict[str, Any]:
    """Version, SIMD level, threads, which backends are available or why one is not, and which serves each device."""
    native = backends.cpu is not None
    simd = {"simd": "none", "simd_best": "none"}
    if native:
        from fastagg import _cpu

        cache = f"{_cpu.cache_bytes() >> 10} KB per core, by which work is cut"
        simd = {"simd": _cpu.simd_level(), "simd_best": _cpu.simd_best(), "cache": cache}
    return {
        "fastagg": version("fastagg"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **simd,
        "threads": torch.get_num_threads(),
        "backends": backends.availability(),
        "tensors_on": backends.serves(),
        "fast_table": "yes" if scanner.NATIVE is not None else "no: needs the native module and functions of torch",
    }
