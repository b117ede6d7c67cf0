"""docs/coming-from.md: what people paste and type from elsewhere, and what happens here. Each line of its tables is tried.

`python -m tests.null.test_coming_from` writes the tables that are made of the package's own.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from deltic.__main__ import COMMANDS, main, parsed, parser
from deltic.aliases import find, published, spelled_out
from deltic.commands.flags import advice
from deltic.config import ConfigError
from deltic.models.hub import hub_name
from deltic.server.app import ROUTES

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"

PASTED = [
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--gpu-memory-utilization",
    "--max-num-batched-tokens",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--quantization",
    "--dtype",
    "--trust-remote-code",
    "--enforce-eager",
    "--swap-space",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "--reasoning-parser",
    "--speculative-config",
    "--limit-mm-per-prompt",
    "--lora-modules",
    "--tp",
    "--mem-fraction-static",
    "--context-length",
    "--chunked-prefill-size",
    "--max-running-requests",
    "--disable-radix-cache",
    "--attention-backend",
    "--model-path",
    "-hf",
    "-m",
    "-c",
    "-np",
    "-b",
    "-fa",
    "-ctk",
    "--jinja",
    "--mmproj",
    "--model-draft",
    "--temp",
    "--n-predict",
]
"""38 flags of the first pages of vLLM, SGLang and llama.cpp."""


def rows(name: str) -> list[list[str]]:
    """The cells of a table of the page."""
    text = PAGE.read_text().split(f"<!-- table {name} -->\n")[1].split("<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in text.splitlines()[2:]]


def code(cell: str) -> str:
    """What a cell says as code."""
    found = re.search("`+ ?(.*?) ?`+", cell)
    assert found, cell
    return found[1]


def flags_table() -> str:
    lines = ["| flag | here |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{flag}` | {advice(flag)} |" for flag in PASTED)])


def names_table() -> str:
    lines = ["| short name | size | format | on the hub |", "| --- | --- | --- | --- |"]
    for model in published():
        size = f"{model.n_bytes / 1e9:.1f} GB" if model.n_bytes else ""
        repository, _, file = model.hub.partition(":")
        link = f"[{repository}](https://huggingface.co/{repository})" + (f" `{file}`" if file else "")
        lines.append(f"| {', '.join(f'`{name}`' for name in model.names)} | {size} | {model.format} | {link} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The page with the tables that are made."""
    for name, table in (("flags", flags_table()), ("short-names", names_table())):
        head, rest = text.split(f"<!-- table {name} -->\n")
        text = f"{head}<!-- table {name} -->\n{table}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return text


def test_its_made_tables_are_those_of_the_package() -> None:
    assert PAGE.read_text() == with_tables(PAGE.read_text()), "run python -m tests.null.test_coming_from"
    assert len(PASTED) == len(set(PASTED)) == 38 and all(map(advice, PASTED))


@pytest.mark.parametrize(("pasted", "means"), rows("names"))
def test_a_name_means_what_its_line_says(pasted: str, means: str) -> None:
    name = code(pasted)
    if means.startswith("refused"):
        with pytest.raises(ConfigError, match=re.escape(code(means))):
            spelled_out(name)
        return
    hub, revision = spelled_out(name)
    found = hub_name(hub)
    assert found is not None
    at = f" at {revision or found.revision}" if revision or found.revision else ""
    assert f"{found}{at}" == code(means)


@pytest.mark.parametrize(("typed", "here"), rows("commands"))
def test_a_command_does_what_its_line_says(typed: str, here: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands of ours are read, those that are not there are refused with what the line says, routes are there."""
    words = shlex.split(code(typed))
    if here.startswith("not there"):
        with pytest.raises(SystemExit):
            main([words[1]])
        assert (
            advice(words[1])
            and advice(words[1]) in capsys.readouterr().err
            and advice(words[1]) in here.replace("`", "")
        )
        return
    if words[0] == "curl":
        assert code(here) in {route.path for route in ROUTES}
        return
    *_, ours = code(here).split(" | ")[-1].split("\\|")
    program, *arguments = shlex.split(ours)
    assert program == "deltic" and arguments[0] in {*COMMANDS, "bench"}
    assert parsed(arguments).command is not None


def test_it_has_what_quick_starts_have() -> None:
    assert (len(rows("names")), len(rows("commands"))) >= (12, 20)
    assert find(code(rows("names")[0][0])) is not None and parser() is not None


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
