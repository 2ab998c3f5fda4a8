"""Register counts as nvcc reports them."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

from benchmarks.gpu_model.counts import REGISTERS
from benchmarks.publish import ROOT


def update() -> None:
    """Puts nvcc's counts into REGISTERS, and prints which of them are others than those stored"""
    for arch, stored in REGISTERS.items():
        found = read_registers(arch)
        for name, count in found.items():
            if stored.get(name) != count:
                print(f"sm_{arch}, {name}: {count} registers, {stored.get(name)} stored", file=sys.stderr)
        REGISTERS[arch] = stored | found


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
            name = kernel_name(symbol)
            if name:
                found[name] = int(count)
    return found


def kernel_name(symbol: str) -> str:
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
