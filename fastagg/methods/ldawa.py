"""L-DAWA (Rehman et al., ICCV 2023): each layer of a client counts by its cosine with the global model's.

    w_l = 1/K sum_k cos(w_kl, g_l) w_kl            for every layer l

The weights do not sum to 1: layers that diverge shrink. BatchNorm's statistics must not, so they get a convex mean.
"""

from __future__ import annotations

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Gram, Weights, ratio, register


@register
class LDAWA(GlobalAggregator):
    """Layer by layer, clients are scaled by the cosine of their weights with those of the global model.

    normalize   divide by the sum of the cosines instead of K, so that weights sum to 1; a layer whose cosines do not
                have a positive sum gets equal weights
    layerwise   False: one cosine for the whole model (DAWA)

    A layer whose global weights are all zero has no direction to diverge from: its clients count fully, 1/K each.
    Statistics (buffers) get weights proportional to max(0, cosine), or equal weights if no cosine is positive.
    """

    name = "ldawa"
    paper = "Rehman et al., ICCV 2023"
    reads = "products"

    normalize: bool = False
    layerwise: bool = True

    def weigh(self, cohort: Cohort) -> Weights:
        cosines = divergence(cohort.gram(self.layerwise))
        weights = shares(cosines) if self.normalize else cosines / cohort.K
        return Weights(weights, others=shares(np.maximum(cosines, 0)))


def divergence(gram: Gram) -> np.ndarray:
    """cos(w_k, g), [K] or [L, K]; 1 where g is zero"""
    nothing = gram.on_host.global_square[..., None] == 0
    return np.where(nothing, 1.0, gram.cosine("global").cpu().numpy())


def shares(cosines: np.ndarray) -> np.ndarray:
    """Cosines over their sum; equal where it is not positive, by more than a float32 Gram can tell from zero"""
    total = cosines.sum(-1, keepdims=True)
    positive = total > 1e-6 * np.abs(cosines).sum(-1, keepdims=True)
    return np.where(positive, ratio(cosines, total), 1 / cosines.shape[-1])
