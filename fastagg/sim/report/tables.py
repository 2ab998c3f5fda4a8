"""The tables of a comparison: as rows, as markdown, and as a pandas DataFrame."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

from fastagg.sim.report.grouping import Groups, sections, setting_options, settings
from fastagg.sim.report.metric import Metric, metric_of
from fastagg.sim.report.pairs import Comparison, differences, seedwise, value_of
from fastagg.sim.report.scores import AVERAGED, SCORES, curve, spent
from fastagg.sim.report.simulated import common_end, end_of, value_at
from fastagg.sim.statistics import CONFIDENCE

Cells = tuple[list[str], list[tuple[bool, list[str]]]]  # headings, and rows with what is bold


def table(groups: Groups) -> list[dict[str, Any]]:
    """One row per label, in the groups' order:

    label, runs    runs is the number of seeds
    mean, std      of the seeds' accuracy (each the mean of its last 5 rounds, or of what it has), as a share of 1; std
                   is the sample's, with n - 1, and None for one seed; mean is None where a run has no finite accuracy
    scores         (mean, std) of each of report.SCORES
    whole          where labels are compared by personal accuracy: (mean, std) on the whole test set, or None
    attack_success   (mean, std) of a backdoor's success in the last 5 rounds; (None, None) where there is none
    best           the best mean, or one that is printed alike
    within_noise   the confidence interval of the difference to the best, over the seeds that both have, includes 0;
                   never claimed where that are fewer than two
    at_time        where all have a clock: (mean, std) when the first of them ended; time: the mean of the seeds' ends
    unfinished     number of runs cut short
    rounds_per_second, aggregation_share    over all seeds' rounds, see spent(); None where no time is recorded
    """
    metric, end = metric_of(groups), common_end(groups)
    rows = []
    for label, runs in groups.items():
        scores = {name: _spread([value_of(run, metric, name) for run in runs]) for name in SCORES}
        plain = Metric(metric.name, metric.best)
        seconds, count = spent([m for run in runs for m in run.metrics])
        total = sum(seconds.values())
        timed = 0 < total < math.inf
        rows.append({
            "label": label, "runs": len(runs), "mean": scores["last_5"][0], "std": scores["last_5"][1],
            "scores": scores, "best": False, "within_noise": False,
            "attack_success": _spread([run.summary.get("attack_success") for run in runs]),
            "whole": _spread([value_of(run, plain) for run in runs]) if metric.is_personal else None,
            "at_time": None if end is None else _spread([value_at(run, metric, end) for run in runs]),
            "time": None if end is None else _spread([end_of(run) for run in runs])[0],
            "unfinished": sum(not run.summary.get("finished", False) for run in runs),
            "rounds_per_second": count / total if timed else None,
            "aggregation_share": seconds["aggregate"] / total if timed else None,
        })  # fmt: skip
    valid = [row for row in rows if row["mean"] is not None]
    if valid:
        best = max(valid, key=lambda row: metric.better(row["mean"], 0))
        for row in valid:
            row["best"] = metric.text(row["mean"]) == metric.text(best["mean"])
            if not row["best"]:
                difference = seedwise(groups[row["label"]], groups[best["label"]], metric)
                row["within_noise"] = difference.low is not None and not difference.is_clear
    return rows


def _spread(values: list[float | None]) -> tuple[float | None, float | None]:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite or len(finite) < len(values):
        return None, None
    return mean(finite), stdev(finite) if len(finite) > 1 else None


def rows(
    groups: Groups, baseline: str | None = None, score: str = "last_5", confidence: float = CONFIDENCE
) -> list[dict[str, Any]]:
    """One plain dict per method and setting:

    method, seeds, the options that settings differ in, and of each of report.SCORES the mean over seeds under its name
    and the standard deviation under <name>_std, and of attack_success if there is a backdoor; against the baseline of
    the setting (see differences()): baseline, difference, low, high, pairs (the number of seeds that both have) and
    wins (those where the method is better), of the chosen score. Where all runs of the setting have a clock, also
    at_time and at_time_std when the first of them ended, and time, the mean of the seeds' ends. Values are as recorded:
    accuracy is a share of 1.
    """
    found = {(c.setting, c.method): c for c in differences(groups, baseline, score, confidence)}
    options, result = setting_options(groups), []
    for setting, methods in settings(groups).items():
        for row in table(methods):
            first = methods[row["label"]][0]
            line = {"method": row["label"], "seeds": row["runs"]} | {name: first.config[name] for name in options}
            for name in SCORES:
                line[name], line[f"{name}_std"] = row["scores"][name]
            if row["at_time"] is not None:
                (line["at_time"], line["at_time_std"]), line["time"] = row["at_time"], row["time"]
            if row["attack_success"][0] is not None:
                line["attack_success"], line["attack_success_std"] = row["attack_success"]
            c = found.get((setting, row["label"]))
            line |= {
                "baseline": c.baseline if c else None, "difference": c.difference.mean if c else None,
                "low": c.difference.low if c else None, "high": c.difference.high if c else None,
                "pairs": len(c.difference.seeds) if c else None, "wins": c.wins if c else None,
            }  # fmt: skip
            result.append(line)
    return result


def frame(groups: Groups, baseline: str | None = None, score: str = "last_5", confidence: float = CONFIDENCE) -> Any:
    """rows() as a pandas DataFrame"""
    return frame_of(rows(groups, baseline, score, confidence))


def frame_of(lines: list[dict[str, Any]]) -> Any:
    """Dicts as a pandas DataFrame"""
    try:
        import pandas  # pyright: ignore[reportMissingImports]  # nothing else needs it
    except ImportError as error:
        raise ImportError(
            f"a DataFrame needs pandas, which cannot be imported ({error}): pip install pandas"
        ) from error
    return pandas.DataFrame(lines)


def averaged(groups: Groups, score: str = "last_5") -> str:
    """Which rounds a score of these runs is of, in words: there may be fewer than its name says"""
    if not score.startswith("last"):
        return SCORES[score]
    key, most = metric_of(groups).key, 10 if score == "last_10" else AVERAGED
    counts = {len(curve(run.metrics, key)[-most:]) for runs in groups.values() for run in runs} - {0}
    if counts <= {1}:
        return "the last round"
    few, many = min(counts), max(counts)
    return f"mean of the last {many} rounds" if few == many else f"mean of the last {few} to {many} rounds"


def cells_of(groups: Groups) -> Cells:
    """Headings, and a row of cells for every label with whether it is the best of several"""
    metric, end = metric_of(groups), common_end(groups)
    headings = ["method", metric.headed(metric.words)]
    headings += [metric.headed("on the whole test set")] if metric.is_personal else []
    rows = table(groups)
    attacked = any(row["attack_success"][0] is not None for row in rows)
    headings += ["attack success, %"] if attacked else []
    headings += [metric.headed("best round"), metric.headed("ten best")]
    headings += [] if end is None else [metric.headed(f"at time {end:.3g}"), "time at the end"]
    headings += ["seeds", "rounds/s", "time in aggregation, %"]
    lines = []
    for row in rows:
        cells = [row["label"], ("≈ " if row["within_noise"] else "") + metric.text(row["mean"], row["std"])]
        cells += [metric.text(*row["whole"]) if row["whole"][0] is not None else "-"] if metric.is_personal else []
        cells += [_success(row)] if attacked else []
        cells += [metric.text(*row["scores"][name]) for name in ("best", "best_10")]
        cells += [] if end is None else [metric.text(*row["at_time"]), f"{row['time']:.3g}"]
        cells += [str(row["runs"]) + (f" ({row['unfinished']} unfinished)" if row["unfinished"] else "")]
        speed, share = row["rounds_per_second"], row["aggregation_share"]
        cells += ["-" if speed is None else f"{speed:.3g}", "-" if share is None else f"{100 * share:.2g}"]
        lines.append((row["best"] and len(groups) > 1, cells))
    return headings, lines


def _success(row: dict[str, Any]) -> str:
    average, std = row["attack_success"]
    return "-" if average is None else Metric().text(average, std)


def notes_of(groups: Groups) -> list[str]:
    """What explains the tables of all sections"""
    parts = [(methods, metric_of(methods), table(methods)) for methods in sections(groups).values()]
    rows = [row for _, _, some in parts for row in some]
    metric, personal = parts[0][1], next((m for _, m, _ in parts if m.is_personal), None)
    name = (personal or metric).words if all(m.is_personal for _, m, _ in parts) else metric.plain
    spread = ", ± the standard deviation over seeds" if any(row["runs"] > 1 for row in rows) else ""
    notes = [
        f"{name[0].upper() + name[1:]} is {of_the(averaged(groups))}{spread}; then the best round, and the mean of the "
        "ten best rounds (or of all, where there are fewer)."
    ]
    if any(row["time"] is not None for row in rows):
        notes.append(
            "Time is simulated: 1 is what a client of speed 1 with an average number of samples takes to train once. "
            '"At time" is what methods have reached when the first run ends.'
        )
    if metric.best == "min":
        notes.append("Lower is better.")
    if personal:
        notes.append(
            f"{personal.words[0].upper() + personal.words[1:]} is each client's model on that client's own test share, "
            "averaged over clients."
        )
    if any(row["attack_success"][0] is not None for row in rows):
        notes.append(
            "Attack success is the part of the test images of other classes that the model takes for the attackers' "
            "target once their trigger is on them, in the last rounds; lower is better."
        )
    if any(len(some) > 1 for _, _, some in parts):
        notes.append("Bold is the best.")
    if any(row["within_noise"] for row in rows):
        notes.append(
            f"≈ is within noise of it: the {100 * CONFIDENCE:g} % confidence interval of the difference over the same "
            "seeds includes 0."
        )
    if len(rows) > 1 and any(row["runs"] == 1 for row in rows):
        notes.append("With one seed nothing can be said about noise.")
    if any(row["mean"] is None for row in rows):
        notes.append(f"n/a: a run has no finite {metric.plain}, it diverged or has no round yet.")
    return notes


def of_the(words: str) -> str:
    return words if words.startswith("the ") else f"the {words}"


def difference_cells(found: list[Comparison], confidence: float = CONFIDENCE) -> Cells:
    """Headings and rows of the differences to one baseline in one setting; bold where 0 is not in the interval"""
    metric = found[0].metric
    unit = "points" if metric.unit else ""
    headings = [
        f"against {found[0].baseline}", metric.headed("difference", unit),
        f"{100 * confidence:g} % confidence interval", "seeds in which it is better",
    ]  # fmt: skip
    lines = []
    for c in found:
        d = c.difference
        interval = "-" if d.low is None or d.high is None else f"{metric.change(d.low)} to {metric.change(d.high)}"
        change = "n/a" if d.mean is None else metric.change(d.mean)
        lines.append((d.is_clear, [c.method, change, interval, f"{c.wins} of {len(d.seeds)}"]))
    return headings, lines


def difference_notes(groups: Groups, found: list[Comparison], score: str = "last_5") -> list[str]:
    """What explains the tables of differences"""
    if not found:
        return []
    pairs = [len(c.difference.seeds) for c in found]
    notes = [
        f"Differences of {of_the(averaged(groups, score))}, seed by seed: a seed has the same split, initial model and "
        "batches for all methods."
    ]
    if max(pairs) > 1:
        notes.append("Bold: 0 is not in the interval (Student's t over seeds, for each method by itself).")
    if 1 in pairs:
        notes.append("With one seed there is no interval: the difference may be chance.")
    if 0 in pairs:
        notes.append("n/a: no seed is there for both, as far and with a finite value.")
    return notes


def by_setting(found: list[Comparison]) -> dict[str, list[Comparison]]:
    return {setting: [c for c in found if c.setting == setting] for setting in dict.fromkeys(c.setting for c in found)}


def markdown(groups: Groups, baseline: str | None = None, score: str = "last_5", confidence: float = CONFIDENCE) -> str:
    """The tables as markdown, by setting, and lines that explain their marks"""
    found = by_setting(differences(groups, baseline, score, confidence))
    text: list[str] = []
    parts = sections(groups)
    for setting, methods in parts.items():
        text += [f"{setting}:"] if setting else []
        text += [lined(*cells_of(methods), bold=2)]
        if setting in found:
            text += [lined(*difference_cells(found[setting], confidence), bold=3)]
    shown = [c for some in found.values() for c in some]
    return "\n\n".join([*text, " ".join(notes_of(groups) + difference_notes(groups, shown, score))]) + "\n"


def lined(headings: list[str], lines: list[tuple[bool, list[str]]], bold: int) -> str:
    """A table whose columns are straight as text, too; `bold` cells of a marked row are in bold"""
    shown = [headings]
    for marked, cells in lines:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
        shown.append([f"**{c}**" if marked and i < bold else c for i, c in enumerate(cells)])
    widths = [max(3, *map(len, column)) for column in zip(*shown, strict=True)]
    padded = [
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))]
        for cells in shown
    ]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [padded[0], rule, *padded[1:]])
