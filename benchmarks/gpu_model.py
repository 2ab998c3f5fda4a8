"""What the CUDA kernels should take on an A100 and an H100, on paper: no GPU is needed, and nothing here is measured.

python -m benchmarks.gpu_model            # the tables of docs/gpu.md, in markdown
python -m benchmarks.gpu_model --write    # puts them into docs/gpu.md
python -m benchmarks.gpu_model --nvcc     # with register counts read from this machine's nvcc
python -m benchmarks.gpu_model --all      # every resource's time of every job

A kernel is a list of what it needs of each part of the GPU. Parts work side by side, so the longest of their times is
the least the kernel can take; launches and the small kernels around it come on top. Cuts into groups, pairs and tiles
are those of csrc/cuda/products.cu and tensor_cores.cu; tests/project/test_gpu_model.py holds them against these.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs/gpu.md"
BEGIN, END = "<!-- predicted -->", "<!-- end of predicted -->"
CLIENTS = (5, 20, 64, 100)


@dataclass(frozen=True)
class GPU:
    name: str
    arch: int
    sms: int
    clock: float  # Hz
    hbm: float  # bytes/s
    fp32: int  # multiply-adds per clock and SM
    fp64: int
    tensor: float  # tf32 multiply-adds per second that mma.sync reaches
    shared: int  # bytes per SM
    l1: int  # bytes per SM that are L1 where no shared memory is used
    conversions: int = 16  # from and to float64, per clock and SM
    shared_bandwidth: int = 128  # bytes per clock and SM, L1 and shared memory together
    l2_bandwidth: int = 5120  # bytes per clock
    issue: int = 4  # instructions of a warp per clock and SM
    registers: int = 65536
    warps: int = 64
    hbm_latency: int = 400  # clocks, of an idle memory
    l2_latency: int = 200
    l1_latency: int = 35
    launch: float = 3e-6  # seconds per kernel, an assumption

    def seconds(self, clocks: float) -> float:
        """Of so many clocks of every SM at once"""
        return clocks / (self.sms * self.clock)

    def blocks(self, threads: int, registers: int, shared: int = 0) -> int:
        """Blocks that an SM has room for. Each of its four parts gives its registers to whole warps, by the 256."""
        per_warp = -(-registers * 32 // 256) * 256
        warps = min(self.warps, 4 * (self.registers // 4 // per_warp)) // (threads // 32)
        return min(warps, self.shared // (shared + 1024))  # 1 KB of a block's is the system's


A100 = GPU("A100", 80, 108, 1.41e9, 2.039e12, 64, 32, 156e12 / 2, 164 << 10, 192 << 10)
# 1.98 GHz is the clock of the 66.9 TFLOPS that NVIDIA states for float32. mma.sync reaches some 60 % of the tensor
# cores' 494 TFLOPS; the rest needs wgmma.
H100 = GPU("H100", 90, 132, 1.98e9, 3.35e12, 128, 64, 0.6 * 494e12 / 2, 228 << 10, 256 << 10)
GPUS = (A100, H100)


@dataclass(frozen=True)
class Model:
    name: str
    D: int
    largest: float  # share of its largest layer


MODELS = {
    "resnet18": Model("ResNet-18", 11_173_962, 0.21),
    "vit_b": Model("ViT-B", 86_567_656, 0.027),
}

# Read off the machine code of nvcc 13.0. Registers by --nvcc; the others by hand, from nvdisasm's listing:
# instructions that stage 16 bytes of a row when all is aligned, and how many such loads of a thread are under way
# before it waits for one.
REGISTERS = {
    80: {"mix 1": 128, "mix 4": 150,
         "alone float32": 128, "alone bfloat16": 128, "pairs float32": 127, "pairs bfloat16": 127,
         "alone float32 mix": 143, "alone bfloat16 mix": 143, "pairs float32 mix": 143, "pairs bfloat16 mix": 143,
         "tensor float32": 124, "tensor bfloat16": 122,
         "alone float32 again": 229, "alone bfloat16 again": 237, "pairs float32 again": 229,
         "pairs bfloat16 again": 237},
    90: {"mix 1": 128, "mix 4": 152,
         "alone float32": 168, "alone bfloat16": 157, "pairs float32": 128, "pairs bfloat16": 128,
         "alone float32 mix": 161, "alone bfloat16 mix": 163, "pairs float32 mix": 161, "pairs bfloat16 mix": 163,
         "tensor float32": 128, "tensor bfloat16": 128,
         "alone float32 again": 226, "alone bfloat16 again": 236, "pairs float32 again": 226,
         "pairs bfloat16 again": 236},
}  # fmt: skip
STAGING = {80: {"float32": 35, "bfloat16": 64}, 90: {"float32": 36, "bfloat16": 67}}  # instructions
IN_FLIGHT = {
    "alone": {"float32": 4, "bfloat16": 4},
    "pairs": {"float32": 2, "bfloat16": 2},
    "tensor": {"float32": 4, "bfloat16": 2},
}
# Instructions of mix per client: on a vector for 1, 2 and 4 outputs, and on an element
MIX = {
    "float32": {1: 119 / 8, 2: 93 / 4, 4: 143 / 4, "element": 42 / 4},
    "bfloat16": {1: 192 / 8, 2: 149 / 4, 4: 239 / 4, "element": 46 / 4},
}
FOLD = 330  # instructions that add a tile's sums over lanes, of which 62 are shuffles and 62 additions
TENSOR_STEP = 235  # instructions of a warp per 16 elements: 24 mma, 88 additions, 24 loads, the rest splits numbers
BLOCKS_AGAIN = 256


@dataclass(frozen=True)
class Job:
    kernel: str  # mix, gram, gram_mix
    K: int
    dtype: str = "float32"
    model: str = "resnet18"
    M: int = 1
    tensor_cores: bool | None = None  # None: as backends/cuda.py chooses on these GPUs

    @property
    def name(self) -> str:
        return f"{self.kernel} to {self.M}" if self.kernel == "mix" else self.kernel

    @property
    def bytes(self) -> int:  # of an element
        return 4 if self.dtype == "float32" else 2

    @property
    def on_tensor_cores(self) -> bool:
        return self.K > 64 if self.tensor_cores is None else self.tensor_cores


@dataclass
class Cost:
    """Seconds of each resource, the kernel's blocks, and what comes on top"""

    times: dict[str, float]
    blocks: int
    threads: int
    blocks_per_sm: int
    registers: int
    shared: int
    on_top: float
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        return max(self.times, key=self.times.get)

    @property
    def seconds(self) -> float:
        return self.times[self.limit] + self.on_top


