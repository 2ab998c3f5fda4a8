"""What nvcc says of the CUDA kernels: no spills, and registers within what their launch bounds promise."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CUDA = Path(__file__).parent.parent / "csrc/cuda"
SOURCES = sorted(CUDA.glob("*.cu"))
NVCC = shutil.which("nvcc")
SHARED_PER_SM = {80: 164 << 10, 90: 228 << 10}  # bytes
REGISTERS_PER_SM = 65536
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")


@pytest.fixture(scope="module", params=[80, 90])
def report(request, tmp_path_factory):
    """(architecture, {kernel: facts}) of every kernel of every source"""
    folder = tmp_path_factory.mktemp(f"sm_{request.param}")

    def one(source):
        common = [NVCC, "-std=c++17", "-O3", "-fmad=false", str(source)]
        ptx, object_file = folder / f"{source.stem}.ptx", folder / f"{source.stem}.o"
        subprocess.run([*common, "-ptx", f"-arch=compute_{request.param}", "-o", ptx], check=True)
        said = subprocess.run(
            [*common, "-c", f"-arch=sm_{request.param}", "-Xptxas", "-v", "-o", object_file],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
        bounds = {}
        for name, text in re.findall(r"\.entry (\w+)\(.*?\)(.*?)\{", ptx.read_text(), re.DOTALL):
            threads, blocks = re.search(r"\.maxntid (\d+)", text), re.search(r"\.minnctapersm (\d+)", text)
            bounds[name] = (int(threads[1]), int(blocks[1]) if blocks else 1)
        facts = {}
        for name, text in re.findall(r"Function properties for (\w+)\n(.*?registers[^\n]*)", said, re.DOTALL):
            stack, stores, loads = map(int, re.findall(r"(\d+) bytes (?:stack|spill)", text))
            static = re.search(r"(\d+) bytes smem", text)
            facts[name] = {
                "spilled": stack + stores + loads, "registers": int(re.search(r"Used (\d+) registers", text)[1]),
                "static": int(static[1]) if static else 0, "threads": bounds[name][0], "blocks": bounds[name][1],
            }  # fmt: skip
        assert facts.keys() == bounds.keys()
        return facts

    with ThreadPoolExecutor(2) as pool:
        kernels = {name: facts for part in pool.map(one, SOURCES) for name, facts in part.items()}
    return request.param, kernels


def test_no_kernel_spills(report):
    _, kernels = report
    for word in ("products_kernel", "tensor_core_kernel", "mix_kernel", "maximum_kernel", "reduce_slots"):
        assert any(word in name for name in kernels), word
    assert {name: facts["spilled"] for name, facts in kernels.items() if facts["spilled"]} == {}


def test_registers_leave_room_for_the_promised_blocks(report):
    _, kernels = report
    for name, facts in kernels.items():
        per_warp = -(-facts["registers"] * 32 // 256) * 256  # allocated in units of 256
        warps = -(-facts["threads"] // 32) * facts["blocks"]
        per_quarter = -(-warps // 4)  # an SM is four parts, with a quarter of the registers each
        assert per_warp * per_quarter <= REGISTERS_PER_SM // 4, (name, facts)
        assert facts["static"] == 0, name  # all shared memory is asked for at launch: below


def test_shared_memory_leaves_room_for_the_promised_blocks(report, cuda):
    import torch
    from cohort import make

    import fastagg

    arch, kernels = report
    for K in (7, 15, 23, 24, 70):
        g, clients = make(K, {"a.weight": (40,)})
        fastagg.gram_mix(g, clients, torch.rand(K))
        fastagg.gram(g, clients)
    cuda.tensor_cores = lambda device: True  # the fixture's, put back at its end
    fastagg.gram_mix(g, clients, torch.rand(70))
    fastagg.gram(g, clients)
    promised = {
        word: max(facts["blocks"] for name, facts in kernels.items() if word in name)
        for word in ("products_kernel", "tensor_core_kernel", "reduce_slots")
    }
    launched = cuda.native.launched()
    for word, start in (("products_kernel", "products"), ("tensor_core_kernel", "tensor"), ("reduce_slots", "reduce")):
        shared = max(bytes_ for name, (_, bytes_) in launched.items() if name.startswith(start))
        reserved = 1024  # of every block, by CUDA itself
        assert shared > 0
        assert (shared + reserved) * promised[word] <= SHARED_PER_SM[arch], word


def test_the_module_loads_without_a_driver():
    native = pytest.importorskip("fastagg._cuda", reason="fastagg._cuda was not built")
    import torch

    assert native.chunk_elements == 1024
    assert native.shape(21, 21, True, False) == (1, 1)
    if not torch.cuda.is_available():
        assert native.why_no_device().startswith("no device")
