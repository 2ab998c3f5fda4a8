"""Registers and instructions of the compiled kernels."""

from __future__ import annotations

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
