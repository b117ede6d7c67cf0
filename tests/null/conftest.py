"""A server of a fake engine, for the tests that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_engine import FakeEngineClient, make_app, served


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
def live(engine: FakeEngineClient) -> Iterator[str]:
    with served(make_app(engine)) as url:
        yield url
