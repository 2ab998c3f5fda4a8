"""`fastagg aggregate`: files in, a file out."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastagg._engine.checks import InputError, suggest
from fastagg._engine.terminal import key_value, say

if TYPE_CHECKING:  # torch is imported when there is work to do, not to print help
    from fastagg._engine.files.file_result import FileResult
    from fastagg._engine.files.job import Job

ABOUT = """Aggregates models in safetensors files into a new model, without loading them into memory as a whole.

  fastagg aggregate --method fedawa --global g.safetensors clients/*.safetensors -o new.safetensors --sizes sizes.json

      One round of FedAWA. The id of a client is the name of its file without the extension. sizes.json is
      {"id": samples, ..} or a list in the order of the files; JSON may also be given inline: --sizes '[600, 150]'.
      new.safetensors is written completely, or not touched at all.

  fastagg aggregate --method fedadam --opt lr=0.01 --state fedadam.state --global g.safetensors -o g.safetensors \\
      clients/*.safetensors

      One of many rounds: fedadam.state keeps what the method remembers, and the global model is replaced.

  fastagg aggregate --method fedawa --global round-3 clients/* -o round-4 --rank 16

      LoRA adapters: folders with adapter_model.safetensors and adapter_config.json. They are aggregated by their
      updates B A, and may have different ranks. docs/lora.md explains --lora.

A model is a .safetensors file, the index of a sharded model (model.safetensors.index.json), or a folder that contains
one of these. Do not change a file while it is read. Exit codes: 0 success, 1 error in the files, 2 error in the
command, 130 stopped by Ctrl-C.
"""


class UsageError(Exception):
    pass


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="fastagg aggregate", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("clients", nargs="+", metavar="CLIENT", help="client models")
    p.add_argument("--method", required=True, metavar="NAME", help="method, as listed by `fastagg methods`")
    p.add_argument("--global", dest="global_path", metavar="MODEL", help="model that the clients started from")
    p.add_argument(
        "-o", "--out", required=True, metavar="PATH",
        help=".safetensors file or folder; if the method produces one model per client or cluster, a folder for all",
    )  # fmt: skip
    p.add_argument("--opt", action="append", default=[], metavar="KEY=VALUE", help="option of the method; repeatable")
    p.add_argument(
        "--sizes", metavar="JSON",
        help='data sizes of the clients (default: equal): {"id": 600, ..}, or a list in the order of the files; inline '
        "or in a file",
    )  # fmt: skip
    p.add_argument(
        "--inputs", metavar="JSON",
        help='round inputs of the method: {"label_dist": {"id": [..], ..}}, or lists in the order of the files; inline '
        "or in a file",
    )  # fmt: skip
    p.add_argument(
        "--on-bad-client", choices=("raise", "drop"),
        help="what to do with a client whose file is damaged, has another form, or holds NaN: end with an error, or "
        "leave it out (default: raise)",
    )  # fmt: skip
    p.add_argument(
        "--lora", choices=("rank", "exact", "frozen_a", "separate"),
        help="what a new LoRA adapter is made of the weighted sum of the updates B A: its best factors of one rank "
        "(the default), the sum itself, of the sum of all ranks, the mean of B where A is frozen, or the means of A "
        "and of B",
    )  # fmt: skip
    p.add_argument(
        "--rank", type=int, metavar="R", help="rank of the new adapter (default: the global adapter's, or the largest)"
    )
    p.add_argument("--state", metavar="FILE", help="state of the method: read if it exists, written at the end")
    p.add_argument("--memory", default="1GB", metavar="SIZE", help="memory to use (default: 1GB)")
    p.add_argument("--shard-size", default="5GB", metavar="SIZE", help="split larger models into files of this size")
    p.add_argument(
        "--report", metavar="PATH",
        help="print weights, norms and cosines, and save them: folder, or .png file, next to which a .json is written",
    )  # fmt: skip
    p.add_argument("--dry-run", action="store_true", help="check the files, print what would be read, and stop")
    p.add_argument("--quiet", action="store_true", help="print only errors")
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_intermixed_args(argv)  # files before and after options
    job = None
    try:
        job = _job(args)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"fastagg aggregate: {message}", file=sys.stderr)
            return run(job, args)
    except UsageError as error:
        return _fail(error, 2)
    except InputError as error:
        return _fail(error, 1)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error, 1)
    except ModuleNotFoundError as error:
        return _fail(f"--report needs {error.name}; pip install '.[sim]' in a clone of fastagg", 2)
    except KeyboardInterrupt:
        begun = job is not None and job.begun
        return _fail(f"stopped; {'files were being replaced, look at them' if begun else 'nothing was written'}", 130)


def run(job: Job, args: argparse.Namespace) -> int:
    if args.dry_run:
        print(_plan_text(job))
        return 0
    with Bar(args.quiet) as bar:
        result = job.run(args.state, bar, args.report)
    if result.made_before:
        if not args.quiet:
            say(f"{args.state} was completed: an earlier run was stopped after it had written {args.out}")
        return 0
    if args.report:
        from fastagg._engine.files import report as file_report

        say(file_report.text(result))
    if not args.quiet:
        say(_summary(result))
    return 0


def _job(args: argparse.Namespace) -> Job:
    from fastagg._engine import registry
    from fastagg._engine.files.job import Job

    try:
        name, _, more = args.method.partition(":")
        options: dict[str, Any] = {}
        for text in [*filter(None, more.split(",")), *args.opt]:
            options |= key_value(text)
        if args.on_bad_client is not None:
            options["on_bad_client"] = args.on_bad_client
        if "layers" in options:
            raise ValueError("option 'layers': a function, which only Python can give")
        for key, value in options.items():
            if isinstance(value, int) and abs(value) >= 2**63:
                raise ValueError(f"option {key!r}: a number of {len(str(value))} digits is too large")
        names = options.get("params")
        if names is not None and not (isinstance(names, list) and all(isinstance(key, str) for key in names)):
            raise ValueError(f"option 'params': {names!r}; expected a JSON list of the parameters' names")
        server = registry.aggregator(name, **options)
        adapters = args.lora or args.rank or any(Path(path, "adapter_config.json").exists() for path in args.clients)
        if args.global_path is None and server.needs_global and not adapters:
            raise ValueError(f"{name} needs --global, the model the clients started from")
        inputs = _read_json("--inputs", args.inputs) or {}
        takes = [spec.name for spec in server.round_inputs]
        for unknown in inputs.keys() - set(takes):
            raise ValueError(f"--inputs: {name} takes no {unknown!r}{suggest(unknown, takes)}")
        job = Job(
            name, args.global_path, args.clients, args.out, sizes=_read_json("--sizes", args.sizes),
            memory=args.memory, shard_size=args.shard_size, lora=args.lora, rank=args.rank, options=options | inputs,
        )  # fmt: skip
        job.read_paths += [Path(given) for given in (args.sizes, args.inputs) if given and not _is_inline(given)]
        return job
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(error) from error


def _is_inline(given: str) -> bool:
    return given.lstrip().startswith(("{", "["))


def _read_json(option: str, given: str | None) -> Any:
    """JSON from a file, or as it stands on the command line"""
    if given is None:
        return None
    name = option if _is_inline(given) else f"{option} {given}"
    try:
        content = json.loads(given if _is_inline(given) else Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON: {error}") from error
    if not isinstance(content, dict if option == "--inputs" else dict | list):
        raise InputError(f"{name}: expected an object{' or a list' if option == '--sizes' else ''}")
    return content


def _plan_text(job: Job) -> str:
    plan = job.plan()
    read = plan["client_bytes"] * plan["passes"]
    lines = [
        f"{plan['method']} of {len(plan['clients'])} clients: {', '.join(map(str, plan['clients'][:5]))}"
        + (" .." if len(plan["clients"]) > 5 else ""),
        f"model   {plan['tensors']} tensors in {plan['layers']} layers, {_size(plan['model_bytes'])}",
        f"read    {_size(read)}: {_size(plan['client_bytes'])} of clients, {plan['passes']} x, in "
        f"{' and '.join(map(str, plan['slabs']))} piece{'s' * (plan['slabs'] != [1])}",
        f"write   {plan['models_written']} x {_size(plan['new_bytes'])} in {plan['shards']} "
        f"file{'s' * (plan['shards'] != 1)} to {plan['out']}",
    ]
    return "\n".join(lines)


def _summary(result: FileResult) -> str:
    lost = max(getattr(result, "truncation", {}).values(), default=0.0)
    lost = f"; the rank leaves out at most {lost:.2g} of a module's update" if lost else ""
    left = f"{lost}; left out: {', '.join(map(str, result.dropped))}" if result.dropped else lost
    where = ", ".join(str(path) for path in list(result.paths.values())[:3]) + (" .." if len(result.paths) > 3 else "")
    return (
        f"{result.method} of {len(result.clients) - len(result.dropped)} clients: {_size(result.bytes_read)} read in "
        f"{result.seconds:.2f} s{left}\n{where}"
    )


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError


def _fail(error: Any, code: int) -> int:
    print(f"fastagg aggregate: {' '.join(str(error).split())}", file=sys.stderr)
    return code


class Bar:
    """How far a pass is, and how fast, on a terminal: tqdm's bar, or a line each few seconds where it is missing"""

    def __init__(self, quiet: bool) -> None:
        self.shown = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self.bar: Any = None
        self.name, self.said, self.began = "", 0.0, 0.0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, name: str, done: int, total: int) -> None:
        if not self.shown:
            return
        now = time.monotonic()
        if name != self.name or (self.bar is not None and done < self.bar.n):
            self.__exit__()
            self.name, self.said, self.began = name, now, now
            self.bar = _tqdm(name, total)
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
        elif now - self.said > 5:
            self.said = now
            print(
                f"{name}: {_size(done)} of {_size(total)}, {done / 1e9 / (now - self.began):.2g} GB/s", file=sys.stderr
            )


def _tqdm(name: str, total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=name, total=total, unit="B", unit_scale=True, leave=False)
