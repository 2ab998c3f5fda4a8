"""CFL (Sattler et al., IEEE TNNLS 2021): clients whose updates point apart get models of their own.

A cluster of clients c is split in two once its mean has stopped moving while its clients have not:

    || sum_{k in c} n_k d_k || < eps1      and      max_{k in c} || d_k || > eps2

The halves are those of hierarchical clustering by the cosine of updates. With single linkage they are the paper's
optimal bipartition, the one with the least maximal similarity across; its authors' code has complete linkage.
Every quantity of every cluster is read off the one Gram of all clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

import numpy as np
import torch

from fastagg.extend import ClusterAggregator, Cohort, InputError, Range, Weights, register


class NumberedClusters(ClusterAggregator):
    """What methods share that remember the number of each client's cluster"""

    state: dict[Any, int] = field(init=False, default_factory=dict, repr=False)  # client id -> number of its cluster

    @property
    def clusters(self) -> list[list[Any]]:
        """The client ids of every cluster"""
        members: dict[int, list[Any]] = {}
        for name, number in self.state.items():
            members.setdefault(number, []).append(name)
        return [members[number] for number in sorted(members)]

    def known_clients(self) -> Iterable[Any]:
        return self.state

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the client ids, and the number of each one's cluster as an int64 tensor."""
        numbers = torch.tensor(list(self.state.values()), dtype=torch.int64, device="cpu")
        return {**super().state_dict(), "client_ids": list(self.state), "clusters": numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state, ("client_ids", "clusters"))
        ids, [numbers] = self.read_clients(state, "clusters")
        if numbers.shape != (len(ids),):
            raise InputError(f"{self.name} state: clusters have shape {numbers.shape}, expected ({len(ids)},)")
        if not ((numbers >= 0) & (numbers < 2**53) & (numbers % 1 == 0)).all():
            raise InputError(f"{self.name} state: clusters are not numbered by integers >= 0")
        super().load_state_dict(state)
        self.state = {name: int(c) for name, c in zip(ids, numbers, strict=True)}


@register
class CFL(NumberedClusters):
    """Clusters of clients, one model per cluster; a cluster is split when the updates of its clients diverge.

    eps1        a cluster is split if its mean update is shorter than this,
    eps2        its longest update is longer than this,
    min_size    and it has more clients than this
    linkage     "complete": the distance of two clusters is that of their least similar clients, as in the authors'
                code;
                "single": that of their most similar clients, which gives the bipartition the paper calls optimal
    weighted    True: means are weighted by data shares, both of updates in the first condition and of models in a
                cluster; False: plain means, as in the authors' code

    Returns Results: one model for each cluster that has clients in this round, the mean of their models. .clusters
    lists the client ids of each, .mixing [M, K] the weights. The aggregator remembers the cluster of each client id;
    its .clusters lists all clusters, including absent clients. An unknown client joins the cluster of the known client
    whose update is most similar to its own. Clients that are absent while their cluster is split are forgotten; they
    join by similarity when they return. Once there are several models, the update of a client must be taken from the
    model it started from: call aggregate() once per cluster, with its model and only its clients. The other clusters do
    not change.
    """

    name = "cfl"
    paper = "Sattler et al., IEEE TNNLS 2021"
    reads = "pairs"

    eps1: Annotated[float, Range(0)] = 0.4
    eps2: Annotated[float, Range(0)] = 1.6
    min_size: Annotated[int, Range(1)] = 2
    linkage: Literal["complete", "single"] = "complete"
    weighted: bool = True

    def weigh(self, cohort: Cohort) -> Weights:
        gram = cohort.gram().host
        n = cohort.shares if self.weighted else np.full(cohort.K, 1 / cohort.K)
        G, cosine = gram.updates().numpy(), gram.cosine().numpy()
        number = _numbers(cohort, cosine)  # [K], of each client's cluster
        following = max([*cohort.state.values(), *number]) + 1
        split = set()
        for c in np.unique(number):
            members = np.flatnonzero(number == c)
            if self._is_split(G[np.ix_(members, members)], shares_within(n[members])):
                second = bipartition(1 - cosine[np.ix_(members, members)], self.linkage)
                number[members[second]] = following
                following += 1
                split.add(int(c))
        present = np.unique(number)
        mixing = np.zeros((len(present), cohort.K))
        for row, c in zip(mixing, present, strict=True):
            members = np.flatnonzero(number == c)
            row[members] = shares_within(n[members])
        clusters = [[cohort.ids[k] for k in np.flatnonzero(row)] for row in (number == present[:, None])]
        kept = {name: c for name, c in cohort.state.items() if c not in split}
        cohort.state = kept | {name: int(c) for name, c in zip(cohort.ids, number, strict=True)}
        return Weights(mixing, about={"clusters": clusters})

    def _is_split(self, G: np.ndarray, n: np.ndarray) -> bool:
        mean, longest = np.sqrt(max(n @ G @ n, 0)), np.sqrt(max(G.diagonal().max(), 0))
        return bool(len(n) > self.min_size and mean < self.eps1 and longest > self.eps2)


def _numbers(cohort: Cohort, cosine: np.ndarray) -> np.ndarray:
    """The number of each client's cluster before this round, [K]; clients that are new join the most similar one"""
    number = np.array([cohort.state.get(name, -1) for name in cohort.ids], dtype=np.int64)
    known, new = np.flatnonzero(number >= 0), np.flatnonzero(number < 0)
    if known.size:
        number[new] = number[known[cosine[np.ix_(new, known)].argmax(1)]]
    else:  # nobody to compare with: the first cluster there is
        number[new] = min(cohort.state.values(), default=0)
    return number


def shares_within(n: np.ndarray) -> np.ndarray:
    """Data shares in a cluster; equal ones where it has no data"""
    total = n.sum()
    return n / total if total > 0 else np.full(len(n), 1 / len(n))


def bipartition(distance: np.ndarray, linkage: str) -> np.ndarray:
    """Which of K >= 2 points are not in the half of the first, [K] bool: the two nearest groups merge until two remain.

    distance   [K, K], symmetric; of groups: the largest ("complete") or smallest ("single") between their points
    """
    K = len(distance)
    link = np.maximum if linkage == "complete" else np.minimum
    D = distance.copy()
    np.fill_diagonal(D, np.inf)
    group = np.arange(K)  # of each point: the row of D that stands for it
    for _ in range(K - 2):
        i, j = divmod(int(D.argmin()), K)
        row = link(D[i], D[j])
        row[i] = np.inf
        D[i], D[:, i] = row, row
        D[j], D[:, j] = np.inf, np.inf
        group[group == j] = i
    return group != group[0]
