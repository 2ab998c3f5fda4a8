"""Rounds of models in files, against `cat` of the same files: is the disk the limit, and how much memory does it take?

    python -m benchmarks.scale_files --clients 20 --gigabytes 1 --dtype bf16

Makes the files in a temporary folder (--folder says where), compares a small round with the same in memory, and then
runs `fastagg aggregate` and `cat` in turn. Warm: the files were just read. Cold: the kernel was told to forget them.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

import fastagg
from fastagg._engine import saved

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
METHODS = {"fedavg": (), "fedawa, released": ("--opt", "variant=released"), "fedawa, paper": ()}
BLOCK = 1 << 22  # random elements, drawn once and written again and again, each time from another place


def shapes(size: int, item: int) -> dict[str, torch.Size]:
    """Matrices and biases of a made-up transformer that takes about so many bytes"""
    width = 4096 if size >= 1 << 27 else 256
    layers = max(1, size // (width * (width + 1) * item))
    form = {}
    for i in range(layers):
        form[f"blocks.{i}.weight"] = torch.Size([width, width])
        form[f"blocks.{i}.bias"] = torch.Size([width])
    return form


def write_model(path: Path, form: dict[str, torch.Size], dtype: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    block = (0.02 * torch.randn(BLOCK, generator=gen)).to(dtype)
    parts = [(name, dtype, shape) for name, shape in form.items()]
    with open(path, "wb") as file:
        file.write(saved.header(parts, {"format": "pt"}))
        at = 0
        for _, _, shape in parts:
            left = shape.numel()
            while left:
                piece = block[at : at + left]
                file.write(piece.view(torch.uint8).numpy())
                left, at = left - len(piece), (at + len(piece)) % BLOCK
        file.flush()
        os.fsync(file.fileno())


def make_round(folder: Path, clients: int, size: int, dtype: torch.dtype) -> list[Path]:
    """[global, client 0, ..]"""
    form = shapes(size, dtype.itemsize)
    paths = [folder / "global.safetensors", *(folder / f"client-{k:03}.safetensors" for k in range(clients))]
    for seed, path in enumerate(paths):
        write_model(path, form, dtype, seed)
    return paths


def command(method: str, paths: list[Path], memory: str) -> list[str]:
    name = method.partition(",")[0]
    return [
        sys.executable, "-m", "fastagg", "aggregate", "--method", name, *METHODS[method], "--global", str(paths[0]),
        *map(str, paths[1:]), "-o", str(paths[0].parent / "new.safetensors"), "--memory", memory,
    ]  # fmt: skip


def check(folder: Path, dtype: torch.dtype, clients: int) -> None:
    """A small round gives the same bits as in memory; raises where it does not"""
    paths = make_round(folder, clients, 4 << 20, dtype)
    g, *sds = [load_file(path) for path in paths]
    for method, options in METHODS.items():
        subprocess.run(command(method, paths, "20MB"), check=True, stdout=subprocess.DEVNULL)
        wanted = fastagg.aggregator(method.partition(",")[0], **dict(o.split("=") for o in options[1:]))
        ids = [path.stem for path in paths[1:]]
        expected, found = wanted.aggregate(g, sds, client_ids=ids), load_file(folder / "new.safetensors")
        for key in expected:
            if not torch.equal(expected[key], found[key]):
                raise SystemExit(f"{method}: {key} differs from the same round in memory")


def measured(arguments: list[str]) -> tuple[float, float, float, float]:
    """Seconds of the command, seconds of the round itself, peak anonymous and mapped memory in bytes"""
    began = time.perf_counter()
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    anonymous = mapped = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        found = {name: int(kb) << 10 for name, kb in re.findall(r"(RssAnon|RssFile):\s+(\d+)", status)}
        anonymous, mapped = max(anonymous, found.get("RssAnon", 0)), max(mapped, found.get("RssFile", 0))
        time.sleep(0.005)
    said = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return time.perf_counter() - began, float(re.search(r"in ([0-9.]+) s", said)[1]), anonymous, mapped


def cat(paths: list[Path]) -> float:
    began = time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *map(str, paths)], stdout=nowhere, check=True)
    return time.perf_counter() - began


def forget(paths: list[Path]) -> None:
    """The next read comes from the disk"""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each model")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files are made (default: the system's temporary folder)")
    args = parser.parse_args(argv)
    dtype = DTYPES[args.dtype]
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        folder = Path(place)
        check(folder, dtype, args.clients)
        paths = make_round(folder, args.clients, int(args.gigabytes * 1e9), dtype)
        size = sum(path.stat().st_size for path in paths[1:])
        print(f"{args.clients} clients x {size / args.clients / 1e9:.2f} GB, {args.dtype}; --memory {args.memory}; "
              f"{torch.get_num_threads()} threads; the bits of a small round are those in memory\n")  # fmt: skip
        print("| method | files | cat | round | of cat | read | command | anonymous | mapped |")
        print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
        for state in ("warm", "cold"):
            prepare = forget if state == "cold" else cat
            for method in METHODS:
                rows = []
                for _ in range(args.repeats):
                    prepare(paths)
                    plain = cat(paths)
                    prepare(paths)
                    rows.append((plain, *measured(command(method, paths, args.memory))))
                plain, whole, inner, anonymous, mapped = (
                    statistics.median(column) for column in zip(*rows, strict=True)
                )
                reads = 2 if method == "fedawa, paper" else 1
                print(f"| {method} | {state} | {plain:.2f} s | {inner:.2f} s | {inner / plain:.2f} | "
                      f"{reads * size / 1e9 / inner:.2f} GB/s | {whole:.2f} s | {anonymous / 1e6:.0f} MB | "
                      f"{mapped / 1e6:.0f} MB |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
