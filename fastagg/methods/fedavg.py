"""FedAvg (McMahan et al., 2017): the mean of the client models, weighted by their data sizes.

    new = gamma (g + server_lr (sum_k n_k w_k - g))

With server_lr and gamma at 1 that is the mean itself. gamma < 1 is FedLAW's global weight shrinking (Li et al., 2023,
Eq. 4 and Table 1), server_lr the global learning rate of its Table 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, InputError, Range, Weights, register


@register
class FedAvg(GlobalAggregator):
    """The mean of the client models, weighted by data size (sizes; default: equal). One read.

    server_lr   how far the model moves from the global model towards the mean; 1: all the way. Other values need the
                global model
    gamma       scales the new parameters (FedLAW's global weight shrinking)

    The new model is gamma (g + server_lr (sum_k weights_k w_k - g)). Buffers are the mean, whatever the options.
    """

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
    reads = "weights"
    needs_global = False  # None is accepted where server_lr is 1; otherwise its form is checked

    server_lr: Annotated[float, Range(above=0)] = 1.0
    gamma: Annotated[float, Range(above=0)] = 1.0

    def check_options(self) -> None:
        if self.server_lr != 1:
            vars(self).update(needs_global=True)  # of this object

    def missing_global(self) -> InputError:
        if self.server_lr == 1 or self.partial:
            return super().missing_global()
        return InputError(
            f"{self.name}: the global model is None; server_lr={self.server_lr:g} is a step from the model the clients "
            "started from"
        )

    def weigh(self, cohort: Cohort) -> Weights:
        rest = None if self.server_lr == 1 else float(self.gamma * (1 - self.server_lr))
        n = self.masses(cohort)
        return Weights(n, scale=self.gamma * self.server_lr, center=rest, others=None if rest is None else n)

    def masses(self, cohort: Cohort) -> np.ndarray:
        """The clients' weights in the mean, [K]"""
        return cohort.shares

    def parts_of_mean(self, size: float, inputs: Mapping[str, Any]) -> tuple[float, float]:
        return size, size
