"""The documents stay true: links lead somewhere, commands and flags exist, code compiles, nothing is left to fill in."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

from deltic.__main__ import parser
from deltic.commands.flags import FOREIGN

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
DOCUMENTS = [ROOT / name for name in TRACKED] or sorted(ROOT.glob("*.md"))


def commands() -> dict[str, set[str]]:
    """Every subcommand with its flags: `serve`, `bench serve`, ..."""
    found: dict[str, set[str]] = {}

    def walk(node: argparse.ArgumentParser, name: str) -> None:
        found[name] = {flag for action in node._actions for flag in action.option_strings}
        for action in node._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub, child in action.choices.items():
                    walk(child, f"{name} {sub}".strip())

    walk(parser(), "")
    return found


COMMANDS = commands()
SCRIPTS = [*ROOT.glob("bench/**/*.py"), *ROOT.glob("training/*.py"), *ROOT.glob("tests/planted.py")]
FLAGS = set().union(*COMMANDS.values(), *(re.findall(r'"(--[a-z][a-z-]+)"', script.read_text()) for script in SCRIPTS))
FLAGS |= {"--extra-index-url", "--dest", "--no-index", "--find-links", "--group"}  # pip's
FLAGS |= {
    "--now",
    "--from",
    "--format",
    "--target",
    "--build-arg",
    "--kill-whom",
    "--log-opt",
}  # systemctl's, uvx's, podman's
FLAGS |= {
    "--from-file",
    "--policy",
    "--worker-urls",
    "--disable-retries",
    "--block-size",
    "--workers",
    "--model-name",
    "--balance-abs-threshold",
    "--balance-rel-threshold",
    "--cb-timeout-duration-secs",
}  # kubectl's, routers'
FLAGS |= {f"--health-{name}" for name in ("check-interval-secs", "failure-threshold", "check-timeout-secs")}
FLAGS |= {"--apply", "--tasks", "--include"}  # lm-eval's, whose names have underscores
FLAGS |= {"--head", "--address", "--http-host", "--http-port", "--non-blocking"}  # ray's and serve's

FOREIGN_FLAGS = set(re.findall(r"--[a-z][a-z-]+", FOREIGN.read_text()))
"""Flags of other servers, which stand on one page."""


def anchors(text: str) -> set[str]:
    """What links to the sections of a document are called."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document(path: Path) -> None:
    text = path.read_text()
    assert "@@" not in text and "TODO" not in text
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name}: broken link {target}"
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
        there = path.parent / target if target else path
        assert anchor in anchors(there.read_text()), f"{path.name}: no section {target}#{anchor}"
    for command in re.findall(
        r"`deltic ([a-z]+(?: (?:serve|speech|stalls|ops|start|gpu|ablate|allreduce|quality))?)", text
    ):
        assert command in COMMANDS, f"{path.name}: no command deltic {command}"
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
        assert flag in FLAGS | (FOREIGN_FLAGS if path.name == "coming-from.md" else set()), (
            f"{path.name}: no flag {flag}"
        )
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        compile(code, path.name, "exec")


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_can_be_read(path: Path) -> None:
    """Lines of at most 140 columns but for tables and programs, paragraphs and items of at most 80 words but for what is generated."""
    text = re.sub(r"<!-- table.*?<!-- end -->|```.*?```", "", path.read_text(), flags=re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > 140 and not line.startswith("|")]
    assert not long
    parts = [part for part in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text) if not part.lstrip().startswith("|")]
    assert not [part for part in parts if len(part.split()) > 80]


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_each_experiment_has_a_line_in_the_index_of_the_log() -> None:
    index = (ROOT / "docs/log/README.md").read_text()
    lines = re.findall(r"^\| (\S+) \| \[(.*)\]\((.*)\.md#.*\) \| (kept|dropped|open|measured)\b.* \|$", index, re.M)
    months = sorted((ROOT / "docs/log").glob("????-??.md"), reverse=True)
    entries = [(p.stem, *e) for p in months for e in re.findall(r"^## (\S+) · (.*)$", p.read_text(), re.M)]
    assert [(month, date, subject) for date, subject, month, _ in lines] == entries
