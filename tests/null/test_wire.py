"""Every API's answers, to the byte: see tests/wire.py."""

from __future__ import annotations

import asyncio

import pytest

from tests import wire

WRITTEN = wire.written()


@pytest.mark.parametrize("name", wire.SAID)
def test_answers_are_what_they_were(name: str) -> None:
    for title, text in asyncio.run(wire.answers_of(name, wire.SAID[name])).items():
        assert text.split("\n") == WRITTEN[title].split("\n"), title


def test_nothing_else_is_written() -> None:
    assert {title.partition(": ")[0] for title in WRITTEN} == set(wire.SAID)
