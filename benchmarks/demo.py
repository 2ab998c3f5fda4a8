"""Does it matter how client models are aggregated, and what does it cost? A minute and a half, on two cores.

1. Twenty clients train a model of handwritten digits together, by five methods: all honest; six with wrong labels; six
   hostile. A table shows every method's accuracy as it trains.
2. One client sends a NaN.
3. A round of 20 ResNet-18s: time and memory, next to the usual PyTorch code.

python -m benchmarks.demo            `make demo` sets it up and runs it. Under 4 GB of memory
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

WIDTH = 100
OUT = Path("runs/demo")
# As rich fills it in: what is in the terminal, in its colours
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fastagg: what the demo showed</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ margin: 2rem auto; max-width: 62rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif }}
pre {{ font: 13px/1.3 ui-monospace, monospace; overflow-x: auto }} img {{ max-width: 100% }} {stylesheet}</style></head>
<body><h1>What the demo showed</h1>
<img src="accuracy.png" alt="accuracy by round, of every method in three conditions"><pre>{code}</pre></body></html>
"""


class Screen:
    """The terminal, and a copy for the page"""

    def __init__(self) -> None:
        self.console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        self.copy = Console(file=io.StringIO(), record=True, width=WIDTH, highlight=False)

    def say(self, *what: object) -> None:
        for each in what:
            self.console.print(each)
            self.copy.print(each)

    def title(self, text: str, below: str = "") -> None:
        self.say("", Rule(text, align="left", style="dim"), *([below] if below else []), "")

    def write(self, path: Path) -> None:
        path.write_text(self.copy.export_html(code_format=PAGE), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    began = time.monotonic()
    screen = Screen()
    screen.title(
        "1  Does it matter how client models are aggregated?",
        f"Twenty clients with unequal data train one model of handwritten digits, for {args.rounds} rounds. Only the\n"
        "aggregation differs: split, first model and batches are the same for every method.",
    )
    # now: torch takes seconds to import, and somebody is waiting
    from benchmarks import demo_nan, demo_speed, demo_training

    if args.out == OUT:
        shutil.rmtree(OUT, ignore_errors=True)
    table = demo_training.train(screen.console, args.out, args.seeds, args.rounds, args.seconds, args.jobs)
    if table is None:
        print("stopped", file=sys.stderr)
        return 130
    screen.say(table, Text("the last number: mean of the last five rounds, and of the seeds", style="dim"), "")
    screen.say(listed(demo_training.GOOD_FOR.items()))
    screen.title("2  One client sends a NaN")
    screen.say(listed(demo_nan.lines()))
    screen.title("3  What does it cost?", "The same answer by PyTorch code as people usually write it, timed in turns.")
    speed, said = demo_speed.compare(screen.console, args.model, args.clients, args.seconds / 3)
    screen.say(speed)
    screen.title("What you have seen")
    screen.say(listed([("-", line) for line in [*demo_training.words(table.cells, table.seeds), *said]]))
    screen.write(args.out / "report.html")
    screen.title("Next")
    screen.say(listed(next_steps(args.out)), "", Text(f"{time.monotonic() - began:.0f} seconds", style="dim"))
    return 0


def listed(rows: Iterable[tuple[str, str]]) -> Table:
    """Names, and what there is to say of each"""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, what in rows:
        grid.add_row(Text(name, no_wrap=True), Text(what))
    return grid


def next_steps(out: Path) -> list[tuple[str, str]]:
    fastagg = Path(sys.executable).with_name("fastagg")
    fastagg = fastagg.relative_to(Path.cwd()) if fastagg.is_relative_to(Path.cwd()) else fastagg
    return [
        ("look at", f"{out}/accuracy.png, the curves; {out}/report.html, all of this"),
        ("type", f"{fastagg} compare fedavg fedawa flame --attack flip --attackers 0.2"),
        ("", "another attack, with a report of weights, similarities and steps (a minute or two)"),
        ("type", f"{fastagg} methods"),
        ("read", "docs/robustness.md: every robust method under ten attacks, and which one we would use"),
        ("", "docs/results.md: where adaptive weights help on unequal data, and where they do not"),
        ("use it", "examples: in Flower, in NVFlare, in forty lines of PyTorch"),
    ]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help="new folder for runs, picture and page")
    parser.add_argument("--seeds", type=int, default=3, help="at most so many (default 3; fewer on a slow machine)")
    parser.add_argument("--rounds", type=int, default=30, help="of training (default 30)")
    parser.add_argument("--seconds", type=float, default=35, help="after which no seed is added (default 35)")
    parser.add_argument("--jobs", type=int, help="trainings side by side (default: one for each core)")
    parser.add_argument("--model", default="resnet18", help="of the third part (default resnet18)")
    parser.add_argument("--clients", type=int, default=20, metavar="K", help="of the third part (default 20)")
    args = parser.parse_args(argv)
    if args.out != OUT and args.out.exists():
        parser.error(f"{args.out} is there already; only {OUT} is made anew")
    return args


if __name__ == "__main__":
    sys.exit(main())
