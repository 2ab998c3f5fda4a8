"""What runs are measured by, and how it is written: accuracy as a percentage, any other metric as a plain number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastagg.sim.report.reading import Run


@dataclass(frozen=True)
class Metric:
    """name   None is accuracy; of `package.module:function`, the function's name is shown
    best   "max" or "min": which of two values is the better
    key    the field of a round's record: "personal_accuracy" where labels are compared by their clients' own test
           shares, since one of them has no global model, else "accuracy". Both hold whatever the metric is.
    """

    name: str | None = None
    best: str = "max"
    key: str = "accuracy"

    @property
    def words(self) -> str:
        return ("personal " if self.is_personal else "") + self.plain

    @property
    def plain(self) -> str:
        return "accuracy" if self.name is None else self.name.rpartition(":")[2]

    @property
    def is_personal(self) -> bool:
        return self.key == "personal_accuracy"

    @property
    def scale(self) -> int:
        """What a value is multiplied by to be shown"""
        return 100 if self.name is None else 1

    @property
    def unit(self) -> str:
        return "%" if self.name is None else ""

    def better(self, a: float, b: float) -> float:
        """How much better a is than b"""
        return b - a if self.best == "min" else a - b

    def text(self, average: float | None, std: float | None = None) -> str:
        """A mean and its spread over seeds"""
        if average is None:
            return "n/a"
        digits = ".2f" if self.name is None else ".4g"
        spread = "" if std is None else f" ± {self.scale * std:{digits if self.name is None else '.2g'}}"
        return f"{self.scale * average:{digits}}" + spread

    def change(self, difference: float) -> str:
        """A difference of two values, with its sign"""
        return f"{self.scale * difference:+{'.2f' if self.name is None else '.3g'}}"

    def headed(self, words: str, unit: str | None = None) -> str:
        """A heading with the unit of its column"""
        unit = self.unit if unit is None else unit
        return f"{words}, {unit}" if unit else words


def metric_of(groups: dict[str, list[Run]]) -> Metric:
    """What all of these runs are compared by; ValueError where they are not measured alike"""
    runs = [run for members in groups.values() for run in members]
    name, best = check_same_metric(runs)
    personal = any(run.summary.get("personal") for run in runs)
    return Metric(name, best, "personal_accuracy" if personal else "accuracy")


def check_same_metric(runs: Sequence[Run]) -> tuple[str | None, str]:
    """Name, and whether max or min is best, of the metric that all runs have"""
    found: dict[tuple[str | None, str], Run] = {}
    for run in runs:
        found.setdefault((run.config.get("metric"), run.config.get("metric_best") or "max"), run)
    if len(found) > 1:
        (a, first), (b, second) = list(found.items())[:2]
        said = [
            f"{name or 'accuracy'} ({best} is best): {run.path or run.summary['label']}"
            for (name, best), run in ((a, first), (b, second))
        ]
        raise ValueError(f"runs that are measured differently cannot be compared: {said[0]}, {said[1]}; leave one out")
    return next(iter(found), (None, "max"))
