"""What docs/results.md says of runs of the simulator, read off their folders.

python -m benchmarks.results fig2 runs/fig2              do client vectors mirror the label groups?
python -m benchmarks.results entropy runs/weiavg         do WeiAvg's weights follow label entropy?
python -m benchmarks.results table runs/a [runs/b ...]   the table of a comparison
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from fastagg.sim import report


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fig2", "entropy", "table"])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs, or of comparisons")
    args = parser.parse_args()
    try:
        runs = [report.read_run(folder) for path in args.folders for folder in report.runs_in(path)]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.what == "table":
        print(report.markdown(report.group(runs)))
    else:
        print("\n".join((fig2 if args.what == "fig2" else entropy)(runs)))
    seconds = sum(run.summary["seconds"]["total"] for run in runs)
    print(f"\n{len(runs)} run{'s' * (len(runs) > 1)}; total time {seconds / 60:.1f} minutes of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
