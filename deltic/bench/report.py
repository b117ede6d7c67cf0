"""Report of a load's bench: its result in a file, and in a picture.

A table for people, and one line of JSON for programs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deltic.bench.provenance import now, runs_directory
from deltic.json_types import JsonObject


def plot(path: Path, picture: Path) -> None:
    """The `draw` of a sweep's result."""
    from deltic.bench.plot import draw

    draw([path], picture)


def report(
    result: JsonObject,
    table: Table,
    out: str | None,
    draw: Callable[[Path, Path], None] | None,
    raw: str = "samples",
    note: str | None = None,
) -> None:
    """result: has the bench's name, a label and rows; all of it goes into the file, under
    runs_directory(out). draw: writes a PNG (second path) of a file; may find matplotlib missing. raw: the
    field of a row that the last line leaves out. note: stands below the table.
    """
    name, label = result["bench"], result["label"]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")
    path = runs_directory(out) / f"{name}-{slug}-{now():%H%M%S}.json"
    path.write_text(json.dumps(result) + "\n")
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    if note:
        print(note)
    picture = None
    if draw:
        try:
            draw(path, path.with_suffix(".png"))
            picture = str(path.with_suffix(".png"))
        except ModuleNotFoundError as error:
            print(f"no plot: {error.name} is missing; pip install 'deltic[bench]'", file=sys.stderr)
    rows = [{field: value for field, value in row.items() if field != raw} for row in result["rows"]]
    print(json.dumps({"bench": name, "label": label, "file": str(path), "plot": picture, "rows": rows}))
