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
        if "path/to/" in program:  # a model that is not here: tests/cpu/test_embedder.py has such
            continue
        exec(compile(program, PAGE.name, "exec"), names)
        printed.append(capsys.readouterr().out)
    names["llm"].close()
    answer, many, streamed, awaited, small, _, _, formed, calls, _, cached = printed
    assert answer == "17 + 25 = 42. stop\n"
    assert [int(line.split()[0]) for line in many.splitlines() if line[:1].isdigit()] == [*range(20)]
    assert streamed.endswith(("(stop)\n", "(length)\n")) and len(streamed) > 10
    assert awaited.startswith("7 + 5 = 12.\n20 + 5 = 25.\n")
    assert re.fullmatch(r'\{ ?"is_even": ?(true|false) ?\} Sum\(is_even=(True|False)\)\n', formed)
    assert small.split()[0] == "2048"
    assert calls == 'get_weather {"city": "Oslo"}\n'
    first, again = map(int, cached.split())
    assert first == 0 and again > 0 and again % 64 == 0
