"""Federated training on scikit-learn's digits, three times: with honest clients, with some whose labels are wrong, and
with some that are hostile. A live table shows every method's accuracy.

The setting is that of docs/robustness.md, which has all robust methods and ten attacks. These three conditions are
shown because what helps in one does not in another. Seeds are 0, 1, 2; none was chosen.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fastagg.sim import comparison, plots, report
from fastagg.sim.config import Config, from_dict
from fastagg.sim.jobs import Job

CLIENTS, BAD, ROUNDS = 20, 6, 30
SHARED = {"data": "digits", "model": "mlp", "clients": CLIENTS, "alpha": 0.5, "epochs": 2}
CONDITIONS = {
    "all are honest": {},
    f"{BAD} have wrong labels": {"attack": "labels", "attackers": BAD / CLIENTS},
    f"{BAD} are hostile": {"attack": "min-max", "attackers": BAD / CLIENTS},
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedawa": {}, "trimmed_mean": {"f": BAD}, "flame": {}, "fltrust": {},
}  # fmt: skip
GOOD_FOR = {
    "fedavg": "Weights by data size. The first choice where nobody sends anything wrong.",
    "fedawa": "Learns weights from how well updates agree. Clients with bad data count less; attackers do not.",
    "trimmed_mean": f"Leaves out the {BAD} largest and smallest of each value. Against few attackers, and loud ones.",
    "flame": "Leaves out updates of an unusual direction, and bounds lengths. Is told nothing. Slower at first.",
    "fltrust": "Trusts updates that agree with the server's own, from 100 clean samples, which it must have.",
}
ALIKE = 2.0  # points, up to which words call two methods as good as each other
FAR = 10.0  # points below the best, which the table shows in red
BARS = " ▁▂▃▄▅▆▇█"
PERCENT = "\u00a0%"  # at which no line ends
WIDTH = 12  # of a curve in the table
Key = tuple[str, str]  # condition, method


class Cell(NamedTuple):
    """What a method has come to: the mean over seeds of the accuracy in the last five rounds, in %; None: diverged"""

    accuracy: float | None
    lowest: float
    highest: float

    @property
    def text(self) -> str:
        return "diverged" if self.accuracy is None else f"{self.accuracy:.1f}{PERCENT}"


def plan(out: Path, seeds: int, rounds: int) -> dict[tuple[Key, int], Job]:
    """Seed by seed, so that the whole table has something to show early"""
    jobs = {}
    for seed in range(seeds):
        for at, (condition, more) in enumerate(CONDITIONS.items()):
            for method, options in METHODS.items():
                mine = {"method": method, "options": options, "seed": seed, "rounds": rounds}
                made = from_dict({**SHARED, **more, **mine})
                jobs[(condition, method), seed] = Job(made, comparison.place(out / f"{at + 1}", made))
    return jobs


class LiveTable:
    """The curves so far, as the runs' rounds come in"""

    def __init__(self, jobs: dict[tuple[Key, int], Job]) -> None:
        self.of = {_run(job.options): key for key, job in jobs.items()}
        self.curves: dict[Key, dict[int, list[float]]] = {(c, m): {} for c in CONDITIONS for m in METHODS}
        self.progress = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.task = self.progress.add_task("two processes start", total=sum(j.options.rounds for j in jobs.values()))
        self.rounds = {key: job.options.rounds for key, job in jobs.items()}
        self.done = self.seeds = 0
        self.cells: dict[Key, Cell] = {}

    def add(self, record: dict[str, Any], options: Config) -> None:
        """A round of one of the runs"""
        key, seed = self.of[_run(options)]
        self.curves[key].setdefault(seed, []).append(100 * (record["accuracy"] or 0))
        self.done += record["round"] == options.rounds
        self.progress.update(self.task, advance=1, description=f"{self.done} of {len(self.rounds)} trainings")

    def __rich__(self) -> Group | Table:
        table = Table(title="accuracy on the test set, round by round", title_style="bold", title_justify="left")
        table.add_column("")
        for condition in CONDITIONS:
            table.add_column(condition, min_width=WIDTH + 9)
        best = {c: max((self.cells[c, m].accuracy or 0 for m in METHODS), default=0) for c in CONDITIONS if self.cells}
        for method in METHODS:
            table.add_row(method, *(self.shown((condition, method), best.get(condition)) for condition in CONDITIONS))
        return table if self.cells else Group(table, self.progress)

    def shown(self, key: Key, best: float | None) -> Text:
        curve = self.curve(key)
        if not curve:
            return Text("")
        cell = self.cells.get(key)
        number = f"{curve[-1]:.1f} %" if cell is None else cell.text
        style = ""
        if cell is not None and best is not None:
            lost = best - (cell.accuracy or 0)
            style = "bold green" if lost < 0.05 else "red" if lost > FAR else ""
        return Text(f"{spark(curve):<{WIDTH}} ") + Text(f"{number:>8}", style)

    def has_seed(self, seed: int) -> bool:
        """Whether all methods have made it to the end"""
        return all(len(curves.get(seed, ())) == self.rounds[key, seed] for key, curves in self.curves.items())

    def keep(self, seeds: list[int]) -> None:
        """Only those that all methods have"""
        self.seeds = len(seeds)
        self.curves = {key: {s: curve for s, curve in some.items() if s in seeds} for key, some in self.curves.items()}

    def curve(self, key: Key) -> list[float]:
        """Mean over the seeds that are there"""
        seeds = list(self.curves[key].values())
        return [mean(seed[r] for seed in seeds if r < len(seed)) for r in range(max(map(len, seeds), default=0))]


