"""What docs/results.md says of runs of the simulator, read off their folders.

python -m benchmarks.results fig2 runs/fig2              do client vectors mirror the label groups?
python -m benchmarks.results entropy runs/weiavg         do WeiAvg's weights follow label entropy?
python -m benchmarks.results table runs/a [runs/b ...]   the table of a comparison
python -m benchmarks.results gain docs/results/fashion-e1.xz --rounds 100    what is left beside equal weights
python -m benchmarks.results page docs/results.md        makes its tables and figures again, from the files beside it
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fastagg._engine import atomic
from fastagg.sim import archive, report
from fastagg.sim.plots.curves import Panel, draw_panels
from fastagg.sim.plots.steps import matched, of_weights
from fastagg.sim.plots.style import save
from fastagg.sim.statistics import paired


def fig2(runs: list[report.Run]) -> list[str]:
    """1 - cosine between clients of one label group, of two, and of a group and those who have all classes"""
    head = ["method", "round", "1 - cosine of", "first halves", "second halves", "all classes", "first and second"]
    lines = [f"| {' | '.join([*head, 'half and all'])} |", "|---" * 8 + "|"]
    for run in runs:
        counts = np.array(run.partition["counts"])
        half = counts.shape[1] // 2
        low, high = counts[:, :half].sum(1), counts[:, half:].sum(1)
        kind = np.where(high == 0, 0, np.where(low == 0, 1, 2))  # first half of the classes, second half, all
        for record in run.metrics:
            for name, key in (("client vectors", "cosine"), ("models", "model_cosine")):
                if key not in record:
                    continue
                distance, who = 1 - np.array(record[key]), kind[record["clients"]]
                pairs = {}
                for i in range(len(who)):
                    for j in range(i):
                        pairs.setdefault(tuple(sorted((who[i], who[j]))), []).append(distance[i, j])
                either = pairs.get((0, 2), []) + pairs.get((1, 2), [])
                cells = [pairs.get(p, []) for p in ((0, 0), (1, 1), (2, 2), (0, 1))] + [either]
                shown = [f"{np.mean(c):.4f}" if c else "-" for c in cells]
                label = run.summary["label"]
                lines.append(f"| {label} | {record['round']} | {name} | " + " | ".join(shown) + " |")
    return lines


def entropy(runs: list[report.Run]) -> list[str]:
    """Correlation of the clients' weights with the entropy of their labels: within rounds, averaged, and of each
    client's mean over the rounds it took part in, as in WeiAvg's Fig. 2. WeiAvg's weights are a linear function of its
    projections (lambda = 1), so within a round this is the projections' correlation."""
    head = ["method", "seeds", "within rounds 1 to 10", "within all rounds", "of the clients' means, all rounds"]
    lines = [f"| {' | '.join(head)} |", "|---" * 5 + "|"]
    for label, some in report.group(runs).items():
        early, all_rounds, means = [], [], []
        for run in some:
            p = np.array(run.partition["counts"], dtype=float)
            p /= p.sum(1, keepdims=True)
            h = -(p * np.log(np.where(p > 0, p, 1))).sum(1)  # [K]
            total, times = np.zeros(len(h)), np.zeros(len(h))
            for record in run.metrics[1:]:
                w, who = np.array(record["weights"]), record["clients"]
                total[who], times[who] = total[who] + w * len(who), times[who] + 1
                if w.std() > 1e-9:
                    all_rounds.append(np.corrcoef(w, h[who])[0, 1])
                    early += all_rounds[-1:] if record["round"] <= 10 else []
            seen = times > 0
            means.append(np.corrcoef(total[seen] / times[seen], h[seen])[0, 1] if all_rounds else np.nan)
        if all_rounds:
            found = [f"{np.mean(x):.2f}" for x in (early, all_rounds, means)]
            lines.append(f"| {label} | {len(some)} | {' | '.join(found)} |")
    return lines


