"""Adapters in, a table out: an entry for each module, which is its Factors, and one for each plain tensor.

Every check of adapters against each other is here; of an adapter by itself in peft.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fastagg._engine import table as tables
from fastagg._engine.adapters.factors import Factors
from fastagg._engine.adapters.forms import Form
from fastagg._engine.adapters.peft import BIAS, PREFIX, Names, Parsed, Scaling, parse, targeting
from fastagg._engine.checks import BadClientError, InputError
from fastagg._engine.forked import one_thread
from fastagg._engine.hints import warn_of_same_tensors
from fastagg._engine.table import Layers, Params, StateDict, Table

CENTER = -1  # the position of the global adapter among the clients
ENDING = ".lora"  # what the entry of a module is called, after the module
Dims = dict[str, tuple[int, ...]]  # by module: out, in; of convolutions, and the kernel


@dataclasses.dataclass(eq=False)
class AdapterTable(Table):
    """A table whose first entries are modules: Factors, or None where an adapter has none.

    center   what is not known of it is None, too: all of it, if no global adapter was given
    names    of each module's factors in a new adapter
    like     whose form new factors have: dtype, scaling and, by default, the rank
    config   of new adapters
    among    the table of some of the clients, as if there had been no others
    """

    names: tuple[Names, ...] = ()
    like: tuple[Factors, ...] = ()
    config: Mapping[str, Any] | None = None
    among: Callable[[Sequence[int]], AdapterTable] | None = None

    def of_round(self, order: Sequence[int]) -> Table:
        assert self.among is not None
        return self.among(order)

    @property
    def modules(self) -> list[str]:
        return [key.removesuffix(ENDING) for key in self.layout.keys[: len(self.names)]]

    @property
    def bytes(self) -> int:
        """Of the clients, without what stands in the place of modules that they do not have"""
        own = self.global_model[: len(self.names)]
        factors = (f for client in self.clients for f, g in zip(client, own, strict=False) if f is not g)
        size = sum(f.A.nbytes + f.B.nbytes for f in factors if isinstance(f, Factors))
        return size + int(self.layout.bytes[len(self.names) :].sum()) * self.K

    @property
    def plain(self) -> Table:
        """The plain tensors alone"""
        layout, some = self.layout, slice(len(self.names), None)
        arrays = ("numel", "bytes", "codes", "layer", "is_param", "gram_layer", "keys", "shapes", "dtypes")
        part = dataclasses.replace(layout, **{name: getattr(layout, name)[some] for name in arrays})
        center = self.global_model[some]
        return Table(
            part, self.device, [client[some] for client in self.clients],
            None if any(x is None for x in center) else center, np.ascontiguousarray(self.client_address[some]),
            self.center_address[some], self.as_numpy[some], self.metadata, client_ids=self.client_ids,
            positions=self.positions,
        )  # fmt: skip


def build(
    global_sd: StateDict | None, client_sds: Sequence[StateDict | InputError], *, form: Form, scaling: Scaling,
    params: Params, layers: Layers, client_ids: Sequence[Any] | None, bad: dict[int, str] | None, partial: bool = False,
) -> AdapterTable:  # fmt: skip
    """As table.build. A module that a client does not have is the global adapter's, or no update if that has none.

    partial   the table says who has which modules and tensors
    """
    if not isinstance(client_sds, Sequence) or not client_sds:
        tables.build(global_sd, client_sds)  # which says what is wrong
    center = parse({} if global_sd is None else global_sd, scaling, "the global adapter")
    names = [tables.client_name(k, client_ids) for k in range(len(client_sds))]
    parsed: list[Parsed | InputError] = []
    some = list(range(len(names)))  # those that fit

    def leave_out(k: int, error: InputError) -> InputError:
        reason = str(error).removeprefix(names[k]).removeprefix(":").strip()
        tables.leave_out(k, f"{names[k]}: {reason}", reason, some, bad, error)
        return InputError(reason)

    for k, given in enumerate(client_sds):
        try:
            parsed.append(leave_out(k, given) if isinstance(given, InputError) else parse(given, scaling, names[k]))
        except BadClientError:
            raise
        except InputError as error:
            parsed.append(leave_out(k, error))
    fit = [p for p in parsed if isinstance(p, Parsed)]
    dims = _dims(center, fit)
    faults = [_fault(p, dims) if isinstance(p, Parsed) else "" for p in parsed]
    if form == "frozen_a":
        good = {k: p for k, p in enumerate(parsed) if isinstance(p, Parsed) and not faults[k]}
        shared = _shared(center, list(good.values()))
        faults = [_not_shared(good[k], shared) if k in good else fault for k, fault in enumerate(faults)]
    for k, fault in enumerate(faults):
        if fault:
            parsed[k] = leave_out(k, InputError(fault))
    for found in (_unscaled, _biased) if scaling is None else (_biased,):
        for k, fault in found(center, parsed).items():
            parsed[k] = leave_out(k, InputError(fault))
    plain = [{**center.plain, **p.plain} if isinstance(p, Parsed) else p for p in parsed]
    known = global_sd is not None and bool(center.plain or not any(isinstance(p, Parsed) and p.plain for p in parsed))
    table = tables.build(
        center.plain if known else None, plain, client_ids=client_ids, bad=bad,
        hints=all(
            isinstance(p, Parsed) and p.plain and not p.factors and p.plain.keys() >= center.plain.keys()
            for p in parsed
        ),
    )  # fmt: skip
    kept = table.given(range(table.K))
    clients = [p for p in (parsed[k] for k in kept) if isinstance(p, Parsed)]
    if all(p.factors for p in clients):
        address = np.array([_addresses(p, dims) for p in clients], dtype=np.int64).T
        warn_of_same_tensors(address, np.ones(len(address), dtype=bool), lambda k: names[kept[k]])

    def among(some: Sequence[int]) -> AdapterTable:
        those, part = [clients[k] for k in some], table if list(some) == list(range(table.K)) else table.part(some)
        modules = sorted(m for m in dims if any(m in p.factors for p in (center, *those)))
        made = _with_modules(part, modules, dims, center, those, tables.parameter_names(params), layers)
        return dataclasses.replace(_who_has_what(made, those) if partial else made, among=among)

    return among(range(table.K))


def _addresses(client: Parsed, dims: Dims) -> list[int]:
    """Of A and B of each module; 0 where it has none"""
    some = [client.factors.get(m) for m in dims]
    return [0 if x is None else x.data_ptr() for f in some for x in ((f.A, f.B) if f else (None, None))]


def _dims(center: Parsed, clients: Sequence[Parsed]) -> Dims:
    """The size of each module: the global adapter's or, if it has no modules, that which most clients have"""
    if center.factors:
        return {m: _size(center, m) for m in center.factors}
    found: dict[str, Counter] = {}
    for client in clients:
        for m in client.factors:
            found.setdefault(m, Counter())[_size(client, m)] += 1
    for m in [m for m in found if PREFIX + m in found]:  # one module, by two names: that which fewer clients use goes
        del found[min((m, PREFIX + m), key=lambda name: found[name].total())]
    return {m: counts.most_common(1)[0][0] for m, counts in found.items()}