def _run(o: Config) -> tuple[str, str, int]:
    return o.attack, o.method, o.seed


def spark(curve: list[float]) -> str:
    """A curve from 0 to 100 % in one line of text"""
    shown = [curve[min(len(curve) - 1, i * max(len(curve), WIDTH) // WIDTH)] for i in range(min(WIDTH, len(curve)))]
    return "".join(BARS[min(8, max(1, round(8 * value / 100)))] for value in shown)


def train(
    console: Console, out: Path, seeds: int, rounds: int, seconds: float, jobs: int | None = None
) -> LiveTable | None:
    """Makes the runs, and returns what the table shows at the end; None if Ctrl-C stopped it.

    seconds   after which no more is done than the first seed: on a slow machine there are fewer
    """
    todo = plan(out, seeds, rounds)
    table = LiveTable(todo)
    end, enough = time.monotonic() + seconds, False

    def look_at_the_clock(record: dict[str, Any], options: Config) -> None:
        nonlocal enough
        if time.monotonic() > end and table.has_seed(0):
            enough = True
            raise KeyboardInterrupt  # as if the user had said so: runs that are under way end at once

    lines = not console.is_terminal  # where nothing can be redrawn, a line tells now and then how far it is
    with Live(table, console=console, transient=True, auto_refresh=not lines):
        stopped = comparison.make([*todo.values()], jobs=jobs, progress=lines, callbacks=[table.add, look_at_the_clock])
    if stopped and not enough:
        return None
    whole = [seed for seed in range(seeds) if table.has_seed(seed)]
    todo = {key: job for key, job in todo.items() if key[1] in whole}
    table.keep(whole)
    table.cells = cells(todo)
    picture(todo, out / "accuracy.png")
    return table


def cells(todo: dict[tuple[Key, int], Job]) -> dict[Key, Cell]:
    found: dict[Key, list[float | None]] = defaultdict(list)
    for (key, _), job in todo.items():
        found[key].append(report.read_run(job.folder).summary["accuracy"])
    result = {}
    for key, values in found.items():
        known = [100 * value for value in values if value is not None]
        lowest, highest = (min(known), max(known)) if known else (0.0, 0.0)
        result[key] = Cell(mean(known) if len(known) == len(values) else None, lowest, highest)
    return result


def words(found: dict[Key, Cell], seeds: int) -> list[str]:
    """What the numbers say; nothing here is known beforehand"""
    score = {key: cell.accuracy or 0.0 for key, cell in found.items()}
    best = [max(METHODS, key=lambda m, c=c: score[c, m]) for c in CONDITIONS]
    where = "; ".join(f"{method} where {condition}" for condition, method in zip(CONDITIONS, best, strict=True))
    lines = [f"The best: {where}." + (" No method is best everywhere." if len({*best}) > 1 else "")]
    for method in METHODS:
        gains = {c: score[c, method] - score[c, "fedavg"] for c in CONDITIONS}
        said = ", ".join(f"{_compared(gain)} where {condition} ({gain:+.1f})" for condition, gain in gains.items())
        lines += [f"{method}, against fedavg: {said}."] if method != "fedavg" else []
    widest = max(found.items(), key=lambda item: item[1].highest - item[1].lowest)
    (condition, method), cell = widest
    lines.append(
        f"Means of {seeds} seeds, which differ most for {method} where {condition}: {cell.lowest:.1f} to "
        f"{cell.highest:.1f}{PERCENT}."
        if seeds > 1 else "One seed: differences of a few points may be chance."
    )  # fmt: skip
    return lines


def _compared(points: float) -> str:
    return "as good" if abs(points) < ALIKE else "better" if points > 0 else "worse"


def picture(todo: dict[tuple[Key, int], Job], path: Path) -> None:
    """The curves: a panel for each condition, means over seeds and bands from the lowest to the highest"""
    from matplotlib.figure import Figure

    groups: dict[str, dict[str, list[report.Run]]] = {c: {m: [] for m in METHODS} for c in CONDITIONS}
    for ((condition, method), _), job in todo.items():
        groups[condition][method].append(report.read_run(job.folder))
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True)
    for axes, (condition, methods) in zip(panels, groups.items(), strict=True):
        for method, runs in methods.items():
            rounds, middle, low, high = plots.over_seeds(runs, lambda m, run: 100 * m["accuracy"])
            look = plots.look(methods, method)
            axes.plot(rounds, middle, lw=1.8, label=method, **look)
            axes.fill_between(rounds, low, high, color=look["color"], alpha=0.15, lw=0)
        axes.set(title=condition, xlabel="round", ylim=(0, 100))
        axes.grid(alpha=0.15)
    panels[0].set_ylabel("test accuracy (%)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        plots.save(figure, file, "png")
