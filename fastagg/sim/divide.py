"""The data of a run, and who has which of them: clients, server, and what is left to test on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fastagg.sim import data, domains, partition
from fastagg.sim.config import Config
from fastagg.sim.data import Dataset
from fastagg.sim.objects import Own
from fastagg.sim.partition import Partition

Proxy = tuple[Tensor, Tensor]  # samples that the server keeps, and their labels


def divided(o: Config, own: Own, dataset: Dataset | None) -> tuple[Dataset, Partition, Proxy]:
    """dataset: what the options name, if it has been loaded already"""
    brought = own.dataset(o) if dataset is None else None
    d = brought.dataset if brought else dataset or data.load(o.data, o.data_dir, o.pixels)
    given, proxy = brought.parts if brought else None, None
    if o.proxy_from == "test":
        if d.domains:
            raise ValueError(
                f"sim: proxy_from=test cannot be had with {d.name}, whose clients test on their own domain"
            )
        kept, rest = partition.proxy_from_test(d.test_y.numpy(), d.classes, o.proxy, o.proxy_split, o.seed)
        proxy = d.test_x[kept], d.test_y[kept]
        d = replace(d, test_x=d.test_x[rest], test_y=d.test_y[rest])
    how: dict[str, Any] = {
        "kind": own.get(o, "partition"), "alpha": o.alpha, "classes_per_client": o.classes_per_client,
        "min_size": o.min_size, "samples": o.samples, "long_tail": o.long_tail, "corrupted": o.corrupted,
        "proxy": 0 if proxy is not None or given is not None else o.proxy, "proxy_split": o.proxy_split,
        "train_share": o.train_share, "seed": o.seed,
    }  # fmt: skip
    if d.domains:
        parts = domains.split(d, o.clients, domain_clients=o.clients_of_domains, **how)
    elif o.domain_clients is not None:
        raise ValueError(f"sim: domain_clients={o.domain_clients} with {d.name}, which has no domains; leave it out")
    else:
        parts = partition.make(d.y.numpy(), d.test_y.numpy(), d.classes, o.clients, **how, given=given)
    return d, parts, proxy or (d.x[parts.proxy], d.y[parts.proxy])
