"""MoNNA (Farhadkhani et al., ICML 2023): the mean of the K - f clients nearest to one of them, the pivot.

In the paper there is no server: every worker is its own pivot, and so the mean of an honest worker is of models near to
an honest one. A server that trains a model itself, or that trusts a client, names it.
"""

from __future__ import annotations

import numpy as np

from fastagg.extend import Cohort, InputError, Weights, register
from fastagg.methods.honest_majority import HonestMajority, in_the_middle, mean_of, nearest


@register
class MoNNA(HonestMajority):
    """The plain mean of the K - f client models that are nearest to the model of one client, which is among them.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1
    pivot       id of that client, best one that is trusted; it must take part in the round. Default: the client with
                the smallest ball around it that holds K - f clients, the first of several; a choice that needs no trust

    .weights are 1 / (K - f) for those clients and 0 for the others; of clients at the same distance the first are
    taken. .pivot is the client's id. Sizes are not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "monna"
    paper = "Farhadkhani et al., ICML 2023"

    pivot: str | int | None = None

    def check_options(self) -> None:
        if self.pivot is not None and (isinstance(self.pivot, bool) or not isinstance(self.pivot, str | int)):
            raise ValueError(f"monna: pivot={self.pivot!r}; expected the id of a client, a string or integer, or None")

    def weights_from(self, D: np.ndarray, cohort: Cohort) -> Weights:
        m = cohort.K - self.f
        if self.pivot is None:
            at = in_the_middle(D, m)
        elif self.pivot in cohort.ids:
            at = cohort.ids.index(self.pivot)
        else:
            raise InputError(f"monna: the pivot, client {self.pivot!r}, does not take part in this round")
        about = {"pivot": cohort.ids[at]}
        return Weights(mean_of(nearest(D, at, m), cohort.K), only_used=True, about=about)
