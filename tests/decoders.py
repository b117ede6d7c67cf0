"""A decoder that does what it is told, for deltic/server/isolated.py: a program's argument is its code."""

from __future__ import annotations

import sys

DECODER = "tests.decoders"
"""The module, as a program names it."""


def prepare() -> None:
    """Imports nothing."""


def main() -> int:
    """Runs the code. Returns what it leaves in `status`."""
    names: dict[str, object] = {}
    exec(sys.argv[1], names)
    return int(str(names.get("status", 0)))
