"""`fastagg reproduce`: the experiments of the papers, with their numbers beside ours."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastagg._engine.terminal import say
from fastagg.sim import recipe as recipes
from fastagg.sim.command import exit_code
from fastagg.sim.recipe import Recipe, Setting

if TYPE_CHECKING:  # torch is imported when there is work to do, not to list recipes
    from fastagg._engine.distributed.peers import Peers
    from fastagg.sim.jobs import Job
    from fastagg.sim.report import Groups

ABOUT = """Runs the experiments of a paper with its own protocol, and prints our numbers beside the paper's.

  fastagg reproduce                            lists the recipes
  fastagg reproduce fedlaw-table8 --show       the recipe, and what `fastagg compare` would be told
  fastagg reproduce fedlaw-table8 --quick      a smaller version, meant for 20 minutes on two cores
  fastagg reproduce fedlaw-table8              all of it; what is there already is not made again
  fastagg reproduce mine.toml                  a recipe of your own
"""
WIDTH = 100


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastagg reproduce", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="recipe, or a TOML file; default: list them")
    parser.add_argument("--quick", action="store_true", help="a scaled version, which says what it scales")
    parser.add_argument("--show", action="store_true", help="print the recipe and the commands, run nothing")
    parser.add_argument("--out", type=Path, help="folder for the runs (default: runs/reproduce/<name>)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the recipe's)")
    parser.add_argument("--jobs", type=int, help="number of parallel runs (default: one per free core)")
    parser.add_argument("--data-dir", help="folder with the files of the data set; default: FASTAGG_DATA")
    parser.add_argument("--device", help="where clients train: cpu, cuda, cuda:1, mps")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def main(argv: list[str]) -> int:
    parser = parser_of()
    given = parser.parse_args(argv)
    for name in ("seeds", "jobs"):
        if (number := getattr(given, name)) is not None and number < 1:
            parser.error(f"--{name} {number}: expected an integer >= 1")
    if given.name is None:
        say("\n\n".join(listed(recipes.read(path)) for path in recipes.recipes()))
        return 0
    return exit_code("reproduce", lambda peers: reproduce(given, peers))


def listed(recipe: Recipe) -> str:
    needs = f"needs {', '.join(recipe.data)}; {recipe.takes}; --quick: {recipe.quick['takes']}"
    return f"{recipe.name}\n  {recipe.title} ({recipe.paper}, {recipe.table})\n  {needs}"


def reproduce(given: argparse.Namespace, peers: Peers | None) -> bool:
    """False if it was stopped"""
    from fastagg.sim import comparison

    recipe = recipes.find(given.name)
    text = recipe.file.read_text(encoding="utf-8")
    if given.quick:
        recipe = recipe.scaled_down()
    asked = recipe.seeds
    recipe = replace(recipe, seeds=given.seeds or asked)
    out = given.out or Path("runs/reproduce") / (recipe.name + ("-quick" if given.quick else ""))
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out names a folder")
    more = {name: getattr(given, name) for name in ("data_dir", "device") if getattr(given, name) is not None}
    runs = list(recipe.jobs(out, more))  # all options are checked here
    first = peers is None or peers.rank == 0
    if given.show:
        if first:
            say("\n".join([text, *recipe.commands(out)]))
        return True
    if first and not given.quiet:
        say(f"{recipe.title}: {len(runs)} runs, {recipe.takes}")
    result = comparison.compare(
        [job for _, _, job in runs], out, progress=not given.quiet, jobs=given.jobs, peers=peers
    )
    if first:
        if result["report"] is not None:
            shown = table(recipe, runs, result["groups"])
            say("\n\n".join([shown, *notes(recipe, asked), f"report: {result['report']}"]))
        if result["interrupted"]:
            say(f"stopped; continue with the same command and --out {out}")
    return not result["interrupted"]


def table(recipe: Recipe, runs: list[tuple[Setting, str, Job]], groups: Groups) -> str:
    """The paper's numbers and ours, as markdown; methods that have no round yet are left out"""
    from fastagg.sim import report

    made = {run.path: run for members in groups.values() for run in members}
    lines: list[tuple[bool, list[str]]] = []
    metric = report.metric_of(groups)
    for setting in recipe.settings:
        cells: Groups = {}
        for where, method, job in runs:
            if where is setting and job.folder in made:
                cells.setdefault(method, []).append(made[job.folder])
        for row in report.table(cells):
            lines.append((False, row_of(recipe, setting, row, metric)))
    headings = ["setting", "method", "paper", metric.headed("ours"), "difference", "seeds"]
    return report.lined(headings, lines, bold=0)


def row_of(recipe: Recipe, setting: Setting, row: dict[str, Any], metric: Any) -> list[str]:
    name, (mean, std) = row["label"], row["scores"][recipe.score]
    value, shown = recipes.printed(setting.paper[name]) if name in setting.paper else (None, "-")
    difference = "-" if value is None or mean is None else f"{metric.scale * mean - value:+.2f}"
    seeds = str(row["runs"]) + (f" ({row['unfinished']} unfinished)" if row["unfinished"] else "")
    mark = " (ours)" if name in recipe.ours else ""
    return [setting.name, name + mark, shown, metric.text(mean, std), difference, seeds]


def notes(recipe: Recipe, asked: int) -> list[str]:
    """What has to be known to read the table"""
    from fastagg.sim.report import SCORES

    lines = [
        f"{recipe.paper}, {recipe.table}. Each run counts with its {SCORES[recipe.score]}. Ours is the "
        "mean over seeds, ± the standard deviation."
    ]
    if recipe.ours:
        lines.append(f"Not in the paper, added for comparison: {', '.join(recipe.ours)}.")
    if not any(setting.paper for setting in recipe.settings):
        lines.append("The paper prints no numbers for these, only curves.")
    if recipe.differs:
        lines.append(f"What differs from the paper: {recipe.differs}")
    if recipe.scaled:
        lines.append(f"This is the quick version, so the numbers are not comparable as they are: {recipe.scaled}")
    if recipe.seeds != asked:
        lines.append(f"Seeds: {recipe.seeds}, where the recipe has {asked}.")
    return [textwrap.fill(" ".join(line.split()), WIDTH) for line in lines]
