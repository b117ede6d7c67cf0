"""`deltic version`, and `deltic completion SHELL`: a script that completes the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from deltic import __version__

FILES = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "MODEL": shtab.DIRECTORY}
"""Completions by the name of an argument; a MODEL may be a directory."""


def version() -> str:
    """Returns the line that `deltic version` prints."""
    return f"deltic {__version__}"


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Returns the script for `eval` by the shell: bash, zsh or fish."""
    for action in _actions(parser):
        name = action.metavar if isinstance(action.metavar, str) else ""
        if complete := FILES.get(name, shtab.FILE if name.endswith(".jsonl") else None):
            action.complete = complete  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _actions(child)
