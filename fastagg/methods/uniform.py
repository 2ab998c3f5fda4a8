"""The plain mean: every client counts alike, whatever its data size.

What a method that learns weights is to be compared with: where small clients move little, equal weights also shorten
the step of the global model, which FedAvg does by server_lr.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastagg.extend import Cohort, register
from fastagg.methods.fedavg import FedAvg


@register
class Uniform(FedAvg):
    """The mean of the client models, all with equal weights, whatever their data sizes. One read.

    server_lr   how far the model moves from the global model towards the mean; 1: all the way. Other values need the
                global model
    gamma       scales the new parameters (FedLAW's global weight shrinking)

    The new model is gamma (g + server_lr (1/K sum_k w_k - g)). Buffers are the mean, whatever the options. Sizes are
    checked but not used.
    """

    name = "uniform"
    paper = "the plain mean"

    def masses(self, cohort: Cohort) -> np.ndarray:
        return np.full(cohort.K, 1 / cohort.K)

    def parts_of_mean(self, size: float, inputs: Mapping[str, Any]) -> tuple[float, float]:
        return 1.0, 1.0
