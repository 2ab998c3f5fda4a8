"""FedAvg as Flower and NVFlare compute it, on the same models, where installed (pip install '.[bench]')."""

from __future__ import annotations

from collections.abc import Callable

import torch


def fedavg() -> dict[str, Callable]:
    """name -> function (global_sd, client_sds) -> state dict"""
    return _flower() | _nvflare()


def _flower() -> dict[str, Callable]:
    try:
        from flwr.server.strategy.aggregate import aggregate
    except ImportError:
        return {}

    def flower(global_sd, client_sds):
        # Flower's servers hold lists of NumPy arrays: views of the same memory here, so that nothing else is timed
        arrays = aggregate([([value.numpy() for value in sd.values()], 1) for sd in client_sds])
        return {key: torch.as_tensor(array) for key, array in zip(global_sd, arrays, strict=True)}

    return {"Flower": flower}


def _nvflare() -> dict[str, Callable]:
    try:
        from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
    except ImportError:
        return {}

    def nvflare(global_sd, client_sds):
        helper = WeightedAggregationHelper()
        for k, sd in enumerate(client_sds):
            helper.add(sd, 1.0, f"site-{k}", 0)
        return helper.get_result()

    return {"NVFlare": nvflare}
