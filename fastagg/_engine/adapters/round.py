"""One round of adapters: fastagg.lora.aggregate()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastagg._engine import registry, rounds
from fastagg._engine.adapters.access import AdapterResult, InAdapters
from fastagg._engine.adapters.folders import Adapter, load, save
from fastagg._engine.adapters.forms import Form
from fastagg._engine.adapters.peft import Scaling
from fastagg._engine.aggregator import Aggregator
from fastagg._engine.checks import InputError
from fastagg._engine.options import options_of
from fastagg._engine.result import Results

__all__ = ["Adapter", "aggregate", "load", "save"]


def aggregate(
    global_adapter: Any, client_adapters: Sequence[Any], sizes: Any = None, *, method: str | Aggregator = "fedawa",
    form: Form = "rank", rank: int | None = None, scaling: Scaling = None, client_ids: Sequence[Any] | None = None,
    **options: Any,
) -> AdapterResult | Results:  # fmt: skip
    """Aggregates LoRA adapters by their updates B A, which are never formed: weights from the Gram of the updates, and
    new factors from the weighted sum.

    global_adapter    the adapter that the clients started from, or None where they started from B = 0. If their
                      adapters have plain tensors too (modules_to_save, biases), methods need it for those.
    client_adapters   K adapters. Each is a state dict as peft.get_peft_model_state_dict gives it, a
                      fastagg.lora.Adapter (a state dict with its config), or the path of a folder with
                      adapter_model.safetensors and adapter_config.json. Ranks may differ. A module that a client does
                      not have did not move; with partial=True, it is mixed by the clients that have it.
    sizes, client_ids as for every method
    method            a method's name, with its options and round inputs as further arguments; or an aggregator, which
                      keeps its state from round to round. Methods that read elements or models are refused.
    form              what the new adapter is made of the weighted sum of the updates:
                      "rank": its best factors of rank `rank`; .truncation says by module what was left out
                      "exact": the sum itself, of the sum of all ranks (FLoRA), to be merged into the base model
                      "frozen_a": the mean of B, where A is the same for all (FFA-LoRA)
                      "separate": the means of A and of B (FedIT), which are not the factors of the mean; zeros fill up
                      smaller ranks (HetLoRA)
    rank              default: that of the global adapter or, without one, the largest of the clients'
    scaling           the factor of B A in adapters without a config: a number, or a function of the rank, such as
                      lambda r: 16 / r. Not needed where all ranks are equal

    Returns an AdapterResult: the tensors by PEFT's names, with .weights, .gram, .dropped, .truncation, .ranks, .scaling
    and .config. Methods that produce several models return a list of them.
    """
    server, inputs = _server(method, options)
    access = InAdapters(form, rank, scaling)
    center = {} if global_adapter is None else load_if_path(global_adapter)
    result, kept = rounds.run(server, access, center, _opened(client_adapters), sizes, client_ids, None, inputs)
    server.commit(kept)
    return result


def load_if_path(adapter: Any) -> Any:
    return adapter if isinstance(adapter, Mapping) else load(adapter)


def _opened(adapters: Any) -> list[Any]:
    """The adapters, and the error in the place of one that cannot be read"""
    if isinstance(adapters, Mapping | str) or not hasattr(adapters, "__iter__"):
        raise InputError(f"client_adapters is a {type(adapters).__name__}; expected a sequence of adapters")
    found: list[Any] = []
    for adapter in adapters:
        try:
            found.append(load_if_path(adapter))
        except InputError as error:
            found.append(error)
    return found


def _server(method: str | Aggregator, options: dict[str, Any]) -> tuple[Aggregator, dict[str, Any]]:
    """The aggregator, and the inputs of this round"""
    if isinstance(method, Aggregator):
        server, inputs = method, options
    else:
        cls = registry.find(method)
        inputs = {key: options.pop(key) for key in options.keys() - options_of(cls).keys()}
        server = registry.make(cls, options)
    registry.check_known(type(server), inputs, [spec.name for spec in server.round_inputs])
    if not isinstance(method, Aggregator):
        server.warn_state_lost(inputs, f'Keep an aggregator, method=fastagg.aggregator("{server.name}", ..)')
    if server.group is not None:
        raise InputError(f"{server.name}: group= is for models spread over processes, not for adapters")
    return server, inputs
