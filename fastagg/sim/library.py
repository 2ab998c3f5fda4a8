"""The simulator in Python: simulate() makes a run, compare() makes several and sets them side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastagg._engine.checks import check_integer, suggest
from fastagg._engine.saved import load
from fastagg.sim import comparison, config, page, report, run
from fastagg.sim.config import Config
from fastagg.sim.jobs import Job
from fastagg.sim.objects import Own, separated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Callback = Callable[[dict[str, Any], Config], object]
Callbacks = Callback | Sequence[Callback]


class Run:
    """A run: its curves, its options, and the model that came out.

    config       every option, with the value in effect
    rounds       the number of each round that is recorded, from 0, which is before training
    accuracy     of the global model on the test set, by round (NaN where there is no global model); with metric=, that
    loss, train_loss, personal_accuracy      likewise
    time         simulated time when each round ended, if the run has a clock, else NaN
    weights      of the clients, by round: a list of lists, None where a method has none
    records      all that is known of each round, as in metrics.jsonl
    summary      what it has come to: "accuracy" is the mean of the last five rounds, ...
    model        the new global model, a state dict; None where clients have models of their own
    models       all of them: one, one for each client, or one for each cluster
    folder       where it was written, if it was
    """

    def __init__(self, found: report.Run, models: Callable[[], list[dict[str, torch.Tensor]]]) -> None:
        self.found, self._models = found, models

    @property
    def config(self) -> dict[str, Any]:
        return self.found.config

    @property
    def summary(self) -> dict[str, Any]:
        return self.found.summary

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.found.metrics

    @property
    def folder(self) -> Path | None:
        return self.found.path

    @property
    def label(self) -> str:
        return self.summary["label"]

    @property
    def models(self) -> list[dict[str, torch.Tensor]]:
        return self._models()

    @property
    def model(self) -> dict[str, torch.Tensor] | None:
        models = self.models
        return models[0] if len(models) == 1 else None

    def curve(self, name: str) -> np.ndarray:
        """A number of every round, NaN where it is not recorded"""
        values = [record.get(name) for record in self.records]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    @property
    def rounds(self) -> np.ndarray:
        return np.array([record["round"] for record in self.records])

    @property
    def accuracy(self) -> np.ndarray:
        return self.curve("accuracy")

    @property
    def personal_accuracy(self) -> np.ndarray:
        return self.curve("personal_accuracy")

    @property
    def loss(self) -> np.ndarray:
        return self.curve("loss")

    @property
    def train_loss(self) -> np.ndarray:
        return self.curve("train_loss")

    @property
    def time(self) -> np.ndarray:
        return self.curve("time")

    @property
    def weights(self) -> list[list[float] | None]:
        return [record.get("weights") for record in self.records]

    def to_frame(self) -> Any:
        """A row for each round, with what is one number; needs pandas"""
        return report.frame_of([_numbers(record) for record in self.records])

    def kept(self) -> Run:
        """The same without a folder, which is about to be deleted"""
        models = self.models
        return Run(replace(self.found, path=None), lambda: models)

    def plot(self) -> Figure:
        return Runs([self]).plot()

    def report(self, path: str | Path = "report.html") -> Path:
        """Writes a page with the table, the curves and all other pictures of this run"""
        return Runs([self]).report(path)

    def __repr__(self) -> str:
        reached = self.summary.get("accuracy")
        reached = "no accuracy" if reached is None else f"accuracy {reached:.4f}"
        return f"Run({self.label}, seed {self.config['seed']}, {self.summary['rounds']} rounds, {reached})"


class Runs(Sequence[Run]):
    """Several runs: a list of them, their table, and the differences to a baseline.

    groups   runs by label, the seeds of a setting together
    """

    def __init__(self, runs: Iterable[Run], baseline: str | None = None) -> None:
        self._runs, self.baseline = list(runs), baseline

    def __getitem__(self, at: Any) -> Any:
        return Runs(self._runs[at], self.baseline) if isinstance(at, slice) else self._runs[at]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    @property
    def groups(self) -> dict[str, list[report.Run]]:
        return report.group([each.found for each in self._runs])

    def table(self, score: str = "last_5", confidence: float = 0.95) -> list[dict[str, Any]]:
        """A dict for each method and setting: mean and deviation over seeds of what runs have come to, and the mean
        difference to the baseline with its confidence interval.

        score        what is compared: "last_5" and "last_10" are means of the last rounds, "best" and "best_10" of the
                     best
        """
        return report.rows(self.groups, self.baseline, score, confidence)

    def differences(self, score: str = "last_5", confidence: float = 0.95) -> list[report.Comparison]:
        """Each method against the baseline, seed by seed, with a confidence interval of the mean"""
        return report.differences(self.groups, self.baseline, score, confidence)

    def to_frame(self, curves: bool = False) -> Any:
        """table() as a DataFrame; with curves=True, a row for each run and round. Needs pandas"""
        if not curves:
            return report.frame_of(self.table())
        rows = []
        for each in self._runs:
            about = {"label": each.label, "seed": each.config["seed"]}
            rows += [about | _numbers(record) for record in each.records]
        return report.frame_of(rows)

    def plot(self) -> Figure:
        """The curves, as a matplotlib figure: figure.savefig("curves.png")"""
        from fastagg.sim import plots

        groups = self.groups
        drawn = plots.accuracy(groups, report.metric_of(groups))
        if drawn is None:
            raise ValueError("there is nothing to plot: no round has an accuracy")
        return drawn

    def report(self, path: str | Path = "report.html") -> Path:
        """Writes a page with tables, curves and all other pictures; plots/ beside it has them as files"""
        path = Path(path)
        return page.write(self.groups, path.parent, name=path.name, baseline=self.baseline)

    def __str__(self) -> str:
        return report.markdown(self.groups, self.baseline)

    def __repr__(self) -> str:
        return f"Runs({', '.join(f'{label} x {len(runs)}' for label, runs in self.groups.items())})"


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in record.items() if isinstance(value, int | float) or value is None}
    return flat | {f"seconds_{phase}": value for phase, value in record.get("seconds", {}).items()}


def simulate(
    model: Any = "mlp", data: Any = "digits", *, method: Any = "fedavg", local: Any = "sgd", split: Any = "dirichlet",
    out: str | Path | None = None, resume: bool = False, callbacks: Callbacks = (), **options: Any,
) -> Run:  # fmt: skip
    """Trains a federated model on this machine, and returns the run.

    model       the name of a network, or a function that returns an nn.Module, of no arguments or of the shape of a
                sample and the number of classes
    data        the name of a data set; (x, y, test_x, test_y); a pair of map-style data sets; each client's own data in
                {"clients": [...], "test": ...}; or a function that returns one of these
    method      the name of an aggregation method, an aggregator, or its class; options={...} are its options
    local       what clients do: the name of an algorithm (sgd, fedprox, feddyn, scaffold, moon), an Algorithm, or a
                function that trains client.model in place
    split       how samples are split over clients: a name, or a function of labels, clients and a NumPy generator that
                returns the indices of each client's samples
    loss        a function of outputs and targets that returns each sample's loss, or their mean; default: cross-entropy
    metric      likewise, in the place of accuracy; metric_best="min" if small is good
    out         a folder to write the run to, round by round, so that it can be continued (resume=True); default: none
    callbacks   functions (or one) called after each round with its record (see Run.records) and the Config of its run

    All other options are those of `fastagg sim --help`, with _ for -: clients, alpha, rounds, epochs, lr, seed, ...
    """
    given = {"model": model, "data": data, "method": method, "algorithm": local, "partition": split, **options}
    made, own = _config(given)
    on_round = _on_round(_several(callbacks), made)
    if out is None:
        if resume:
            raise ValueError("resume=True continues the run in a folder: name it by out=")
        found, sim = run.in_memory(made, own, on_round)
        return Run(found, lambda: sim.models)
    run.simulate(made, Path(out), resume=resume, own=own, on_round=on_round)
    return _read(Path(out), made.rounds)


def compare(
    methods: Any, *, seeds: int | Sequence[int] = 1, grid: Mapping[str, Sequence[Any]] | None = None,
    baseline: str | None = None, model: Any = "mlp", data: Any = "digits", local: Any = "sgd", split: Any = "dirichlet",
    out: str | Path | None = None, jobs: int | None = None, progress: bool = True, callbacks: Callbacks = (),
    **options: Any,
) -> Runs:  # fmt: skip
    """Makes a run for every method, seed and point of a grid, several at a time, and sets them side by side.

    methods     names, classes or aggregators in a list; or a dict from each to its options: {"fedavg": {}, "fedawa":
                {"steps": 5}}. In a list, a pair (method, options) is one of several variants of a method
    seeds       how many, from seed= on (default: 0), or which. The same seed means the same split, first model and
                batches for every method, so differences are taken seed by seed
    grid        options with the values that they take in turn: {"alpha": [0.1, 0.5], "epochs": [1, 3]}; these may be
                objects, too
    baseline    the label that others are compared with; default: fedavg, or the first
    out         a folder for the runs: those that are there already are not made again
    jobs        runs that are made at the same time, in processes; default: as many as cores

    For the rest see simulate().
    """
    first = options.pop("seed", 0)
    numbers = [first + i for i in range(seeds)] if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise ValueError(f"seeds={seeds!r}; expected how many, from 1 on, or a list of them")
    if jobs is not None:
        check_integer("compare", "jobs", jobs, 1)
    shared = {"model": model, "data": data, "algorithm": local, "partition": split, **options}
    plain, own = separated(shared)  # once: data may be large
    with ExitStack() as held:
        top = Path(out or held.enter_context(TemporaryDirectory(prefix="fastagg-")))
        todo: list[Job] = []
        for point in comparison.points(_named(grid or {})):
            here, mine = plain | point, own
            if point.keys() & {"data", "pixels"}:  # data are scaled when they are read
                here, mine = separated(shared | point)
            for method, given in _methods(methods):
                for seed in numbers:
                    values = here | {"seed": seed, "method": method}
                    made, used = _config(values | {"options": {**(here.get("options") or {}), **given}}, mine)
                    at = {name: getattr(made, name) for name in point}  # objects by their names
                    todo.append(Job(made, comparison.place(top, made, at), used))
        comparison.check_baseline(baseline, todo)
        stopped = comparison.make(todo, jobs=jobs, progress=progress, callbacks=_several(callbacks))
        found = [
            _read(job.folder, job.options.rounds) for job in todo if not stopped or comparison.has_round(job.folder)
        ]
        if out is None:
            found = [each.kept() for each in found]
    return Runs(found, baseline)


def _named(grid: Mapping[str, Any]) -> dict[str, Any]:
    """A grid by the names that options have in a Config"""
    names = {"local": "algorithm", "split": "partition"}
    return {names.get(name, name): values for name, values in grid.items()}


def _methods(methods: Any) -> list[tuple[Any, dict[str, Any]]]:
    if isinstance(methods, str) or not isinstance(methods, Mapping | Iterable):
        methods = [methods]
    if isinstance(methods, Mapping):
        found = [(method, dict(options or {})) for method, options in methods.items()]
    else:
        found = [(m[0], dict(m[1])) if isinstance(m, tuple) else (m, {}) for m in methods]
    if not found:
        raise ValueError("compare: there are no methods")
    return found


def _config(values: dict[str, Any], own: Own | None = None) -> tuple[Config, Own]:
    """The Config of options of which some may be objects; with those that are known already"""
    names = [f.name for f in fields(Config)]
    for unknown in values.keys() - set(names):
        raise TypeError(f"no option {unknown!r}{suggest(unknown, [*names, 'local', 'split'])}")
    if isinstance(method := values.get("method"), str):  # with options perhaps: fedavg:server_lr=0.5
        name, options = config.with_options(method)
        values = values | {"method": name, "options": options | dict(values.get("options") or {})}
    plain, more = separated(values)
    given = {name: value for name, value in vars(more).items() if value is not None}
    return config.from_dict(plain), replace(own or Own(), **given)


def _several(callbacks: Callbacks) -> Sequence[Callback]:
    return [callbacks] if callable(callbacks) else callbacks


def _on_round(callbacks: Sequence[Callback], made: Config) -> Callable[[dict[str, Any]], None] | None:
    def on_round(record: dict[str, Any]) -> None:
        for callback in callbacks:
            callback(record, made)

    return on_round if callbacks else None


def _read(folder: Path, rounds: int) -> Run:
    found = report.read_run(folder, rounds)
    return Run(found, partial(_models_in, folder))


def _models_in(folder: Path) -> list[dict[str, torch.Tensor]]:
    return load(folder / "checkpoint.safetensors")["models"]
