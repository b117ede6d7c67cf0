"""Grids, of which a run that leaves the long tests out has a few cases (tests/areas.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def grid(values: Iterable[Any], kept: Collection[Any], mark: pytest.MarkDecorator) -> list[Any]:
    """Parameters: those that are not in `kept` have the mark.

    Which the caller writes out, as `pytest.mark.long`: by that word a file of tests is one of its area.
    """
    return [value if value in kept else pytest.param(*_tuple(value), marks=mark) for value in values]


def by_turns(
    some: Iterable[Any], others: Iterable[Any], mark: pytest.MarkDecorator, whole: Collection[Any] = ()
) -> list[Any]:
    """All pairs. Each of `others` is with one of `some` by turns, if it is in `whole` with all; the rest have the mark."""
    firsts = list(some)
    return [
        pytest.param(one, other, marks=() if other in whole or i % len(firsts) == j else mark)
        for i, other in enumerate(others)
        for j, one in enumerate(firsts)
    ]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
