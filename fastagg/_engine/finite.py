"""Who sent values that are not finite: seen for free on a Gram's diagonal or in a mix, named by a second look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from fastagg._engine.forked import one_thread
from fastagg._engine.gram import Gram
from fastagg._engine.table import FLOATING, InputError, Table

FAR = 1e3  # times the median of the clients: further from them than any honest one
NAMED = 5  # keys, or clients, that a message lists before it counts the rest


class NonFiniteError(InputError):
    """Clients have values that are NaN, infinite, or so large that the round cannot be computed with them.

    The message names the clients and the keys.

    clients   their positions among the clients given
    """

    def __init__(self, message: str, clients: Sequence[int]) -> None:
        super().__init__(message)
        self.clients = list(clients)

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.clients)


class OutOfRangeError(NonFiniteError):
    """Clients that are finite, and so large that a round's numbers are not."""


def check_gram(table: Table, gram: Gram) -> None:
    """Raises when a model is not finite: neither is its square on the Gram's diagonal, so this costs nothing."""
    if capturing(gram.matrix.device):
        raise RuntimeError(
            "a CUDA graph is being captured: this method reads its Gram on the host, which a capture does not allow. "
            "Capture fastagg.gram, fastagg.mix or fastagg.gram_mix instead"
        )
    diagonal = np.einsum("...kk->...k", gram.matrix.cpu().numpy())  # [K+1] or [L, K+1]
    good = np.isfinite(diagonal)
    if good.all():
        return
    bad = ~good.reshape(-1, table.K + 1).all(0)
    if bad[0]:  # row 0 is the global model
        raise InputError(_what(table, table.center, "the global model") or "the global model is too large for float64")
    check_clients(table, np.flatnonzero(bad[1:]))


def check_clients(table: Table, bad: Sequence[int]) -> None:
    """Raises, naming them and their keys, when there are clients that are known not to be finite."""
    if len(bad):
        raise _error(table, bad)


def marks(table: Table, wanted: bool = True) -> torch.Tensor | None:
    """Marks [T] for a mix to set, on the table's device, for check_outputs. None where they are not wanted, or cannot
    be read: a CUDA graph that is being captured has computed nothing yet."""
    if not wanted or capturing(table.device):
        return None
    return torch.zeros(table.T, dtype=torch.uint8, device=table.device)


def capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_outputs(table: Table, not_finite: torch.Tensor | None) -> None:
    """Raises when a mix marked tensors, not_finite [T], that came out with a NaN or an infinity. On a GPU this waits
    for the mix: T bytes are copied to the host."""
    if not_finite is None:
        return
    marked = np.flatnonzero(not_finite.cpu().numpy())
    if not len(marked):
        return
    bad = [k for k, client in enumerate(table.clients) if not_finite_in(client, marked)]
    if bad:
        raise _error(table, bad)
    if table.center is not None and not_finite_in(table.center, marked):
        raise InputError(_what(table, table.center, "the global model"))
    t = marked[0]
    key, dtype = table.layout.keys[t], table.layout.dtypes[t]
    words = f"the result: key {key!r} has values that are too large for {dtype}, though every client is finite"
    models = [*table.clients, *([] if table.center is None else [table.center])]
    raise too_large(table, [k for k in dominant([_largest(model[t]) for model in models]) if k < table.K], words)


def dominant(amounts: Sequence[float]) -> list[int]:
    """Whose amounts make a sum too large: at least half the largest, and FAR times the median. At most half of all."""
    amounts = np.asarray(amounts, dtype=np.float64)
    median = np.sort(amounts)[(len(amounts) - 1) // 2]
    return np.flatnonzero((amounts >= amounts.max() / 2) & (amounts > FAR * median)).tolist()


def too_large(table: Table, clients: Sequence[int], words: str) -> InputError:
    """The error when numbers leave the range of their dtype; where certain clients are the cause, it names them."""
    if not len(clients):
        return InputError(words)
    names = listed([table.name(k) for k in clients])
    return OutOfRangeError(f"{names}: {'with it' if len(clients) == 1 else 'with them'}, {words}", table.given(clients))


@one_thread()
def _largest(tensor: torch.Tensor) -> float:
    return max((float(part.abs().max()) for part in tensor.detach().reshape(-1).split(1 << 20)), default=0.0)


def _error(table: Table, clients: Iterable[int]) -> NonFiniteError:
    clients = [int(k) for k in clients]
    first = clients[0]
    name = table.name(first)
    message = _what(table, table.clients[first], name)
    message = message or f"{name}: its distance to the global model is too large for float64"
    if len(clients) > 1:
        message += f"; so have {listed([table.name(k) for k in clients[1:]])}"
    return NonFiniteError(message, table.given(clients))


def _what(table: Table, tensors: list[torch.Tensor], name: str) -> str:
    """The keys of a model that are not finite, in words; nothing if all are"""
    return in_words(name, [table.layout.keys[t] for t in not_finite_in(tensors, range(table.T))])


def in_words(name: str, keys: list[str]) -> str:
    """What is said of a model with such keys; nothing if there are none"""
    if not keys:
        return ""
    those = listed([repr(key) for key in keys])
    return (
        f"{name}: {'key' if len(keys) == 1 else 'keys'} {those} {'has' if len(keys) == 1 else 'have'} values "
        "that are not finite (NaN or infinity)"
    )


def not_finite_in(tensors: list[torch.Tensor], some: Iterable[int]) -> list[int]:
    """Those of a model's tensors that are not finite, by number"""
    return [t for t in some if tensors[t].dtype in FLOATING and not _is_finite(tensors[t].detach())]


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu":
        return bool(torch.isfinite(tensor).all())
    # by NumPy, on this thread alone: in a child that forked, torch's threads hang; in parts, which need little memory
    return all(_part_is_finite(part) for part in tensor.reshape(-1).split(1 << 20))


def _part_is_finite(part: torch.Tensor) -> bool:
    if part.dtype == torch.bfloat16:
        return bool((part.view(torch.int16).numpy() & 0x7F80 != 0x7F80).all())
    return bool(np.isfinite(part.numpy()).all())


def listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
