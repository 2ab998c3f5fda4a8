"""Whether a round forms the Gram, or multiplies with it without forming it: whichever reads and computes less.

Costs are in reads of the clients' memory, and the same numbers everywhere: a result must not depend on how fast a
machine happens to be. docs/performance.md has the measurements behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fastagg._engine.stages import read_gram
from fastagg._engine.table import Table

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator, Pass

FEW = 32  # clients of which the Gram is always formed: it costs little, and tells how similar they are
# What forming a Gram costs per client, in reads: its multiply-adds grow with K, one read does not. By kind of device.
PER_CLIENT = {"cpu": 0.07, "cuda": 0.025}


def is_wanted(method: Aggregator, table: Table, pass_cost: float, any_part: Callable[[bool], bool] = bool) -> bool:
    """Whether a round of this method forms the Gram. Stages before a method mix what is formed, and Grams of
    clients that hold only a part are scaled entry by entry.

    pass_cost   what a pass over the clients costs, in reads of memory
    any_part    of a model that is spread over processes: whether something is true of any part
    """
    if table.has is not None or method.stages or method.reads != "products" or method.gram == "full" or table.K <= FEW:
        return True
    float64 = any_part(torch.float64 in table.layout.gram_dtypes)  # its products take twice as long
    form = table.K * PER_CLIENT.get(table.device.type, PER_CLIENT["cpu"]) * (2 if float64 else 1)
    return max(form, pass_cost) <= max(method.products(), 1) * pass_cost


def passes(method: Aggregator, table: Table, pass_cost: float, inputs: Mapping[str, Any]) -> tuple[Pass, ...]:
    """The passes over the clients that a round makes, at least"""
    declared = method.passes(table.layout, inputs)
    if read_gram(method.stages):  # before all else, and formed
        return ("gram", *("mix" if kind == "gram_mix" else kind for kind in declared if kind != "gram"))
    if table.has is not None:  # the Gram of the parts, and then the mix
        return tuple(part for kind in declared for part in (("gram", "mix") if kind == "gram_mix" else (kind,)))
    if is_wanted(method, table, pass_cost):
        return declared
    products = max(method.products(), 1)
    found: list[Pass] = []
    for kind in declared:
        fused = kind == "gram_mix"
        found.append("times_mix" if fused else "times" if kind == "gram" else kind)
        for _ in range(1, products if fused or kind == "gram" else 1):
            found.append("times")
    return tuple(found)
