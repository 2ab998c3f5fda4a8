"""One round of any method on any access: checks, the order of clients, bad clients, and the result for the caller."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fastagg._engine import forming
from fastagg._engine import inputs as given_inputs
from fastagg._engine.access import Access
from fastagg._engine.checks import BadClientError, InputError
from fastagg._engine.cohort import Cohort
from fastagg._engine.describe import in_callers_order
from fastagg._engine.inputs import RoundInput, data_shares, read_client_ids, read_inputs, read_sizes
from fastagg._engine.mixed import MixedCohort
from fastagg._engine.outputs import list_of
from fastagg._engine.stages import make_buckets
from fastagg._engine.table import Out, StateDict, Table

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator

LOG = logging.getLogger("fastagg")
Kept = tuple[Any, int | None]  # a method's state after a round, and how many clients it had, if they had no ids


def run(
    method: Aggregator, access: Access, global_sd: StateDict | None, client_sds: Iterable[StateDict | InputError],
    sizes: Any,
    client_ids: Sequence[Any] | None, out: Out, inputs: Mapping[str, Any],
) -> tuple[Any, Kept]:  # fmt: skip
    """The result, and what the method is to commit() once it has been delivered.

    Does not change what the method remembers, so a round that fails or is interrupted leaves no trace.
    """
    if isinstance(client_sds, Iterable) and not isinstance(client_sds, Mapping):
        client_sds = list(client_sds)
    form: dict[str, Any] = {"params": method.params, "layers": method.layers, "partial": method.partial}
    if not isinstance(client_sds, list) or not client_sds:
        access.build(global_sd, cast(list, client_sds), **form, client_ids=None, bad=None)  # which says what is wrong
        raise AssertionError
    K = len(client_sds)
    ids = read_client_ids(client_ids, K)
    if method.needs_global and global_sd is None:
        raise method.missing_global()
    values, bad = read_inputs(method.name, method.round_inputs, inputs, ids)
    if make_buckets(method.stages):
        for name in (spec.name for spec in method.round_inputs if spec.per_client and spec.name in values):
            raise InputError(f"{method.name}: {name} are of clients, and it sees buckets of them: pre has bucketing")
    amounts, no_size = read_sizes(sizes, ids)
    bad |= no_size
    bad |= {k: str(sd) for k, sd in enumerate(client_sds) if isinstance(sd, InputError)}  # whatever else is wrong
    if why := access.why_not(method, values):
        raise InputError(f"{method.name}: {why}")
    drops = method.on_bad_client == "drop"
    if drops:  # the round may be computed again, without a client
        values = {name: list(value) if isinstance(value, Iterator) else value for name, value in values.items()}
    if bad and not drops:
        raise given_inputs.bad_clients(bad, ids)
    misfits: dict[int, str] = {}
    try:
        table = access.build(global_sd, client_sds, **form, client_ids=ids, bad=misfits if drops else None)
    except BadClientError as error:
        if drops:
            raise InputError(f"no client is left: none of {K} can be used. {error}") from error
        raise
    bad = misfits | bad
    if client_ids is None:
        method.check_unnamed(K)
    for k, reason in bad.items():
        LOG.warning("%s: %s; left out of this round", method.name, given_inputs.bad_clients({k: reason}, ids))
    order = [k for k in (range(K) if client_ids is None else by_id(ids)) if k not in bad]
    while True:
        if not order:
            last = next(reversed(bad.items()))
            raise InputError(
                f"no client is left: none of {K} can be used. {given_inputs.bad_clients(dict([last]), ids)}"
            )
        try:
            result, state = _compute(method, access, table, order, K, amounts, ids, out, values)
            break
        except BadClientError as error:
            if not drops or not set(error.reasons) & set(order):  # without progress it would be raised for ever
                raise
            LOG.warning("%s: %s; left out of this round", method.name, error)
            bad |= error.reasons
            order = [k for k in order if k not in bad]
    for value in method.client_values:
        if getattr(result, value.name, None) is not None:
            setattr(result, value.name, value.tensor(getattr(result, value.name)))
    result = in_callers_order(result, order, K, method.produces == "personalised", method.client_values)
    result.dropped = {ids[k]: bad[k] for k in sorted(bad)}
    if bad:
        method.describe_dropped(result, ids, values)
    return result, (state, K if client_ids is None else None)


def _compute(
    method: Aggregator, access: Access, table: Table, order: list[int], K: int, amounts: np.ndarray, ids: list[Any],
    out: Out, inputs: Mapping[str, Any],
) -> tuple[Any, Any]:  # fmt: skip
    """The round of some of the K clients given, in this order, and the method's state after it"""
    values = {
        spec.name: _some(spec, inputs[spec.name], order, K) for spec in method.round_inputs if spec.name in inputs
    }
    column = {k: at for at, k in enumerate(table.given(range(table.K)))}
    columns = [column[k] for k in order]
    if columns != list(range(table.K)):
        table = table.of_round(columns)
    if out is not None and method.produces == "personalised" and order != list(range(K)):
        outs = list_of(out)
        if len(outs) != K:
            raise InputError(f"out: {len(outs)} state dicts given, {K} needed")
        out = [outs[k] for k in order]
    cohort = Cohort(
        table, data_shares(amounts[order]), [ids[k] for k in order], access, method.state, out,
        forms_gram=forming.is_wanted(method, table, access.pass_cost, access.any),
    )  # fmt: skip
    try:
        if not method.stages:
            return method.combine(cohort, **values), cohort.state
        mixed = MixedCohort(cohort, method.stages, method.turn)
        result = method.combine(mixed, **values)
        mixed.spread(result, method.client_values)
        return result, mixed.state
    finally:
        cohort.close()


def by_id(ids: list[Any]) -> list[int]:
    """Positions in the order of the ids: numbers, then strings"""
    return sorted(range(len(ids)), key=lambda k: (isinstance(ids[k], str), ids[k]))


def _some(spec: RoundInput, value: Any, order: Sequence[int], K: int) -> Any:
    """An input for some of the K clients, in this order"""
    if not spec.per_client or order == list(range(K)):
        return value
    return value[np.ix_(order, order)] if spec.pairwise else np.take(value, order, spec.client_axis)
