"""Which runs belong together: the seeds of a method, and the methods of a setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastagg.sim.report.metric import check_same_metric
from fastagg.sim.report.reading import Run

Groups = dict[str, list[Run]]
# What runs of one label may differ in and still be seeds of the same thing
FREE = {"seed", "data_dir", "batched", "threads", "device"}
# What belongs to a method. All other options make the setting, in which methods are compared.
OF_METHOD = {"method", "options", "algorithm", "mu", "wdr", "clock"}


def group(runs: Sequence[Run]) -> Groups:
    """The seeds of each label together, in order of first appearance.

    Runs of one label that differ in more than their seed (say, in alpha) are told apart by it: `fedawa, alpha=0.1`.
    ValueError where a seed comes twice: it would look like less noise than there is; and where metrics differ.
    """
    check_same_metric(runs)
    groups: Groups = {}
    told_by = _told_by(runs)
    for run in runs_by_label(runs):
        name = _named(run, told_by[run.summary["label"]])
        twin = next((r for r in groups.get(name, ()) if r.summary.get("seed") == run.summary.get("seed")), None)
        if twin is None:
            groups.setdefault(name, []).append(run)
        elif twin.path is None or run.path is None or twin.path.resolve() != run.path.resolve():
            seed = run.summary.get("seed")
            raise ValueError(f"{name}, seed {seed}, comes twice: {twin.path} and {run.path}; leave one out")
    return groups


def runs_by_label(runs: Sequence[Run]) -> list[Run]:
    labels: dict[str, list[Run]] = {}
    for run in runs:
        labels.setdefault(run.summary["label"], []).append(run)
    return [run for members in labels.values() for run in members]


def _told_by(runs: Sequence[Run]) -> dict[str, list[str]]:
    """By label, the options besides the seed that its runs differ in"""
    labels = dict.fromkeys(run.summary["label"] for run in runs)
    members = {label: [run for run in runs if run.summary["label"] == label] for label in labels}
    return {label: sorted(_varied(some) - FREE) for label, some in members.items()}


def _named(run: Run, options: Sequence[str]) -> str:
    return ", ".join([run.summary["label"], *(f"{name}={run.config[name]}" for name in options)])


def _varied(runs: Sequence[Run]) -> set[str]:
    return {name for name, values in options_of(runs).items() if len(values) > 1}


def options_of(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The values that each option of these runs has; options that only some of them know are left out"""
    names = [name for name in runs[0].config if all(name in run.config for run in runs)]
    return {n: list({json.dumps(r.config[n], sort_keys=True): r.config[n] for r in runs}.values()) for n in names}


def settings(groups: Groups) -> dict[str, Groups]:
    """The methods of each setting: `alpha=0.1` -> `fedawa` -> its seeds. Where there is one setting, its name is empty.

    A setting is what the options say of the data, the clients and the training; a method is its own options and the
    clients' algorithm.
    """
    runs = [run for members in groups.values() for run in members]
    if not runs:
        return {}
    options = setting_options(groups)
    told_by = _told_by(runs)
    found: dict[str, Groups] = {}
    for members in groups.values():
        first = members[0]
        setting = ", ".join(f"{name}={first.config[name]}" for name in options)
        own = [name for name in told_by[first.summary["label"]] if name not in options]
        found.setdefault(setting, {})[_named(first, own)] = members
    return found


def setting_options(groups: Groups) -> list[str]:
    """The options that make one setting differ from another in these runs, in the order of the configuration"""
    runs = [run for members in groups.values() for run in members]
    return [name for name, values in options_of(runs).items() if len(values) > 1 and name not in FREE | OF_METHOD]


def sections(groups: Groups) -> dict[str, Groups]:
    """What is shown in one table: the methods of a setting; all of it where no setting has two methods"""
    found = settings(groups)
    return found if any(len(methods) > 1 for methods in found.values()) else {"": groups}
