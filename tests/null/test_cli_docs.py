"""docs/cli.md is what the parsers say."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import cli
from deltic.__main__ import parser


def test_the_page_is_that_of_the_parsers() -> None:
    assert cli.DOCUMENT.read_text() == cli.page(parser()), "run python -m bench.cli"


def test_every_command_and_flag_is_on_it_once() -> None:
    text = cli.page(parser())
    found = list(cli.commands(parser()))
    assert len(found) > 10
    for name, command in found:
        assert text.count(f"### {name}\n") == 1
        for action in command._actions:
            for flag in action.option_strings:
                assert f"`{flag}" in text or f", {flag}" in text or flag in ("-h", "--help")
    assert max(map(len, text.splitlines())) <= 140


def test_a_group_is_written_once_and_a_command_says_what_it_takes_of_it() -> None:
    top = argparse.ArgumentParser("deltic")
    under = top.add_subparsers()
    for name, flags in (("a", ("one", "two", "three")), ("b", ("one", "two")), ("c", ("one",))):
        sub = under.add_parser(name, description=f"Does {name}.")
        group = sub.add_argument_group("engine")
        for flag in flags:
            group.add_argument(f"--{flag}", metavar="N", help="50 %% of *")
    text = cli.page(top)
    assert text.count("- `--one N`: 50 % of \\*") == 1
    assert "All [engine](#engine) flags." in text
    assert "All [engine](#engine) flags but `--three`." in text
    assert "Some of the [engine](#engine) flags: `--one`." in text


def test_a_stale_page_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "DOCUMENT", tmp_path / "cli.md")
    assert cli.main(["--check"]) == 1
    assert cli.main([]) == 0
    assert cli.main(["--check"]) == 0
    assert capsys.readouterr().out == "stale: docs/cli.md\nwritten: docs/cli.md\nstale: nothing\n"
