"""cwFedAvg (Lee and Choi): FedAvg once per class, then every client's own blend of the classes.

    q_ij = n_i p_ij / sum_i n_i p_ij,  p_ij the share of class j in client i's data, n_i its share of all data   (Eq. 6)
    class model j = sum_i q_ij w_i                                                                               (Eq. 5)
    personal model i = sum_j p_ij (class model j)                                                                (Eq. 7)

Both steps are linear, so the K personal models are one mix of the clients with A = P Q', [K, K]: no class model is ever
stored. Without the shares they are estimated from the output layer's weight (Eq. 4); wdr_penalty (Eq. 8) is what
clients add to their loss so that the estimate is good.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch

from fastagg.extend import (
    FLOATING,
    ClientValue,
    Cohort,
    ExampleRound,
    InputError,
    PersonalisedAggregator,
    Results,
    RoundInput,
    SetBy,
    StateDict,
    Table,
    Weights,
    bad_clients,
    describe_several,
    example_inputs,
    float64,
    module_of,
    nonfinite,
    ratio,
    read_inputs,
    register,
    shares,
)

CLASS_DIST = RoundInput(
    "class_dist", "each client's class distribution, [K, classes]", entry_dims=1, low=0, kind="labels"
)


@register
class CwFedAvg(PersonalisedAggregator):
    """One model per client: FedAvg of each class, blended by the class distribution of the client.

    head         key of the output layer's weight, one row per class
    scope        which tensors are personalised; the others are plain FedAvg. "all"; "output": the layer of head, best
                 in the paper's tables; or a regular expression that is searched for in the keys
    by           where class distributions come from: "norms" of the rows of head (Eq. 4); "labels": every round then
                 needs class_dist
    class_dist   per round: [K, C], one row of shares or sample counts per client (each row is divided by its sum, so
                 counts do not replace sizes), which replaces the estimate from head

    The model of a class that no client has is FedAvg. A client whose row is all zero is treated as having the classes
    of the whole cohort, and gets FedAvg. The global model may be None.

    The result is a list of K state dicts in the order of the clients, with .mixing ([K, K], rows sum to 1; used for
    tensors in scope) and .class_dist ([K, C], the shares used).
    """

    name = "cwfedavg"
    paper = "Lee and Choi, cwFedAvg, Eq. 4 to 7"
    reads = "weights"
    needs_global = False
    round_inputs = (CLASS_DIST,)
    client_values = (ClientValue("class_dist", axis=0),)

    head: Annotated[str, SetBy("head")] = "fc.weight"
    scope: str = "all"
    by: Literal["norms", "labels"] = "norms"

    def check_options(self) -> None:
        if self.by == "labels":
            self.require("class_dist")
        for option in ("head", "scope"):
            value = getattr(self, option)
            if not isinstance(value, str) or not value:
                raise ValueError(f"cwfedavg: {option}={value!r}; expected a string")
        try:
            re.compile(self.scope)
        except re.error as error:
            raise ValueError(f"cwfedavg: scope={self.scope!r} is not a regular expression: {error}") from error

    def why_not_over_group(self, inputs: Mapping[str, Any] | None) -> str:
        missing = inputs is not None and inputs.get("class_dist") is None
        return "shards of models have no whole head to estimate classes from; pass class_dist" * missing

    def why_not_partial(self) -> str:
        return "it looks at the rows of each client's output layer"

    def why_not_on_adapters(self) -> str:
        return "it looks at the rows of the output layer, which an adapter does not have"

    @classmethod
    def example_round(cls, K: int) -> ExampleRound:
        return ExampleRound({}, example_inputs(cls.round_inputs, K, optional=True))

    def weigh(self, cohort: Cohort, class_dist: np.ndarray | None = None) -> Weights:
        personal = self._in_scope(cohort)
        P = class_shares(cohort, self.head, class_dist)
        A = P @ class_weights(P, cohort.shares)  # [K, K]
        plain = np.broadcast_to(cohort.shares, A.shape)
        return Weights(A, others=plain, others_for=~personal, about={"class_dist": torch.from_numpy(P)})

    def _in_scope(self, cohort: Cohort) -> np.ndarray:
        """[T] bool"""
        table, layout = cohort.table, cohort.table.layout
        if self.scope == "all":
            return np.ones(table.T, dtype=bool)
        if self.scope == "output":
            if not cohort.access.any(self.head in layout.keys) or self.group is None:
                head_index(table, self.head)  # raises where it is not there, or no matrix
            name = (self.layers or module_of)(self.head)
            return np.array([layout.layers[at] == name for at in layout.layer], dtype=bool)
        found = np.array([re.search(self.scope, key) is not None for key in layout.keys], dtype=bool)
        if not cohort.access.any(bool(found.any())):
            raise InputError(f"cwfedavg: scope={self.scope!r} is found in no key of the model")
        return found


def cwfedavg_class_models(
    global_sd: StateDict | None, client_sds: Sequence[StateDict], sizes=None, *, class_dist=None,
    head: str = "fc.weight", out=None,
) -> Results:  # fmt: skip
    """Computes the C class models of cwFedAvg (Eq. 5), for inspection; .mixing is [C, K].

    The arguments are those of cwfedavg, which does not need these models itself. This takes the memory of C models.
    """
    cohort = Cohort.of(global_sd, client_sds, sizes, out)
    given, faults = read_inputs("cwfedavg_class_models", (CLASS_DIST,), {"class_dist": class_dist}, cohort.ids)
    if faults:
        raise bad_clients(faults, cohort.ids)
    P = class_shares(cohort, head, given.get("class_dist"))
    weights = Weights(class_weights(P, cohort.shares), about={"class_dist": torch.from_numpy(P)})
    return describe_several(cohort.mix(weights, several=True), cohort, weights)


def wdr_penalty(head_weight: torch.Tensor, class_dist: Any) -> torch.Tensor:
    """Computes the weight distribution regulariser ||p - p~||_2 (Eq. 8), which a client adds to its loss, times lambda.

    head_weight   weight of the output layer, [C, ...]; the penalty is differentiable in it
    class_dist    the client's shares or sample counts of the C classes

    p~ are the row norms of the weight divided by their sum (Eq. 4). If a norm is zero, so is its gradient; it is never
    NaN.
    """
    if head_weight.dim() < 2 or head_weight.dtype not in FLOATING:
        raise InputError(f"head_weight is {head_weight.dtype} {tuple(head_weight.shape)}, expected a float [C, ...]")
    p = float64(class_dist)
    if p.shape != (head_weight.shape[0],) or not np.isfinite(p).all() or (p < 0).any() or not p.any():
        raise InputError(f"class_dist: expected {head_weight.shape[0]} finite numbers >= 0, not all 0: one per class")
    half = head_weight.dtype in (torch.float16, torch.bfloat16)
    norms = torch.linalg.vector_norm(head_weight.flatten(1), dim=1, dtype=torch.float32 if half else None)  # [C]
    total = norms.sum()
    estimate = norms / torch.where(total > 0, total, 1)
    return torch.linalg.vector_norm(torch.from_numpy(p / p.sum()).to(estimate) - estimate)


def head_index(table: Table, head: str) -> int:
    """Where the output layer's weight is among the tensors"""
    layout = table.layout
    matrices = [key for key, shape, d in zip(layout.keys, layout.shapes, layout.dtypes, strict=True)
                if len(shape) >= 2 and d in FLOATING]  # fmt: skip
    if head in matrices:
        return layout.keys.index(head)
    what = "is not a key of the model" if head not in layout.keys else "is not a float matrix with a row per class"
    last = f"; its last matrix is {matrices[-1]!r}" if matrices else ""
    raise InputError(f"cwfedavg: head={head!r} {what}{last}")


