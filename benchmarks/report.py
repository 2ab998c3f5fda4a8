"""Tables and plots of what `make bench` measured.

python -m benchmarks.report                 # benchmarks/results/bench.json -> tables on the screen, plots beside it
python -m benchmarks.report --publish       # also into docs/performance.md, docs/performance/ and README.md
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import plots
from benchmarks.publish import DOCS, ROOT, publish
from benchmarks.records import Record, load
from benchmarks.tables import all_tables, front

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"


def about(records: list[Record], path: Path) -> str:
    r, date = records[0], json.loads(path.read_text())["datetime"][:10]
    most = max(r["threads"] for r in records)  # the simulator's rounds have one
    threads = "one thread" if most == 1 else f"{most} threads"
    return (
        f"{date}, {r['cpu']}, {threads}, {r['simd']}, PyTorch {r['torch']}. Medians; ± is half the "
        "interquartile range. R is one read of the clients' bytes by the fastest of several readers, F is the Gram's "
        "multiply-adds at the cores' peak, and the roof is the larger of the two. All were measured in the same rounds."
    )


def markdown(tables: list[tuple], intro: str) -> str:
    parts = [intro]
    for title, headings, rows, note in tables:
        parts.append(f"### {title}\n\n" + lines_of(headings, rows) + (f"\n\n{note}" if note else ""))
    return "\n\n".join(parts) + "\n"


def lines_of(headings: list[str], rows: list[list[str]]) -> str:
    lines = "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, ["---"] * len(headings), *rows))
    return lines.replace("torch._foreach_", "`torch._foreach_`")  # whose underscores are Markdown's emphasis


def show(tables: list[tuple], intro: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 170)
    for title, headings, rows, note in tables:
        table = Table(
            title=f"\n{title}", title_style="bold", title_justify="left", caption=note, caption_justify="left"
        )
        for heading in headings:
            table.add_column(heading, justify="left" if heading == headings[0] else "right")
        for cells in rows:
            table.add_row(*cells, style="yellow" if cells[-1].startswith("missed") else None)
        console.print(table)
    console.print(intro)


def publish_all(text: str, readme: str, drawn: list[Path]) -> None:
    publish(DOCS / "performance.md", "measured", text)
    publish(README, "speed", readme)
    (DOCS / "performance").mkdir(exist_ok=True)
    for path in drawn:
        shutil.copy(path, DOCS / "performance" / path.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "bench.json", help="what pytest-benchmark wrote")
    parser.add_argument(
        "--publish", action="store_true", help="also write docs/performance.md, its plots, and the table of README.md"
    )
    args = parser.parse_args()
    if not args.json.exists():
        parser.error(f"{args.json} does not exist; run `make bench` first")
    records = load(args.json)
    tables, intro = all_tables(records), about(records, args.json)
    show(tables, intro)
    (args.json.parent / "tables.md").write_text(markdown(tables, intro))
    drawn = plots.draw(records, args.json.parent)
    print(f"Written to {args.json.parent}: tables.md, {', '.join(path.name for path in drawn)}")
    if args.publish:
        _, headings, rows, _ = front(records)
        publish_all(markdown(tables, intro), lines_of(headings, rows), drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
