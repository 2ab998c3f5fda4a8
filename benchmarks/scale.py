"""Rounds larger than memory, and rounds over several processes: the measurements of docs/scale.md.

python -m benchmarks.scale files --clients 20 --gigabytes 1   # `fastagg aggregate` against cat; 22 GB of disk
python -m benchmarks.scale processes --million 10             # 1, 2 and 4 ranks: time, and bytes on the wire
"""

from __future__ import annotations

import sys

from benchmarks import scale_files, scale_processes

PARTS = {"files": scale_files.main, "processes": scale_processes.main}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in PARTS:
        print(__doc__, file=sys.stderr)
        return 2
    return PARTS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
