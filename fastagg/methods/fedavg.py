"""FedAvg (McMahan et al., 2017): the mean of the client models, weighted by their data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastagg import core
from fastagg import table as tables
from fastagg.methods.common import data_shares
from fastagg.result import Result
from fastagg.table import StateDict


def fedavg(
    global_sd: StateDict | None, client_sds: Sequence[StateDict], sizes=None, *, out: StateDict | None = None
) -> Result:
    """The weighted mean of the client models. One read of the clients.

    global_sd   the model they started from: only its form is checked; None is accepted
    sizes       how much data each client has (default: equal)
    out         a former result, written in place
    """
    table = tables.build(global_sd, client_sds)
    weights = data_shares(sizes, table.K)
    result = core.mix_of(table, weights[None, None], core.rows(table, False), out)[0]
    result.weights = torch.from_numpy(weights)
    return result
