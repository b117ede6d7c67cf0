"""docs/llm.md: its programs run one after the other, as they stand, and print what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "llm.md"


def test_the_pages_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    printed = []
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(program, PAGE.name, "exec"), names)
        printed.append(capsys.readouterr().out)
    names["llm"].close()
    answer, many, small, _, _, calls, _, cached = printed
    assert answer == "17 + 25 = 42. stop\n"
    assert [int(line.split()[0]) for line in many.splitlines() if line[:1].isdigit()] == [*range(20)]
    assert small.split()[0] == "2048"
    assert calls == 'get_weather {"city": "Oslo"}\n'
    first, again = map(int, cached.split())
    assert first == 0 and again > 0 and again % 64 == 0