def class_shares(cohort: Cohort, head: str, class_dist: np.ndarray | None) -> np.ndarray:
    """P, [K, C], rows sum to 1: as given, or estimated from the norms of the head's rows (Eq. 4)"""
    table, n = cohort.table, cohort.shares
    if class_dist is None:
        t = head_index(table, head)
        P = np.stack([row_norms(table.model_tensor(k, t)) for k in range(table.K)])
        nonfinite.check_clients(table, np.flatnonzero(~np.isfinite(P).all(1)).tolist())
    else:
        P = class_dist
    P = shares(P)
    overall = n @ P if (n @ P).any() else np.ones(P.shape[1])
    return np.where(P.any(1, keepdims=True), P, overall / overall.sum())


def class_weights(P: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Q', [C, K], rows sum to 1: client i's part in class j (Eq. 6); its part in all data for a class nobody holds"""
    held = (n[:, None] * P).T  # [C, K]
    total = held.sum(1, keepdims=True)
    return np.where(total > 0, ratio(held, total), n)


def row_norms(weight: torch.Tensor) -> np.ndarray:
    weight = weight.detach().cpu() if weight.device.type == "mps" else weight.detach()  # which has no float64
    return torch.linalg.vector_norm(weight.flatten(1), dim=1, dtype=torch.float64).cpu().numpy()
