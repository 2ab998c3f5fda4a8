"""FLTrust (Cao et al., NDSS 2021): the server trains on a little data of its own, and trusts who goes the same way.

    d_0 = the update that the server has trained,      T_k = max(0, cos(d_k, d_0))
    new model g + sum_k T_k (||d_0|| / ||d_k||) d_k / sum_k T_k

The server's model is one more row of the Gram. Only its column is needed: no pair of clients is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fastagg.extend import (
    ClientValue,
    Cohort,
    ExampleNet,
    ExampleRound,
    GlobalAggregator,
    RoundInput,
    Weights,
    ratio,
    register,
)

LONGER = 1e3  # how many times an update can be lengthened without its rounding becoming visible in the model
SERVER_MODEL = RoundInput(
    "server_model", "the model that the server has trained, from the global one, on its own data", required=True,
    per_client=False, from_clients=False, kind="server_model",
)  # fmt: skip


@register
class FLTrust(GlobalAggregator):
    """The mean of the client updates, weighted by their cosine with an update of the server, and all as long as it.

    server_model   per round: a state dict, the model that the server has trained on a small clean data set of its own,
                   from the global model and for as long as clients do

    The model is g + sum_k weights_k (w_k - g). The result has .weights, 0 for clients whose cosine is not positive, and
    .trust, these cosines from 0 to 1. If nobody is trusted the parameters do not change. The server's model itself is
    not part of the mean. An update is lengthened 1000 times at most: one that is shorter than a thousandth of the
    server's is mostly rounding. Sizes are not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "fltrust"
    paper = "Cao et al., NDSS 2021"
    reads = "products"
    buffers = "median"
    round_inputs = (SERVER_MODEL,)
    client_values = (ClientValue("trust"),)

    def why_not_on_files(self) -> str:
        return "the server's model is given in memory, and this method does not work on files"

    def why_not_over_group(self, inputs: Mapping[str, Any] | None) -> str:
        return "the server's model is given whole, and this method takes no group"

    def why_not_on_adapters(self) -> str:
        return "the server's model is given whole, and not as an adapter"

    @classmethod
    def example_round(cls, K: int) -> ExampleRound:
        generator = torch.Generator().manual_seed(9)
        tensors = {
            key: torch.rand(value.shape, generator=generator) if value.is_floating_point() else value
            for key, value in ExampleNet().state_dict().items()
        }
        return ExampleRound({}, {"server_model": tensors})

    def weigh(self, cohort: Cohort, server_model: Mapping[str, Any]) -> Weights:
        K = cohort.K
        cohort.add_model(
            cohort.tensors_of(server_model, "server_model"),
            "server_model: it has values that are not finite (NaN or infinity), or too large to compute with",
        )
        server = np.append(np.zeros(K), 1.0)
        gram = cohort.gram(times=server)
        lengths = np.sqrt(gram.on_host.squares)
        trust = np.clip(ratio((gram @ server)[:K], lengths[:K] * lengths[K]), 0, 1)
        factor = ratio(lengths[K], np.maximum(lengths[:K], lengths[K] / LONGER))
        w = ratio(trust, trust.sum()) * factor
        return Weights(np.append(w, 0.0), center=1 - w.sum(), about={"trust": torch.from_numpy(trust)})
