"""`fastagg sim` and `fastagg compare`: arguments in, runs and a report out."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastagg._engine.terminal import key_value, parse, say
from fastagg.sim import config
from fastagg.sim.config import Config

if TYPE_CHECKING:  # torch is imported when there is work to do, not to print help
    from fastagg._engine.distributed.peers import Peers
    from fastagg.sim.jobs import Job

SIM = """Trains federated models on this machine, and writes a folder with the runs and report.html.

  fastagg sim                                  FedAvg and FedAWA on scikit-learn's digits, in well under a minute
  fastagg sim --method fedawa --alpha 0.5      one method, another split
  fastagg sim --method fedawa --opt steps=5 --opt reg=euc
  fastagg sim --data fashion-mnist --clients 20 --alpha 0.1 --rounds 200 --model mlp --seed 8
  fastagg sim --config run.toml --out runs/a   options from a file; the command line overrides them
  fastagg sim --out runs/a --resume ...        continues a stopped run and gives the same curve
  torchrun --nproc-per-node 2 -m fastagg sim   distributes the clients over processes
"""
COMPARE = """Runs several methods with several seeds, skips runs that exist already, and shows all in one report.

  fastagg compare fedavg fedawa fedawa-l simprox --alpha 0.1 --seeds 3 --out runs/cmp
  fastagg compare fedavg fedawa:steps=5,reg=euc --out runs/steps      options of a method follow its name
  fastagg compare fedprox runs/cmp --out runs/more                    also shows the runs in a folder
  fastagg compare fedavg fedawa --rounds 40 --out runs/cmp            shows the first 40 rounds of longer runs
  fastagg compare fedavg fedawa uniform --seeds 3 --grid alpha=0.1,0.5 --grid epochs=1,3 --baseline uniform
