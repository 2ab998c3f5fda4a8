"""Runs read back from their folders, the table of them, and report.html: one file that needs nothing else."""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

AVERAGED = 5  # rounds at the end whose mean is a run's accuracy
# What runs of one label may differ in and still be seeds of the same thing
FREE = {"seed", "data_dir", "batched"}
CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #fff; --card: #f6f8fa; --line: #d1d9e0;
  --best: #ddf4e4 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa4ae; --page: #12161b; --card: #1a2027;
  --line: #333c46; --best: #173626 } }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 960px; margin: 0 auto; padding: 2rem 1.2rem 4rem }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem } h2 { font-size: 1.15rem; margin: 0 }
.lead, .note, figcaption, summary { color: var(--soft) } .note, figcaption, details { font-size: .9rem }
.verdict { font-size: 1.1rem } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .9rem .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right }
th { color: var(--soft); font-weight: normal } th:first-child, td:first-child { text-align: left }
tr.best td { background: var(--best); font-weight: 600 }
figure { margin: 2rem 0 0; padding: 1rem 1.2rem; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card) }
figcaption { margin: .2rem 0 .6rem } svg { display: block; width: 100%; height: auto; color: var(--ink) }
main > details { margin-top: 2rem } figure > details { margin: 0 } summary { cursor: pointer }
figure:has(> details:not([open])) { margin-top: .6rem; padding: .5rem 1.2rem }
@media print { figure { break-inside: avoid } }
"""


@dataclass(frozen=True)
class Run:
    """One folder that the simulator wrote: a method and a seed."""

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    partition: dict[str, Any]
    metrics: list[dict[str, Any]]


# ---- reading ----


def read_run(path: Path) -> Run:
    """A run from its folder; one that was cut short counts as far as it went. ValueError says what is wrong with it."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give the folder of a run, as written by `fastagg sim`")
    if not (path / "config.json").exists():
        raise ValueError(f"{path} is not a run of the simulator: it has no config.json")
    config = _read_json(path / "config.json")
    metrics = _read_metrics(path / "metrics.jsonl")
    partition = _read_json(path / "partition.json") if (path / "partition.json").exists() else {}
    summary = _read_json(path / "summary.json") if (path / "summary.json").exists() else {}
    last = metrics[-1]["round"]
    if summary.get("rounds") != last:  # a crash: the summary is missing, or older than the metrics
        personal = metrics[-1].get("accuracy") is None
        summary = summary | {
            "rounds": last, "finished": last >= config.get("rounds", last), "personal": personal,
            "accuracy": _average(metrics, "personal_accuracy" if personal else "accuracy"),
            "personal_accuracy": _average(metrics, "personal_accuracy"),
        }  # fmt: skip
    named = {"label": config.get("method", path.name), "method": config.get("method"), "seed": config.get("seed")}
    return Run(path, config, named | summary, partition, metrics)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); repeat the run, or leave this folder out") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected an object; repeat the run")
    return value


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    rounds: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            rounds[int(record["round"])] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break  # a crash cut it off
            raise ValueError(
                f"{path}: line {number} of {len(lines)} is not the record of a round ({error}); repeat the run, or "
                "delete this line and what follows"
            ) from error
    if not rounds:
        raise ValueError(f"{path.parent} has no metrics yet: not one round is recorded in {path.name}")
    return [rounds[r] for r in sorted(rounds)]


def _average(metrics: list[dict[str, Any]], key: str) -> float | None:
    values = [m[key] for m in metrics if m["round"] > 0 and m.get(key) is not None]
    return mean(values[-AVERAGED:]) if values else None


