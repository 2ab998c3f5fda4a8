"""The kernels at every SIMD level that this CPU has, and as they are chosen for it."""

import numpy as np
import pytest
import torch

import fastagg
from benchmarks.conftest import cohorts
from fastagg import _cpu

KERNELS = {
    "mix": lambda g, clients, w, out: fastagg.mix(clients, w, out=out),
    "gram": lambda g, clients, w, out: fastagg.gram(g, clients).matrix,
    "gram_mix": lambda g, clients, w, out: fastagg.gram_mix(g, clients, w, out=out)[0].matrix,
    "gram_times": lambda g, clients, w, out: fastagg.gram_times(g, clients, w) @ w,
}
LEVELS = ("avx2", "avx512")


@pytest.mark.parametrize("kernel", KERNELS)
@cohorts(("resnet18", 20), ("mlp_6m", 100))
def test_levels(cohort, contest, kernel):
    if _cpu.simd_best() not in LEVELS:
        pytest.skip("this CPU has no AVX2")
    g, clients, compute = cohort.global_sd, cohort.client_sds, KERNELS[kernel]
    w = np.full(cohort.K, 1 / cohort.K)
    out = fastagg.mix(clients, w)

    def at(level: str):
        def job() -> object:
            _cpu.set_simd(level)
            try:
                return compute(g, clients, w, out)
            finally:
                _cpu.set_simd("auto")

        return job

    here = [level for level in LEVELS if LEVELS.index(level) <= LEVELS.index(_cpu.simd_best())]
    if kernel != "mix":
        expected = torch.as_tensor(at("baseline")())
        scale = expected.abs().max()
        for level in here:
            torch.testing.assert_close(torch.as_tensor(at(level)()) / scale, expected / scale, rtol=0, atol=1e-6)
    contest(cohort, f"level_{kernel}", at("auto"), {level: at(level) for level in here})
