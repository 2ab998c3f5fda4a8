"""L-DAWA (Rehman et al., ICCV 2023): each layer of a client counts by its cosine with the global model's.

    w_l = 1/K sum_k cos(w_kl, g_l) w_kl            for every layer l

The weights do not sum to 1: layers that diverge shrink. BatchNorm's statistics must not, so they get a convex mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastagg._engine.aggregator import (
    Aggregator,
    Cohort,
    check_flag,
    describe,
    function_of,
    ratio,
)
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result


@dataclass(kw_only=True, eq=False)
class LDAWA(Aggregator):
    """Layer by layer, clients scaled by the cosine of their weights with the global model's.

    normalize   divide by the sum of the cosines instead of K, so that weights sum to 1; a layer whose cosines do not
                have a positive sum gets equal weights
    layerwise   False: one cosine for the whole model (DAWA)

    A layer whose global weights are all zero has no direction to diverge from: its clients count fully, 1/K each.
    Statistics (buffers) get weights proportional to max(0, cosine), equal ones where no cosine is positive.
    """

    name = "ldawa"
    paper = "Rehman et al., ICCV 2023"

    normalize: bool = False
    layerwise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("ldawa", "normalize", self.normalize)
        check_flag("ldawa", "layerwise", self.layerwise)

    def round(self, cohort: Cohort, out) -> Result:
        gram = cohort.gram(self.layerwise)
        cosines = divergence(gram)
        weights = shares(cosines) if self.normalize else cosines / cohort.K
        buffers = shares(np.maximum(cosines, 0))
        [result] = cohort.mix(weights[..., None, :], layerwise=self.layerwise, buffers=buffers[..., None, :], out=out)
        return describe(result, cohort, weights, gram)


ldawa = function_of(LDAWA)


def divergence(gram: Gram) -> np.ndarray:
    """cos(w_k, g), [K] or [L, K]; 1 where g is zero"""
    nothing = gram.matrix[..., 0, :1].cpu().numpy() == 0
    return np.where(nothing, 1.0, gram.cosine("global").cpu().numpy())


def shares(cosines: np.ndarray) -> np.ndarray:
    """Cosines over their sum; equal where it is not positive, by more than a float32 Gram can tell from zero"""
    total = cosines.sum(-1, keepdims=True)
    positive = total > 1e-6 * np.abs(cosines).sum(-1, keepdims=True)
    return np.where(positive, ratio(cosines, total), 1 / cosines.shape[-1])
