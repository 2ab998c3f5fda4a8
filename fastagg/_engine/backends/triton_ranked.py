"""What runs on the GPU for ranked_means of triton.py: the values of each element in order, and means of them."""

# Triton compiles these functions. In their bodies a constexpr is the value it holds, which type checkers cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from fastagg._engine.backends.triton_kernels import CHUNK


@triton.jit
def _values(own, mixed, r, R, e, inside, N: tl.constexpr, DTYPE: tl.constexpr, MIXED: tl.constexpr):
    """Elements e of rows r: of the clients, whose addresses follow own, or of what they were mixed to, [R, N].
    [len(r), N]"""
    some = (r < R)[:, None] & inside[None, :]
    if MIXED:
        x = tl.load(mixed + r[:, None] * N + tl.arange(0, N)[None, :], mask=some, other=0)
    else:
        address = tl.load(own + 1 + r, mask=r < R, other=0).to(tl.pointer_type(DTYPE))
        x = tl.load(address[:, None] + e[None, :], mask=some, other=0)
    return x.to(tl.int64 if DTYPE.is_int() else tl.float64 if MIXED or DTYPE.primitive_bitwidth == 64 else tl.float32)


@triton.jit
def _element(own, k, e, inside, DTYPE: tl.constexpr):
    """Elements e of row k of the table, row 0 being the global model, in float64: [N]"""
    return tl.load(tl.load(own + k).to(tl.pointer_type(DTYPE)) + e, mask=inside, other=0).to(tl.float64)


@triton.jit
def _mix(own, factors, mixed, K, R, e, inside, N: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """mixed [R, N] = the sums of the clients, in their order, and of the global model with factors [K + 1, R].
    Gives what _sort does."""
    bad = tl.zeros([N], tl.int32)
    for base in range(0, R, GROUP):
        r = base + tl.arange(0, GROUP)
        total = tl.zeros([GROUP, N], tl.float64)
        for k in range(K + 1):
            x = _element(own, tl.where(k < K, k + 1, 0), e, inside, DTYPE)
            bad |= ((k < K) & ~(tl.abs(x) < float("inf"))).to(tl.int32)
            f = tl.broadcast_to(tl.load(factors + k * R + r, mask=r < R, other=0)[:, None], total.shape)
            total = tl.where((k < K) | (f != 0), tl.fma(f, tl.broadcast_to(x[None, :], total.shape), total), total)
        tl.store(mixed + r[:, None] * N + tl.arange(0, N)[None, :], total, mask=(r < R)[:, None])
    tl.debug_barrier()  # they are read by other threads than wrote them
    return bad


@triton.jit
def _sort(
    own, mixed, ordered, R, e, inside, N: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr, MIXED: tl.constexpr
):
    """ordered [R, N]: every value in the place of its rank, which is the number of values below it; of equal ones the
    first comes first. Gives 1 where one is not finite, [N]."""
    bad = tl.zeros([N], tl.int32)
    for base in range(0, R, GROUP):
        r = base + tl.arange(0, GROUP)
        x = _values(own, mixed, r, R, e, inside, N, DTYPE, MIXED)
        if not DTYPE.is_int():
            bad |= tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 0)
        rank = tl.zeros([GROUP, N], tl.int32)
        for k in range(R):
            other = _values(own, mixed, k + tl.arange(0, 1), R, e, inside, N, DTYPE, MIXED)  # [1, N]
            rank += ((other < x) | ((other == x) & (k < r)[:, None])).to(tl.int32)
        to = ordered + rank * N + tl.arange(0, N)[None, :]
        tl.store(to, x.to(ordered.dtype.element_ty), mask=(r < R)[:, None] & inside[None, :])
    tl.debug_barrier()
    return bad


@triton.jit
def _around(s, begin, at, end, N: tl.constexpr):
    return tl.load(s + tl.where(at < end, at, at - end + begin) * N + tl.arange(0, N)).to(tl.float64)


@triton.jit
def _mean(s, begin, start, end, count, N: tl.constexpr):
    """The mean of `count` rows of s from `start` on, and around from `end` to `begin`, added in this order: [N]"""
    total = tl.zeros([N], tl.float64)
    number = count.to(tl.float64)
    for i in range(count):
        total += _around(s, begin, start + i, end, N)
    mean = total / number
    if s.dtype.element_ty == tl.float64:
        too_large = ~(tl.abs(mean) < float("inf"))
        if tl.max(too_large.to(tl.int32), 0) > 0:  # values near the end of float64
            scaled = tl.zeros([N], tl.float64)
            for i in range(count):
                scaled += _around(s, begin, start + i, end, N) / number
            largest = 1.7976931348623157e308  # which the mean must not pass by a rounding
            mean = tl.where(too_large, tl.minimum(tl.maximum(scaled, -largest), largest), mean)
    return mean


