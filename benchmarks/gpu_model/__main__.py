"""What the CUDA kernels should take on an A100 and an H100, on paper: no GPU is needed, and nothing here is measured.

python -m benchmarks.gpu_model            # the tables of docs/gpu.md, in markdown
python -m benchmarks.gpu_model --write    # puts them into docs/gpu.md
python -m benchmarks.gpu_model --nvcc     # with register counts read from this machine's nvcc
python -m benchmarks.gpu_model --all      # every resource's time of every job
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.gpu_model import nvcc, page, tables


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_model", description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", action="store_true", help="read register counts from nvcc (half a minute)")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/gpu.md")
    parser.add_argument("--all", action="store_true", help="print the time of every resource instead")
    args = parser.parse_args()
    if args.nvcc:
        nvcc.update()
    if args.write:
        page.write()
    else:
        print(tables.every_resource() if args.all else page.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