def _size(adapter: Parsed, m: str) -> tuple[int, ...]:
    return len(adapter.factors[m].B), *adapter.names[m].shape_A


def _fault(client: Parsed, dims: Dims) -> str:
    """What is wrong with a client's modules; empty if nothing is"""
    if not client.factors and not client.plain:
        return "it has no tensors"
    for m in client.factors:
        if m not in dims:
            other = next((name for name in (PREFIX + m, m.removeprefix(PREFIX)) if name in dims), None)
            return f"module {m!r} is {'not in the global adapter' if other is None else f'{other!r} in other adapters'}"
        if (size := _size(client, m)) != dims[m]:
            return f"module {m!r} is {' x '.join(map(str, size))}, expected {' x '.join(map(str, dims[m]))}"
    return ""


def _shared(center: Parsed, clients: Sequence[Parsed]) -> dict[str, Tensor]:
    """The A of each module: the global adapter's or, if it has no modules, that which most clients have"""
    if center.factors:
        return {m: f.A for m, f in center.factors.items()}
    found: dict[str, list[list[Tensor]]] = {}  # by module, lists of those that are the same
    for m, f in (item for client in clients for item in client.factors.items()):
        alike = found.setdefault(m, [])
        same = next((some for some in alike if _same(some[0], f.A)), None)
        if same is None:
            alike.append(same := [])
        same.append(f.A)
    return {m: max(alike, key=len)[0] for m, alike in found.items()}


def _not_shared(client: Parsed, shared: Mapping[str, Tensor]) -> str:
    for m, f in client.factors.items():
        if not _same(shared[m], f.A):
            return f"key {client.names[m].A!r} is not the A of the others, which form='frozen_a' expects"
    return ""


@one_thread()
def _same(A: Tensor, other: Tensor) -> bool:
    return A.shape == other.shape and A.device == other.device and bool((other == A).all())


def _unscaled(center: Parsed, clients: Sequence[Parsed | InputError]) -> dict[int, str]:
    """Clients of which it is not known how their B A is scaled next to that of most others, as some come without a
    config. It makes no difference while all ranks are equal."""
    kinds = {
        k: () if p.config is not None else tuple(sorted({f.rank for f in p.factors.values()}))
        for k, p in _with_factors(center, clients).items()
    }
    ranks = sorted({rank for kind in kinds.values() for rank in kind})
    return _unusual(
        kinds,
        f"adapters of rank {' and '.join(map(str, ranks))} come without a config that says how B A is scaled: "
        "pass fastagg.lora.Adapter(state_dict, config), or scaling=lambda r: alpha / r",
    )


