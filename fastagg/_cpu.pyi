"""Native CPU kernels, from csrc/bind_cpu.cpp and csrc/bind_table.cpp: addresses of the tensors of K clients, [T, K]"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def gram(
    client: NDArray[np.int64],
    numel: NDArray[np.int64],
    dtype: NDArray[np.int32],
    center: NDArray[np.int64],
    layer: NDArray[np.int32],
    per_layer: bool,
    out: NDArray[np.float64],
    threads: int,
    /,
) -> None: ...
def mix(
    client: NDArray[np.int64],
    numel: NDArray[np.int64],
    dtype: NDArray[np.int32],
    weights: NDArray[np.float64],
    row: NDArray[np.int32],
    out: NDArray[np.int64],
    not_finite: NDArray[np.uint8],
    threads: int,
    /,
) -> None: ...
def gram_mix(
    client: NDArray[np.int64],
    numel: NDArray[np.int64],
    dtype: NDArray[np.int32],
    center: NDArray[np.int64],
    layer: NDArray[np.int32],
    per_layer: bool,
    gram_out: NDArray[np.float64],
    weights: NDArray[np.float64],
    row: NDArray[np.int32],
    out: NDArray[np.int64],
    not_finite: NDArray[np.uint8],
    threads: int,
    /,
) -> None: ...
def gram_times(
    client: NDArray[np.int64],
    numel: NDArray[np.int64],
    dtype: NDArray[np.int32],
    center: NDArray[np.int64],
    layer: NDArray[np.int32],
    per_layer: bool,
    products: NDArray[np.float64],
    weights: NDArray[np.float64],
    row: NDArray[np.int32],
    out: NDArray[np.int64] | None,
    not_finite: NDArray[np.uint8],
    threads: int,
    /,
) -> None: ...
def ranked_means(
    client: NDArray[np.int64],
    numel: NDArray[np.int64],
    dtype: NDArray[np.int32],
    center: NDArray[np.int64] | None,
    means: NDArray[np.int64],
    row: NDArray[np.int32],
    out: NDArray[np.int64],
    not_finite: NDArray[np.uint8],
    mixing: NDArray[np.float64] | None,
    threads: int,
    /,
) -> None: ...
def dots(
    client: NDArray[np.int64],
    numel: NDArray[np.int64],
    dtype: NDArray[np.int32],
    left: NDArray[np.int64],
    row: NDArray[np.int32],
    out: NDArray[np.float64],
    threads: int,
    /,
) -> None: ...
def read_all(
    client: NDArray[np.int64], numel: NDArray[np.int64], dtype: NDArray[np.int32], piece: int, threads: int, /
) -> int: ...
def fma_peak(iterations: int, threads: int, /) -> float: ...
def cache_bytes() -> int: ...
def set_cache_bytes(n: int, /) -> None: ...
def simd_level() -> str: ...
def simd_best() -> str: ...
def simd_levels() -> list[str]: ...
def set_simd(level: str, /) -> bool: ...
def scan(
    functions: NDArray[np.int64],
    codes_of_torch: NDArray[np.int32],
    types: tuple[type, ...],
    handle: int,
    models: list[dict[str, Any]],
    keys: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    codes: NDArray[np.int32],
    device_type: int,
    device_index: int,
    out: NDArray[np.int64],
    /,
) -> list[tuple[list[Any], list[int]]]: ...
