"""What tests share: a server of a fake engine, a browser, a fork server with the decoders of tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltic.server import isolated
from tests import browser
from tests.fake_engine import FakeEngineClient, make_app, served


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
def live(engine: FakeEngineClient) -> Iterator[str]:
    with served(make_app(engine)) as url:
        yield url


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with browser.started() as running:
        yield running


@pytest.fixture(scope="module")
def driver(chromium: Any) -> Any:
    """Chromium, for tests marked as `browser.needed`, with an empty log. Each server has a port, and so a storage, of its own."""
    chromium.get("about:blank")
    chromium.get_log("browser")
    return chromium


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[isolated.ForkServer]:
    """A fork server that finds tests/decoders.py, too."""
    code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); {isolated.COMMAND[-1]}"
    monkeypatch.setattr(isolated, "COMMAND", (sys.executable, "-I", "-c", code))
    server = isolated.ForkServer()
    monkeypatch.setattr(isolated, "FORKS", server)
    yield server
    server.stop()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own SIGINT handler, here and in new processes: a shell takes it away from what it starts in the
    background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
