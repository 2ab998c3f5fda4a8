"""Clients whose values are not finite: noticed at no cost on a Gram's diagonal or in a mix, named by a second look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from fastagg._engine.checks import BadClientError, InputError
from fastagg._engine.dtypes import FLOATING
from fastagg._engine.forked import one_thread
from fastagg._engine.gram import Gram
from fastagg._engine.table import Table

FAR = 1e3  # times the median of the clients: further from them than any honest one
NAMED = 5  # keys, or clients, that a message lists before it counts the rest


class NonFiniteError(BadClientError):
    """Clients have values that are NaN, infinite, or so large that the round cannot be computed with them.

    The message names the clients and the keys.
    """


class OutOfRangeError(NonFiniteError):
    """Clients that are finite, and so large that a round's numbers are not."""


KeysOf = Callable[[Table, Sequence[torch.Tensor]], list[str]]  # the keys of a model that are not finite


def check_gram(table: Table, gram: Gram, keys_of: KeysOf | None = None) -> None:
    """Raises when a model is not finite: neither is its square on the Gram's diagonal, so this costs nothing.

    keys_of   who knows which keys of a model are not finite, where this process has only a part of it
    """
    if capturing(gram.device):
        raise RuntimeError(
            "a CUDA graph is being captured: this method reads its Gram on the host, which a capture does not allow. "
            "Capture fastagg.gram, fastagg.mix or fastagg.gram_mix instead"
        )
    good = np.isfinite(gram.on_host.squares)  # [K] or [L, K]
    good_global = bool(np.isfinite(gram.on_host.global_square).all())
    if good.all() and good_global:
        return
    if not good_global:
        keys = (keys_of or keys_not_finite)(table, table.global_model)
        raise InputError(in_words("the global model", keys) or "the global model is too large for float64")
    check_clients(table, np.flatnonzero(~good.reshape(-1, table.K).all(0)).tolist(), keys_of)


def check_clients(table: Table, bad: Sequence[int], keys_of: KeysOf | None = None, far: str = "") -> None:
    """Raises, naming them and their keys, when there are clients that are known not to be finite.

    far   what to say of a client whose values are all finite
    """
    if not len(bad):
        return
    bad = [int(k) for k in bad]
    keys = [(keys_of or keys_not_finite)(table, table.clients[k]) for k in bad]
    names = [table.name(k) for k in bad]
    kind = OutOfRangeError if far and not keys[0] else NonFiniteError
    far = far or f"{names[0]}: its distance to the global model is too large for float64"
    message = in_words(names[0], keys[0]) or far
    if len(bad) > 1:
        message += f"; so have {listed(names[1:])}"
    reasons = [in_words("", found) or far.removeprefix(f"{names[0]}: ") for found in keys]
    raise kind(message, dict(zip(table.given(bad), reasons, strict=True)))


def marks(table: Table, wanted: bool = True) -> torch.Tensor | None:
    """Marks [T] for a mix to set, on the table's device, for check_outputs. None where they are not wanted, or cannot
    be read: a CUDA graph that is being captured has computed nothing yet."""
    if not wanted or capturing(table.device):
        return None
    if table.device.type == "cpu":
        return torch.from_numpy(np.zeros(table.T, np.uint8))  # which is there sooner than torch.zeros
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
    if table.has is not None and not_finite_in(table.global_model, marked):  # which stands for what clients lack
        raise InputError(in_words("the global model", keys_not_finite(table, table.global_model)))
    check_clients(table, [k for k, client in enumerate(table.clients) if not_finite_in(client, marked)])
    if table.center is not None and not_finite_in(table.center, marked):
        raise InputError(in_words("the global model", keys_not_finite(table, table.center)))
    t = marked[0]
    key, dtype = table.layout.keys[t], table.layout.dtypes[t]
    words = f"the result: key {key!r} has values that are too large for {dtype}, though every client is finite"
    models = [*table.clients, *([] if table.center is None else [table.center])]
    raise too_large(table, [k for k in dominant([largest(model[t]) for model in models]) if k < table.K], words)


def dominant(given: Sequence[float] | np.ndarray) -> list[int]:
    """Whose amounts make a sum too large: at least half the largest, and FAR times the median. At most half of all."""
    amounts = np.asarray(given, dtype=np.float64)
    median = np.sort(amounts)[(len(amounts) - 1) // 2]
    return np.flatnonzero((amounts >= amounts.max() / 2) & (amounts > FAR * median)).tolist()


def too_large(table: Table, clients: Sequence[int], words: str) -> InputError:
    """The error when numbers leave the range of their dtype; where certain clients are the cause, it names them."""
    if not len(clients):
        return InputError(words)
    names = listed([table.name(k) for k in clients])
    message = f"{names}: {'with it' if len(clients) == 1 else 'with them'}, {words}"
    return OutOfRangeError(message, dict.fromkeys(table.given(clients), f"with it, {words}"))


@one_thread()
def largest(tensor: torch.Tensor) -> float:
    return max((float(part.abs().max()) for part in tensor.detach().reshape(-1).split(1 << 20)), default=0.0)


def keys_not_finite(table: Table, model: Sequence[torch.Tensor]) -> list[str]:
    return [table.layout.keys[t] for t in not_finite_in(model, range(table.T))]


def in_words(name: str, keys: list[str]) -> str:
    """What is said of a model with such keys; nothing if there are none"""
    if not keys:
        return ""
    those, one = listed([repr(key) for key in keys]), len(keys) == 1
    words = "values that are not finite (NaN or infinity)"
    fault = f"{'key' if one else 'keys'} {those} {'has' if one else 'have'} {words}"
    return f"{name}: {fault}" if name else fault


def not_finite_in(tensors: Sequence[torch.Tensor], some: Iterable[int]) -> list[int]:
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
