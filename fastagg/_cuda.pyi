"""Native CUDA kernels, from csrc/bind_cuda.cpp. Arrays are addresses of device memory, a stream is its handle."""

from typing import overload

chunk_elements: int

class Work:
    def __init__(self, *, items: int, first: int, count: int, order: int, numel: int) -> None: ...

class Rows:
    def __init__(self, *, address: int, aligned: int, rows: int) -> None: ...

class Mix:
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(
        self,
        *,
        rows: Rows,
        first: int,
        clients: int,
        weights: int,
        row: int,
        out: int,
        aligned: int,
        dtype: int,
        not_finite: int,
        outputs: int,
    ) -> None: ...

def why_no_device() -> str: ...
def code_version(device: int, /) -> int: ...
def shape(a_rows: int, b_rows: int, triangle: bool, tensor_cores: bool, /) -> tuple[int, int]: ...
def mix(work: Work, mix: Mix, device: int, stream: int, /) -> None: ...
def products(
    dtype: int,
    work: Work,
    rows: Rows,
    *,
    a_first: int,
    a_rows: int,
    b_first: int,
    b_rows: int,
    triangle: bool,
    centred: bool,
    partial: int,
    flags: int,
    mix: Mix,
    tensor_cores: bool,
    device: int,
    stream: int,
) -> None: ...
def times(
    dtype: int,
    work: Work,
    rows: Rows,
    *,
    vectors: int,
    partial: int,
    flags: int,
    mix: Mix,
    device: int,
    stream: int,
) -> None: ...
def ranked_scratch(dtype: int, sorted: int, mixed: bool) -> int: ...
def ranked_means(
    dtype: int,
    work: Work,
    rows: Rows,
    *,
    means: int,
    row: int,
    out: int,
    outputs: int,
    not_finite: int,
    mixing: int,
    sorted: int,
    scratch: int,
    device: int,
    stream: int,
) -> None: ...
def reduce(
    *,
    partial: int,
    first_slot: int,
    groups: int,
    slices: int,
    a_rows: int,
    b_rows: int,
    triangle: bool,
    group: int,
    total: int,
    device: int,
    stream: int,
) -> None: ...
