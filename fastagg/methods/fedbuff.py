"""FedBuff (Nguyen et al., AISTATS 2022): asynchronous updates, aggregated whenever a buffer of them is full.

    new = g + server_lr sum_k n_k s(t_k) d_k,      d_k = w_k - g_v,      s(t) = (1 + t)^-0.5

g_v is the version of the global model that client k started from, t_k the number of versions made since then. The
paper's clients are equal, n_k = 1/m for m of them. Without staleness that is FedAvg with a server step. A model w_k is
mixed as it is, together with g_v: sum_k a_k w_k - sum_v (sum of its a_k) g_v in one read, rounded once. So older
versions are kept; an update needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import numpy as np
import torch

from fastagg.extend import Cohort, InputError, Range, Weights, check_form, one_thread, register
from fastagg.methods.asynchronous import Asynchronous, Model, Versions

NOT_FINITE = "the former versions that are remembered, or the new model, are too large to compute with"


@register
class FedBuff(Asynchronous):
    """Asynchronous: updates of clients that do not wait for each other; the staler, the less they count.

    buffer_size     how many clients make a round: in a session, round.is_ready says that they are there
    server_lr       how far the model moves
    decay           how the weight falls with the staleness t, the number of versions made since the client got its
                    model: "polynomial", (1 + t)^-a; "hinge", 1 up to t = b, then 1 / (a (t - b) + 1); "constant", 1
    a, b            of decay; a is 0.5 (polynomial) or 10 (hinge) by default
    keep_versions   how many former versions of the global model to remember, for clients that send models. Clients that
                    send updates need none
    version         per round, required: [K], the number of the version that each client started from. The first one is
                    0, each round makes the next, and the aggregator's .version is the current one

    The new model is g + sum_k weights_k (w_k - g_v): .weights are server_lr times the data shares times s(t), and
    .staleness has t. Buffers are the mean by data shares. A client that started from a version that is not remembered
    is a bad client, unless it sends its update.
    """

    name = "fedbuff"
    paper = "Nguyen et al., AISTATS 2022"
    stale_as = "updates"

    buffer_size: Annotated[int, Range(1)] = 10
    server_lr: Annotated[float, Range(above=0)] = 1.0
    keep_versions: Annotated[int, Range(0)] = 5

    @property
    def waits_for(self) -> int:
        return self.buffer_size

    def why_not_on_adapters(self) -> str:
        if not self.keep_versions:
            return ""
        return (
            "it keeps former versions of the global model, and an adapter has only the factors of its update; with "
            "keep_versions=0 it takes clients that started from the current version"
        )

    def weigh(self, cohort: Cohort, version: np.ndarray) -> Weights:
        t = self.stalenesses(cohort, version, cohort.table.updates)
        weights = self.server_lr * cohort.shares * self.discounts(t)
        of_current, values, others = weights.sum(), weights, cohort.shares
        if not cohort.table.updates:
            of_current = weights[t == 0].sum()
            for v in np.unique(version[t > 0]):
                cohort.add_model(cohort.with_parameters(cohort.state.former[int(v)], self.name), NOT_FINITE)
                values, others = np.append(values, -weights[version == v].sum()), np.append(others, 0.0)
        return Weights(values, center=1 - of_current, others=others, about={"staleness": t})

    def _why_not_stale(self, state: Versions, version: int) -> str:
        if version in state.former:
            return ""
        kept = [*map(str, state.former), f"{state.now}, the current one"]
        return (
            f"it started from version {version} of the global model, and there are {' and '.join(kept)}; remember more "
            "of them (keep_versions), or let clients send updates"
        )

    def started_from(self, inputs: Mapping[str, Any]) -> Model | None:
        version = int(inputs["version"])
        if why := self._why_not(self.state, version, is_update=False):
            raise InputError(f"{self.name}: a client cannot be used: {why}")
        return self.state.former.get(version)

    def _kept(self, cohort: Cohort) -> Mapping[int, Model]:
        if not self.keep_versions:
            return {}
        table, former = cohort.table, cohort.state.former
        for model in former.values():
            check_form(self.name, table.layout, model)
        with one_thread():
            parameters = {
                table.layout.keys[t]: table.global_model[t].detach().clone()
                for t in np.flatnonzero(table.layout.is_param)
            }
        return dict([*former.items(), (cohort.state.now, parameters)][-self.keep_versions :])

    def bytes_needed(self, parameters: Iterable[tuple[int, torch.dtype]]) -> int:
        kept = self.keep_versions and self.keep_versions + 1  # the oldest goes when the new one is there
        return kept * sum(numel * dtype.itemsize for numel, dtype in parameters)