# ---- comparing ----


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The seeds of each label together, in order of first appearance.

    Runs of one label that differ in more than their seed (say, in alpha) are told apart by it: `fedawa, alpha=0.1`.
    ValueError where a seed comes twice: it would look like less noise than there is.
    """
    labels: dict[str, list[Run]] = {}
    for run in runs:
        labels.setdefault(run.summary["label"], []).append(run)
    groups: dict[str, list[Run]] = {}
    for label, members in labels.items():
        told_by = sorted(name for name, values in _options(members).items() if name not in FREE and len(values) > 1)
        for run in members:
            name = ", ".join([label, *(f"{key}={run.config[key]}" for key in told_by)])
            twin = next((r for r in groups.get(name, ()) if r.summary.get("seed") == run.summary.get("seed")), None)
            if twin is None:
                groups.setdefault(name, []).append(run)
            elif twin.path.resolve() != run.path.resolve():
                seed = run.summary.get("seed")
                raise ValueError(f"{name}, seed {seed}, comes twice: {twin.path} and {run.path}; leave one out")
    return groups


def _options(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The values that each option of these runs has; options that only some of them know are left out"""
    names = [name for name in runs[0].config if all(name in run.config for run in runs)]
    return {n: list({json.dumps(r.config[n], sort_keys=True): r.config[n] for r in runs}.values()) for n in names}


def measure(groups: dict[str, list[Run]]) -> str:
    """What labels are compared by: where one of them has no global model, all by their clients' own test shares"""
    personal = any(run.summary.get("personal") for runs in groups.values() for run in runs)
    return "personal_accuracy" if personal else "accuracy"


def table(groups: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """One row per label, in the groups' order:

    label, runs    runs is the number of seeds
    mean, std      of the seeds' accuracy (each the mean of its last 5 rounds), as a share of 1; std is the sample's,
                   with n - 1, and None for one seed; mean is None where a run has no finite accuracy
    whole          where labels are compared by personal accuracy: (mean, std) on the whole test set, or None
    best           the highest mean
    within_noise   the difference to the best is at most twice its standard error over seeds:
                   |mean_a - mean_b| <= 2 sqrt(std_a^2 / n_a + std_b^2 / n_b); never claimed where either has one seed
    unfinished     number of runs cut short
    rounds_per_second, aggregation_share    means over seeds, or None
    """
    by = measure(groups)
    rows = []
    for label, runs in groups.items():
        average, std = _spread([_accuracy(run, by) for run in runs])
        rows.append({
            "label": label, "runs": len(runs), "mean": average, "std": std, "best": False, "within_noise": False,
            "whole": _spread([_accuracy(run, "accuracy") for run in runs]) if by != "accuracy" else None,
            "unfinished": sum(not run.summary.get("finished", False) for run in runs),
            "rounds_per_second": _spread([run.summary.get("rounds_per_second") for run in runs])[0],
            "aggregation_share": _spread([run.summary.get("aggregation_share") for run in runs])[0],
        })  # fmt: skip
    valid = [row for row in rows if row["mean"] is not None]
    if valid:
        best = max(valid, key=lambda row: row["mean"])
        best["best"] = True
        for row in valid:
            if row is not best and row["std"] is not None and best["std"] is not None:
                noise = 2 * math.sqrt(row["std"] ** 2 / row["runs"] + best["std"] ** 2 / best["runs"])
                row["within_noise"] = best["mean"] - row["mean"] <= noise
    return rows


def _accuracy(run: Run, by: str) -> float | None:
    personal = bool(run.summary.get("personal"))
    if personal and by == "accuracy":
        return None
    if personal == (by == "personal_accuracy"):
        return run.summary.get("accuracy")
    return _average(run.metrics, by)


def _spread(values: list[float | None]) -> tuple[float | None, float | None]:
    if not values or any(v is None or not math.isfinite(v) for v in values):
        return None, None
    return mean(values), stdev(values) if len(values) > 1 else None


def _percent(average: float | None, std: float | None) -> str:
    if average is None:
        return "n/a"
    return f"{100 * average:.2f}" + (f" ± {100 * std:.2f}" if std is not None else "")


def _cells(groups: dict[str, list[Run]]) -> tuple[list[str], list[tuple[dict[str, Any], list[str]]], list[str]]:
    """Headings, rows of the table with their cells, and the notes that explain them"""
    rows, personal = table(groups), measure(groups) != "accuracy"
    headings = ["method", "personal accuracy, %" if personal else "accuracy, %"]
    headings += ["on the whole test set, %"] if personal else []
    headings += ["seeds", "rounds/s", "time in aggregation, %"]
    lines = []
    for row in rows:
        cells = [row["label"], ("≈ " if row["within_noise"] else "") + _percent(row["mean"], row["std"])]
        cells += [_percent(*row["whole"]) if row["whole"][0] is not None else "-"] if personal else []
        cells += [str(row["runs"]) + (f" ({row['unfinished']} unfinished)" if row["unfinished"] else "")]
        speed, share = row["rounds_per_second"], row["aggregation_share"]
        cells += ["-" if speed is None else f"{speed:.3g}", "-" if share is None else f"{100 * share:.2g}"]
        lines.append((row, cells))
    several = any(row["runs"] > 1 for row in rows)
    notes = [f"Mean of the last {AVERAGED} rounds" + ("; ± is the standard deviation over seeds." if several else ".")]
    if personal:
        notes.append("Personal accuracy is each client's model on that client's own test share, averaged over clients.")
    if len(rows) > 1:
        notes.append("Bold is the best.")
    if any(row["within_noise"] for row in rows):
        notes.append("≈ is within noise of it: the difference is at most twice its standard error.")
    if len(rows) > 1 and any(row["runs"] == 1 for row in rows):
        notes.append("With one seed nothing can be said about noise.")
    if any(row["mean"] is None for row in rows):
        notes.append("n/a: a run has no finite accuracy, it diverged or has no round yet.")
    return headings, lines, notes


def markdown(groups: dict[str, list[Run]]) -> str:
    """The table as markdown, and a line that explains its marks"""
    headings, lines, notes = _cells(groups)
    text = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for row, cells in lines:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
        if row["best"] and len(lines) > 1:
            cells[:2] = [f"**{cell}**" for cell in cells[:2]]
        text.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in text) + "\n\n" + " ".join(notes) + "\n"


