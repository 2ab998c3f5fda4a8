"""FLAME (Nguyen et al., USENIX Security 2022), without its noise: the majority that points the same way, clipped.

    L = the cluster of clients by cosine distance that HDBSCAN finds with min_cluster_size K/2 + 1
    s = median_k ||d_k||,      new model g + 1/|L| sum_{k in L} d_k min(1, s / ||d_k||)

With more than half of the clients in a cluster there cannot be two of them. What HDBSCAN then finds (min_samples=1,
allow_single_cluster=True, as in implementations of the paper) is this: join clients at growing distances; the first
component with K/2 + 1 clients is the cluster.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Gram, Weights, ratio, register


@register
class FLAME(GlobalAggregator):
    """The mean of the updates of a majority of clients that point the same way, clipped to the median length.

    of          what is compared by its cosine: "updates", or "models"

    The model is g + sum_k weights_k (w_k - g). .weights are 1 / L for the L > K / 2 clients of the cluster, less if the
    update was clipped, and 0 for the others. Sizes are not used. An update of zero has no direction: its cosine with
    any other is 0. The paper's last step adds noise to every coordinate; it is left out, and the result is not
    differentially private.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "flame"
    paper = "Nguyen et al., USENIX Security 2022"
    reads = "pairs"
    buffers = "median"

    of: Literal["updates", "models"] = "updates"

    def weigh(self, cohort: Cohort) -> Weights:
        gram = cohort.gram().host
        distance = between_models(gram, cohort.distance_gram()) if self.of == "models" else 1 - gram.cosine().numpy()
        inside = majority(distance)
        lengths = np.sqrt(gram.on_host.squares)
        s = np.median(lengths)
        clipped = np.where(lengths > s, ratio(s, lengths), 1)
        w = inside * clipped / inside.sum()
        return Weights(w, center=1 - w.sum(), only_used=bool(w.any()))


def between_models(gram: Gram, distances: Gram) -> np.ndarray:
    """1 - cos(w_i, w_j), [K, K]. Models are nearly parallel, so this is not the difference of two numbers near 1, but
    (||w_i - w_j||^2 - (||w_i|| - ||w_j||)^2) / (2 ||w_i|| ||w_j||)."""
    c, b, squares = gram.on_host.global_square, gram.on_host.along_global, gram.on_host.squares
    more = 2 * b + squares  # ||w_k||^2 - ||g||^2
    lengths = np.sqrt(np.maximum(c + more, 0))
    longer = ratio(more[:, None] - more[None, :], lengths[:, None] + lengths[None, :])
    squared = distances.host.squared_distances().numpy()
    apart = np.maximum(np.where(np.isfinite(squared), squared, np.inf) - longer**2, 0)
    product = lengths[:, None] * lengths[None, :]
    return np.where(product > 0, ratio(apart, 2 * product), 1.0)


def majority(distance: np.ndarray) -> np.ndarray:
    """Which clients are in the first component of more than half of them, [K] bool, when those at growing distances
    [K, K] are joined; of several at the same distance, all"""
    K = len(distance)
    group = np.arange(K)
    i, j = np.triu_indices(K, 1)
    order = np.argsort(distance[i, j], kind="stable")
    largest, widths = 1, distance[i, j][order]
    for at, (a, b) in enumerate(zip(i[order], j[order], strict=True)):
        if largest > K // 2 and widths[at] > widths[at - 1]:
            break
        if group[a] != group[b]:
            group[group == group[b]] = group[a]
            largest = max(largest, int((group == group[a]).sum()))
    return group == np.bincount(group).argmax()
