"""Flags of benches that those of `deltic` have, too."""

from __future__ import annotations

import argparse

from deltic.commands.flags import add_flags, add_table
from deltic.config import MEASURED, EngineConfig


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the model's name."""
    add_table(parser, "model")


def add_some(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds flags of these settings of an engine."""
    add_flags(parser, EngineConfig, [name for name in EngineConfig.__dataclass_fields__ if name not in names])


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds flags of all of them but the model's name."""
    add_flags(parser, EngineConfig, ["model"])


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Adds the number of layers of a dummy."""
    parser.add_argument("--layers", type=int, metavar="N", help="of --dummy: the first N layers alone (default: all)")


def add_gpu_model(parser: argparse.ArgumentParser, *more: str) -> None:
    """Adds what says which model is measured on a GPU, with how many sequences, and where the result goes.
    more: further settings of an engine.
    """
    add_table(parser, "gpu model")
    add_some(parser, *MEASURED, *more)