# ---- words ----


def heading(groups: dict[str, list[Run]]) -> str:
    labels, data = list(groups), _said(groups, "data")
    if len(labels) > 3:
        return f"{len(labels)} methods on {data}"
    return f"{' against '.join(labels)} on {data}" if len(labels) < 3 else f"{', '.join(labels)} on {data}"


def described(groups: dict[str, list[Run]]) -> str:
    """What was run, in a sentence"""
    say = lambda name: _said(groups, name)  # noqa: E731
    split = {
        "iid": "at random (IID)", "dirichlet": f"by label with Dirichlet({say('alpha')})",
        "pathological": f"with {say('classes_per_client')} classes each",
        "hybrid": f"half of them balanced, the others by Dirichlet({say('alpha')})",
        "entropy": "from one class for the first to all for the last",
        "groups": "in three groups: the first half of the classes, the second, all",
    }.get(say("partition"), f"(partition {say('partition')}, alpha {say('alpha')})")  # fmt: skip
    parts = [f"{say('data')} split over {say('clients')} clients {split}"]
    if say("participation") not in ("1", "?"):
        parts.append(f"a share of {say('participation')} of them in a round")
    for name, words in (("dropout", "dropout"), ("stragglers", "stragglers"), ("corrupted", "corrupted clients")):
        if say(name) not in ("0", "?"):
            parts.append(f"{words} {say(name)}")
    parts.append(f"model {say('model')}")
    parts.append(f"{say('rounds')} rounds of {say('epochs')} local epochs at learning rate {say('lr')}")
    seeds = sorted(
        {run.summary.get("seed") for runs in groups.values() for run in runs if run.summary.get("seed") is not None}
    )
    parts.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds)) or 'unknown'}")
    return "; ".join(parts) + "."


def _said(groups: dict[str, list[Run]], name: str) -> str:
    values = _options([run for runs in groups.values() for run in runs]).get(name, ["?"])
    return " or ".join(f"{v:g}" if isinstance(v, int | float) else str(v) for v in values)


