"""The time of a job: of each part of the GPU, of which the longest counts, and what comes on top."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks.gpu_model.counts import FOLD, IN_FLIGHT, MIX, REGISTERS, STAGING, TENSOR_STEP
from benchmarks.gpu_model.cuts import pairs, shape, tiles
from benchmarks.gpu_model.devices import GPU
from benchmarks.gpu_model.jobs import MODELS, Job

BLOCKS_AGAIN = 256


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
