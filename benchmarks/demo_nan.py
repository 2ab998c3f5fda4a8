"""A client whose training went wrong sends a NaN: what a plain mean does, and what fastagg does."""

from __future__ import annotations

import logging

import torch

import fastagg
from benchmarks import models
from benchmarks.torch_code import CONTESTANTS


def lines() -> list[tuple[str, str]]:
    torch.manual_seed(0)
    global_sd = models.MODELS["resnet20"]()
    clients = list(models.clients(global_sd, 5))
    ids = ["hospital-1", "hospital-2", "hospital-3", "hospital-4", "hospital-5"]
    clients[3]["layer2.0.conv1.weight"][0, 0, 0, 0] = torch.nan
    usual = CONTESTANTS["fedavg"].usual(global_sd, clients)
    spoilt = [key for key, value in usual.items() if value.isnan().any()]
    try:
        fastagg.FedAvg().aggregate(global_sd, clients, client_ids=ids)
        said = "nothing"
    except fastagg.NonFiniteError as error:
        said = f"{type(error).__name__}: {error}"
    logger = logging.getLogger("fastagg")
    logger.disabled, before = True, logger.disabled  # what it would log is shown below
    try:
        result = fastagg.FedAvg(on_bad_client="drop").aggregate(global_sd, clients, client_ids=ids)
    finally:
        logger.disabled = before
    clean = all(value.isfinite().all() for value in result.values())
    left = len(ids) - len(result.dropped)
    return [
        ("PyTorch loop", f"says nothing; the new model has NaN in {', '.join(spoilt) or 'no tensor'}"),
        ("fastagg", said),
        ('on_bad_client="drop"', f"{left} clients aggregated; the model is {'finite' if clean else 'not finite'}; "
                                 f"result.dropped names {', '.join(result.dropped)}"),
    ]  # fmt: skip
