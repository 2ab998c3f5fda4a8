"""Which backend serves a call, and what is said when one cannot."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

import fastagg
from fastagg._engine import backends
from helpers.cohort import make

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def pretend(monkeypatch):
    """pretend(cuda="", triton="reason"): those backends load, and cannot serve for that reason if there is one"""

    def set_up(**reasons):
        modules = {
            name: (
                SimpleNamespace(__name__=f"fastagg._engine.backends.{name}", why_not=lambda device, why=why: why),
                "",
            )
            for name, why in reasons.items()
        }
        monkeypatch.setattr(backends, "load", lambda name: modules.get(name, (None, f"no {name} here")))
        backends._auto.cache_clear()
        return {name: module for name, (module, _) in modules.items()}

    yield set_up
    backends._auto.cache_clear()


def test_auto_prefers_cuda_then_triton_then_the_reference(pretend):
    both = pretend(cuda="", triton="")
    assert backends.choose(GPU) is both["cuda"]
    second = pretend(cuda="no device", triton="")
    assert backends.choose(GPU) is second["triton"]
    second = pretend(triton="")  # _cuda does not load
    assert backends.choose(GPU) is second["triton"]
    pretend(cuda="built without kernels for it", triton="too old")
    with pytest.warns(
        UserWarning, match=r"reference serves .*cuda:0 .cuda: built without kernels for it; triton: too old"
    ):
        assert backends.choose(GPU) is backends.reference
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert backends.choose(GPU) is backends.reference


def test_cpu_tensors_never_go_to_a_gpu(pretend):
    all_three = pretend(cpu="", cuda="", triton="")
    assert backends.choose(CPU) is all_three["cpu"]
    pretend(cuda="", triton="")
    with pytest.warns(UserWarning, match="no cpu here"):
        assert backends.choose(CPU) is backends.reference


def test_a_named_backend_is_taken_or_its_absence_explained(pretend):
    loaded = pretend(cuda="no device", triton="")
    assert backends.choose(GPU, "triton") is loaded["triton"]
    assert backends.choose(GPU, "reference") is backends.reference
    with pytest.raises(RuntimeError, match="backend 'cuda' is not available: no device"):
        backends.choose(GPU, "cuda")
    with pytest.raises(RuntimeError, match="backend 'cpu' is not available: no cpu here"):
        backends.choose(CPU, "cpu")
    said = backends.availability()
    assert said["cuda"] == "not available: no device"
    assert said["triton"] == said["reference"] == "available"


def test_cpu_tensors_on_gpu_backends_here():
    g, clients = make(2, {"w": (3,)})
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="backend 'cuda' is not available: "):
            fastagg.gram(g, clients, backend="cuda")
    with pytest.raises(RuntimeError, match="cannot read tensors on cuda:0"):
        backends.choose(GPU, "cpu")
    with pytest.raises(ValueError, match="unknown backend 'rocm'; expected one of auto, cpu, cuda, triton, reference"):
        fastagg.set_backend("rocm")


def test_info_says_what_serves():
    facts = fastagg.info()
    assert facts["tensors_on"]["cpu"] == "cpu"
    assert len(facts["tensors_on"]) == 1 + torch.cuda.device_count()
    assert facts["backends"].keys() == {"cpu", "cuda", "triton", "reference"}
