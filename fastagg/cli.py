"""The `fastagg` command: argument parsing and printing only. Nothing here imports torch before there is work to do."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from fastagg._engine.terminal import give_up_printing


def main(argv: list[str] | None = None) -> int:
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # `fastagg methods | head`
        give_up_printing()
        return 1
    except KeyboardInterrupt:  # before a command had begun
        return 130


def _run(argv: list[str]) -> int:
    if argv[:1] in (["sim"], ["compare"]):  # what they need is loaded for them only
        from fastagg.sim.command import main as simulator

        return simulator(argv[0], argv[1:])
    if argv[:1] == ["reproduce"]:
        from fastagg.sim.reproduce import main as reproduce

        return reproduce(argv[1:])
    if argv[:1] == ["aggregate"]:
        from fastagg._engine.files.command import main as aggregate

        return aggregate(argv[1:])
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    return _methods(args.names, args.json) if args.command == "methods" else _info(args.json)


def _parser() -> argparse.ArgumentParser:
    from fastagg import __version__

    parser = argparse.ArgumentParser(
        prog="fastagg", description="Fast aggregation of federated-learning client models."
    )
    parser.add_argument("--version", action="version", version=f"fastagg {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    listed = commands.add_parser(
        "methods",
        help="list the aggregation methods, their options and papers",
        description="Lists the aggregation methods with their options, defaults and papers. With names, explains "
        "these methods and all of their options.",
    )
    listed.add_argument("names", nargs="*", metavar="NAME", help="method to explain")
    about = commands.add_parser(
        "info",
        help="show version, SIMD level, threads and backends",
        description="Prints the version, the SIMD level in use (FASTAGG_SIMD=baseline, or another, lowers it), the "
        "number of threads (torch.set_num_threads or OMP_NUM_THREADS), which backends are available and why others are "
        "not, and which backend serves the tensors on each device (choose another with fastagg.set_backend).",
    )
    commands.add_parser(
        "aggregate", help="aggregate models in safetensors files: fastagg aggregate --help", add_help=False
    )
    commands.add_parser("sim", help="train federated models on this machine: fastagg sim --help", add_help=False)
    commands.add_parser(
        "compare", help="compare methods and seeds in one report: fastagg compare --help", add_help=False
    )
    commands.add_parser(
        "reproduce", help="run a paper's experiments, with its numbers beside: fastagg reproduce --help", add_help=False
    )
    for command in (listed, about):
        command.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _methods(names: list[str], as_json: bool) -> int:
    from fastagg._engine import registry
    from fastagg._engine.checks import suggest

    every = {method.name: method for method in registry.list_methods()}
    for name in names:
        if name not in every:
            print(f"fastagg methods: no method {name!r}{suggest(name, every)}", file=sys.stderr)
            return 2
    chosen = [every[name] for name in names] or list(every.values())
    if as_json:
        facts = [dataclasses.asdict(method) | {"help": method.help} for method in chosen]
        json.dump(facts, sys.stdout, indent=2, default=str)
        print()
        return 0
    print("\n\n".join(method.text() if names else method.summary() for method in chosen))
    if not names:
        print(f"\nAll methods take {', '.join(registry.SHARED)} as well. `fastagg methods NAME` explains one.")
    return 0


def _info(as_json: bool) -> int:
    import warnings

    from fastagg._engine.info import info

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is missing stands in the facts
        facts = info()
    if as_json:
        json.dump(facts, sys.stdout, indent=2)
        print()
        return 0
    simd = facts.pop("simd_best")
    if not facts["simd"].startswith(simd):
        facts["simd"] += f" (this CPU has {simd}; FASTAGG_SIMD lowers it)"
    for name, value in facts.items():
        if isinstance(value, dict):
            print(f"{name.replace('_', ' ')}:")
            for key, text in value.items():
                print(f"  {key:<12} {text}")
        else:
            print(f"{name.replace('_', ' '):<14} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
