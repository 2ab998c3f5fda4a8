"""What nvcc makes of the CUDA kernels: no spills, registers within what their launch bounds promise, and in the machine
code loads that are global and under way together."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "csrc/cuda"
SOURCES = sorted(CUDA.glob("*.cu"))
NVCC = shutil.which("nvcc")
SHARED_PER_SM = {80: 164 << 10, 90: 228 << 10}  # bytes
REGISTERS_PER_SM = 65536
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def nvdisasm():
    """CUDA's own, or the one that comes with Triton; None if there is none"""
    try:
        import triton
    except ImportError:
        return shutil.which("nvdisasm")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return shutil.which("nvdisasm") or (str(bundled) if bundled.exists() else None)


@pytest.fixture(scope="module", params=[80, 90])
def report(request, tmp_path_factory):
    """(architecture, {kernel: facts}) of every kernel; facts["code"] is its listing, if one can be had"""
    folder = tmp_path_factory.mktemp(f"sm_{request.param}")

    def one(source):
        ptx, object_file = folder / f"{source.stem}.ptx", folder / f"{source.stem}.cubin"
        said = subprocess.run(
            [NVCC, "-std=c++17", "-O3", "-fmad=false", str(source), "-cubin", f"-arch=sm_{request.param}",
             "-Xptxas", "-v", "-o", object_file, "--keep", "--keep-dir", folder],  # which keeps the PTX
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
        if nvdisasm() is not None:
            listing = subprocess.run([nvdisasm(), "-c", object_file], check=True, capture_output=True, text=True).stdout
            for part in re.split(r"\n\s*\.section\s+\.text\.", listing)[1:]:
                facts[re.match(r"\w+", part)[0]]["code"] = part
        return facts

    with ThreadPoolExecutor(2) as pool:
        kernels = {name: facts for part in pool.map(one, SOURCES) for name, facts in part.items()}
    return request.param, kernels


def test_no_kernel_spills(report):
    _, kernels = report
    words = ("products_kernel", "tensor_core_kernel", "mix_kernel", "times_kernel", "times_again", "reduce_slots")
    for word in (*words, "ranked_kernel", "ranked_merging_kernel", "ranked_integers_kernel"):
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

    import fastagg
    from fastagg._engine import table as tables
    from helpers.cohort import DTYPES, make
    from helpers.kernels import times

    arch, kernels = report
    for K in (7, 15, 23, 24, 70):
        g, clients = make(K, {"a.weight": (40,)})
        fastagg.gram_mix(g, clients, torch.rand(K))
        fastagg.gram(g, clients)
        for dtype in DTYPES:
            times(cuda, tables.build(*make(K, {"a.weight": (40,)}, dtype)), torch.rand(3, K))
    cuda.tensor_cores = lambda device: True  # the fixture's, put back at its end
    fastagg.gram_mix(g, clients, torch.rand(70))
    fastagg.gram(g, clients)
    promised = {
        word: max(facts["blocks"] for name, facts in kernels.items() if word in name)
        for word in ("products_kernel", "tensor_core_kernel", "times", "reduce_slots")
    }
    launched = cuda.native.launched()
    starts = {"products_kernel": "products", "tensor_core_kernel": "tensor", "times": "times", "reduce_slots": "reduce"}
    for word, start in starts.items():
        shared = max(bytes_ for name, (_, bytes_) in launched.items() if name.startswith(start))
        reserved = 1024  # of every block, by CUDA itself
        assert shared > 0
        assert (shared + reserved) * promised[word] <= SHARED_PER_SM[arch], word


def test_columns_of_sorted_values_leave_room_for_the_promised_blocks(report, cuda):
    import torch

    from helpers.ranked import cohort_of, every_mean, ranked_means

    arch, kernels = report

    def shared(name, threads):  # 16-bit values are sorted as float32
        rows = int(re.search(r"ranked_kernelI.*?Li(\d+)E", name)[1])
        return rows * threads * (8 if "ranked_kernelId" in name else 4)

    sizes = {name: shared(name, facts["threads"]) for name, facts in kernels.items() if "ranked_kernel" in name}
    ranked_means(cuda, *cohort_of(32, (3,), torch.float64), every_mean(32))
    assert cuda.native.launched()["ranked_in_registers"][1] == max(sizes.values())
    for name, size in sizes.items():
        assert (size + 1024) * kernels[name]["blocks"] <= SHARED_PER_SM[arch], name


INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


def loads_under_way(code, kind):
    """How many loads of a kind are issued before a result of one of them is used, or paths meet or part for good: one
    number for each such group of loads, in the order of the code"""
    groups, count, waiting = [], 0, set()
    for line in code.splitlines():
        found = INSTRUCTION.search(line)
        predicate, operation, operands = found.groups() if found else (None, "", "")
        sources = operands if operation.startswith("ST") else operands.partition(",")[2]
        used = {int(register) for register in re.findall(r"\bR(\d+)", sources)}
        leaves = re.match(r"\s*\.L_", line) or (operation.startswith(("BRA", "EXIT", "BSYNC")) and not predicate)
        if count and (leaves or used & waiting):
            groups.append(count)
            count, waiting = 0, set()
        if re.fullmatch(kind, operation):
            register = int(re.match(r"R(\d+)", operands)[1])
            count, waiting = count + 1, waiting | set(range(register, register + (4 if ".128" in operation else 1)))
    return groups


@pytest.fixture
def code(report):
    kernels = report[1]
    if not any("code" in facts for facts in kernels.values()):
        pytest.skip("no nvdisasm")
    return {name: facts["code"] for name, facts in kernels.items()}


def test_loads_are_counted_as_they_stand():
    listing = """
        /*0010*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0020*/              @!P0 LDG.E.128.CONSTANT R8, [R2.64+0x10] ;
        /*0030*/                   FFMA R0, R1, R3, R0 ;
        /*0038*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   FFMA R0, R10, R3, R0 ;
        /*0050*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
    .L_x_1:
        /*0060*/                   LDG.E.64 R4, [R2.64] ;
        /*0070*/                   EXIT ;"""
    assert loads_under_way(listing, r"LDG\.E\.128.*") == [2, 1]
    assert loads_under_way(listing, r"LDG\.E\.64") == [1]


def test_mix_reads_clients_eight_four_two_and_one_at_a_time(code):
    """Vectors of each of four dtypes; with four outputs at a time four clients, and groups of 4, 2 and 1 outputs"""
    wide = r"LDG\.E\.128.*"
    [one] = (listing for name, listing in code.items() if "mix_kernelILi1E" in name)
    assert loads_under_way(one, wide) == [8, 4, 2, 1] * 4
    [several] = (listing for name, listing in code.items() if "mix_kernelILi4E" in name)
    assert sorted(loads_under_way(several, wide)) == sorted(([4, 2, 1] * 2 + [8, 4, 2, 1]) * 4)


def test_unaligned_tensors_are_read_several_elements_at_a_time(code):
    [one] = (listing for name, listing in code.items() if "mix_kernelILi1E" in name)
    for kind in (r"LDG\.E\.CONSTANT|LDG\.E(\.32)?", r"LDG\.E\.U16.*"):  # float32, and both 16-bit dtypes
        assert max(loads_under_way(one, kind)) >= 16, kind
    for name, listing in code.items():
        if "products_kernel" in name or "tensor_core_kernel" in name:
            kind = r"LDG\.E\.U16.*" if re.search(r"half|bfloat16", name) else r"LDG\.E(\.64)?\.CONSTANT"
            assert max(loads_under_way(listing, kind)) >= 8, name


def test_rows_are_staged_four_or_two_at_a_time(code):
    """Two where registers are short: pairs of groups without a mix, and 16-bit rows for tensor cores"""
    for name, listing in code.items():
        if "products_kernel" in name or "tensor_core_kernel" in name:
            few = re.search(r"fLi128ELb0E|tensor_core_kernelI(?!f)", name)
            assert max(loads_under_way(listing, r"LDG\.E\.128.*")) >= (2 if few else 4), name


def test_gram_times_reads_clients_as_mix_does_and_rows_by_vectors(code):
    """u is formed from eight clients at a time, two elements of a 16-bit tensor in a load; rows are then multiplied by
    four vectors (two of 16-bit elements) at a time, with every vector u and with the first"""
    kernels = {name: listing for name, listing in code.items() if "times_kernel" in name}
    assert len(kernels) == 8
    for name, listing in kernels.items():
        few = re.search(r"half|bfloat16", name)
        word = r"LDG\.E\.64\.CONSTANT" if "Idd" in name else r"LDG\.E\.CONSTANT"
        assert 8 in loads_under_way(listing, word), name
        assert loads_under_way(listing, r"LDG\.E\.128.*") == ([2, 2] if few else [4, 4]), name


def test_clients_are_sorted_with_the_values_of_all_under_way(code):
    """As many loads as a network has rows before the first value is used; in float64 registers allow a few less"""
    kernels = {name: listing for name, listing in code.items() if "ranked_kernel" in name}
    assert len(kernels) == 20
    for name, listing in kernels.items():
        word = ".U16" if re.search(r"half|bfloat16", name) else r"\.64" if "ranked_kernelId" in name else ""
        rows = int(re.search(r"ranked_kernelI.*?Li(\d+)E", name)[1])
        least = rows * 7 // 8 if "ranked_kernelId" in name else rows
        assert max(loads_under_way(listing, rf"LDG\.E{word}\.CONSTANT")) >= least, name


def test_rows_are_read_and_written_by_global_instructions(code):
    """Addresses come from tables, so that nvcc has to be told; generic loads are LD.E, generic stores ST.E"""
    for name, listing in code.items():
        assert "LDG.E" in listing, name
        assert not re.findall(r"\s(?:LD|ST)\.E[^;]*", listing), name


def test_the_module_loads_without_a_driver():
    native = pytest.importorskip("fastagg._cuda", reason="fastagg._cuda was not built")
    import torch

    assert native.chunk_elements == 1024
    assert native.shape(21, 21, True, False) == (1, 1)
    if not torch.cuda.is_available():
        assert native.why_no_device().startswith("no device")
