"""What runs on the GPU for gram_times of triton.py: products of the Gram with vectors, without the Gram."""

# Triton compiles these functions. In their bodies a constexpr is the value it holds, which type checkers cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from fastagg._engine.backends.triton_kernels import CHUNK, _at, _mix_span, _read

# Squares of the length of a row, or of a scaled u, that float32 products can be trusted with
LEAST = tl.constexpr(2.0**-100)
MOST = tl.constexpr(2.0**100)
BARELY = tl.constexpr(2.0**-1000)  # what has become zero must not be taken for it


@triton.jit(do_not_specialize=["K", "V"])
def find_scales(weights, scales, K, V, CLIENTS_AT_ONCE: tl.constexpr):
    """scales [2, V]: 2^-e, and 2^e, for each of the V vectors of weights [V, K], whose largest is in [2^(e-1), 2^e).
    With the first of them, u is as large as an update, whatever the weights."""
    v = tl.program_id(0).to(tl.int64)
    most = tl.zeros([CLIENTS_AT_ONCE], tl.float64)
    for first in range(0, K, CLIENTS_AT_ONCE):
        k = first + tl.arange(0, CLIENTS_AT_ONCE)
        most = tl.maximum(most, tl.abs(tl.load(weights + v * K + k, mask=k < K, other=0)))
    bits = tl.max(most, 0).to(tl.int64, bitcast=True)
    e = tl.minimum(tl.maximum((bits >> 52) - 1022, -1000), 1000)
    tl.store(scales + v, ((1023 - e) << 52).to(tl.float64, bitcast=True))
    tl.store(scales + V + v, ((1023 + e) << 52).to(tl.float64, bitcast=True))


@triton.jit
def _update_sums(x, r, R, weights):
    """The part that rows r have in u: their x [GROUP, PIECE] times weights [R - 1], of which row 0 has none"""
    w = tl.load(weights + r - 1, mask=(r > 0) & (r < R), other=0)
    return tl.sum(w[:, None] * x.to(tl.float64), 0)


@triton.jit
def _square(x, total):
    return tl.where((total == 0) & (tl.max(tl.abs(x), 1) > 0), BARELY, total.to(tl.float64))


@triton.jit
def _add(p, value, i, n, started):
    """To what is at p, where i < n; if nothing has been written there yet, started is 0"""
    tl.store(p, tl.load(p, mask=i < n * started, other=0) + value, mask=i < n)


@triton.jit
def _multiply(x, g, u, inverse, r, R, sums, M, m, started):
    """Adds the products of rows r with u, and those with themselves and with g along with the first u"""
    p = sums + r * (2 + M)
    _add(p + 2 + m, tl.sum(x * u, 1).to(tl.float64) * inverse, r, R, started)
    if m == 0:
        _add(p, _square(x, tl.sum(x * x, 1)), r, R, started)
        _add(p + 1, tl.sum(x * g, 1).to(tl.float64), r, R, started)


