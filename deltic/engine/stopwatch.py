"""How long the stages of a start took."""

from __future__ import annotations

import time
from collections.abc import Callable


def stopwatch() -> tuple[Callable[[str], None], dict[str, float]]:
    """For the stages of a start: a function that ends one, by its name, and the seconds that each took."""
    begun, spent = time.perf_counter(), dict[str, float]()

    def lap(stage: str) -> None:
        nonlocal begun
        now = time.perf_counter()
        spent[stage], begun = round(now - begun, 3), now

    return lap, spent
