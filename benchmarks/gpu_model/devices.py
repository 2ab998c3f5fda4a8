"""The GPUs: what each of their parts does per clock, and how many blocks an SM has room for."""

from __future__ import annotations

from dataclasses import dataclass


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