def gain(runs: list[report.Run], rounds: int, score: str = "accuracy") -> list[str]:
    """What is left of a method beside equal weights: accuracy, the length of its steps, and its weights' spread.

    Accuracy (score="personal_accuracy": of clients' own models, on their shares of the test set) and differences are of
    the mean of the last ten of so many rounds, seed by seed. The step is the length of what a round adds to the global
    model, as a part of what FedAvg's weights would have added from the same clients. The largest and smallest weight
    are in units of 1 / K. Steps and weights are means over rounds and seeds."""
    head = ["method", "accuracy, %", "against uniform, points", "95 % interval", "against fedavg", "95 % interval",
            "step, of FedAvg's", "largest weight", "smallest"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    scores: dict[str, dict[int, float]] = {}
    seen: dict[str, list[np.ndarray]] = {}
    for label, some in _until(runs, rounds).items():
        scores[label] = {r.config["seed"]: 100 * float(np.mean([m[score] for m in r.metrics[-10:]])) for r in some}
        seen[label] = [_steps_and_spread(r.metrics) for r in some]
    for label in sorted(scores, key=lambda name: -np.mean(list(scores[name].values()))):
        cells = [label, f"{np.mean(list(scores[label].values())):.2f}"]
        for base in ("uniform", "fedavg"):
            found = paired(scores[label], scores[base])
            known = label != base and found.mean is not None and found.low is not None
            text = f"{found.mean:+.2f}" if known else ""
            cells += [f"**{text}**" if known and found.is_clear else text]
            cells += [f"{found.low:+.2f} to {found.high:+.2f}" if known else ""]
        cells += ["" if np.isnan(x) else f"{x:.2f}" for x in np.mean(seen[label], axis=0)]
        lines.append(f"| {' | '.join(cells)} |")
    seeds = sorted({len(found) for found in scores.values()})
    said = f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    return [*lines, "", f"{said}, {rounds} rounds. Bold: 0 is not in the interval (Student's t, seed by seed)."]


def drawn(runs: list[report.Run], rounds: int, score: str = "accuracy") -> Figure:
    """The same by round: means over seeds, and bands from the lowest to the highest"""
    panels = [
        Panel(lambda m, run: 100 * m[score] if m.get(score) is not None else None, f"{score.replace('_', ' ')} (%)"),
        Panel(matched, "step / FedAvg's step", reference=1, may_be_log=True),
        Panel(lambda m, run: of_weights(m, np.max), "largest weight / equal weight", reference=1),
    ]
    figure = draw_panels(_until(runs, rounds), panels)
    assert figure is not None
    return figure


def _until(runs: list[report.Run], rounds: int) -> report.Groups:
    """Runs that have so many rounds, and these only"""
    cut = [replace(run, metrics=[m for m in run.metrics if 0 < m["round"] <= rounds]) for run in runs]
    return report.group([run for run in cut if run.metrics and run.metrics[-1]["round"] == rounds])


def _steps_and_spread(records: list[dict]) -> np.ndarray:
    """Means over the rounds: step, largest and smallest weight; NaN where a method makes several models"""
    steps = [m["step"] / m["fedavg_step"] for m in records if m.get("step") and m.get("fedavg_step")]
    ends = [np.array([max(m["weights"]), min(m["weights"])]) * len(m["weights"]) for m in records if _one_row(m)]
    return np.array([np.mean(steps) if steps else np.nan, *(np.mean(ends, axis=0) if ends else [np.nan] * 2)])


def _one_row(record: dict) -> bool:
    """Whether there is one weight of each client"""
    return np.ndim(record.get("weights")) == 1


def read(paths: Sequence[Path]) -> list[report.Run]:
    """The runs in folders, and in files of archive.py"""
    runs = []
    for path in paths:
        in_file = path.suffix in archive.SUFFIXES
        runs += archive.unpack(path) if in_file else [report.read_run(folder) for folder in report.runs_in(path)]
    return runs


def answer(what: str, paths: Sequence[Path], rounds: int, score: str = "accuracy") -> list[str]:
    runs = read(paths)
    if what == "table":
        lines = [report.markdown(report.group(runs))]
    else:
        lines = {"fig2": fig2, "entropy": entropy, "gain": lambda some: gain(some, rounds, score)}[what](runs)
    seconds = sum(run.summary["seconds"]["total"] for run in runs)
    return [*lines, "", f"{len(runs)} run{'s' * (len(runs) > 1)}; {seconds / 60:.0f} minutes of one process in all."]


def publish(page: Path) -> int:
    """Replaces what stands between `<!-- results: gain FILE --rounds N -->` and `<!-- end of results -->`; how often"""
    text, made = page.read_text(), 0

    def again(found: re.Match) -> str:
        nonlocal made
        made += 1
        args = arguments(found[1].split())
        paths = [page.parent / path for path in args.paths]
        lines = answer(args.what, paths, args.rounds, args.score)
        if args.figure:
            save(drawn(read(paths), args.rounds, args.score), page.parent / args.figure, "png")
            lines += ["", f"![Accuracy, length of the step and largest weight by round]({args.figure})"]
        return "\n".join([f"<!-- results: {found[1]} -->", "", *lines, "", "<!-- end of results -->"])

    text = re.sub(r"<!-- results: (.*?) -->.*?<!-- end of results -->", again, text, flags=re.DOTALL)
    atomic.write(page, text)
    return made


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fig2", "entropy", "table", "gain", "page"])
    parser.add_argument("paths", nargs="+", type=Path, help="folders of runs, files of packed ones; or a page")
    parser.add_argument("--rounds", type=int, default=100, help="gain: of how many rounds (default: %(default)s)")
    parser.add_argument("--score", choices=["accuracy", "personal_accuracy"], default="accuracy", help="gain: of what")
    parser.add_argument("--figure", type=Path, help="gain, in a page: the same by round, as a PNG file beside the page")
    return parser.parse_args(given)


def main() -> int:
    args = arguments(None)
    try:
        if args.what == "page":
            print(f"{args.paths[0]}: {publish(args.paths[0])} tables")
        else:
            print("\n".join(answer(args.what, args.paths, args.rounds, args.score)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
