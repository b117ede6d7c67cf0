"""What tests wait for: conditions, with a bound that a busy machine keeps, too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

MOST_S = 30.0


def wait_for(condition: Callable[[], Any], seconds: float = MOST_S) -> Any:
    """What is true in the end."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
    return value


async def until(condition: Callable[[], Any], seconds: float = MOST_S) -> None:
    """The same in an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.002)