def _biased(center: Parsed, clients: Sequence[Parsed | InputError]) -> dict[int, str]:
    """Clients with another scaling than most, where biases are multiplied by it"""
    given = _with_factors(center, clients)
    key = next((key for p in given.values() for key in p.plain if BIAS.fullmatch(key)), None)
    if key is None:
        return {}
    return _unusual(
        {k: tuple(sorted({f.scaling for f in p.factors.values()})) for k, p in given.items()},
        f"key {key!r} (lora_bias) is multiplied by each adapter's scaling, and these differ",
    )


def _with_factors(center: Parsed, clients: Sequence[Parsed | InputError]) -> dict[int, Parsed]:
    return {k: p for k, p in enumerate((center, *clients), CENTER) if isinstance(p, Parsed) and p.factors}


def _unusual(kinds: Mapping[int, tuple], fault: str) -> dict[int, str]:
    """The clients of another kind than most adapters, at fault. Where there is no such kind, of at most one element, or
    the global adapter is of another, it is nobody's."""
    if not kinds:
        return {}
    usual, count = Counter(kinds.values()).most_common(1)[0]
    odd = [k for k, kind in kinds.items() if kind != usual]
    if len(usual) > 1 or (odd and 2 * count <= len(kinds)) or CENTER in odd:
        raise InputError(fault)
    return dict.fromkeys(odd, fault)


def _with_modules(
    table: Table, modules: list[str], dims: Dims, center: Parsed, clients: Sequence[Parsed],
    chosen: tables.ParameterNames, layers: Layers,
) -> AdapterTable:  # fmt: skip
    """The table of the plain tensors, with the modules before them"""
    first = [_reference(m, center, clients) for m in modules]
    devices = {f.A.device for p in (center, *clients) for f in p.factors.values()}
    devices |= {table.device} if table.T else set()
    if len(devices) > 1:
        raise InputError(f"adapters are on {' and '.join(sorted(map(str, devices)))}; all must be on one device")
    keys = (*(m + ENDING for m in modules), *table.layout.keys)
    layout = tables.layout_of(
        keys, (*((dims[m][0], math.prod(dims[m][1:])) for m in modules), *table.layout.shapes),
        (*(p.factors[m].A.dtype for m, p in zip(modules, first, strict=True)), *table.layout.dtypes),
        chosen.names, chosen.tied, None if layers is None else tuple(layers(key) for key in keys),
    )  # fmt: skip
    own = [center.factors.get(m) for m in modules]
    rows = [[p.factors.get(m, g) for m, g in zip(modules, own, strict=True)] for p in clients]
    none = np.zeros((len(modules), table.K), dtype=np.int64)
    given = ((p.config, p) for p in (center, *sorted(clients, key=lambda p: -p.largest)) if p.config is not None)
    configs = (targeting(config, [m for m in modules if m not in p.factors]) for config, p in given)
    return AdapterTable(
        layout, next(iter(devices), table.device),
        [[*f, *plain] for f, plain in zip(rows, table.clients, strict=True)],  # type: ignore[arg-type]
        [*own, *(table.center or [None] * table.T)],  # type: ignore[arg-type]
        np.concatenate([none, table.client_address]), np.concatenate([none[:, 0], table.center_address]),
        (*(False for _ in modules), *table.as_numpy), table.metadata, table.other_inputs, table.client_ids,
        table.positions, names=tuple(p.names[m] for m, p in zip(modules, first, strict=True)),
        like=tuple(p.factors[m] for m, p in zip(modules, first, strict=True)),
        config=next(configs, None),
    )  # fmt: skip


def _who_has_what(table: AdapterTable, clients: Sequence[Parsed]) -> AdapterTable:
    plain = table.layout.keys[len(table.names) :]
    given = [{*p.factors} for p in clients], [{*p.plain} for p in clients]
    rows = [[m in own for own in given[0]] for m in table.modules] + [[key in own for own in given[1]] for key in plain]
    has = np.array(rows, dtype=bool).reshape(table.T, table.K)
    return table if has.all() else dataclasses.replace(table, has=has)


def _reference(module: str, center: Parsed, clients: Sequence[Parsed]) -> Parsed:
    """Whose form a new module has: the global adapter's, or the first client's of the largest rank"""
    if module in center.factors:
        return center
    return max((p for p in clients if module in p.factors), key=lambda p: p.factors[module].rank)
