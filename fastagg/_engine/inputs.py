"""What a round takes besides models: data sizes, client ids, and the inputs that a method declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastagg._engine.checks import BadClientError, InputError, suggest
from fastagg._engine.numerics import float64, shares
from fastagg._engine.table import StateDict, client_name

ClientId = str | int
Faults = dict[int, str]  # what is wrong with a client, by its position
_NO_NUMBER = (bool, str, bytes)


@dataclass(frozen=True)
class RoundInput:
    """A keyword argument of aggregate() that a method declares: something it takes in every round besides the models.

    name           of the argument
    about          what it is, for the message where it is missing
    required       the round cannot be computed without it
    per_client     it has an entry for every client, along client_axis: K numbers, or K rows of numbers
    client_axis    0, or -1
    entry_dims     dimensions of one client's entry: 0 for a number, 1 for a row; None: either
    pairwise       a client's entry is a row of K numbers, one about each client in the order of the clients given
    low, above     every number is at least low, or more than above
    finite         False: a number may also be NaN or infinite, and the method knows what that means
    not_all_zero   a client whose numbers are all zero is a bad client
    from_clients   clients may report it themselves, so frameworks read it from their replies, and a wrong entry makes a
                   bad client. False: the server provides it, and a wrong entry is an error
    kind           what it is to a program that has such things for any method: "labels" (label counts, or shares),
                   "entropies" (of the labels, in nats), "steps" (local steps), "proxy" (batches of proxy data),
                   "cross_losses" (of all clients' models on data of each client that it does not train on, if it has
                   some), "start_losses" (of the model it started from, on the same data), "train_losses" (of that
                   model, on the data it trains on), "start_distances" (of all clients' models from that one), "choices"
                   (the number of the model it started from), "server_model" (the model that the server has trained on
                   its own data), "versions" (the number of the global model's version that it started from). The
                   simulator supplies those that a method requires, by its class or by its options, and start_distances
                   where clients started from different models.
    """

    name: str
    about: str = ""
    required: bool = False
    per_client: bool = True
    client_axis: int = 0
    entry_dims: int | None = 0
    pairwise: bool = False
    low: float | None = None
    above: float | None = None
    finite: bool = True
    not_all_zero: bool = False
    from_clients: bool = True
    kind: str | None = None

    def expects(self) -> str:
        """One client's entry in words"""
        numbers = "a number" if self.entry_dims == 0 else "numbers"
        if self.finite:
            numbers = numbers.replace("number", "finite number")
        bound = f" >= {self.low:g}" if self.low is not None else f" > {self.above:g}" if self.above is not None else ""
        return numbers + bound + (", not all of them 0" if self.not_all_zero and self.entry_dims != 0 else "")

    def is_good(self, entries: np.ndarray) -> bool:
        """Whether these clients' entries, along the first axis, have the declared form and range"""
        return bool(
            entries.size
            and (self.entry_dims is None or entries.ndim == self.entry_dims + 1)
            and (not self.finite or np.isfinite(entries).all())
            and (self.low is None or not (entries < self.low).any())
            and (self.above is None or not (entries <= self.above).any())
            and (not self.not_all_zero or entries.reshape(len(entries), -1).any(1).all())
        )


SIZES = RoundInput("sizes", "how much data each client has", low=0)


def read_sizes(sizes: Any, ids: Sequence[ClientId]) -> tuple[np.ndarray, Faults]:
    """How much data each client has, [K], and which clients have no valid size. None: equally much."""
    if sizes is None:
        return np.ones(len(ids)), {}
    return _read_per_client(SIZES, sizes, ids)


def data_shares(amounts: np.ndarray) -> np.ndarray:
    """n_k, the clients' shares of the data, summing to 1: [K]"""
    if not amounts.any():
        raise InputError("sizes sum to zero: no client has data")
    return shares(amounts)


def read_client_ids(client_ids: Sequence[Any] | None, K: int) -> list[Any]:
    """The clients' identities over rounds; their positions when none are given."""
    if client_ids is None:
        return list(range(K))
    ids = [x.item() if isinstance(x, np.generic | torch.Tensor) else x for x in client_ids]
    if len(ids) != K:
        raise InputError(f"client_ids has {len(ids)} entries for {K} clients")
    seen: dict[Any, int] = {}
    for k, name in enumerate(ids):
        if not isinstance(name, str | int):
            raise InputError(
                f"client_ids: the id of client {k} is a {type(name).__name__}, expected a string or integer"
            )
        if seen.setdefault(name, k) != k:
            raise InputError(f"client_ids: clients {seen[name]} and {k} have the same id {name!r}")
    return ids


def read_inputs(
    method: str, specs: Sequence[RoundInput], given: Mapping[str, Any], ids: Sequence[ClientId]
) -> tuple[dict[str, Any], Faults]:
    """A round's inputs: arrays of those with an entry per client, the rest as it is; and which clients' are wrong.

    The entries of clients at fault are NaN. Raises where an input is unknown, or missing, or wrong as a whole.
    """
    known = {spec.name: spec for spec in specs}
    for unknown in given.keys() - known.keys():
        raise TypeError(f"{method}: aggregate() takes no {unknown!r}{suggest(unknown, known)}")
    found: dict[str, Any] = {}
    faults: Faults = {}
    for spec in specs:
        value = given.get(spec.name)
        if value is None:
            if spec.required:
                raise InputError(f"{method} needs {spec.name}" + (f": {spec.about}" if spec.about else ""))
        elif not spec.per_client:
            found[spec.name] = value
        else:
            found[spec.name], wrong = _read_per_client(spec, value, ids)
            if spec.pairwise and len(wrong) < len(ids) and found[spec.name].shape != (len(ids), len(ids)):
                raise InputError(
                    f"{spec.name} have shape {found[spec.name].shape}, expected {(len(ids), len(ids))}: a row for each "
                    "client, with a number about each client"
                )
            if wrong and not spec.from_clients:
                raise InputError(str(bad_clients(wrong, ids)))
            faults |= {k: reason for k, reason in wrong.items() if k not in faults}
    return found, faults


def bad_clients(faults: Faults, ids: Sequence[ClientId] | None) -> BadClientError:
    """The error about these clients"""
    named = [f"{client_name(k, ids)}: {reason}" for k, reason in faults.items()]
    return BadClientError("; ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else ""), faults)


def _read_per_client(spec: RoundInput, value: Any, ids: Sequence[ClientId]) -> tuple[np.ndarray, Faults]:
    """The entries of all clients in one array; those of clients at fault are NaN"""
    value = list(value) if isinstance(value, Iterator) else value
    K, axis = len(ids), spec.client_axis
    given = _by_client(spec.name, value, ids, axis)
    array = _all_at_once(given)
    if not K and array is not None and not array.size:
        return array, {}
    if array is not None and array.ndim and array.shape[axis] == K and spec.is_good(np.moveaxis(array, axis, 0)):
        return array, {}
    entries = _entries(spec, given, K)
    usual = Counter(x.shape for x in entries if x is not None and spec.is_good(x[None])).most_common(1)
    shape = usual[0][0] if usual else ()
    faults: Faults = {}
    for k, entry in enumerate(entries):
        if entry is None or not spec.is_good(entry[None]):
            faults[k] = f"its entry in {spec.name} is {_shown(value, k, ids, axis)}, expected {spec.expects()}"
        elif entry.shape != shape:
            count = entry.size if entry.ndim < 2 else entry.shape
            faults[k] = f"its entry in {spec.name} has {count} numbers, most clients have {int(np.prod(shape))}"
    blank = np.full(shape, np.nan)
    good = [blank if entry is None or k in faults else entry for k, entry in enumerate(entries)]
    return np.stack(good, axis=axis), faults


def _all_at_once(given: Any) -> np.ndarray | None:
    if isinstance(given, list | tuple) and any(isinstance(value, _NO_NUMBER) for value in given):
        return None  # NumPy would read "3" as 3, and True as 1
    try:
        return float64(given)
    except (TypeError, ValueError, OverflowError):
        return None


def _by_client(name: str, given: Any, ids: Sequence[ClientId], axis: int = 0) -> Any:
    """What was given by client id as a list in the order of the ids; anything else as it is"""
    if not isinstance(given, Mapping):
        return given
    for client in ids:
        if client not in given:
            raise InputError(f"{name}: there is none for client {client!r}")
    for unknown in given.keys() - set(ids):
        raise InputError(f"{name}: {unknown!r} is not a client{suggest(str(unknown), map(str, ids))}")
    values = [given[client] for client in ids]
    if axis == 0:
        return values
    try:
        return np.stack([_numbers(name, value, len(ids)) for value in values], axis=axis)
    except ValueError as error:
        raise InputError(f"{name}: expected as many numbers for every client ({error})") from error


def _entries(spec: RoundInput, given: Any, K: int) -> list[np.ndarray | None]:
    """The clients' entries, as numbers; None where one is no number. Raises where there are not K of them."""
    if isinstance(given, torch.Tensor | np.ndarray) or spec.client_axis != 0:
        array = _numbers(spec.name, given, K)
        if array.ndim == 0 or array.shape[spec.client_axis] != K:
            raise InputError(f"{spec.name} have shape {array.shape}, expected one for each of the {K} clients")
        return list(np.moveaxis(array, spec.client_axis, 0))
    try:
        values = list(given)
    except TypeError as error:
        raise InputError(f"{spec.name}: expected one for each of the {K} clients ({error})") from error
    if isinstance(given, str):
        raise InputError(f"{spec.name}: expected one for each of the {K} clients, got {given!r}")
    if len(values) != K:
        raise InputError(f"{spec.name} have shape ({len(values)},), expected one for each of the {K} clients")
    return [_number_or_none(value) for value in values]


def _numbers(name: str, given: Any, K: int) -> np.ndarray:
    try:
        return float64(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name}: expected numbers, one entry for each of the {K} clients ({error})") from error


def _number_or_none(value: Any) -> np.ndarray | None:
    """A number, or several, that somebody else sent"""
    if value is None or isinstance(value, _NO_NUMBER):
        return None
    try:
        return float64(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _shown(given: Any, k: int, ids: Sequence[ClientId], axis: int = 0) -> str:
    """A client's entry for a message"""
    if isinstance(given, Mapping):
        value = given[ids[k]]
    elif isinstance(given, torch.Tensor | np.ndarray):
        value = np.moveaxis(float64(given), axis, 0)[k].tolist()
    else:
        value = list(given)[k]
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits, which Python does not write out
        text = f"a {type(value).__name__}"
    return text if len(text) < 80 else text[:77] + "..."


def missing_global() -> InputError:
    return InputError("the global model is None; a Gram needs the model the clients started from")


def require_global(global_sd: StateDict | None) -> StateDict:
    if global_sd is None:
        raise missing_global()
    return global_sd