@dataclass(frozen=True)
class Shape:
    """shape_of in csrc/cuda/products.cu, for a triangle"""

    size: int
    groups: int
    slices: int
    tensor: bool

    @property
    def pairs(self) -> int:
        return self.groups * (self.groups + 1) // 2

    @property
    def kind(self) -> str:
        return "tensor" if self.tensor else "alone" if self.groups == 1 else "pairs"

    @property
    def tiles(self) -> int:  # of a block, at most
        side = self.size // 8
        return side * (side + 1) // 2 if self.groups == 1 else side * side

    @property
    def threads(self) -> int:
        return 256 if self.tensor else 32 * self.tiles * self.slices

    @property
    def elements(self) -> int:  # of a stage
        return 64 if self.tensor else 256 * self.slices

    def staged(self, diagonal: bool) -> int:
        return self.size if diagonal else 2 * self.size

    @property
    def shared(self) -> int:
        rows = self.staged(self.groups == 1 and not self.tensor)
        return (4 * (68 if self.tensor else self.elements) + 12) * rows + 8


def shape(rows: int, tensor: bool) -> Shape:
    if tensor:
        return Shape(64, -(-rows // 64), 1, True)
    most = 24 if rows <= 24 else 16
    groups = -(-rows // most)
    size = (rows + 8 * groups - 1) // (8 * groups) * 8
    groups = -(-rows // size)
    slices, warps = 4, 6 if groups == 1 else 4
    cut = Shape(size, groups, slices, False)
    while slices > 1 and (slices * cut.tiles > warps or 4 * cut.elements * cut.staged(groups == 1) > 40 << 10):
        slices //= 2
        cut = Shape(size, groups, slices, False)
    return cut


def pairs(s: Shape, rows: int) -> list[tuple[int, int, bool]]:
    """(rows of a, rows of b, diagonal) of every pair"""
    real = [min(s.size, rows - g * s.size) for g in range(s.groups)]
    return [(real[i], real[j], i == j) for i in range(s.groups) for j in range(i + 1)]


def tiles(s: Shape, na: int, nb: int, diagonal: bool) -> tuple[int, int]:
    """Tiles with work of a pair: (whole ones, half ones on the diagonal)"""
    if s.tensor:
        spots = [(i, j) for i in range(0, 64, 16) for j in range(0, 64, 32)]
        return sum(i < na and j < nb and not (diagonal and i + 16 <= j) for i, j in spots), 0
    a, b = -(-na // 8), -(-nb // 8)
    return (a * (a - 1) // 2, a) if diagonal else (a * b, 0)


def predict(gpu: GPU, job: Job) -> Cost:
    if job.kernel == "mix":
        return _mix(gpu, job)
    if job.kernel == "gram_mix" and job.on_tensor_cores:  # one after the other
        cost = _gram(gpu, replace(job, kernel="gram"))
        return replace(cost, on_top=cost.on_top + _mix(gpu, replace(job, kernel="mix")).seconds)
    return _gram(gpu, job)


def one_read(gpu: GPU, job: Job) -> float:
    """R: the clients' bytes at the memory's full speed"""
    return MODELS[job.model].D * job.K * job.bytes / gpu.hbm


def _mix(gpu: GPU, job: Job) -> Cost:
    model, K, M, S = MODELS[job.model], job.K, job.M, job.bytes
    V, at_once = 16 // S, 4 if job.M > 1 else 1
    groups = {4: M // 4, 2: M % 4 // 2, 1: M % 2}  # passes over the clients, by the outputs that each forms
    passes = sum(groups.values())
    registers = REGISTERS[gpu.arch][f"mix {at_once}"]
    per_sm = gpu.blocks(128, registers)
    kept = K * 1024 * S * per_sm <= gpu.l1  # a chunk of all clients, until the last outputs are formed
    bytes_hbm = S * (K + M)
    bytes_l2 = bytes_hbm if kept else S * (K * passes + M)
    # a warp reads 512 bytes of a client, its address and a weight per output, each of these 128 bytes' worth of time
    bytes_l1 = sum(n * K * (5 + outputs) * 128 / (32 * V) for outputs, n in groups.items()) + M * S
    wide = job.dtype == "float32"
    instructions = K * sum(n * MIX[job.dtype][outputs] / V for outputs, n in groups.items())
    conversions = K * passes + M if wide else K * M / V
    in_flight = per_sm * 128 * 16 * (8 if at_once == 1 else 4)
    per_element = {
        "HBM": bytes_hbm / (gpu.hbm / (gpu.sms * gpu.clock)),
        "L2": bytes_l2 / (gpu.l2_bandwidth / gpu.sms),
        "shared": bytes_l1 / gpu.shared_bandwidth,
        "fp64" if wide else "fp32": K * M / (gpu.fp64 if wide else gpu.fp32),
        "convert": conversions / gpu.conversions,
        "issue": instructions / (32 * gpu.issue),
        "latency": bytes_hbm / in_flight * gpu.hbm_latency,
    }
    times = {name: gpu.seconds(clocks * model.D) for name, clocks in per_element.items()}
    blocks = min(-(-model.D // 1024), 16384)
    facts = {"bytes": bytes_hbm, "L2 bytes": bytes_l2, "multiply-adds": K * M, "passes": passes}
    facts |= {"conversions": conversions, "instructions": instructions}
    return Cost(times, blocks, 128, per_sm, registers, 0, gpu.launch, facts)


def _gram(gpu: GPU, job: Job) -> Cost:
    model, K, S = MODELS[job.model], job.K, job.bytes
    rows, V, mixed = K + 1, 16 // S, job.kernel == "gram_mix"
    s = shape(rows, job.on_tensor_cores)
    cut = pairs(s, rows)
    registers = REGISTERS[gpu.arch][f"{s.kind} {job.dtype}{' mix' if mixed else ''}"]
    per_sm = gpu.blocks(s.threads, registers, s.shared)
    items = max(1, 2048 // s.pairs)
    partial = 2 * 8 * items * s.slices * rows * rows / model.D  # bytes per element, written and read again

    fp32 = shared = issue = tensor = l2 = phases = work = staged = 0.0
    for na, nb, diagonal in cut:
        whole, half = tiles(s, na, nb, diagonal)
        put = loaded = na if diagonal else na + nb
        staged += put
        l2 += S * (loaded + 1)
        if s.tensor:
            products, adds, read = 1536 * whole, 176 * whole, 192 * whole
            instructions = TENSOR_STEP * 2 * whole
            tensor += products
        else:
            warps = whole + half  # of a slice, each of which has its own share of the elements
            products, read = 64 * whole + 36 * half, 64 * whole + 32 * half
            adds = products + 2 * warps * s.slices  # and 62 additions a lane in 1024 elements
            instructions = 84 * whole + 50 * half + FOLD * warps * s.slices / 32
            read += 62 * 128 / 1024 * warps * s.slices
        instructions += put * STAGING[gpu.arch][job.dtype] / V
        moved = read + put * (4 + 12 / V) + 2 * loaded * S
        adds += put
        work += products
        if mixed and not phases:  # the first pair's block
            instructions += K * MIX[job.dtype]["element"]
            moved += 12 * K + S
        fp32, shared, issue = fp32 + adds, shared + moved, issue + instructions
        # a block's own time for a stage: it waits for its loads, then multiplies, then mixes
        rounds = -(-put * s.elements // (V * s.threads * IN_FLIGHT[s.kind][job.dtype]))
        clocks = rounds * gpu.hbm_latency
        clocks += s.elements * max(adds / gpu.fp32, instructions / (32 * gpu.issue))
        if mixed and not phases:  # four clients at a time: an address, then a value; of other groups' rows from L2
            wait = gpu.l1_latency + (gpu.l1_latency if s.groups == 1 else gpu.l2_latency)
            clocks += -(-s.elements // s.threads) * -(-K // 4) * wait
        phases += clocks / s.elements / per_sm
    wide = job.dtype == "float32"
    bytes_hbm = S * (rows + mixed) + partial
    per_element = {
        "HBM": bytes_hbm / (gpu.hbm / (gpu.sms * gpu.clock)),
        "L2": (l2 + partial) / (gpu.l2_bandwidth / gpu.sms),
        "shared": shared / gpu.shared_bandwidth,
        "fp32": (fp32 + (K if mixed and not wide else 0)) / gpu.fp32,
        "tensor": tensor / (gpu.tensor / (gpu.sms * gpu.clock)),
        "issue": issue / (32 * gpu.issue),
        "phases": phases,
    }
    if mixed:
        per_element |= {"fp64": K * wide / gpu.fp64, "convert": (K + wide) / gpu.conversions}
    times = {name: gpu.seconds(clocks * model.D) for name, clocks in per_element.items()}

    # The second pass: a few blocks read items and their flags, one after the other. Then the reduction, in which a
    # thread adds an eighth of a layer's slots, four loads at a time.
    again = shape(rows, False)
    room = gpu.blocks(again.threads, REGISTERS[gpu.arch][f"{again.kind} {job.dtype} again"], again.shared)
    waves = max(1, BLOCKS_AGAIN / (gpu.sms * room)) * items * again.pairs / BLOCKS_AGAIN
    slots = items * s.slices * model.largest
    small = (2 * gpu.hbm_latency * max(1, waves) + gpu.hbm_latency * max(1, slots / 32)) / gpu.clock
    launches = 5 + mixed  # flags to zero, products, again, two of the reduction; buffers
    facts = {"bytes": bytes_hbm, "L2 bytes": l2 + partial, "multiply-adds": work, "staged": staged}
    facts |= {"shared bytes": shared, "instructions": issue, "fp32": fp32, "small": small, "launches": launches}
    return Cost(times, items * s.pairs, s.threads, per_sm, registers, s.shared, small + launches * gpu.launch, facts)


# What is printed


def jobs(model: str, dtype: str) -> list[Job]:
    kinds = [("mix", lambda K: 1), ("mix", lambda K: K), ("gram", lambda K: 1), ("gram_mix", lambda K: 1)]
    return [Job(kernel, K, dtype, model, M(K)) for kernel, M in kinds for K in CLIENTS]


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]


def times_table(model: str) -> list[str]:
    head = ["job", "K", *(f"{gpu.name}, {dtype}" for gpu in GPUS for dtype in ("float32", "bfloat16"))]
    rows = []
    for plain in jobs(model, "float32"):
        cells = []
        for gpu in GPUS:
            for dtype in ("float32", "bfloat16"):
                job = Job(plain.kernel, plain.K, dtype, model, plain.M)
                cost, R = predict(gpu, job), one_read(gpu, job)
                low, high = _ms(cost.seconds), _ms(1.5 * cost.seconds)
                cells.append(f"{low} to {high} ms, {cost.seconds / R:.1f} R, {cost.limit}")
        name = "mix to K" if plain.kernel == "mix" and plain.M > 1 else "mix" if plain.kernel == "mix" else plain.kernel
        rows.append([name, str(plain.K), *cells])
    return _table(head, rows)


def work_table() -> list[str]:
    head = ["gram of", "pairs", "tiles", "multiply-adds", "needed", "rows staged", "rows read", "HBM bytes", "L2 bytes",
            "shared bytes", "instructions", "blocks", "A100: blocks x warps per SM", "H100"]  # fmt: skip
    rows = []
    for K in CLIENTS:
        s = shape(K + 1, K > 64)
        counts = [tiles(s, *pair) for pair in pairs(s, K + 1)]
        cost = predict(A100, Job("gram", K))
        facts = cost.facts
        room = []
        for gpu in GPUS:
            c = predict(gpu, Job("gram", K))
            room.append(f"{c.blocks_per_sm} x {c.threads // 32}")
        rows.append([f"{K} x float32", str(s.pairs), str(sum(map(sum, counts))), f"{facts['multiply-adds']:.0f}",
                     str((K + 1) * (K + 2) // 2), f"{facts['staged']:.0f}", str(K + 1), f"{facts['bytes']:.0f}",
                     f"{facts['L2 bytes']:.0f}", f"{facts['shared bytes']:.0f}", f"{facts['instructions']:.0f}",
                     str(cost.blocks), *room])  # fmt: skip
    return _table(head, rows)


def registers_table() -> list[str]:
    def block(name: str) -> tuple[int, int]:
        if name.startswith("mix"):
            return 128, 0
        s = shape(21 if name.startswith("alone") else 65, name.startswith("tensor"))
        return s.threads, 25_000 if name.endswith("again") else s.shared

    rows = []
    for name in REGISTERS[80]:
        if "bfloat16" in name:
            continue
        threads, shared = block(name)
        cells = []
        for gpu in GPUS:
            registers = REGISTERS[gpu.arch][name]
            fits = gpu.blocks(threads, registers, shared)
            cells.append(f"{registers}, {fits} x {threads // 32}")
        rows.append([name.replace(" float32", ""), str(threads), f"{shared / 1024:.0f} KB", *cells])
    return _table(["kernel, float32", "threads", "shared", "A100: registers, blocks x warps per SM", "H100"], rows)


def arithmetic() -> list[str]:
    """One row of each kernel, step by step"""
    gpu, model = A100, MODELS["resnet18"]
    D, R = model.D, one_read(gpu, Job("mix", 20))
    mix, several, gram, both, large = (
        predict(gpu, job)
        for job in (Job("mix", 20), Job("mix", 20, M=20), Job("gram", 20), Job("gram_mix", 20), Job("gram", 100))
    )

    def us(cost: Cost, resource: str) -> str:
        return f"{cost.times[resource] * 1e6:.0f} us"

    def total(cost: Cost, R: float = R) -> str:
        return f"{cost.seconds * 1e6:.0f} us = {cost.seconds / R:.2f} R"

    f, s = gram.facts, shape(21, False)
    rounds = -(-21 * s.elements // (4 * s.threads * IN_FLIGHT["alone"]["float32"]))
    busy = s.elements * max(f["fp32"] / gpu.fp32, f["instructions"] / (32 * gpu.issue))
    flying, needed = mix.blocks_per_sm * 128 * 8 * 16 / 1024, gpu.hbm * gpu.hbm_latency / gpu.clock / gpu.sms / 1024
    return [
        f"**R**: 20 x {D / 1e6:.2f} M x 4 bytes = {80 * D / 1e6:.0f} MB at 2.039 TB/s take {R * 1e6:.0f} us.",
        "",
        "**mix**",
        f"- HBM: (20 + 1) x 4 bytes per element, {us(mix, 'HBM')}; this takes longest.",
        f"- 20 float64 multiply-adds per element, 32 per clock on 108 SMs at 1.41 GHz: {us(mix, 'fp64')}; 21 "
        f"conversions, 16 per clock: {us(mix, 'convert')}; {mix.facts['instructions']:.0f} instructions, 128 lanes per "
        f"clock: {us(mix, 'issue')}.",
        f"- In flight: {mix.blocks_per_sm} blocks x 128 threads x 8 loads x 16 bytes = {flying:.0f} KB per SM; HBM "
        f"delivers {needed:.1f} KB to an SM in {gpu.hbm_latency} clocks.",
        f"- One launch, for floats and counters together, is added: {total(mix)}.",
        "",
        "**mix to 20 models**",
        f"- 400 float64 multiply-adds per element: {us(several, 'fp64')}, which takes longest. HBM, 40 x 4 bytes: "
        f"{us(several, 'HBM')}. Each of the five passes of four outputs converts all clients: "
        f"{us(several, 'convert')}. Total: {total(several)}.",
        "",
        "**gram**",
        f"- 21 rows are one group of 24: one pair, 3 whole tiles of 64 products and 3 diagonal tiles of 36, "
        f"{f['multiply-adds']:.0f} multiply-adds per element, of which 231 are needed. With {f['fp32'] - 300:.0f} "
        f"additions (rows minus the global model, sums over lanes) {f['fp32']:.0f} / 64 = {f['fp32'] / 64:.2f} clocks "
        f"per element and SM; x {D / 1e6:.2f} M / (108 x 1.41 GHz): {us(gram, 'fp32')}.",
        f"- HBM: 21 x 4 bytes and the partial sums, {f['bytes']:.1f} bytes: {us(gram, 'HBM')}. Shared memory and L1: "
        f"{f['shared bytes']:.0f} bytes, 128 per clock: {us(gram, 'shared')}.",
        f"- Instructions: {f['instructions']:.0f} per element, 128 lanes per clock: {us(gram, 'issue')}. Staging takes "
        f"21 rows x {STAGING[80]['float32']} / 4 = {21 * STAGING[80]['float32'] / 4:.0f} of them.",
        f"- Phases: a block stages 256 elements in {rounds} rounds of loads, {gpu.hbm_latency} clocks each, and is "
        f"busy for {busy:.0f} clocks; {gram.blocks_per_sm} blocks per SM: ({rounds * gpu.hbm_latency} + {busy:.0f}) "
        f"/ 256 / {gram.blocks_per_sm} clocks per element: {us(gram, 'phases')}.",
        f"- {gram.limit} takes longest; {f['launches']:.0f} launches and {f['small'] * 1e6:.0f} us of small kernels "
        f"are added: {total(gram)}.",
        "",
        "**gram_mix**",
        f"- In addition to gram, 4 bytes of output, 20 float64 multiply-adds, 21 conversions ({us(both, 'convert')}, "
        f"in parallel with the rest) and {20 * MIX['float32']['element']:.0f} instructions per element: "
        f"{us(both, both.limit)} of {both.limit}. Total: {total(both)}. gram and mix one after the other: "
        f"{(gram.seconds + mix.seconds) * 1e6:.0f} us.",
        "",
        "**gram on tensor cores**, K = 100",
        f"- 101 rows are two groups of 64: three pairs, 16 tiles of 16 x 32 at work, three products each, "
        f"{large.facts['multiply-adds']:.0f} tf32 multiply-adds per element: {us(large, 'tensor')} at 156 TFLOPS.",
        f"- Instructions: {large.facts['instructions']:.0f} per element, {us(large, 'issue')}: 16 tiles x "
        f"{TENSOR_STEP} x 2 and {large.facts['staged']:.0f} staged rows x {STAGING[80]['float32']} / 4. "
        f"{large.limit.capitalize()} takes longest. Total: {total(large, 5 * R)}.",
    ]  # fmt: skip


KINDS = (
    "mix 1, mix 4: one or four outputs at once, of every dtype. alone: one group of rows, K <= 23; pairs: pairs of "
    "groups of 16; tensor: pairs of groups of 64, on tensor cores. ... mix: gram_mix. ... again: the second pass, in "
    "float64."
)


def markdown() -> str:
    lines = ["### ResNet-18, 11.17 M parameters: predicted, not measured", "", *times_table("resnet18"), ""]
    lines += ["### ViT-B, 86.6 M parameters: predicted, not measured", "", *times_table("vit_b"), ""]
    lines += ["### The work of gram, per element of the model", "", *work_table(), ""]
    lines += ["### Registers and occupancy, nvcc 13.0", "", *registers_table(), "", KINDS, ""]
    lines += ["### The arithmetic of 20 x ResNet-18, float32, on an A100", "", *arithmetic()]
    return "\n".join(lines)


def every_resource() -> str:
    lines = []
    for gpu in GPUS:
        for model in MODELS:
            for dtype in ("float32", "bfloat16"):
                lines += ["", f"{gpu.name}, {MODELS[model].name}, {dtype} (ms)"]
                for job in jobs(model, dtype):
                    cost = predict(gpu, job)
                    parts = ", ".join(f"{name} {_ms(t)}" for name, t in cost.times.items())
                    said = f"  {job.name:<11} K={job.K:<4} R {_ms(one_read(gpu, job))}: {_ms(cost.seconds)} = "
                    lines.append(f"{said}{parts}; on top {_ms(cost.on_top)}")
    return "\n".join(lines[1:])


def read_registers(arch: int) -> dict[str, int]:
    """As REGISTERS, from nvcc"""
    found = {}
    target = f"arch=compute_{arch},code=sm_{arch}"
    for source in ("mix", "products", "tensor_cores"):
        with tempfile.TemporaryDirectory() as folder:
            command = ["nvcc", "-std=c++17", "-O3", "-fmad=false", "-gencode", target, "-Xptxas", "-v", "-cubin",
                       "-o", f"{folder}/x.cubin", str(ROOT / f"csrc/cuda/{source}.cu")]  # fmt: skip
            said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        for symbol, count in re.findall(r"entry function '(\S+)'.*?Used (\d+) registers", said, re.DOTALL):
            name = _kernel_name(symbol)
            if name:
                found[name] = int(count)
    return found


def _kernel_name(symbol: str) -> str:
    """From a mangled name, such as products_kernelIffLi192ELb0EE"""
    dtype = r"(f|13__nv_bfloat16)"
    names = {"f": "float32", "13__nv_bfloat16": "bfloat16"}
    if m := re.search(r"mix_kernelILi(\d)E", symbol):
        return f"mix {m[1]}"
    if m := re.search(rf"tensor_core_kernelI{dtype}E", symbol):
        return f"tensor {names[m[1]]}"
    if m := re.search(rf"products_kernelI{dtype}fLi(\d+)ELb(\d)E", symbol):
        return f"{'alone' if m[2] == '192' else 'pairs'} {names[m[1]]}" + " mix" * int(m[3])
    if m := re.search(rf"products_again_kernelI{dtype}Li(\d+)E", symbol):
        return f"{'alone' if m[2] == '192' else 'pairs'} {names[m[1]]} again"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_model", description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", action="store_true", help="read register counts from nvcc (half a minute)")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/gpu.md")
    parser.add_argument("--all", action="store_true", help="print the time of every resource instead")
    args = parser.parse_args()
    if args.nvcc:
        for arch, stored in REGISTERS.items():
            found = read_registers(arch)
            for name, count in found.items():
                if stored.get(name) != count:
                    print(f"sm_{arch}, {name}: {count} registers, {stored.get(name)} stored", file=sys.stderr)
            REGISTERS[arch] = stored | found
    if args.write:
        text = DOC.read_text()
        before, rest = text.split(BEGIN)
        DOC.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{rest.split(END)[1]}")
    else:
        print(every_resource() if args.all else markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
