"""The paper model of the GPU kernels: docs/gpu.md is what it prints, and its cuts are those of the kernels."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_host
from benchmarks.gpu_model import cuts, page
from benchmarks.gpu_model.costs import one_read, predict
from benchmarks.gpu_model.counts import REGISTERS
from benchmarks.gpu_model.devices import A100, GPUS, H100
from benchmarks.gpu_model.jobs import MODELS, Job, jobs
from benchmarks.gpu_model.nvcc import kernel_name
from fastagg._engine.backends import cuda, plan
from helpers import emulated

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def native():
    try:
        from fastagg import _cuda

        return _cuda
    except ImportError:
        pass
    try:
        return emulated.kernels().native
    except (OSError, ImportError, TypeError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no module to ask for its shapes: {error}")


def test_the_page_shows_what_is_printed():
    text = (ROOT / "docs/gpu.md").read_text()
    between = text.split(page.BEGIN)[1].split(page.END)[0]
    assert between.strip() == page.markdown(), "python -m benchmarks.gpu_model --write"


def test_command_prints_the_tables():
    command = [sys.executable, "-m", "benchmarks.gpu_model"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == page.markdown() + "\n"


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_cuts_are_those_of_the_kernels(native, tensor_cores):
    for rows in range(2, 300):
        s = cuts.shape(rows, tensor_cores)
        assert (s.pairs, s.slices) == tuple(native.shape(rows, rows, True, tensor_cores)), rows
        cut = cuts.pairs(s, rows)
        assert len(cut) == s.pairs
        assert sum(na for na, _, diagonal in cut if diagonal) == rows


@pytest.mark.parametrize("K", [*range(1, 70), 100, 200])
@pytest.mark.parametrize("tensor_cores", [False, True])
def test_tiles_hold_every_product(K, tensor_cores):
    """Never fewer multiply-adds than the Gram has, and at most what padding to tiles explains"""
    facts = predict(A100, Job("gram", K, tensor_cores=tensor_cores)).facts
    needed = (K + 1) * (K + 2) // 2 * (3 if tensor_cores else 1)
    assert facts["multiply-adds"] >= needed
    rows = -(-(K + 1) // 8) * 8
    assert tensor_cores or facts["multiply-adds"] <= (rows + 8) * (rows + 16) / 2


def test_choices_are_those_of_the_backend():
    assert cuda.MOST_FMA_ROWS == 65
    assert not Job("gram", 64).on_tensor_cores
    assert Job("gram", 65).on_tensor_cores
    assert (plan.CHUNK, plan.MIX_ITEMS, plan.PRODUCT_BLOCKS) == (1024, 16384, 2048)
    assert {(gpu.arch // 10, gpu.arch % 10) for gpu in GPUS} <= cuda.FAST_TF32


def test_gpus_have_the_stated_peaks():
    assert 2 * A100.fp32 * A100.sms * A100.clock == pytest.approx(19.5e12, rel=0.01)
    assert 2 * A100.fp64 * A100.sms * A100.clock == pytest.approx(9.7e12, rel=0.01)
    assert 2 * H100.fp32 * H100.sms * H100.clock == pytest.approx(66.9e12, rel=0.01)
    assert 2 * H100.fp64 * H100.sms * H100.clock == pytest.approx(33.5e12, rel=0.01)


def test_blocks_on_an_sm():
    assert A100.blocks(128, 96) == 5
    assert A100.blocks(192, 138) == 2
    assert A100.blocks(256, 128) == 2
    assert A100.blocks(128, 32, shared=100 << 10) == 1
    assert A100.blocks(1024, 32) == 2


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_job_is_faster_than_its_bytes(gpu, dtype):
    for model in MODELS:
        for job in jobs(model, dtype):
            cost = predict(gpu, job)
            assert cost.seconds >= one_read(gpu, job)
            assert cost.blocks_per_sm >= 1
            twice = predict(replace(gpu, hbm=gpu.hbm * 2), job)
            assert twice.seconds <= cost.seconds


def test_rate_of_conversions_that_could_not_be_checked_changes_no_row():
    """As docs/gpu.md says"""
    other = replace(H100, conversions=64)
    for model in MODELS:
        for dtype in ("float32", "bfloat16"):
            for job in jobs(model, dtype):
                assert predict(other, job).seconds == predict(H100, job).seconds, job


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZN7fastagg3gpu12_GLOBAL__N_10mix_kernelILi4EEEvNS0_4WorkENS0_3MixE", "mix 4"),
        ("_ZN7fastagg3gpu12_GLOBAL__N_115products_kernelI13__nv_bfloat16fLi192ELb1EEEvNS0_8ProductsE",
         "alone bfloat16 mix"),
        ("_ZN7fastagg3gpu12_GLOBAL__N_121products_again_kernelIfLi128EEEvNS0_8ProductsE", "pairs float32 again"),
        ("_ZN7fastagg3gpu12_GLOBAL__N_118tensor_core_kernelIfEEvNS0_8ProductsE", "tensor float32"),
        ("_ZN7fastagg3gpu12_GLOBAL__N_112reduce_slotsENS1_9ReductionE", ""),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_symbols(symbol, name):
    assert kernel_name(symbol) == name
    assert not name or all(name in registers for registers in REGISTERS.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys):
    assert gpu.main(["--clients", "5"]) == 2
    said = capsys.readouterr().err
    assert said.strip() == gpu.NO_GPU
    assert "python -m benchmarks.gpu_model" in said


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--help"])
    assert ended.value.code == 0
    assert "one read of the clients' bytes" in capsys.readouterr().out


def test_host_time_is_measured_without_a_gpu(capsys):
    pytest.importorskip("fastagg._cuda", reason="fastagg._cuda was not built")
    assert gpu_host.main(["--clients", "3", "--rounds", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "3 x resnet20, 116 tensors each: host time of a repeated call"
    assert [line.split()[0] for line in said[1:]] == ["mix", "gram", "gram_mix"]
