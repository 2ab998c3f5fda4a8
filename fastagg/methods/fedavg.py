"""FedAvg (McMahan et al., 2017): the mean of the client models, weighted by their data."""

from __future__ import annotations

from dataclasses import dataclass

from fastagg._engine.aggregator import Aggregator, Cohort, describe, function_of
from fastagg._engine.result import Result


@dataclass(kw_only=True, eq=False)
class FedAvg(Aggregator):
    """The mean of the client models, weighted by how much data each has (sizes; default: equal). One read."""

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
    needs_global = False  # None is accepted; otherwise its form is checked

    def round(self, cohort: Cohort, out) -> Result:
        [result] = cohort.mix(cohort.n[None], out=out)
        return describe(result, cohort, cohort.n)


fedavg = function_of(FedAvg)
