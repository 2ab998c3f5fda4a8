"""Compiles what the Triton backend launches, for GPUs that need not be here: python -m helpers.triton_aot 80 90

It calls the backend with a launcher that only listens, so that kernels, signatures, block sizes and warps are those of
the real calls. Prints one JSON object per kernel and architecture. Must not run with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastagg._engine import table as tables
from fastagg._engine.backends import triton as backend
from helpers.cohort import make

POINTER = {torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
# (function, dtype, K, M, offset in elements)
CASES = [
    *(("gram", F32, K, 0, 0) for K in (5, 20, 40, 70)),
    *(("gram", dtype, 20, 0, 0) for dtype in (F64, BF16, F16)),
    *(("gram", dtype, 70, 0, 0) for dtype in (F64, BF16)),
    ("gram", F32, 20, 0, 1),
    *(("gram_mix", dtype, K, M, 0) for dtype, K, M in ((F32, 20, 1), (F32, 70, 5), (F64, 20, 5), (BF16, 20, 1))),
    *(("mix", dtype, 20, M, 0) for dtype, M in ((F32, 1), (F32, 5), (F64, 5), (BF16, 1), (BF16, 5), (F16, 1))),
    *(("mix", dtype, 20, 1, 0) for dtype in (torch.int64, torch.bool)),
    ("mix", F32, 20, 1, 1),
    *(("dots", dtype, 20, 1, 0) for dtype in (F32, F64, BF16)),
    *(
        ("gram_times", dtype, K, 1, 0)
        for dtype, K in ((F32, 5), (F32, 20), (F32, 40), (F64, 40), (BF16, 40), (F16, 20))
    ),
    ("gram_times", F32, 40, 1, 1),
    *(("gram_times_mix", dtype, 40, M, 0) for dtype, M in ((F32, 1), (F32, 3), (BF16, 1))),
    *(("ranked_means", dtype, K, 1, 0) for dtype, K in ((F32, 5), (F32, 20), (F64, 40), (BF16, 20), (F16, 20))),
    *(("ranked_means", dtype, 20, 1, 0) for dtype in (torch.int64, torch.bool)),
    *(("ranked_means_mixed", dtype, 20, 1, 0) for dtype in (F32, F64, BF16)),
]
# Architectures other than the first get what differs in kind only
SHORT = [case for case in CASES if case[:3] in {("gram", F32, 5), ("gram", F32, 20), ("gram", F32, 70)} and not case[4]]
SHORT += [("gram", F64, 70, 0, 0), ("gram_mix", F32, 20, 1, 0), ("mix", F32, 20, 1, 0), ("mix", F64, 20, 5, 0)]
SHORT += [("gram_times", F32, 20, 1, 0), ("gram_times_mix", F32, 40, 1, 0), ("ranked_means", F32, 20, 1, 0)]
SHORT += [("ranked_means", F64, 40, 1, 0), ("ranked_means_mixed", F32, 20, 1, 0)]


def launches(cases) -> dict[tuple, tuple]:
    """(kernel name, constants) -> (kernel, signature, attributes, constants, example of a call)"""
    found: dict[tuple, tuple] = {}
    for function, dtype, K, M, offset in cases:

        def listen(table, kernel, grid, *args, case=(function, str(dtype), K, M, offset), **constants):
            given = iter(args)
            values = {name: next(given) for name in kernel.arg_names if name not in constants}
            signature = {name: _type(values[name]) if name in values else "constexpr" for name in kernel.arg_names}
            attributes = {
                (i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name][0] == "*"
            }
            key = kernel.__name__, str(sorted(constants.items(), key=str))
            found.setdefault(key, (kernel, signature, attributes, constants, case))

        backend._launch = listen
        g, clients = make(K, {"w": (2048,)}, dtype, offset=offset)
        table = tables.build(g, clients)
        out = [[t] for sd in make(M, {"w": (2048,)}, dtype, offset=offset)[1] for t in sd.values()]
        row, weights = np.zeros(1, np.int32), torch.ones(1, M, K, dtype=torch.float64)
        if function == "gram":
            backend.gram(table, row, 1, False)
        elif function == "mix":
            backend.mix(table, weights, row, out)
        elif function == "gram_mix":
            backend.gram_mix(table, row, 1, False, weights, row, out)
        elif function == "dots":
            backend.dots(table, out, row, 1)
        elif function.startswith("ranked_means"):
            mixing = np.eye(K) if function == "ranked_means_mixed" else None
            backend.ranked_means(table, np.array([[[1, K - 1, 2]]]), row, out, None, mixing)
        else:
            backend.gram_times(table, row, 1, False, weights, row, out if function == "gram_times_mix" else None)
    return found


def _type(value) -> str:
    return POINTER[value.dtype] if isinstance(value, torch.Tensor) else "i32"


def compiled(arch: int, kernel, signature, attributes, constants, case) -> dict:
    options = {"num_warps": constants["num_warps"]}
    constants = {name: value for name, value in constants.items() if name != "num_warps"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    asm = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm
    return {
        "arch": arch, "kernel": kernel.__name__, "case": case, "cubin": len(asm["cubin"]), **resources(asm["cubin"]),
        "constants": {name: value if isinstance(value, int) else str(value) for name, value in constants.items()},
        "tf32": len(re.findall(r"mma[.:\w]*tf32", asm["ptx"])),
        "16 bytes": len(re.findall(r"cp\.async\.cg|ld\.global[.:\w]*(\.v4\.[bfu]32|\.v2\.[bfu]64)", asm["ptx"])),
    }  # fmt: skip


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes it spills to the stack; nothing if Triton came without cuobjdump"""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(re.search(rf"{name.upper()}:(\d+)", said.stdout)[1]) for name in ("reg", "stack")}


if __name__ == "__main__":
    first, *others = map(int, sys.argv[1:])
    for arch, cases in [(first, CASES), *((arch, SHORT) for arch in others)]:
        for launch in launches(cases).values():
            print(json.dumps(compiled(arch, *launch)), flush=True)