@triton.jit
def _ranked_mean(s, g, low, high, nearest, R, N: tl.constexpr):
    center = g
    if high > low:
        center = _mean(s, low, low + tl.zeros([N], tl.int32), high, high - low, N)
    if nearest > 0:
        # The nearest are neighbours: the lowest ones, moved up as long as the next above is nearer than the lowest.
        begin = tl.zeros([N], tl.int32)
        for a in range(R - nearest):
            lowest = tl.load(s + a * N + tl.arange(0, N)).to(tl.float64)
            following = tl.load(s + (a + nearest) * N + tl.arange(0, N)).to(tl.float64)
            begin += (lowest * 0.5 + following * 0.5 < center).to(tl.int32)
        # One that moves takes the place of another in the definition's sum, which begins at a multiple of their number.
        start = (begin + nearest - 1) // nearest * nearest
        center = _mean(s, begin, start, begin + nearest, nearest, N)
    return center


@triton.jit(do_not_specialize=["first", "count", "K", "R", "M"])
def ranked(
    first, count, rows, numel, order, items, means, mean_row, out, factors, marks, scratch, K, R, M,
    DTYPE: tl.constexpr, MIXED: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """out = the means [S, M, 3] of the values of each element. A program takes N elements at a time, and has its own
    part of scratch, [1 + MIXED, R, N] values, for the values in order and for what the clients were mixed to."""
    kept: tl.constexpr = tl.float64 if MIXED else tl.int64 if DTYPE.is_int() else DTYPE
    values = tl.cast(R, tl.int64) * N
    ordered = scratch.to(tl.pointer_type(kept)) + tl.program_id(0).to(tl.int64) * values * (2 if MIXED else 1)
    mixed = ordered + values
    for n in range(tl.program_id(0), count, tl.num_programs(0)):
        item = items + (first + n) * 4
        place, left = tl.load(item), tl.load(item + 2)
        at = tl.load(item + 1).to(tl.int64) * CHUNK
        while left > 0:
            t = tl.load(order + place).to(tl.int64)
            end = tl.minimum(tl.load(numel + t), at + left.to(tl.int64) * CHUNK)
            left -= tl.cdiv(end - at, CHUNK).to(tl.int32)
            own = rows + t * (K + 1)
            wanted = means + tl.load(mean_row + t).to(tl.int64) * M * 3
            for begin in range(at, end, N):
                e = begin + tl.arange(0, N)
                inside = e < end
                if MIXED:
                    bad = _mix(own, factors, mixed, K, R, e, inside, N, GROUP, DTYPE)
                    _sort(own, mixed, ordered, R, e, inside, N, GROUP, DTYPE, MIXED)
                else:
                    bad = _sort(own, mixed, ordered, R, e, inside, N, GROUP, DTYPE, MIXED)
                tl.store(marks + t + tl.zeros([N], tl.int32), 1, mask=bad > 0)  # hardly ever: no lane stores
                for m in range(M):
                    low = tl.load(wanted + 3 * m).to(tl.int32)
                    high = tl.load(wanted + 3 * m + 1).to(tl.int32)
                    to = tl.load(out + t * M + m).to(tl.pointer_type(DTYPE)) + e
                    if DTYPE.is_int():
                        rank = tl.where(high > low, (low + high - 1) // 2, (K - 1) // 2)
                        tl.store(to, tl.load(ordered + rank * N + tl.arange(0, N)).to(DTYPE), mask=inside)
                    else:
                        nearest = tl.load(wanted + 3 * m + 2).to(tl.int32)
                        g = _element(own, 0, e, inside, DTYPE)
                        mean = _ranked_mean(ordered, g, low, high, nearest, R, N)
                        mean = tl.where(mean == 0, 0.0, mean)
                        if DTYPE.primitive_bitwidth == 16:
                            tl.store(to, mean.to(tl.float32).to(DTYPE), mask=inside)
                        else:
                            tl.store(to, mean.to(DTYPE), mask=inside)
                tl.debug_barrier()  # before the next elements take the place of these
            place += 1
            at = tl.full((), 0, tl.int64)
