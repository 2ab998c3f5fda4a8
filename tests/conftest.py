from __future__ import annotations

import pytest
import torch

import fastagg
from fastagg import backends

LEVELS = ("baseline", "avx2", "avx512")


@pytest.fixture(autouse=True)
def _restore():
    """Every test starts and ends with the default backend, thread count and SIMD level."""
    threads = torch.get_num_threads()
    level = backends.cpu._cpu.simd_level() if backends.cpu is not None else None
    yield
    torch.set_num_threads(threads)
    fastagg.set_backend("auto")
    if backends.cpu is not None:
        backends.cpu._cpu.set_simd(level)


@pytest.fixture(params=LEVELS)
def simd(request):
    """Runs a test at every SIMD level this CPU has."""
    if backends.cpu is None:
        pytest.skip("no native module")
    native = backends.cpu._cpu
    if LEVELS.index(request.param) > LEVELS.index(native.simd_best()):
        pytest.skip(f"this CPU has no {request.param}")
    native.set_simd(request.param)
    assert native.simd_level() == request.param
    return request.param
