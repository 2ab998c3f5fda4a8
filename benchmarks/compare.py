"""Is the working tree slower than another commit? They take turns, job by job, so a noisy machine hits both alike.

python -m benchmarks.compare --base HEAD~1            # or: make bench-compare BASE=HEAD~1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parent.parent
SMALL, SMALL_RUNS = "resnet20", 4  # runs per round: short jobs are noisier, and cost little
PAUSE = 0.005  # seconds; after a job PyTorch's threads spin for a while, and would take a core from the other version
STYLES = {"slower": "bold red", "faster": "bold green", "same": "dim"}
EPILOG = """\
The commit is built aside. Then every job runs with both versions, one right after the other, round after round. What
is judged is the ratio of such a pair, now / base: its median over the rounds, with a 95 % bootstrap interval.
  slower   the interval lies above 1 and the ratio above the threshold, twice: what seems slower is measured again
  faster   the interval lies below 1 and the ratio below 1 / threshold
  same     anything else: no difference, a small one, or too much noise to tell (try more rounds)
Uncommitted changes count: --base HEAD tells what they cost. After a change of native code build first, as
`make bench-compare` does.
Exit status: 0 nothing is slower; 1 something is; 2 no answer (no such commit, it does not build, wrong usage).
"""
Times = dict[str, tuple[list[float], list[float]]]  # job -> seconds of base, seconds of now; in pairs


class Failure(Exception):
    """No answer, for a reason the user should read"""


@dataclass
class Comparison:
    base: float  # median seconds
    now: float
    ratio: float  # now / base
    low: float
    high: float
    verdict: str


def compare(base: Sequence[float], now: Sequence[float], threshold: float = 1.05) -> Comparison:
    """Judges times taken in pairs: a slow moment of the machine hits both of a pair and leaves their ratio alone."""
    logs = np.log(np.asarray(now) / np.asarray(base))
    picks = np.random.default_rng(0).integers(len(logs), size=(2000, len(logs)))
    low, high = np.exp(np.percentile(np.median(logs[picks], axis=1), (2.5, 97.5))).tolist()
    ratio = float(np.exp(np.median(logs)))
    slower, faster = low > 1 and ratio > threshold, high < 1 and ratio < 1 / threshold
    verdict = "slower" if slower else "faster" if faster else "same"
    return Comparison(float(np.median(base)), float(np.median(now)), ratio, low, high, verdict)


class Worker:
    """A process that runs jobs with one version"""

    def __init__(self, version: str, package: Path, models: list[str]) -> None:
        self.version, script, pipe = version, Path(__file__).with_name("compare_worker.py"), subprocess.PIPE
        command = [sys.executable, str(script), str(package), *models]  # in a session of its own: Ctrl-C is for us
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)

    def answer(self) -> dict:
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise Failure(f"The process of {self.version} ended with status {self.process.wait()}; see above.")

    def run(self, job: str) -> float:
        time.sleep(PAUSE)
        print(json.dumps({"run": job}), file=self.process.stdin, flush=True)
        return self.answer()["seconds"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(workers: list[Worker], jobs: list[str], rounds: int, bar: Progress, what: str) -> Times:
    times: Times = {job: ([], []) for job in jobs}
    runs = [(n, job, i) for n, job in enumerate(jobs) for i in range(SMALL_RUNS if job.startswith(SMALL) else 1)]
    order = random.Random(0)
    task = bar.add_task(what, total=rounds)
    for r in range(rounds):
        bar.refresh()
        for n, job, i in order.sample(runs, len(runs)):
            first = (r + n + i) % 2  # over the rounds each version goes first equally often
            for which in (first, 1 - first):
                times[job][which].append(workers[which].run(job))
        bar.advance(task)
    return times


def git(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True)


def commit_of(name: str) -> str:
    if found := git("rev-parse", "--verify", "--quiet", "--short", f"{name}^{{commit}}").stdout.strip():
        return found
    raise Failure(f"There is no commit {name!r} here. Is it spelt right, and fetched?")


def build(commit: str, scratch: Path) -> Path:
    """The commit's package, installed in a directory of its own"""
    tree, package = scratch / "tree", scratch / "package"
    try:
        if (added := git("worktree", "add", "--detach", str(tree), commit)).returncode:
            raise Failure(f"git worktree add: {added.stderr.strip()}")
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--target"]
        cpu_only = {**os.environ, "FASTAGG_CUDA": "0"}
        built = subprocess.run([*pip, str(package), str(tree)], capture_output=True, text=True, env=cpu_only)
    finally:
        shutil.rmtree(tree, ignore_errors=True)
        git("worktree", "prune")
    if built.returncode:
        end = "\n".join((built.stdout + built.stderr).splitlines()[-40:])
        raise Failure(f"{end}\n\n{commit} does not build; above is the end of pip's output.")
    return package