def verdict(groups: dict[str, list[Run]]) -> str:
    """What came out, in a sentence"""
    rows = table(groups)
    best = next((row for row in rows if row["best"]), None)
    if best is None:
        return "No run has a finite accuracy."
    first = f"{best['label']} reached {_percent(best['mean'], best['std'])} % {measure(groups).replace('_', ' ')}"
    others = sorted((r for r in rows if r["mean"] is not None and r is not best), key=lambda r: -r["mean"])
    if not others:
        return first + "."
    behind = 100 * (best["mean"] - others[0]["mean"])
    if f"{behind:.2f}" == "0.00":
        return f"{first}, and so did {others[0]['label']}."
    noise = ", which is within noise" if others[0]["within_noise"] else ""
    return f"{first}, {behind:.2f} points above {others[0]['label']}{noise}."


# ---- writing ----


def write(groups: dict[str, list[Run]], out: Path, title: str | None = None) -> Path:
    """Writes out/report.html and out/plots/*.png; each file appears whole or not at all. Returns the page's path."""
    if not any(groups.values()):
        raise ValueError("a report needs at least one run")
    from fastagg.sim import plots  # only here: tables do not need matplotlib

    out = Path(out)
    (out / "plots").mkdir(parents=True, exist_ok=True)
    parts, names = [], set()
    for drawn in plots.figures(groups, measure(groups)):
        name = re.sub(r"[^a-z0-9]+", "-", drawn.name.lower()).strip("-")[:80]
        while name in names:
            name += "-2"
        names.add(name)
        picture, drawing = io.BytesIO(), io.StringIO()
        plots.save(drawn.figure, picture, "png")
        plots.save(drawn.figure, drawing, "svg")
        _replace(out / "plots" / f"{name}.png", picture.getvalue())
        title_, words = _safe(drawn.title), _safe(drawn.caption)
        svg = _inline(drawing.getvalue().replace(plots.INK, "currentColor"), name, title_)
        part = f"<figcaption>{words}</figcaption>{svg}"
        part = f"<details><summary>{title_}</summary>{part}</details>" if drawn.folded else f"<h2>{title_}</h2>{part}"
        parts.append(f'<figure id="{name}">{part}</figure>')
    page = out / "report.html"
    _replace(page, _page(groups, title or heading(groups), parts).encode())
    return page


def _page(groups: dict[str, list[Run]], title: str, figures: list[str]) -> str:
    headings, lines, notes = _cells(groups)
    best = [" class=best" if row["best"] and len(lines) > 1 else "" for row, _ in lines]
    rows = "".join(
        f"<tr{mark}>{''.join(f'<td>{_safe(cell)}</td>' for cell in cells)}</tr>"
        for mark, (_, cells) in zip(best, lines, strict=True)
    )
    runs = [run for members in groups.values() for run in members]
    options = "".join(
        f"<tr><td>{_safe(name)}</td><td>{_safe(' or '.join(map(json.dumps, values)))}</td></tr>"
        for name, values in _options(runs).items()
    )
    versions = dict.fromkeys(f"{k} {v}" for run in runs for k, v in (run.summary.get("versions") or {}).items())
    folders = "".join(f"<li>{_safe(run.path)}</li>" for run in runs)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{_safe(title)}</title><style>{CSS}</style></head><body><main>
<h1>{_safe(title)}</h1><p class="lead">{_safe(described(groups))}</p><p class="verdict">{_safe(verdict(groups))}</p>
<div class="scroll"><table><tr>{"".join(f"<th>{_safe(h)}</th>" for h in headings)}</tr>{rows}</table></div>
<p class="note">{_safe(" ".join(notes))}</p>
{"".join(figures)}
<details><summary>All options, and where the runs are</summary><table>{options}</table><ul>{folders}</ul>
<p>{_safe(", ".join(versions))}</p></details>
</main></body></html>
"""


def _safe(text: Any) -> str:
    return html.escape(str(text))


def _inline(svg: str, name: str, title: str) -> str:
    """An SVG file as part of a page: with ids of its own, and no address of anything outside"""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))  # of the others some come twice
    svg = re.sub(r'\sid="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
