"""Rounds of models as odd as they come, for the property tests; and the machine they are computed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st

from fastagg._engine import backends, scanner
from fastagg._engine import table as tables
from fastagg._engine.dtypes import FLOATING, INTEGER

try:
    import ml_dtypes
except ImportError:  # NumPy has no bfloat16 of its own
    ml_dtypes = None

# ---- values ----

KINDS = ("near", "far", "zero", "same", "constant", "ulps", "denormal", "huge", "outlier", "wide", "limits", "drowned")


def rows_of(kind: str, K: int, n: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """[K + 1, n]: the global model and the clients. All is finite, and squares do not leave float64."""

    def whole(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (K + 1, n), generator=rng)

    if dtype in INTEGER:
        info = None if dtype == torch.bool else torch.iinfo(dtype)
        return whole(0, 1).bool() if info is None else whole(max(info.min, -(2**60)), min(info.max, 2**60)).to(dtype)
    info = torch.finfo(dtype)
    top = {torch.float64: 500, torch.float16: 15}.get(dtype, 127)  # exponent of the largest number
    huge = 2.0 ** (0.65 * top)  # 1e25 in float32: its square leaves it
    normal = torch.randn(K + 1, n, generator=rng, dtype=torch.float64)
    near = torch.cat([normal[:1], normal[:1] + 0.01 * normal[1:]])
    if kind == "drowned":  # sums of squares in which each addition rounds up: the worst for float32
        lanes = (4, 8, 16)[K % 3]
        one_client = torch.where(torch.arange(n) % min(256, 32 * lanes) < lanes, 1.0, 2**-12 * (1 + 2**-5))
        rows = one_client * torch.arange(K + 1)[:, None].clamp(max=1)
    elif kind == "wide":
        exponent = torch.rand(K + 1, n, generator=rng, dtype=torch.float64) * 2 - 1
        rows = normal.sign() * 2 ** (exponent * top)
    elif kind == "outlier":
        near[K // 2 + 1] *= huge
        rows = near
    else:
        rows = {
            "near": near,
            "far": normal,
            "zero": whole(-1, 1) * -0.0,
            "same": normal[:1].expand(K + 1, n),
            "constant": (torch.arange(K + 1) / 3)[:, None].expand(K + 1, n),
            "ulps": normal[:1] * (1 + info.eps * whole(-2, 2)),
            "denormal": info.tiny * info.eps * whole(-50, 50).double(),
            "huge": normal * huge,
            "limits": whole(-1, 1).double() * min(info.max, 2.0**top),
        }[kind]
    return rows.double().clamp(-info.max, info.max).to(dtype)


# ---- memory ----


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def _offset(x: torch.Tensor) -> torch.Tensor:
    around = x.new_ones(3)
    return torch.cat([around, x.reshape(-1), around])[3:-3].view(x.shape)


def _strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1).flatten(-2)[..., ::2] if x.dim() else torch.stack([x, x, x])[1]


def _transposed(x: torch.Tensor) -> torch.Tensor:
    back = tuple(reversed(range(x.dim())))
    return x.permute(back).contiguous().permute(back)


def _negated(x: torch.Tensor) -> torch.Tensor:
    """Lazily: the sign is a flag of the tensor"""
    if x.dtype not in (torch.float32, torch.float64):
        return x.clone()
    return torch.complex(torch.zeros_like(x), -x).conj().imag


def _unaligned(x: torch.Tensor) -> np.ndarray:
    array = _numpy(x)
    memory = np.frombuffer(b"x" + array.tobytes(), dtype=np.uint8).copy()
    return memory[1:].view(array.dtype).reshape(array.shape)


def _swapped(x: torch.Tensor) -> np.ndarray:
    array = _numpy(x)
    return array.copy() if x.dtype == torch.bfloat16 else array.astype(array.dtype.newbyteorder(">"))


def _read_only(x: torch.Tensor) -> np.ndarray:
    array = _numpy(x.clone())
    array.flags.writeable = False
    return array


TORCH_FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": torch.clone,
    "offset": _offset,
    "strided": _strided,
    "transposed": _transposed,
    "expanded": lambda x: x[:1].clone().expand(x.shape),
    "negated": _negated,
    "parameter": lambda x: torch.nn.Parameter(x.clone(), requires_grad=x.dtype in FLOATING),
}
NUMPY_FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "array": lambda x: _numpy(x.clone()),
    "unaligned": _unaligned,
    "reversed": lambda x: np.flip(np.flip(_numpy(x)).copy()),
    "swapped": _swapped,
    "broadcast": lambda x: np.broadcast_to(_numpy(x[:1].clone()), x.shape),
    "read-only": _read_only,
}
FORMS = TORCH_FORMS | NUMPY_FORMS


def placed(x: torch.Tensor, form: str) -> tuple[Any, torch.Tensor]:
    """The values in memory of that form, and what they are there: some forms have their first row everywhere"""
    if form in NUMPY_FORMS and x.dtype == torch.bfloat16 and ml_dtypes is None:
        form = "plain"
    repeats = form in ("expanded", "broadcast")
    if repeats and not x.dim():
        form = "plain"
    elif repeats:
        x = x[:1].expand(x.shape).contiguous()
    return FORMS[form](x), x


# ---- rounds ----

NAMES = (
    "a.weight", "a.bias", "b.weight", "b.running_mean", "b.running_var", "b.num_batches_tracked", "deep.0.1.weight",
    "w", "", "two words.weight", "größe.bias",
)  # fmt: skip
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1025)
CHUNKS = (16383, 16384, 16385, 2 * 16384 + 1, 40_000)  # work is cut in chunks of 16,384 elements
MANY = (124, 126, 127, 128, 129, 131, 200, 257)  # clients; rows are multiplied in groups of 128


def usually(often: st.SearchStrategy, rarely: st.SearchStrategy) -> st.SearchStrategy:
    """Nine times of ten the first"""
    return st.integers(0, 9).flatmap(lambda i: rarely if i == 9 else often)


short = st.sampled_from(SIZES).map(lambda n: (n,))
several = st.lists(st.integers(0, 9), min_size=2, max_size=4).map(tuple)
shapes = usually(st.one_of(st.just(()), short, several), st.sampled_from(CHUNKS).map(lambda n: (n,)))


@dataclass
class Round:
    """A global model and K clients, as odd as they come; and the same values in plain tensors"""

    g: dict[str, Any]
    clients: list[dict[str, Any]]
    plain_g: dict[str, torch.Tensor]
    plain_clients: list[dict[str, torch.Tensor]]
    worst: bool  # made up to defeat float32 sums

    @property
    def K(self) -> int:
        return len(self.clients)


@st.composite
def rounds(draw, least: int = 1, many: bool = True, forms: tuple[str, ...] = tuple(FORMS)) -> Round:
    some = st.integers(least, 40)
    K = draw(usually(st.integers(least, 12), st.one_of(some, st.sampled_from(MANY)) if many else some))
    tensor = st.tuples(
        shapes, usually(st.sampled_from(FLOATING), st.sampled_from(INTEGER)), st.sampled_from(KINDS),
        st.lists(st.sampled_from(forms), min_size=1, max_size=3),
    )  # fmt: skip
    tensors = draw(st.dictionaries(st.sampled_from(NAMES), tensor, min_size=1, max_size=5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    odd: list[dict] = [{} for _ in range(K + 1)]
    plain: list[dict] = [{} for _ in range(K + 1)]
    for name, (shape, dtype, kind, chosen) in tensors.items():
        shape = shape if K <= 40 or np.prod(shape) < 300 else (257,)
        rows = rows_of(kind, K, int(np.prod(shape)), dtype, rng)
        for r, row in enumerate(rows):
            odd[r][name], plain[r][name] = placed(row.view(shape), chosen[r % len(chosen)])
    first = next(iter(tensors))
    if draw(st.booleans()):  # tied: one tensor under two names
        for models in (odd, plain):
            for sd in models:
                sd["tied.weight"] = sd[first]
    if draw(st.booleans()):  # the first client trained all but one tensor
        odd[1][first], plain[1][first] = odd[0][first], plain[0][first]
    if draw(st.booleans()):  # the last client is the first
        odd[K], plain[K] = odd[1], plain[1]
    if K > 1 and draw(st.booleans()):  # in another order
        odd[K] = dict(reversed(odd[K].items()))
    return Round(odd[0], odd[1:], plain[0], plain[1:], any(kind == "drowned" for _, _, kind, _ in tensors.values()))


# ---- what is done with them ----


def memory(*models: dict[str, Any]) -> list[bytes]:
    """All memory that models look at, also what lies between their elements"""
    return [bytes_of(value) for sd in models for value in sd.values()]


def bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).numpy().tobytes()
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value.tobytes()


def as_plain(sd: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A result, some of which may be NumPy arrays, as tensors"""
    return {key: tables.as_tensor(value, "the result", key) for key, value in sd.items()}


class On:
    """The machine of a case: threads, SIMD level, and whether tensors are looked at by native code"""

    def __init__(self, threads: int, level: str, scan: bool) -> None:
        self.threads, self.level = threads, level
        self.patch = mock.patch.object(scanner, "NATIVE", scanner.NATIVE if scan else None)

    def __enter__(self) -> None:
        torch.set_num_threads(self.threads)
        backends.cpu._cpu.set_simd(self.level)
        self.patch.start()

    def __exit__(self, *exception: object) -> None:
        self.patch.stop()
        torch.set_num_threads(1)


@st.composite
def machines(draw) -> tuple[int, str, bool]:
    levels = backends.cpu._cpu.simd_levels()
    here = levels[: levels.index(backends.cpu._cpu.simd_best()) + 1]
    return draw(st.integers(1, 4)), draw(st.sampled_from(here)), draw(st.booleans())
