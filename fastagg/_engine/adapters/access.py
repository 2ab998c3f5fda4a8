"""Adapters: updates B A of modules, of which only the factors exist, and plain tensors beside them.

A method sees their Gram, as of models. Plain tensors take the usual way; a module becomes new factors (forms.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastagg._engine import kernels, nonfinite
from fastagg._engine.adapters import forms, peft
from fastagg._engine.adapters.adapter_table import AdapterTable, build
from fastagg._engine.adapters.factors import Core, Factors, core_of
from fastagg._engine.adapters.side_by_side import side_by_side
from fastagg._engine.adapters.truncated import EPSILON
from fastagg._engine.checks import BadClientError, InputError
from fastagg._engine.gram import Gram
from fastagg._engine.in_memory import InMemory
from fastagg._engine.result import Result, Results
from fastagg._engine.table import Out, StateDict, Table

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator

NO_ELEMENTS = "looks at the elements of updates, and those of an adapter's update B A are never formed"
UNKNOWN = 1e-6  # of the square of an update, its own or the usual one: what rounding errors may be. Or the square of
# it, of the global adapter's
KEPT = 0.5  # of the clients' bytes: products of a Gram that are kept for the new factors


class AdapterResult(Result):
    """A new adapter: pass it to peft.set_peft_model_state_dict, or save it with fastagg.lora.save.

    Besides what every Result says:

    truncation   by module: what the components left out have, relative to the whole weighted update (in the Frobenius
                 norm); 0 if nothing was left out
    ranks        by module: of the new factors
    scaling      by module: the update is scaling * B A
    config       what adapter_config.json is to say for that, if an adapter came with one
    """

    truncation: Mapping[str, float]
    ranks: Mapping[str, int]
    scaling: Mapping[str, float]
    config: Mapping[str, Any] | None = None


class InAdapters:
    """form, rank   what new factors are made: see forms.py
    scaling         of adapters without a config
    progress        what is being done, bytes of the clients read so far, bytes in all
    """

    pass_cost = math.inf  # a product of the Gram with a vector costs what the whole Gram does

    def __init__(
        self, form: forms.Form = "rank", rank: int | None = None, scaling: peft.Scaling = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:  # fmt: skip
        forms.check(form, rank)
        self.form: forms.Form = form
        self.rank, self.scaling, self.progress = rank, scaling, progress
        self.passes = self.bytes_read = 0
        self._cores: dict[str, Core] = {}  # of the last Gram
        self._read = False  # all clients have been, and are finite
        self._plain = InMemory()

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def why_not(self, method: Aggregator, inputs: Mapping[str, Any]) -> str:
        return method.why_not_on_adapters()

    def build(self, global_sd: StateDict | None, client_sds: Sequence[StateDict | InputError], **options: Any) -> Table:
        return build(global_sd, client_sds, form=self.form, scaling=self.scaling, **options)

    def any(self, flag: bool) -> bool:
        return flag

    def gram(self, table: Table, layerwise: bool) -> Gram:
        assert isinstance(table, AdapterTable)
        layout, n = table.layout, len(table.names)
        matrix = torch.zeros(
            len(layout.layers) if layerwise else 1, table.K + 1, table.K + 1, dtype=torch.float64, device="cpu"
        )
        used = [t for t in range(n) if layout.gram_layer[t] >= 0]
        room, said = KEPT * table.bytes, self._reading("Gram", table)
        self._cores = {}

        def one(t: int) -> tuple[Core | None, torch.Tensor, torch.Tensor]:
            core = core_of(table.global_model[t], [client[t] for client in table.clients])  # type: ignore[arg-type]
            return core if core.bytes * len(used) <= room else None, core.gram(), core.terms()

        terms: dict[int, torch.Tensor] = {}
        for t, (core, products, terms[t]) in zip(used, side_by_side(one, used, table.device, said), strict=True):
            matrix[layout.gram_layer[t] if layerwise else 0] += products
            if core is not None:
                self._cores[layout.keys[t]] = core
        if (layout.gram_layer[n:] >= 0).any():
            matrix += self._plain.gram(_with_center(table), layerwise).host.matrix.reshape(matrix.shape)
        gram = kernels.formed(table, layerwise, matrix)
        nonfinite.check_gram(table, gram, keys_not_finite)
        _check_known(table, matrix, {t: (layout.gram_layer[t] if layerwise else 0, terms[t]) for t in used})
        self._read = True
        return gram

    def mix(self, table: Table, weights: np.ndarray, row: np.ndarray, out: Out, blame: Table) -> list[Result]:
        assert isinstance(table, AdapterTable)
        assert isinstance(blame, AdapterTable)
        n, models = len(table.names), weights.shape[1]
        if out is not None:
            raise InputError("out: new factors have another form in each round, and are not written in place")
        results = [Result() for _ in range(models)]
        if n < table.T:
            plain = _with_center(table) if table.K > blame.K else table.plain
            results = self._plain.mix(plain, weights, row[n:], None, blame.plain)
        some = [(m, t) for m in range(models) for t in range(n)]
        made = side_by_side(
            lambda at: self._new(table, at[1], weights[row[at[1]], at[0]]), some, table.device,
            self._reading("new factors", table),
        )  # fmt: skip
        lost = any(new is None for new in made)
        suspects = [k for k in range(blame.K) if lost or not (self._read or weights[..., k].any())]
        bad = [k for k in suspects if keys_not_finite(blame, blame.clients[k])]
        nonfinite.check_clients(blame, bad, keys_not_finite)
        if lost:
            if keys := keys_not_finite(blame, blame.global_model):
                raise InputError(nonfinite.in_words("the global adapter", keys))
            raise _too_large(blame, next(at[1] for at, new in zip(some, made, strict=True) if new is None))
        return [self._result(table, result, made[m * n : (m + 1) * n]) for m, result in enumerate(results)]

    def gram_mix(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out
    ) -> tuple[Gram, list[Result]]:
        return self.gram(table, layerwise), self.mix(table, weights, row, out, table)

    def gram_times(self, *given: Any, **options: Any) -> Any:
        raise AssertionError  # pass_cost says that the Gram is always formed

    def ranked_means(
        self, table: Table, means: np.ndarray, row: np.ndarray, out: Out = None, *,
        into: list[Result] | None = None, mixing: np.ndarray | None = None,
    ) -> list[Result]:  # fmt: skip
        """Of plain tensors"""
        if into is None:
            raise InputError(f"the method {NO_ELEMENTS}")
        assert isinstance(table, AdapterTable)
        n = len(table.names)
        return self._plain.ranked_means(table.plain, means, row[n:], into=into) if n < table.T else into

    def wide_updates(
        self, table: Table, weights: np.ndarray, row: np.ndarray, used: np.ndarray
    ) -> dict[int, torch.Tensor]:
        raise InputError(f"the method {NO_ELEMENTS}")

    def refuse(self, table: Table, clients: Sequence[int], words: str) -> None:
        self._plain.refuse(table, clients, words)

    def deliver(self, result: Result | Results) -> None:
        pass

    def new_bytes(self, table: Table) -> int:
        """Of a new adapter, at most: that of exact factors depends on which clients have a weight"""
        assert isinstance(table, AdapterTable)
        n = len(table.names)
        size = int(table.layout.bytes[n:].sum())
        for t, like in enumerate(table.like):
            ranks = {id(f): f.rank for f in (client[t] for client in table.clients) if isinstance(f, Factors)}
            rank = self.rank or like.rank
            if self.form != "rank":
                rank = (sum if self.form == "exact" else max)(ranks.values()) if ranks else like.rank
            size += rank * (like.A.nbytes + like.B.nbytes) // like.rank
        return size

    def _reading(self, what: str, table: AdapterTable) -> Callable[[int, int], None] | None:
        self.passes, self.bytes_read = self.passes + 1, self.bytes_read + table.bytes
        if self.progress is None:
            return None
        progress = self.progress
        return lambda done, of: progress(what, table.bytes * done // of, table.bytes)

    def _new(self, table: AdapterTable, t: int, weights: np.ndarray) -> forms.New | None:
        """The new factors of a module; None if they are not finite"""
        weight: dict[Factors, float] = {}
        for client, w in zip(table.clients, weights.tolist(), strict=True):
            f: Any = client[t]  # clients without the module have the global adapter's
            if f is not None and w:
                weight[f] = weight.get(f, 0.0) + w
        factors, like = list(weight), table.like[t]
        largest = max([f.rank for f in factors], default=like.rank)
        rank = self.rank or like.rank if self.form == "rank" else largest
        core = self._cores.get(table.layout.keys[t])
        return forms.new_factors(self.form, factors, list(weight.values()), like, rank, core)

    def _result(self, table: AdapterTable, plain: Result, made: Sequence[forms.New | None]) -> AdapterResult:
        result, new = AdapterResult(), {}
        for module, names, one in zip(table.modules, table.names, made, strict=True):
            assert one is not None
            result[names.A] = names.for_caller(one.A.reshape(-1, *names.shape_A))
            result[names.B] = names.for_caller(one.B.reshape(*one.B.shape, *names.shape_B))
            new[module] = one
        result.update(plain)
        result.truncation = {module: one.left for module, one in new.items()}
        result.ranks = {module: len(one.A) for module, one in new.items()}
        result.scaling = {module: like.scaling for module, like in zip(table.modules, table.like, strict=True)}
        if table.config is not None:
            result.config = peft.config_with(table.config, result.ranks, result.scaling)
        return result


def _too_large(table: AdapterTable, t: int) -> InputError:
    """The error when a module's new factors leave the range of their dtype: naming the clients of which they do"""
    words = f"the result: module {table.modules[t]!r} is too large for its dtype, though clients are finite"
    models: list[Any] = [model[t] for model in (*table.clients, table.global_model)]
    some = [k for k, f in enumerate(models) if f is not None]
    A = np.array([nonfinite.largest(models[k].A) for k in some])
    B = np.array([nonfinite.largest(models[k].B) * abs(models[k].scaling) for k in some])
    named = ([some[at] for at in nonfinite.dominant(sizes) if some[at] < table.K] for sizes in (A * B, A, B))
    return nonfinite.too_large(table, next(filter(None, named), []), words)


