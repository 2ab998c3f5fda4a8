"""torch's threads do not survive a fork: an operation that would use them hangs in the child.

The native kernels have threads of their own there. The little arithmetic that is left to torch runs on one thread.
"""

from __future__ import annotations

import os
from contextlib import ContextDecorator

import torch

_parent = os.getpid()


class one_thread(ContextDecorator):
    """In a process that was forked after fastagg was imported, torch uses one thread in here."""

    def __enter__(self) -> None:
        self.former = None
        if os.getpid() != _parent:
            self.former = torch.get_num_threads()
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self.former is not None:
            torch.set_num_threads(self.former)

    def _recreate_cm(self) -> one_thread:
        return one_thread()  # a decorated function may be called by several threads at once
