"""The runs that are kept, which of them count, and how a table writes their figures.

A run counts when it was not cut short and its tree is not known to have had uncommitted changes; where it
was a copy without history, the table says that no commit was recorded. Of each kind the newest counts, with
those that were taken at the same commit in the same directory as further rounds of it; where a part of one of
them failed, none of them counts, and the newest before them does. A cell is a median with the least and the
most of its rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

GPUS = ("h200", "h100")
"""One is in the names of directories whose runs are of a GPU."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A result file that is kept."""

    path: Path
    data: Row

    @property
    def made_by(self) -> Row:
        """Version, commit and whether the tree had changes; of a load generator its own."""
        found: Row = self.data.get("code") or self.data.get("client") or {}
        return found

    @property
    def is_gpu(self) -> bool:
        return any(name in self.path.parent.name for name in GPUS)

    @property
    def has_failed(self) -> bool:
        """Whether a part of it, or a request, came to no good end."""
        rows = self.data.get("rows")
        return bool(self.data.get("failed")) or any(
            row.get("errors") for row in (rows if isinstance(rows, list) else ()) if isinstance(row, dict)
        )

    @property
    def key(self) -> tuple[str, str | None]:
        return str(self.path.parent), self.made_by.get("commit")


class Runs:
    """All result files below a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def _of_clean_trees(self) -> list[Run]:
        """Those that say when they were made and were not cut, oldest first."""
        files = sorted(self.directory.glob("*/*.json"))
        found = [Run(path, json.loads(path.read_text())) for path in files]
        whole = [run for run in found if run.data.get("date") and not run.data.get("incomplete")]
        kept = [run for run in whole if not run.made_by.get("modified")]
        return sorted(kept, key=lambda run: str(run.data["date"]))

    @property
    def clean(self) -> list[Run]:
        """Those of trees without changes in which nothing failed, oldest first."""
        return [run for run in self._of_clean_trees if not run.has_failed]

    def newest(self, name: str, gpu: bool = False, where: Callable[[Row], bool] = bool) -> list[Run]:
        """The newest whose file is called so (a pattern), and the others of its directory and commit; oldest
        first. where: of those whose data is so.
        """
        of_kind = [run for run in self._of_clean_trees if run.path.match(name) and run.is_gpu == gpu]
        failed = {run.key for run in of_kind if run.has_failed}
        found = [run for run in of_kind if run.key not in failed and where(run.data)]
        return [run for run in found if run.key == found[-1].key]

    def newest_of_each(
        self, name: str, what: Callable[[Row], object], gpu: bool = False, where: Callable[[Row], bool] = bool
    ) -> list[Run]:
        """The same for each of what runs differ in, in the order of its text."""
        kinds = {what(run.data) for run in self.clean if run.path.match(name) and run.is_gpu == gpu and where(run.data)}
        of_kind = [
            partial(lambda kind, data: where(data) and what(data) == kind, kind) for kind in sorted(kinds, key=str)
        ]
        return [run for is_so in of_kind for run in self.newest(name, gpu, is_so)]


def shown(value: float) -> str:
    """Three figures."""
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3}f}"


def ranged(values: Iterable[float], middle: float | None = None) -> str:
    """Median, or the middle that is given, with least and most."""
    found = sorted(values)
    told = shown(median(found) if middle is None else middle)
    return f"{told} ({shown(found[0])} .. {shown(found[-1])})" if len(found) > 1 else told


def spread(found: Row) -> str:
    """The same of a row with median, min and max."""
    return ranged((found["min"], found["max"]), found["median"])


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def machine(data: Row) -> str:
    """What it ran on, in words."""
    found = data["machine"]
    cpu = found["cpu"] + (f" (family/model {found['cpu_id']})" if found.get("cpu_id") else "")
    return (f"{data['device']}, " if "device" in data else "") + f"{found['cores']} cores of an {cpu}"


def source(runs: Sequence[Run], *commands: str) -> str:
    """Where the figures above come from: directory, date, commit, machine, and what takes them again."""
    parts = []
    for directory, commit in dict.fromkeys(run.key for run in runs):
        of = [run for run in runs if run.key == (directory, commit)]
        made = f"commit {commit}" if commit else "commit not recorded"
        where = dict.fromkeys(machine(run.data) for run in of if "machine" in run.data)
        parts.append(f"[{Path(directory).name}](RUNS/{Path(directory).name}), {made}, {' and '.join(where)}")
    again = " and ".join(f"`{command}`" for command in commands)
    return f"{'Run' if len(runs) == 1 else 'Runs'}: {'; '.join(parts)}; by {again}."


def missing(*commands: str) -> str:
    return f"No run of a clean tree is kept; {' and '.join(f'`{command}`' for command in commands)} takes one."
