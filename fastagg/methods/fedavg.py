"""FedAvg (McMahan et al., 2017): the mean of the client models, weighted by their data sizes."""

from __future__ import annotations

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, register


@register
class FedAvg(GlobalAggregator):
    """The mean of the client models, weighted by data size (sizes; default: equal). One read."""

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
    reads = "weights"
    needs_global = False  # None is accepted; otherwise its form is checked

    def weigh(self, cohort: Cohort) -> np.ndarray:
        return cohort.shares
