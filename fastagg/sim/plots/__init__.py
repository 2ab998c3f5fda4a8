"""The figures of a report: each function takes runs and gives a matplotlib Figure, or None where nothing is to show.

style      colours, lines and parts that figures share
curves     accuracy, losses, coherence, shrinking by round
steps      length of the global step, spread of the weights, heterogeneity coherence
forest     differences to a baseline
weights    each client's weight over rounds
cosines    how alike clients are
heads      what output layers say of the clients' classes
simulated  accuracy over simulated time
ideal      distance to the update of training on all data
time       seconds by phase
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from matplotlib.figure import Figure

from fastagg.sim.plots.cosines import by_labels, cosines
from fastagg.sim.plots.curves import accuracy, attack_success, coherence, gamma, loss, over_seeds
from fastagg.sim.plots.forest import forest
from fastagg.sim.plots.heads import head_shares, heads
from fastagg.sim.plots.ideal import ideal
from fastagg.sim.plots.simulated import over_time
from fastagg.sim.plots.steps import heterogeneity, spread, step
from fastagg.sim.plots.style import INK, look, save
from fastagg.sim.plots.time import time
from fastagg.sim.plots.weights import span, weight_matrix, weights
from fastagg.sim.report import Comparison, Groups, Metric, averaged, metric_of, sections

__all__ = [
    "INK",
    "Drawn",
    "accuracy",
    "attack_success",
    "by_labels",
    "coherence",
    "cosines",
    "differences",
    "every_figure",
    "figures",
    "forest",
    "gamma",
    "head_shares",
    "heads",
    "heterogeneity",
    "ideal",
    "look",
    "loss",
    "over_seeds",
    "over_time",
    "save",
    "span",
    "spread",
    "step",
    "time",
    "weight_matrix",
    "weights",
]


class Drawn(NamedTuple):
    name: str
    title: str
    caption: str
    figure: Figure
    folded: bool = False  # one of many of its kind: the page shows it when asked
    setting: str = ""  # where there are several

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]


def every_figure(groups: Groups, found: list[Comparison], words: str, confidence: float) -> Iterator[Drawn]:
    """Of a whole report: the differences, then all figures of each setting; from the second on most are folded"""
    yield from differences(found, words, confidence)
    for number, (setting, methods) in enumerate(sections(groups).items()):
        for drawn in figures(methods, metric_of(methods)):
            folded = drawn.folded or (number > 0 and drawn.name != "accuracy")
            yield drawn._replace(setting=setting, folded=folded)


def differences(found: list[Comparison], words: str, confidence: float) -> Iterator[Drawn]:
    """Of all settings together; words say what the differences are of"""
    if figure := forest(found, words):
        better = "Left" if found[0].metric.best == "min" else "Right"
        one = "" if any(c.difference.low is not None for c in found) else " With one seed there is no interval."
        words = (
            f"{better} of the line is better than the baseline. Each dot is a seed, which has the same split, initial "
            f"model and batches for all methods. The diamond is the mean, the bar its {100 * confidence:g} % "
            f"confidence interval (Student's t), thick and filled where 0 is not in it.{one}"
        )
        yield Drawn("differences", "Differences to the baseline", words, figure)


def figures(groups: Groups, metric: Metric) -> Iterator[Drawn]:
    """All there is to show of the methods of one setting, in a report's order"""
    several = any(len(runs) > 1 for runs in groups.values())
    band = " Lines are means over seeds, bands reach from the lowest to the highest seed." if several else ""
    tested = "each client's model on that client's own test share, averaged" if metric.is_personal else "test set"
    dots = f" Right: {averaged(groups)}" + (", one dot per seed." if several else ".")
    dots = dots if len(groups) > 1 else ""
    if figure := accuracy(groups, metric):
        good = "Lower" if metric.best == "min" else "Higher"
        words = f"{good} and earlier is better ({tested}; round 0 is the untrained model).{band}{dots}"
        yield Drawn("accuracy", metric.plain[:1].upper() + metric.plain[1:], words, figure)
    if figure := over_time(groups, metric):
        words = (
            "The same over simulated time: clients have speeds. In a synchronous round all wait for the slowest; "
            f"asynchronous methods take what arrives.{band}"
        )
        yield Drawn("simulated", "Over simulated time", words, figure)
    if figure := loss(groups):
        words = (
            "Lower is better. Where test loss rises and accuracy does not fall, the model is too sure of its errors; "
            f"training loss is the clients' own, while they train.{band}"
        )
        yield Drawn("loss", "Loss", words, figure)
    if figure := attack_success(groups):
        words = (
            "Lower is better: the part of the test images of other classes that the model takes for the attackers' "
            f"target once their trigger is on them.{band}"
        )
        yield Drawn("attack", "Success of the backdoor", words, figure)
    if figure := step(groups):
        words = (
            "How far the global model moves in a round; and relative to the step of FedAvg (weights by data size) with "
            "the same clients' models. A method that is steadily below 1 is to be compared with FedAvg with that "
            f"server step.{band}"
        )
        yield Drawn("step", "Length of the global step", words, figure)
    if figure := spread(groups):
        words = (
            "Largest and smallest weight of a round, where 1 is a client's weight if all were equal; and the share of "
            f"clients that count, 1 / (K sum of squared weights): 1 if all are equal, 1 / K if one has all.{band}"
        )
        yield Drawn("spread", "Spread of the weights", words, figure)
    yield from _of_clients(groups, weights, "weights", "who counts for how much", (
        "Each row is a client, the largest on top. Left: its weight in every round (blank where it sent no model); "
        "colours span the weights that occur, they do not begin at 0. Middle: its average weight (dot) beside what "
        "its share of the data would give it (bar). Right: which labels it has."
    ))  # fmt: skip
    yield from _of_clients(groups, heads, "heads", "does the output layer show a client's classes?", (
        "Each row is a client. First its labels, then the distribution that the norms of its output layer's rows show "
        "after training in a round (cwFedAvg, Eq. 4; blank where it was absent), in colours of their own scale. Right: "
        "one against the other, a dot for each client and label, with their correlation r; on the line they are equal."
    ))  # fmt: skip
    yield from _of_clients(groups, cosines, "cosine", "do updates mirror the data?", (
        "Each cell is the cosine of the angle between two clients, ordered so that those with similar labels are "
        "neighbours (labels on the left). Blocks along the diagonal mean that clients with the same labels move the "
        "same way. Models are nearly parallel: their colours span what occurs in each panel. Below each: the span of "
        "the cosines, and r, their correlation with how alike the labels of the two clients are."
    ))  # fmt: skip
    yield from _of_clients(groups, ideal, "ideal", "how close to training on all data?", (
        "The ideal vector is the update of the same global model trained on the data of all clients together (FedAWA, "
        "Fig. 3). Shown is the distance of each client's update to it, of their mean by data size, and of what the "
        "method made of them: lower is closer."
    ))  # fmt: skip
    if figure := coherence(groups):
        words = f"How much the clients' updates agree: above 0 they help each other, below 0 they pull apart.{band}"
        yield Drawn("coherence", "Coherence of the clients", words, figure)
    if figure := heterogeneity(groups):
        words = (
            "Cosine of the class distribution that the round's weights give the cohort, and that of all clients' data "
            f"(FedLAW, Def. 5.2): 1 where they are the same.{band}"
        )
        yield Drawn("heterogeneity", "Heterogeneity coherence", words, figure)
    if figure := gamma(groups):
        words = (
            "What the new global model is multiplied by: below 1 it is shrunk, which acts like weight decay. r is the "
            f"length of what is learned over that of what is shrunk (FedLAW, Fig. 3), where it is recorded.{band}"
        )
        yield Drawn("gamma", "Shrinking", words, figure)
    if figure := time(groups):
        yield Drawn("time", "Where the time goes", "Average seconds of one round, by phase.", figure)


def _of_clients(groups: Groups, draw: Callable, name: str, title: str, caption: str) -> Iterator[Drawn]:
    """One figure per label, of its first seed; from the second on they are folded where there are many"""
    shown = 0
    for label, runs in groups.items():
        if figure := draw(runs[0]):
            seed = f" Shown is seed {runs[0].summary.get('seed')}." if len(runs) > 1 else ""
            yield Drawn(f"{name}-{label}", f"{label}: {title}", caption + seed, figure, len(groups) > 3 and shown > 0)
            shown += 1
