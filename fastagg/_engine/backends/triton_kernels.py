"""What runs on the GPU for triton.py: row products, their sums, and the mix."""

# Triton compiles these functions. In their bodies a constexpr is the value it holds, which type checkers cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from fastagg._engine.backends import plan

CHUNK = tl.constexpr(plan.CHUNK)
SPAN = tl.constexpr(256)  # elements after which gram_mix mixes: what it has read of all clients still is in the cache
CLIENTS = tl.constexpr(8)  # loads of mix that are under way at once
# Rows whose largest value is between sqrt(count) / SCALE and MOST have squares that float32 adds without harm: STEP of
# them do not overflow, and what is lost below 2^-149 is nothing beside a sum of count * 2^-116.
MOST = tl.constexpr(2.0**61)
SCALE = tl.constexpr(2.0**58)


@triton.jit
def _at(address, e, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to elements e of the rows at address: [n, len(e)]. Says so if 16 bytes can be read at once."""
    p = address.to(tl.pointer_type(DTYPE))[:, None] + e[None, :]
    if ALIGNED:
        p = tl.max_contiguous(tl.multiple_of(p, [1, 16]), [1, 128 // DTYPE.primitive_bitwidth])
    return p


@triton.jit
def _read(
    address, center, row, R, e, end,
    MASKED: tl.constexpr, CENTRED: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Elements e of some rows, less the global model's unless that is the row: [GROUP, STEP]. 0 where there is none."""
    real: tl.constexpr = tl.float64 if WIDE else tl.float32
    inside = (e < end)[None, :] if MASKED else None  # only the last step has such a mask: it stops 16-byte loads
    some = (row < R)[:, None]
    if MASKED:
        some = some & inside
    x = tl.load(_at(address, e, ALIGNED, DTYPE), mask=some, other=0).to(real)
    if CENTRED:
        g = tl.load(_at(center, e, ALIGNED, DTYPE), mask=inside).to(real)  # [1, STEP]
        x -= tl.where(some & (row > 0)[:, None], g, 0)
    return x


@triton.jit
def _step(
    sums, top_a, top_b, at_a, at_b, center, a, b, R, e, end, MASKED: tl.constexpr, CENTRED: tl.constexpr,
    SAME: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the products of STEP elements to sums, and keeps the largest values."""
    x = _read(at_a, center, a, R, e, end, MASKED, CENTRED, ALIGNED, DTYPE, WIDE)
    y = x if SAME else _read(at_b, center, b, R, e, end, MASKED, CENTRED, ALIGNED, DTYPE, WIDE)
    if WIDE:
        sums = tl.dot(x, tl.trans(y), sums, input_precision="ieee", out_dtype=tl.float64)
    else:
        sums += tl.dot(x, tl.trans(y), input_precision=PRECISION).to(tl.float64)
        top_a = tl.maximum(top_a, tl.abs(x))
        if not SAME:
            top_b = tl.maximum(top_b, tl.abs(y))
    return sums, top_a, top_b


@triton.jit
def _leaves_float32(top, count):
    """1 if a row's squares are too large or too small to be added in float32; a row of zeros is neither."""
    most = tl.max(top, 1)  # [GROUP]
    scaled = most * SCALE
    return tl.max(((most > MOST) | ((most > 0) & (scaled * scaled < count.to(tl.float32)))).to(tl.int32), 0)


@triton.jit(do_not_specialize=["first", "R", "P", "M"])
def products(
    first, rows, pairs, numel, order, items, R, P, partial, flags, out, weight_row, weights, marks, M,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, AGAIN: tl.constexpr, CENTRED: tl.constexpr, SAME: tl.constexpr,
    GROUP: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """partial[slot, pair] = products of two groups of rows over an item. AGAIN: only where a flag was raised."""
    pair = tl.program_id(1)
    item = items + (first + tl.program_id(0)) * 4
    place, left = tl.load(item), tl.load(item + 2)
    at = tl.load(item + 1).to(tl.int64) * CHUNK
    slot = tl.load(item + 3).to(tl.int64) * P + pair
    if AGAIN:  # noqa: SIM102 (decided when compiling)
        if tl.load(flags + slot) == 0:
            return
    a = tl.load(pairs + 2 * pair) + tl.arange(0, GROUP)
    b = tl.load(pairs + 2 * pair + 1) + tl.arange(0, GROUP)
    sums = tl.zeros([GROUP, GROUP], tl.float64)
    top_a = tl.zeros([GROUP, STEP], tl.float32)
    top_b = top_a
    count = tl.full((), 0, tl.int64)
    while left > 0:
        t = tl.load(order + place).to(tl.int64)
        end = tl.minimum(tl.load(numel + t), at + left.to(tl.int64) * CHUNK)
        left -= tl.cdiv(end - at, CHUNK).to(tl.int32)
        count += end - at
        own = rows + t * R
        center = tl.load(own + tl.arange(0, 1))
        at_a = tl.load(own + a, mask=a < R, other=0)
        at_b = tl.load(own + b, mask=b < R, other=0)
        while at < end:
            stop = tl.minimum(at + SPAN, end) if OUTPUTS > 0 else end
            whole = stop - (stop - at) % STEP
            for e in range(at, whole, STEP):
                sums, top_a, top_b = _step(
                    sums, top_a, top_b, at_a, at_b, center, a, b, R, e + tl.arange(0, STEP), end,
                    False, CENTRED, SAME, ALIGNED, DTYPE, WIDE, PRECISION,
                )  # fmt: skip
            if whole < stop:
                sums, top_a, top_b = _step(
                    sums, top_a, top_b, at_a, at_b, center, a, b, R, whole + tl.arange(0, STEP), end,
                    True, CENTRED, SAME, ALIGNED, DTYPE, WIDE, PRECISION,
                )  # fmt: skip
            if OUTPUTS > 0:  # noqa: SIM102
                if (t + at // SPAN) % P == pair:  # the blocks of this item share the work
                    own_weights = weights + tl.load(weight_row + t).to(tl.int64) * M * (R - 1)
                    _mix_span(
                        own + 1, out + t * M, own_weights, marks + t, at, end, R - 1, M, SPAN, OUTPUTS, ALIGNED, DTYPE
                    )
            at = stop
        place += 1
        at = tl.full((), 0, tl.int64)
    entry = tl.arange(0, GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(partial + slot * (GROUP * GROUP) + entry, sums)
    if not WIDE:
        tl.store(flags + slot, tl.maximum(_leaves_float32(top_a, count), _leaves_float32(top_b, count)))


@triton.jit(do_not_specialize=["P", "end_a", "end_b", "origin"])
def add_slots(
    partial, pairs, first_slot, out, P, end_a, end_b, origin,
    SYMMETRIC: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """out[owner] = sum of the owner's slots, always in the same order. A symmetric result is read where i >= j."""
    blocks: tl.constexpr = GROUP * GROUP // ENTRIES
    pair, owner = tl.program_id(0) // blocks, tl.program_id(1)
    entry = tl.program_id(0) % blocks * ENTRIES + tl.arange(0, ENTRIES)
    last = tl.load(first_slot + owner + 1)
    sums = tl.zeros([SLOTS, ENTRIES], tl.float64)
    for at in range(tl.load(first_slot + owner), last, SLOTS):
        slot = (at + tl.arange(0, SLOTS))[:, None]
        p = partial + (slot.to(tl.int64) * P + pair) * (GROUP * GROUP) + entry[None, :]
        sums += tl.load(p, mask=slot < last, other=0)
    total = tl.sum(sums, 0)
    i = tl.load(pairs + 2 * pair) + entry // GROUP
    j = tl.load(pairs + 2 * pair + 1) + entry % GROUP
    wanted = (i < end_a) & (j < end_b) & ((i >= j) if SYMMETRIC else True)
    to = out + owner.to(tl.int64) * (end_a - origin) * end_b
    tl.store(to + (i - origin).to(tl.int64) * end_b + j, total, mask=wanted)
    if SYMMETRIC:
        tl.store(to + j.to(tl.int64) * end_b + i, total, mask=wanted)


@triton.jit(do_not_specialize=["layers", "size"])
def add_layers(parts, out, layers, size, ENTRIES: tl.constexpr):
    """out = sum of parts [layers, size], one after the other: their order is part of the contract."""
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    total = tl.zeros([ENTRIES], tl.float64)
    for layer in range(layers):
        total += tl.load(parts + tl.cast(layer, tl.int64) * size + e, mask=e < size)
    tl.store(out + e, total, mask=e < size)


@triton.jit(do_not_specialize=["first", "K", "M"])
def mix(
    first, rows, numel, order, items, out, weight_row, weights, marks, K, M,
    DTYPE: tl.constexpr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    item = items + (first + tl.program_id(0)) * 4
    place, left = tl.load(item), tl.load(item + 2)
    at = tl.load(item + 1).to(tl.int64) * CHUNK
    while left > 0:
        t = tl.load(order + place).to(tl.int64)
        end = tl.minimum(tl.load(numel + t), at + left.to(tl.int64) * CHUNK)
        left -= tl.cdiv(end - at, CHUNK).to(tl.int32)
        own_weights = weights + tl.load(weight_row + t).to(tl.int64) * M * K
        for start in range(at, end, CHUNK):
            _mix_span(
                rows + t * K, out + t * M, own_weights, marks + t, start, end, K, M, CHUNK, OUTPUTS, ALIGNED, DTYPE
            )
        place += 1
        at = tl.full((), 0, tl.int64)


@triton.jit
def _mix_span(
    clients, out, weights, mark, at, end, K, M,
    N: tl.constexpr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Mixes N elements from `at` on, up to the end: clients [K] and out [M] are addresses, weights is [M, K]. mark is
    set where an output is not finite."""
    if at + N <= end:
        _mix_elements(clients, out, weights, mark, at, end, K, M, N, OUTPUTS, ALIGNED, DTYPE, False)
    else:
        _mix_elements(clients, out, weights, mark, at, end, K, M, N, OUTPUTS, ALIGNED, DTYPE, True)


@triton.jit
def _mix_elements(
    clients, out, weights, mark, at, end, K, M,
    N: tl.constexpr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    e = at + tl.arange(0, N)
    inside = (e < end)[None, :] if MASKED else tl.full([1, 1], 1, tl.int1)
    one = tl.arange(0, 1)
    real: tl.constexpr = tl.float64 if DTYPE.primitive_bitwidth >= 32 else tl.float32
    for first in range(0, M, OUTPUTS):
        m = first + tl.arange(0, OUTPUTS)
        if DTYPE.is_int():
            mixed = tl.load(_at(tl.load(clients + one), e, ALIGNED, DTYPE), mask=inside, other=0)  # [1, N]
            for k in range(1, K):
                x = tl.load(_at(tl.load(clients + k + one), e, ALIGNED, DTYPE), mask=inside, other=0)
                mixed = tl.maximum(mixed, x)
        else:
            mixed = tl.zeros([OUTPUTS, N], real)
            for some in range(0, K, CLIENTS):
                for i in tl.static_range(CLIENTS):
                    k = some + i + one  # [1]
                    p = _at(tl.load(clients + k, mask=k < K, other=0), e, ALIGNED, DTYPE)
                    x = tl.load(p, mask=inside & (k < K)[:, None], other=0).to(real)  # [1, N]
                    w = tl.load(weights + m * K + k, mask=(m < M) & (k < K), other=0).to(real)  # [OUTPUTS]
                    mixed = tl.fma(tl.broadcast_to(w[:, None], mixed.shape), tl.broadcast_to(x, mixed.shape), mixed)
        p = _at(tl.load(out + m, mask=m < M, other=0), e, ALIGNED, DTYPE)
        y = tl.broadcast_to(mixed.to(DTYPE), [OUTPUTS, N])
        real_output = tl.broadcast_to(inside & (m < M)[:, None], [OUTPUTS, N])
        tl.store(p, y, mask=real_output)
        if not DTYPE.is_int():
            bad = real_output & ~(tl.abs(y.to(real)) < float("inf"))  # hardly ever: no lane stores
            tl.store(mark + tl.zeros([OUTPUTS, N], tl.int32), 1, mask=bad)
