"""docs/cli.md from the parsers of the command line: `python -m bench.cli` writes it, `--check` only looks.

A group of flags that has a title (engine, model, server, load, speech) is written once, behind the commands;
a command says which of its flags it takes.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from deltic.__main__ import parser

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
WIDTH = 118
INTRODUCTION = """# The command line

This page is made from the parsers: `python -m bench.cli` writes it, and a test compares.

Every flag of the groups engine, model and server is also a variable, `DELTIC_` and its name in capitals, as `DELTIC_MAX_MODEL_LEN`,
and a key of the file that [`--config`](serving.md#a-file-of-settings) names. The command line counts most, then the variable, then
the file. A switch has two forms, `--prefix-cache` and `--no-prefix-cache`. A flag of vLLM, SGLang, llama.cpp, Ollama or
LM Studio that is none here is told what to give instead (`deltic/commands/foreign_flags.txt`).

A command ends with status 0 when it did its work, with 2 for a wrong argument or setting, with 1 for anything else, and with 130
when it was interrupted."""

Groups = dict[str, list[argparse.Action]]


def commands(top: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name, parser) of each command that can be run, in the parser's order: `deltic bench serve`, not
    `deltic bench`.
    """
    below = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    for action in below:
        for child in action.choices.values():
            yield from commands(child)
    if not below:
        yield top.prog, top


def groups(command: argparse.ArgumentParser) -> Groups:
    """Its arguments by the title of their group ("" for a group without one), without --help."""
    found: Groups = {"": []}
    for group in command._action_groups:
        title = "" if group in (command._positionals, command._optionals) else group.title or ""
        for action in group._group_actions:
            if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
                found.setdefault(title, []).append(action)
    return found


def called(action: argparse.Action) -> str:
    """What is typed: `--port INT`, `[MODEL]`."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    metavar = action.metavar or choices or action.dest.upper()
    value = {0: "", "...": "...", "?": f"[{metavar}]", "+": f"{metavar} ..."}.get(action.nargs, str(metavar))
    return f"{', '.join(action.option_strings)} {value}".strip()


def broken(text: str) -> str:
    """Prose in lines of at most WIDTH columns; words stay whole."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def item(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    """A line of a list, broken."""
    text = command._get_formatter()._expand_help(action) if action.help else ""
    text = "".join("\\" + sign if sign in "*<[" else sign for sign in text)
    whole = f"`{called(action)}`" + (f": {text}" if text else "")
    return broken("- " + whole).replace("\n", "\n  ")


def takes(title: str, some: Sequence[argparse.Action], everything: Sequence[argparse.Action]) -> str:
    """Which flags of a group a command has, in words."""
    have, link = {action.dest for action in some}, f"[{title}](#{title}) flags"
    names = {action.dest: f"`{action.option_strings[0]}`" for action in everything}
    without = [name for dest, name in names.items() if dest not in have]
    if not without:
        return f"All {link}."
    if len(without) <= len(have):
        return f"All {link} but {', '.join(without)}."
    return f"Some of the {link}: {', '.join(names[action.dest] for action in some)}."


def page(top: argparse.ArgumentParser) -> str:
    """The whole document."""
    every = [(name, command, groups(command)) for name, command in commands(top)]
    shared: dict[str, dict[str, tuple[argparse.ArgumentParser, argparse.Action]]] = {}
    for _, command, found in every:
        for title in filter(None, found):
            for action in found[title]:
                shared.setdefault(title, {}).setdefault(action.dest, (command, action))
    parts = [INTRODUCTION, "## Commands"]
    for name, command, found in every:
        positional = [called(action) for action in found[""] if not action.option_strings]
        has_flags = len(positional) < sum(map(len, found.values()))
        usage = command.usage or " ".join([name, *positional, *["[flags]"] * has_flags])
        parts += [f"### {name}", f"```text\n{usage}\n```", command.description or ""]
        parts.append("\n".join(item(command, action) for action in found[""]))
        told = [takes(t, found[t], [action for _, action in shared[t].values()]) for t in found if t]
        parts.append(broken(" ".join(told)))
    parts.append("## Groups of flags")
    for title, members in shared.items():
        parts += [f"### {title}", "\n".join(item(*member) for member in members.values())]
    return "\n\n".join(filter(None, parts)) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    """The command. With --check exit status 1 where the document is not what the parsers say."""
    own = argparse.ArgumentParser(prog="python -m bench.cli", description=__doc__.partition("\n")[0])
    own.add_argument("--check", action="store_true", help="write nothing; say whether the document would change")
    check = own.parse_args(given).check
    made = page(parser())
    is_stale = not DOCUMENT.exists() or DOCUMENT.read_text() != made
    if is_stale and not check:
        DOCUMENT.write_text(made)
    print(f"{'stale' if check else 'written'}: {'docs/cli.md' if is_stale else 'nothing'}")
    return 1 if check and is_stale else 0


if __name__ == "__main__":
    sys.exit(main())
