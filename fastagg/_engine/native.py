"""The native modules, which an installation may lack: why one is not there."""

from __future__ import annotations

import importlib.util

NOT_BUILT = {
    "_cpu": "fastagg was installed without its native code (docs/packaging.md says what that needs)",
    "_cuda": "fastagg was installed without its CUDA kernels (docs/packaging.md says how to build them)",
}


def why_missing(name: str, error: ImportError) -> str:
    """In a sentence; error is what importing it said"""
    if importlib.util.find_spec(f"fastagg.{name}") is None:
        return NOT_BUILT[name]
    return f"fastagg.{name} does not load: {error}"
