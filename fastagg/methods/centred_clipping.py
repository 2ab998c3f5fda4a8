"""Centred clipping (Karimireddy et al., ICML 2021): no client moves the model further than a clipped update may.

    v = v + 1/K sum_k (d_k - v) min(1, tau / ||d_k - v||),      new model g + v

from v = 0, or as in the paper from the v of the round before. Every v is u v_0 + sum_k c_k d_k with v_0 the start, so
||d_k - v|| comes from a Gram that has v_0 as one more row, and an iteration is c = (1 - mean s) c + s / K with
s_k = min(1, tau / ||d_k - v||): the coefficients are never negative and their sum is never above 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

import numpy as np
import torch

from fastagg.extend import Cohort, GlobalAggregator, Gram, InputError, Range, Result, Weights, check_tensor, register

NOT_FINITE = (
    "the global model and the update that this method remembers add up to a model that is not finite, or too far away; "
    "make a new aggregator to start without it"
)


@register
class CentredClipping(GlobalAggregator):
    """The mean of the client updates, each clipped to length tau: the model moves at most that far per iteration.

    tau          updates are clipped to this length; choose it close to the length of an honest update
    iterations   number of iterations; each clips again around the model found so far
    weighted     True: weight clients by their data shares. False, as in the paper: all clients count equally, whatever
                 data size they claim
    center       what updates are clipped around: "global", no update at all; "previous", as in the paper, the update of
                 the previous round, which an aggregator remembers (in memory; not available for models in files)

    The model is g + sum_k weights_k (w_k - g); with center="previous", previous_weight times the previous update is
    added. .weights (and .previous_weight) are never negative and sum to at most 1, less if updates were clipped.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "centred_clipping"
    paper = "Karimireddy et al., ICML 2021"
    reads = "products"
    buffers = "median"

    tau: Annotated[float, Range(1e-100)] = 10.0
    iterations: Annotated[int, Range(1)] = 1
    weighted: bool = False
    center: Literal["global", "previous"] = "global"
    # The update of the round before, a tensor for each parameter; None before the first. Never written to.
    state: dict[str, torch.Tensor] | None = field(init=False, default=None, repr=False)

    def products(self) -> int:
        return self.iterations

    def why_not_on_files(self) -> str:
        return "center='previous' keeps an update in memory and does not work on files" * (self.center == "previous")

    def why_not_on_adapters(self) -> str:
        return "center='previous' keeps an update, and of an adapter's there are only the factors" * (
            self.center == "previous"
        )

    def weigh(self, cohort: Cohort) -> Weights:
        K = cohort.K
        masses, start = cohort.shares if self.weighted else np.full(K, 1 / K), np.zeros(K)
        # any: of a model that is spread over processes, this one may have no part, and no update of it
        if self.center == "previous" and cohort.access.any(bool(cohort.state)):
            cohort.add_model(cohort.global_plus(cohort.state or {}, self.name), NOT_FINITE)
            masses, start = np.append(masses, 0), np.append(start, 1.0)
        c = clip(cohort.gram(times=start), masses, start, self.tau, self.iterations)
        return Weights(c, center=1 - c.sum(), about={"previous_weight": float(c[K:].sum())})

    def learn(self, cohort: Cohort, weights: Weights, result: Result | None) -> None:
        if self.center == "previous":
            if result is None:
                raise InputError("centred_clipping: center='previous' remembers its own model, and gives no weights")
            cohort.state = cohort.update_of(result)

    def state_dict(self) -> dict[str, Any]:
        """The update of the last round by key: {"method": .., "previous": {key: tensor}}; none without a round, or with
        center="global\""""
        previous = {key: value.clone() for key, value in (self.state or {}).items()}
        return {**super().state_dict(), "previous": previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state, ("previous",))
        previous = state["previous"]
        if not isinstance(previous, Mapping):
            raise InputError(f"{self.name} state: previous is a {type(previous).__name__}, expected a dict")
        if previous and self.center == "global":
            raise InputError(f"{self.name} state: it has a previous update, which center='global' does not use")
        for key, value in previous.items():
            check_tensor(f"{self.name} state: previous update of {key!r}", key, value)
        copies = {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in previous.items()}
        super().load_state_dict(state)
        self.state = copies or None


def clip(gram: Gram, masses: np.ndarray, c: np.ndarray, tau: float, iterations: int) -> np.ndarray:
    """The coefficients after so many iterations from c, all [K], from the Gram and masses that sum to 1"""
    squares = gram.on_host.squares
    for _ in range(iterations):
        Gc = gram @ c
        distance = np.sqrt(np.maximum(squares - 2 * Gc + c @ Gc, 0))
        s = masses * (tau / np.maximum(distance, tau))
        c = (1 - s.sum()) * c + s
    return c
