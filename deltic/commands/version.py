"""`deltic version`."""

from __future__ import annotations

from deltic import __version__


def version() -> str:
    """The line that it prints."""
    return f"deltic {__version__}"
