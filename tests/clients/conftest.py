"""Client programs that nobody here wrote, against `deltic serve`. They come with `pip install '.[clients]'`; where a package is missing
its tests are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.served import Served, served
from tests.tiny_speech import tiny_speech

__all__ = ["served"]

# Before the packages are imported: without these they ask their makers' servers for prices, versions and datasets.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")


@pytest.fixture(scope="module")
def speaking() -> Iterator[Served]:
    """A tiny speech model, which has OpenAI's default voices under other names."""
    aliases = ["--voice-alias", "ash=ryan", "--voice-alias", "alloy=vivian"]
    running = Served(str(tiny_speech("custom_voice")), *aliases)
    yield running
    running.close()
