"""IFCA (Ghosh et al., NeurIPS 2020): there are some models, and each client trains the one that fits its data best.

In a round the server sends all models. Client i chooses the one with the least loss on its data and trains it; the new
model j is the mean of what the clients that chose j have made of it (the paper's model averaging). Models that nobody
chose stay as they are. Clusters come about if the models differ at the beginning.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import numpy as np

from fastagg.extend import BadClientError, Cohort, ExampleRound, Range, RoundInput, Weights, register
from fastagg.methods.cfl import NumberedClusters, shares_within


@register
class IFCA(NumberedClusters):
    """The mean of the clients that chose the same of several models, for each of these models.

    models     how many models there are
    weighted   True: means are weighted by data shares; False: plain means
    choices    per round, required: the number of the model that each client chose and trained, [K], from 0 to
               models - 1

    Returns Results: one model for each choice that was made in this round. .clusters lists the client ids of each,
    .numbers which of the models each is, .mixing [M, K] the weights. The aggregator remembers the last choice of each
    client id; its .clusters lists all clients. The models themselves are kept by the caller, who makes the first ones,
    different from each other. The global model may be None.
    """

    name = "ifca"
    paper = "Ghosh et al., NeurIPS 2020"
    reads = "weights"
    needs_global = False
    round_inputs = (
        RoundInput("choices", "the number of the model that each client trained", required=True, low=0, kind="choices"),
    )

    models: Annotated[int, Range(1)] = 2
    weighted: bool = True

    @property
    def first_models(self) -> int:
        return self.models

    @classmethod
    def example_round(cls, K: int) -> ExampleRound:
        return ExampleRound({"models": 9}, {"choices": [k % 2 for k in range(K)]})

    def weigh(self, cohort: Cohort, choices: np.ndarray) -> Weights:
        wrong = np.flatnonzero((choices >= self.models) | (choices % 1 != 0))
        if wrong.size:
            expected = f"expected an integer from 0 to {self.models - 1}"
            words = {int(k): f"its entry in choices is {choices[k]:g}, {expected}" for k in wrong}
            said = "; ".join(f"{cohort.table.name(k)}: {word}" for k, word in words.items())
            raise BadClientError(said, {cohort.positions[k]: word for k, word in words.items()})
        n = cohort.shares if self.weighted else np.full(cohort.K, 1 / cohort.K)
        members: dict[int, list[int]] = defaultdict(list)
        for k, choice in enumerate(choices):
            members[int(choice)].append(k)
        numbers = sorted(members)
        mixing = np.zeros((len(numbers), cohort.K))
        for row, number in zip(mixing, numbers, strict=True):
            row[members[number]] = shares_within(n[members[number]])
        clusters: list[list[Any]] = [[cohort.ids[k] for k in members[number]] for number in numbers]
        cohort.state = cohort.state | {name: int(c) for name, c in zip(cohort.ids, choices, strict=True)}
        return Weights(mixing, about={"clusters": clusters, "numbers": numbers})
