from __future__ import annotations

import os

# Read when torch is loaded. Tests run side by side: a thread that waits for others must not keep a core from them
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton's kernels are defined

import fastagg
from fastagg._engine import backends
from fastagg._engine.backends import cuda as cuda_backend

pytest.register_assert_rewrite("helpers")
LEVELS = backends.cpu._cpu.simd_levels() if backends.cpu else []


@pytest.fixture(autouse=True)
def _restore():
    """Every test starts and ends with the default backend, thread count and SIMD level."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    fastagg.set_backend("auto")
    if backends.cpu is not None:
        backends.cpu._cpu.set_simd(os.environ.get("FASTAGG_SIMD") or "auto")
        backends.cpu._cpu.set_cache_bytes(0)


@pytest.fixture(params=[*LEVELS, "cuda", "cuda-tensor-cores"])
def kernels(request, monkeypatch):
    """Runs a test with every native implementation of the kernels: SIMD levels that this CPU has, and the CUDA kernels
    on the emulator, by multiply-adds or on tensor cores whatever the number of clients."""
    if request.param.startswith("cuda"):
        use_emulated(monkeypatch, tensor_cores=request.param == "cuda-tensor-cores")
        return request.param
    if not LEVELS:
        pytest.skip("no native module")
    native = backends.cpu._cpu
    if request.param not in LEVELS[: LEVELS.index(native.simd_best()) + 1]:
        pytest.skip(f"this CPU has no {request.param}")
    native.set_simd(request.param)
    assert native.simd_level() == request.param
    return request.param


@pytest.fixture
def cuda(monkeypatch):
    """The CUDA kernels serve every call that names no backend, on the emulator."""
    return use_emulated(monkeypatch)


def use_emulated(monkeypatch, tensor_cores=False):
    from helpers import emulated

    chosen, really = emulated.kernels(), backends.choose
    monkeypatch.setattr(cuda_backend, "MOST_FMA_ROWS", 0)  # so that tensor cores are tried with few clients too
    monkeypatch.setattr(chosen, "tensor_cores", lambda device: tensor_cores)
    monkeypatch.setattr(
        backends, "choose", lambda device, name=None: chosen if name in (None, "cuda") else really(device, name)
    )
    return chosen