def answer(args: argparse.Namespace, console: Console) -> int:
    base, now = commit_of(args.base), f"working tree ({commit_of('HEAD')})"
    if git("status", "--porcelain", "--", "csrc", "fastagg").stdout:
        now = "working tree (with uncommitted changes)"
    models = [SMALL] if args.quick else ["resnet18", SMALL]
    with ExitStack() as stack:
        scratch = tempfile.TemporaryDirectory(prefix="fastagg-compare-", ignore_cleanup_errors=True)
        with console.status(f"Building {base}: about a minute"):
            package = build(base, Path(stack.enter_context(scratch)))
        with console.status("Making client models"):
            workers = [Worker(*version, models) for version in ((base, package), (now, ROOT))]
            for worker in workers:
                stack.callback(worker.close)
            hello = [worker.answer() for worker in workers]
        if hello[1]["missing"] or not hello[0]["jobs"]:
            raise Failure(f"Jobs that cannot run: {hello[1]['missing'] or hello[0]['missing']}")
        bar = Progress(console=console, auto_refresh=False, transient=True)  # drawn between rounds: it takes a core
        stack.enter_context(bar)
        jobs, results = list(hello[0]["jobs"]), {}
        for what in ("Measuring", "Measuring again what seems slower"):  # of many jobs, one may seem so by chance
            times = measure(workers, jobs, args.rounds, bar, what) if jobs else {}
            results |= {job: compare(*pair, args.threshold) for job, pair in times.items()}
            jobs = [job for job in jobs if results[job].verdict == "slower"]
    report(console, results, hello, base, now)
    return int(bool(jobs))


def report(console: Console, results: dict[str, Comparison], hello: list[dict], base: str, now: str) -> None:
    columns = [Column(name, justify="right") for name in ("base", "now", "now / base", "95 % interval", "verdict")]
    table = Table("job", *columns, title=f"\n{now} against {base}", title_style="bold", title_justify="left")
    for job, r in results.items():
        times = f"{r.base * 1e3:.2f} ms", f"{r.now * 1e3:.2f} ms", f"{r.ratio:.3f}", f"{r.low:.3f} to {r.high:.3f}"
        table.add_row(job, *times, f"[{STYLES[r.verdict]}]{r.verdict}[/]")
    console.print(table)
    for job, reason in hello[0]["missing"].items():
        console.print(f"Left out: {job}, which {base} cannot run ({reason})", markup=False)
    unequal = [job for job in results if hello[0]["jobs"][job] != hello[1]["jobs"][job]]
    console.print("Results are equal bit for bit" + (f", but for: {', '.join(unequal)}." if unequal else "."))
    count = Counter(r.verdict for r in results.values())
    slower = ", ".join(f"{job} ({r.ratio:.2f})" for job, r in results.items() if r.verdict == "slower")
    first = f"[bold red]Slower than {base}: {slower}[/]" if slower else f"[bold green]Nothing is slower than {base}[/]"
    console.print(f"{first}; {count['faster']} faster, {count['same']} the same.")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__.splitlines()[0], epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--base", required=True, metavar="COMMIT", help="what to compare with: a hash, tag or branch")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="default 40")
    parser.add_argument("--quick", action="store_true", help=f"{SMALL} only")
    parser.add_argument("--threshold", type=float, default=1.05, help="the least ratio that counts (default 1.05)")
    args = parser.parse_args()
    if args.rounds < 6 or args.threshold < 1:
        parser.error("--rounds must be at least 6, --threshold at least 1")
    console = Console(width=None if sys.stdout.isatty() else 110)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up then too
    try:
        return answer(args, console)
    except (Failure, KeyboardInterrupt) as end:
        console.print(str(end) or "Interrupted.", style="red", markup=False, highlight=False)
        return 2 if isinstance(end, Failure) else 130


if __name__ == "__main__":
    sys.exit(main())
