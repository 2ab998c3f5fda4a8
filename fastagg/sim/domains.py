"""Who has which samples, where samples come from several domains: each client has those of one.

Every domain is split over its own clients as if it were all there is, by any kind of partition.make: "iid" is the
setting of FPL (Huang et al., 2023), which has 20 clients, each with 1 % of its domain. Clients of the first domain come
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastagg._engine.checks import check_integer
from fastagg.sim import partition
from fastagg.sim.data import Dataset
from fastagg.sim.partition import Partition, apportion


def split(
    data: Dataset,
    clients: int,
    *,
    domain_clients: Sequence[int] | None = None,
    samples: int | None = None,
    proxy: int = 0,
    seed: int = 0,
    **options: Any,
) -> Partition:
    """Takes the options of partition.make, which are those of each domain, and:

    domain_clients   how many clients each domain has (None: as equal as can be)
    samples          how many training samples all clients have together: each the same part of its domain (None: all)
    proxy            how many training samples the server keeps: as many of each domain as can be
    """
    assert data.domain is not None  # the caller has seen it
    assert data.test_domain is not None
    number = len(data.domains)
    check_integer("partition", "clients", clients, number)
    each = (
        [clients // number + (d < clients % number) for d in range(number)]
        if domain_clients is None
        else domain_clients
    )
    if len(each) != number or sum(each) != clients or min(each) < 1:
        raise ValueError(
            f"partition: domain_clients={list(each)}; expected {number} numbers, of {', '.join(data.domains)}, from 1,"
            f" that sum to clients={clients}"
        )
    y, test_y = data.y.numpy(), data.test_y.numpy()
    rows, test_rows = (
        [np.flatnonzero(domain.numpy() == d) for d in range(number)] for domain in (data.domain, data.test_domain)
    )
    sizes = np.array([len(r) for r in rows])
    seeds = np.random.SeedSequence(int(seed)).generate_state(number)
    some = [None] * number if samples is None else apportion(samples, sizes * np.array(each)).tolist()
    kept = apportion(proxy, np.ones(number)).tolist()
    parts = []
    for d, name in enumerate(data.domains):
        try:
            parts.append(
                partition.make(
                    y[rows[d]], test_y[test_rows[d]], data.classes, each[d],
                    samples=some[d], proxy=kept[d], seed=int(seeds[d]), **options,
                )
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{error} (in the domain {name!r}, which has {each[d]} clients)") from error
    labels = y.copy()
    for part, here in zip(parts, rows, strict=True):
        labels[here] = part.labels
    return Partition(
        train=[here[r] for part, here in zip(parts, rows, strict=True) for r in part.train],
        test=[here[r] for part, here in zip(parts, test_rows, strict=True) for r in part.test],
        proxy=np.concatenate([here[part.proxy] for part, here in zip(parts, rows, strict=True)]),
        labels=labels,
        counts=np.concatenate([part.counts for part in parts]),
        held_out=[here[r] for part, here in zip(parts, rows, strict=True) for r in part.held_out],
    )
