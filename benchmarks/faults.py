"""Runs of the simulator that are killed (SIGKILL) at random moments and resumed, next to one that is left alone.

python -m benchmarks.faults --kills 20

Every disturbed run must end with the bits of the undisturbed one: models, memory of the server, metrics and all else
but the times; and no file may be left over. Exits with 1 where one does not.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from fastagg.sim.report import read_metrics

METHODS = ("fedadp", "fedadam")  # which remember a number per client, and tensors
# With 60 rounds, half of the time is spent in them; the other half is imports and the report
OPTIONS = ["--participation", "0.75", "--dropout", "0.1", "--alpha", "0.5", "--quiet"]
LAST = "after the last round"
TIMES = {"seconds", "rounds_per_second", "aggregation_share"}  # what may differ between runs that are the same


@dataclass(frozen=True)
class Kill:
    run: str
    after: float  # seconds since the process was started
    where: str


def command(method: str, out: Path, rounds: int) -> list[str]:
    """Continues the run if there is one"""
    start = [sys.executable, "-m", "fastagg", "sim", "--method", method, "--rounds", str(rounds), *OPTIONS]
    return [*start, "--out", str(out), *(["--resume"] if run_folder(out, method).exists() else [])]


def run_folder(out: Path, method: str) -> Path:
    return out / method / "seed-0"


def undisturbed(method: str, out: Path, rounds: int) -> float:
    """Makes the run; the seconds it took, imports and all"""
    start = time.perf_counter()
    subprocess.run(command(method, out, rounds), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


@dataclass
class Moments:
    """When to kill: parts of the time that a whole run takes, which is measured again whenever one is left alone, for
    the machine may have become faster"""

    parts: list[float]
    seconds: float

    @property
    def next(self) -> float:
        return self.parts[-1] * self.seconds


def disturbed(method: str, out: Path, rounds: int, moments: Moments) -> list[Kill]:
    """One run to its end, killed at the moments, which are used up. A process may end before its moment; a run whose
    rounds are all made is killed once more at most, or most kills would meet no round."""
    kills: list[Kill] = []
    while True:
        spared = not moments.parts or (kills and kills[-1].where == LAST)
        start = time.perf_counter()
        process = subprocess.Popen(command(method, out, rounds), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _, said = process.communicate(timeout=None if spared else moments.next)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills.append(Kill(out.name, moments.next, where(run_folder(out, method), rounds)))
            moments.parts.pop()
            continue
        if process.returncode:
            raise RuntimeError(f"{out.name}: resuming failed after {len(kills)} kills:\n{said.decode()}")
        if not kills:
            moments.seconds = time.perf_counter() - start
        return kills


def where(folder: Path, rounds: int) -> str:
    """How far a run came before it was killed"""
    if not folder.exists():
        return "before its first file"
    done = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    if not done:
        return "before its first record"
    last = done[-1]["round"]
    return LAST if last == rounds else f"after round {last} of {rounds}"


def differences(a: Path, b: Path) -> list[str]:
    """What is not the same in two folders, which hold a run and its report; times may differ"""
    # a process that is killed leaves its lock, which the next one removes, but for a run that was finished
    files = [[path for path in x.rglob("*") if path.is_file() and path.name != "run.lock"] for x in (a, b)]
    names = [{path.relative_to(x).as_posix() for path in some} for x, some in zip((a, b), files, strict=True)]
    found = [f"{name}: only in {(a if name in names[0] else b).name}" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        left, right = a / name, b / name
        if name.endswith(".safetensors"):
            found += [f"{name}: {what}" for what in tensor_differences(left, right)]
        elif name.endswith(".jsonl"):
            pair = [[without_times(record) for record in read_metrics(x)] for x in (left, right)]
            found += [f"{name}: {len(pair[0])} and {len(pair[1])} records"] if len(pair[0]) != len(pair[1]) else []
            rounds = [x["round"] for x, y in zip(*pair, strict=False) if x != y]
            found += [f"{name}: rounds {rounds} differ"] if rounds else []
        elif name.endswith(".json"):
            x, y = (without_times(json.loads(path.read_text())) for path in (left, right))
            found += [f"{name}: {key} differs" for key in sorted(x.keys() | y.keys()) if x.get(key) != y.get(key)]
    return found


def without_times(record: dict) -> dict:
    """As text: NaN, which a loss may be, is not the same as itself"""
    return {key: value if key == "round" else json.dumps(value) for key, value in record.items() if key not in TIMES}


def tensor_differences(a: Path, b: Path) -> list[str]:
    with safe_open(a, framework="pt") as left, safe_open(b, framework="pt") as right:
        plain = [file.metadata().get("fastagg") for file in (left, right)]  # and not the checksum, which is of all
        if plain[0] != plain[1] or set(left.keys()) != set(right.keys()):
            return ["another structure, or other plain values"]
        pairs = ((name, left.get_tensor(name), right.get_tensor(name)) for name in left.keys())  # noqa: SIM118
        return [f"tensor {name}" for name, x, y in pairs if not same_bits(x, y)]


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (x, y)))


def spread(kills: int, rng: random.Random) -> list[float]:
    """Random numbers all over 0 to 1: one in each of so many equal parts, shuffled"""
    parts = [(i + rng.random()) / kills for i in range(kills)]
    rng.shuffle(parts)
    return parts


def fault_run(kills: int, seed: int, rounds: int, methods: list[str], work: Path) -> int:
    whole = {method: work / f"{method}-undisturbed" for method in methods}
    seconds = {method: undisturbed(method, out, rounds) for method, out in whole.items()}
    moments = Moments(spread(kills, random.Random(seed)), min(seconds.values()))
    done: list[Kill] = []
    results: dict[str, list[str]] = {}
    while moments.parts:
        method = methods[len(results) % len(methods)]
        out = work / f"{method}-{len(results) + 1}"
        done += disturbed(method, out, rounds, moments)
        results[out.name] = differences(whole[method], out)
        print(f"{len(done)} of {kills} kills, {out.name} ended", file=sys.stderr)
    print("| kill | run | seconds after start | how far the run was |\n|---:|---|---:|---|")
    for number, kill in enumerate(done, 1):
        print(f"| {number} | {kill.run} | {kill.after:.2f} | {kill.where} |")
    print("\n| run | kills | compared with the undisturbed run |\n|---|---:|---|")
    for name, found in results.items():
        print(f"| {name} | {sum(kill.run == name for kill in done)} | {'; '.join(found) or 'the same bits'} |")
    took = ", ".join(f"{method} {s:.1f}" for method, s in seconds.items())
    bad = sum(bool(found) for found in results.values())
    inside = sum(kill.where.startswith("after round") for kill in done)
    print(f"\n{len(done)} kills, {inside} of them between the first round and the last. {len(results)} runs, of which "
          f"{bad} differ. Seconds of an undisturbed run: {took}")  # fmt: skip
    return 1 if bad else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as work:
        try:
            return fault_run(args.kills, args.seed, args.rounds, args.methods, Path(work))
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