def _check_known(table: AdapterTable, matrix: torch.Tensor, terms: Mapping[int, tuple[int, torch.Tensor]]) -> None:
    """Raises where the terms of a client's square cancel each other so far that rounding errors are left. Who sends
    B = (b, -b) and A = (a, a + d) with a long b and a short d could hide an update of any length from every method.

    terms   by module: the Gram's layer that it is part of, and Core.terms
    """
    whole = torch.zeros(matrix.shape[:2], dtype=torch.float64, device="cpu")
    for layer, found in terms.values():
        whole[layer] += found
    squares = matrix.diagonal(dim1=1, dim2=2).clamp(min=0)
    usual = squares[:, 1:].median(1, keepdim=True)[0]
    lost = EPSILON * whole > torch.maximum(UNKNOWN * torch.maximum(squares, usual), UNKNOWN**2 * squares[:, :1])
    bad = [k for k in range(table.K) if lost[:, k + 1].any()]
    if not bad:
        return
    reasons = []
    for k in bad:
        t = max((t for t, (layer, _) in terms.items() if lost[layer, k + 1]), key=lambda t: float(terms[t][1][k + 1]))
        reasons.append(
            f"module {table.modules[t]!r}: its update is so short, next to the products that it is made of, that only "
            "rounding errors are left of it"
        )
    said = "; ".join(f"{table.name(k)}: {reason}" for k, reason in zip(bad[: nonfinite.NAMED], reasons, strict=False))
    raise BadClientError(said, dict(zip(table.given(bad), reasons, strict=True)))


def keys_not_finite(table: Table, model: Sequence[Any]) -> list[str]:
    """The keys of an adapter's tensors that are not finite"""
    assert isinstance(table, AdapterTable)
    n, found = len(table.names), []
    for names, f in zip(table.names, model, strict=False):
        if f is not None:
            found += [key for key, x in ((names.A, f.A), (names.B, f.B)) if nonfinite.not_finite_in([x], [0])]
    plain = [t for t in range(n, table.T) if model[t] is not None]
    return found + [table.layout.keys[t] for t in nonfinite.not_finite_in(model, plain)]


def _with_center(table: AdapterTable) -> Table:
    plain = table.plain
    if plain.center is None or any(x is None for client in plain.clients for x in client):
        raise InputError(
            f"the adapters have tensors besides factors, such as {plain.layout.keys[0]!r}: pass the global adapter, "
            "with those that the clients started from"
        )
    return plain
