"""What benchmarks that compare simulated runs share: arguments, the runs, and the table that goes into a document."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.publish import publish
from fastagg.sim import comparison, report
from fastagg.sim.config import Config
from fastagg.sim.jobs import Job

Key = TypeVar("Key")


def parse(
    argv: list[str] | None, doc: str, *, out: str, page: Path, seeds: int, quick: str,
    more: dict[str, dict[str, Any]] | None = None,
) -> argparse.Namespace:  # fmt: skip
    """The arguments; with --quick there is one seed.

    out     default folder of the runs
    page    the document that --write changes
    seeds   default number of seeds
    quick   what --quick runs
    more    further arguments, with what add_argument takes
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for the runs")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{page.name}")
    parser.add_argument("--seeds", type=int, default=seeds, help="number of seeds (default: %(default)s)")
    for name, settings in (more or {}).items():
        parser.add_argument(name, **settings)
    parser.add_argument("--jobs", type=int, help="runs made side by side (default: one for every core)")
    args = parser.parse_args(argv)
    if args.quick and args.write:
        parser.error("--quick is to see that it works; its table is not for the documents")
    if args.quick:
        args.seeds = 1
        args.jobs = args.jobs or 1  # another process would take longer to begin than this takes
    return args


def run(
    args: argparse.Namespace, page: Path, mark: str, plan: Callable[[], dict[Key, list[tuple[Config, Path]]]],
    show: Callable[[dict[Key, list[report.Run]]], str],
) -> int:  # fmt: skip
    """Makes the runs that are not there yet, prints what `show` makes of all of them, and publishes it with --write.

    plan   gives every run and its folder, in groups
    show   gets the finished runs in the same groups, and gives the text
    """
    try:
        groups = plan()
        flat = {folder: options for some in groups.values() for options, folder in some}  # groups may share a run
        done = sum(comparison.is_done(options, folder) for folder, options in flat.items())
        print(f"{len(flat)} runs, {done} of them made before in {args.out}", file=sys.stderr)
        if comparison.make([Job(options, folder) for folder, options in flat.items()], jobs=args.jobs):
            print("stopped; the same command goes on", file=sys.stderr)
            return 130
        found = {key: [report.read_run(folder) for _, folder in some] for key, some in groups.items()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    text = show(found)
    print(text)
    if args.write:
        publish(page, mark, text)
    return 0