@triton.jit
def _piece(
    own, weights, scales, V, sums, squares, started, R, M, e, end, MASKED: tl.constexpr, ALONE: tl.constexpr,
    GROUP: tl.constexpr, PIECE: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds the products of elements e of all rows to sums [R, 2 + M], and the squares of u to squares [M]"""
    real: tl.constexpr = tl.float64 if WIDE else tl.float32
    center = tl.load(own + tl.arange(0, 1))
    inside = (e < end)[None, :] if MASKED else None
    g = tl.load(_at(center, e, ALIGNED, DTYPE), mask=inside, other=0 if MASKED else None).to(real)  # [1, PIECE]
    rows = tl.arange(0, GROUP)
    x = tl.zeros([GROUP, PIECE], real)
    if ALONE:
        at = tl.load(own + rows, mask=rows < R, other=0)
        x = _read(at, center, rows, R, e, end, MASKED, True, ALIGNED, DTYPE, WIDE)
    for m in range(M):
        sum_of_updates = tl.zeros([PIECE], tl.float64)
        if ALONE:
            sum_of_updates = _update_sums(x, rows, R, weights + m * (R - 1))
        else:
            for base in range(0, R, GROUP):
                r = base + rows
                at = tl.load(own + r, mask=r < R, other=0)
                y = _read(at, center, r, R, e, end, MASKED, True, ALIGNED, DTYPE, WIDE)
                sum_of_updates += _update_sums(y, r, R, weights + m * (R - 1))
        scaled = (sum_of_updates * tl.load(scales + m))[None, :]
        one = tl.arange(0, 1)
        _add(squares + m + one, _square(scaled, tl.sum(scaled * scaled, 1)), one, 1, started)
        u = scaled.to(real)
        inverse = tl.load(scales + V + m)
        if ALONE:
            _multiply(x, g, u, inverse, rows, R, sums, M, m, started)
        else:
            for base in range(0, R, GROUP):
                r = base + rows
                at = tl.load(own + r, mask=r < R, other=0)
                y = _read(at, center, r, R, e, end, MASKED, True, ALIGNED, DTYPE, WIDE)
                _multiply(y, g, u, inverse, r, R, sums, M, m, started)
    tl.debug_barrier()  # sums are read again by other threads than wrote them


@triton.jit
def _not_trusted(square):
    return tl.max(((square != 0) & ~((square >= LEAST) & (square <= MOST))).to(tl.int32), 0)


@triton.jit(do_not_specialize=["first", "R", "V", "M"])
def times(
    first, rows, numel, order, items, R, partial, squares, flags, out, weight_row, weights, scales, V, marks, M,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, AGAIN: tl.constexpr, ALONE: tl.constexpr, GROUP: tl.constexpr,
    PIECE: tl.constexpr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """partial[slot] = <r, r>, <r, g> and <r, u_m> of every row r, [R, 2 + M], over an item. AGAIN: only where a flag
    was raised. ALONE: the rows are one group, read once. With OUTPUTS, mixes as well."""
    item = items + (first + tl.program_id(0)) * 4
    place, left = tl.load(item), tl.load(item + 2)
    at = tl.load(item + 1).to(tl.int64) * CHUNK
    slot = tl.load(item + 3).to(tl.int64)
    if AGAIN:  # noqa: SIM102 (decided when compiling)
        if tl.load(flags + slot) == 0:
            return
    sums, own_squares = partial + slot * R * (2 + M), squares + slot * M
    started = tl.full((), 0, tl.int32)
    while left > 0:
        t = tl.load(order + place).to(tl.int64)
        end = tl.minimum(tl.load(numel + t), at + left.to(tl.int64) * CHUNK)
        left -= tl.cdiv(end - at, CHUNK).to(tl.int32)
        own = rows + t * R
        vector = tl.load(weight_row + t).to(tl.int64) * M
        own_weights = weights + vector * (R - 1)
        for begin in range(at, end, PIECE):
            e = begin + tl.arange(0, PIECE)
            if begin + PIECE <= end:
                _piece(
                    own, own_weights, scales + vector, V, sums, own_squares, started, R, M, e, end,
                    False, ALONE, GROUP, PIECE, ALIGNED, DTYPE, WIDE,
                )  # fmt: skip
            else:
                _piece(
                    own, own_weights, scales + vector, V, sums, own_squares, started, R, M, e, end,
                    True, ALONE, GROUP, PIECE, ALIGNED, DTYPE, WIDE,
                )  # fmt: skip
            if OUTPUTS > 0:
                _mix_span(
                    own + 1, out + t * M, own_weights, marks + t, begin, end, R - 1, M, PIECE, OUTPUTS, ALIGNED, DTYPE
                )
            started = tl.full((), 1, tl.int32)
        place += 1
        at = tl.full((), 0, tl.int64)
    if not WIDE:
        bad = tl.full((), 0, tl.int32)
        for base in range(0, R, GROUP):
            r = base + tl.arange(0, GROUP)
            bad = tl.maximum(bad, _not_trusted(tl.load(sums + r * (2 + M), mask=r < R, other=0)))
        for m in range(M):
            bad = tl.maximum(bad, _not_trusted(tl.load(own_squares + m + tl.arange(0, 1))))
        tl.store(flags + slot, bad)


@triton.jit(do_not_specialize=["size"])
def add_items(partial, first_slot, out, size, ENTRIES: tl.constexpr, SLOTS: tl.constexpr):
    """out[owner] = sum of the owner's slots of partial [slots, size], always in the same order"""
    e, owner = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES), tl.program_id(1)
    last = tl.load(first_slot + owner + 1)
    sums = tl.zeros([SLOTS, ENTRIES], tl.float64)
    for at in range(tl.load(first_slot + owner), last, SLOTS):
        slot = (at + tl.arange(0, SLOTS))[:, None]
        p = partial + slot.to(tl.int64) * size + e[None, :]
        sums += tl.load(p, mask=(slot < last) & (e < size)[None, :], other=0)
    tl.store(out + owner.to(tl.int64) * size + e, tl.sum(sums, 0), mask=e < size)
