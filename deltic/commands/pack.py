"""`deltic pack`: a model directory whose weights are laid out as the CPU's kernels read them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from deltic.config import EngineConfig
from deltic.models.checkpoint import text_directory
from deltic.models.gguf import is_gguf
from deltic.models.packed import pack_model
from deltic.text import Tokenizer


def pack(arguments: argparse.Namespace, config: EngineConfig) -> str:
    """Writes the directory --out; what it came to, in a line.

    Raises ConfigError and a loader's other ValueErrors.
    """
    target = Path(arguments.out)
    if is_gguf(source := text_directory(config)):
        Tokenizer.load(source)  # checks that tokens get their ids
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("packing", total=1.0)
        formats, notices = pack_model(
            config, target, lambda stage, done: progress.update(bar, description=stage, completed=done)
        )
    for notice in notices:
        print(notice, file=sys.stderr)
    n_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return f"{target}: {n_bytes / 1e6:,.0f} MB, {formats}; deltic serve {target}"
