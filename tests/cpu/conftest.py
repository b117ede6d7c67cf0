"""The built-in model served, once for a file of tests that asks for it. A file whose server is to be another has a `served` of its own.
And further machines of a model, which end with a test."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from deltic.commands.endpoint import LocalServer
from tests.served import Served, served
from tests.staged import Stage

__all__ = ["served"]


@pytest.fixture(scope="module")
def server(served: Served) -> LocalServer:
    return served.process


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.openai


@pytest.fixture(scope="module")
def model(served: Served) -> str:
    return served.model


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    """Those that a test puts into it."""
    found: list[Stage] = []
    yield found
    for stage in found:
        stage.close()
