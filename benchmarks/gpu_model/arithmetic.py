"""One row of each kernel, step by step, as docs/gpu.md shows it."""

from __future__ import annotations

from benchmarks.gpu_model.costs import Cost, one_read, predict
from benchmarks.gpu_model.counts import IN_FLIGHT, MIX, STAGING, TENSOR_STEP
from benchmarks.gpu_model.cuts import shape
from benchmarks.gpu_model.devices import A100
from benchmarks.gpu_model.jobs import MODELS, Job


def arithmetic() -> list[str]:
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