"""


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"fastagg {name}", description=SIM if name == "sim" else COMPARE,
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    if name == "compare":
        parser.add_argument("methods", nargs="*", help="methods, or folders with earlier runs")
        parser.add_argument("--seeds", type=int, help="number of seeds, starting at --seed (default: 1)")
        parser.add_argument(
            "--grid", action="append", metavar="OPTION=V1,V2", help="values that an option takes in turn; repeatable"
        )
        parser.add_argument("--baseline", help="method that others are compared with (default: fedavg, or the first)")
    else:
        parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--out", type=Path, help="folder for the results (default: runs/<date>-<time>)")
    parser.add_argument("--config", type=Path, help="TOML file of options, named as below with _ for -")
    parser.add_argument("--jobs", type=int, help="number of parallel runs (default: one per free core)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    group = parser.add_argument_group("options of a run")
    for f in dataclasses.fields(Config):
        flag = "--" + f.name.replace("_", "-")
        if f.name == "options":
            group.add_argument("--opt", action="append", metavar="KEY=VALUE", help=f.metadata["help"])
        elif f.name != "method" or name == "sim":
            shown = "" if f.default is None else f" (default: {f.default})"
            shown = " (default: fedavg and fedawa)" if f.name == "method" else shown
            group.add_argument(flag, dest=f.name, metavar="X", help=f.metadata["help"].replace("%", "%%") + shown)
    return parser


def main(name: str, argv: list[str]) -> int:
    given = vars(parser_of(name).parse_args(argv))
    return exit_code(name, lambda peers: run_command(name, given, peers))


def exit_code(name: str, work: Callable[[Peers | None], bool]) -> int:
    """Does what a command is for, and says what is wrong where it cannot. work: False if it was stopped"""
    from fastagg.sim import jobs, ranks  # Ctrl-C during this is cli.main's

    signals = jobs.Signals()
    try:
        with ExitStack() as entered:
            peers = entered.enter_context(ranks.joined())
            if peers is None:  # torchrun has its own way to stop its processes
                signals = entered.enter_context(jobs.stoppable())
            complete = work(peers)
        return 0 if complete else 128 + (signals.first or signal.SIGINT)
    except KeyboardInterrupt:
        print(f"fastagg {name}: stopped", file=sys.stderr)
        return 128 + (signals.first or signal.SIGINT)
    except ModuleNotFoundError as error:
        print(f"fastagg {name}: needs {error.name}; pip install '.[sim]' in a clone of fastagg", file=sys.stderr)
        return 2
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error
        print(f"fastagg {name}: {what}", file=sys.stderr)
        return 1
    except (ValueError, TypeError) as error:
        print(f"fastagg {name}: {error}", file=sys.stderr)
        return 2


def run_command(name: str, given: dict[str, Any], peers: Peers | None) -> bool:
    """False if it was stopped"""
    from fastagg.sim import comparison, report

    if peers is None:
        todo = plan(name, given)
    else:
        with peers.together():  # nobody writes before all have looked
            todo = plan(name, given)
            peers.agree({"step": "plan"})
            todo = todo._replace(out=Path(peers.texts(str(todo.out))[0]))  # by the first one's clock
    result = comparison.compare(
        todo.runs, todo.out, progress=not given.get("quiet", False), earlier=todo.earlier, jobs=given.get("jobs"),
        peers=peers, rounds=todo.rounds, baseline=given.get("baseline"),
    )  # fmt: skip
    if peers is None or peers.rank == 0:
        if result["report"] is not None:
            table = report.markdown(result["groups"], given.get("baseline"))
            say("\n".join([table, *speed(result["groups"]), f"report: {result['report']}"]))
        if result["interrupted"]:
            again = " --resume" if name == "sim" else ""
            say(f"stopped; continue with the same command and --out {todo.out}{again}")
    return not result["interrupted"]


class Plan(NamedTuple):
    """The runs to make, where to, folders with runs made before, and how many of their rounds to show (None: all)"""

    runs: list[Job]
    out: Path
    earlier: list[Path]
    rounds: int | None


def plan(name: str, given: dict[str, Any]) -> Plan:
    from fastagg.sim import comparison
    from fastagg.sim.jobs import Job

    values = config.read_toml(given["config"]) if "config" in given else {}
    methods, seeds, grid = (values.pop(name, usual) for name, usual in (("methods", None), ("seeds", 1), ("grid", {})))
    names = {f.name for f in dataclasses.fields(Config)}
    values |= {k: parse(v) if isinstance(v, str) else v for k, v in given.items() if k in names}
    for text in given.get("opt", ()):
        values["options"] = values.get("options", {}) | key_value(text)
    methods = given.get("methods") or methods or ([values["method"]] if "method" in values else ["fedavg", "fedawa"])
    values.pop("method", None)
    seeds = given.get("seeds", seeds)
    if not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds={seeds!r}; expected an integer >= 1")
    if not isinstance(methods, list) or not all(isinstance(method, str) for method in methods):
        raise ValueError(f"methods={methods!r}; expected a list of names")
    folders = [m for m in methods if Path(m).is_dir() and not config.is_method(m)]  # ./fedavg is one, fedavg a method
    out = given.get("out") or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    runs: list[Job] = []
    for point in comparison.points(grid_of(given.get("grid") or grid)):
        for method in methods:
            for s in range(seeds if method not in folders else 0):
                options = one_run(method, values | point, parse(str(values.get("seed", 0))) + s)
                job = Job(options, comparison.place(out, options, point))
                runs += [job] if job not in runs else []  # the same method named twice is one
    check_out(name, out, given, [job.folder for job in runs])
    if "jobs" in given and given["jobs"] < 1:
        raise ValueError(f"jobs={given['jobs']}; expected an integer >= 1")
    rounds = one_run("fedavg", {"rounds": values["rounds"]}, 0).rounds if "rounds" in values else None
    return Plan(runs, out, [Path(folder) for folder in folders], rounds)


def grid_of(given: Any) -> dict[str, list[Any]]:
    """--grid alpha=0.1,0.5 --grid epochs=1,3, or a table of a TOML file"""
    if isinstance(given, list):
        for text in given:
            if "=" not in text:
                raise ValueError(f"--grid {text}: expected an option with values, as alpha=0.1,0.5")
        pairs = [text.partition("=") for text in given]
        given = {key.replace("-", "_"): [parse(value) for value in values.split(",")] for key, _, values in pairs}
    if not isinstance(given, dict) or not all(isinstance(values, list) and values for values in given.values()):
        raise ValueError(f"grid={given!r}; expected options with lists of values: alpha=0.1,0.5")
    return given


def check_out(name: str, out: Path, given: dict[str, Any], folders: list[Path]) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out names a folder")
    if given.get("resume"):
        if "out" not in given:
            raise ValueError("--resume continues the run in a folder: name it by --out")
        if not any(folder.is_dir() for folder in folders):
            raise ValueError(f"{out} has no run to resume: there is no {' or '.join(map(str, folders))}")
    elif name == "sim" and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; continue what is there by --resume, or name another folder")


def one_run(method: str, values: dict[str, Any], seed: int) -> Config:
    """The configuration of `method`, a name with options perhaps: fedawa:steps=5,reg=euc"""
    name, options = config.with_options(method)
    options = {**values.get("options", {}), **options}
    return config.from_dict(values | {"method": name, "options": options, "seed": seed})


def speed(groups: dict[str, list]) -> list[str]:
    """How each method's clients were trained, and how fast"""
    from fastagg.sim import report

    lines = []
    for row in report.table(groups):
        if row["rounds_per_second"] is not None:
            how = "all at once" if groups[row["label"]][0].summary.get("training") == "batched" else "one by one"
            lines.append(
                f"{row['label']}: {row['rounds_per_second']:.3g} rounds/s, {100 * row['aggregation_share']:.2g} % "
                f"of the time in aggregation; clients trained {how}"
            )
    return lines
