"""The command line: `deltic serve | chat | run | say | pull | list | plan | doctor | ...`.

A command's module is imported when it runs, so `deltic --help` answers at once. Commands and their flags are
in commands/flags.toml.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltic import __version__
from deltic.commands import flags, settings
from deltic.config import BUILT_IN, ConfigError, EngineConfig, ModelConfig, ServerConfig, exit_status, nearest
from deltic.config_sources import check_environment, resolve
from deltic.logs import printable

Result = int | str | None
"""The result of a command: its exit status, or a text to print; None is status 0."""


@dataclass(frozen=True)
class Subcommand:
    """A command, which is a table of commands/flags.toml: its help, its function as `module:function` below
    deltic, and what makes the values that the function is called with.
    """

    help: str
    function: str
    values: Callable[[argparse.Namespace], tuple[object, ...]]

    def run(self, arguments: argparse.Namespace) -> Result:
        """The values are made, and so the settings checked, before the import, which may take seconds."""
        values = self.values(arguments)
        module, _, name = self.function.partition(":")
        run: Callable[..., Result] = getattr(importlib.import_module(f"deltic.{module}"), name)
        return run(*values)


def _models(arguments: argparse.Namespace) -> tuple[object, ...]:
    """The models to serve: (EngineConfig, ModelConfig) of each, and the ServerConfig. Raises ConfigError."""
    groups = [arguments]
    while (words := groups[-1].further) is not None:
        groups.append(_further(words))
    tables = settings.tables(arguments)
    if len(groups) > 1 and len(tables) > 1:
        raise ConfigError("there are models behind --and, and in the file of --config. Give them in one place.")
    models = [
        (
            resolve(EngineConfig, settings.given(group, EngineConfig), table=table or {}),
            resolve(ModelConfig, settings.given(group, ModelConfig), table=table or {}),
        )
        for group, table in itertools.zip_longest(groups, tables)
    ]
    for engine, about in models:
        _check_names(engine, about)
    return models, resolve(ServerConfig, settings.given(arguments, ServerConfig), table=tables[0])


def _check_names(engine: EngineConfig, about: ModelConfig) -> None:
    """Raises ConfigError where the last of several names must have been meant as the MODEL, of which there is
    none.
    """
    *others, last = about.served_model_name or ("",)
    if others and engine.model == BUILT_IN and engine.dummy is None and ("/" in last or Path(last).exists()):
        raise ConfigError(f"--served-model-name takes every word behind it, {last!r} too. Give the MODEL before it.")


def _further(words: Sequence[str]) -> argparse.Namespace:
    """The arguments after an `--and`: a model and its flags, and perhaps another `--and`.

    Raises ConfigError.
    """
    group = parsed(["serve", *words])
    if not {"model", "dummy"} & vars(group).keys():
        raise ConfigError("--and needs a MODEL behind it, or --dummy SHAPE")
    misplaced = settings.given(group, ServerConfig) | ({"config": None} if "config" in group else {})
    if misplaced:
        flag = "--" + next(iter(misplaced)).replace("_", "-")
        raise ConfigError(f"{flag} is the whole server's. Give it before the first --and.")
    return group


VALUES: dict[str, Callable[[argparse.Namespace], tuple[object, ...]]] = {
    "": lambda arguments: (),
    "arguments": lambda arguments: (arguments,),
    "arguments, server": lambda arguments: (arguments, settings.server_arguments(arguments)),
    "arguments, engine": lambda arguments: (arguments, settings.engine(arguments)),
    "arguments, settings": lambda arguments: (arguments, settings.given(arguments, EngineConfig)),
    "engine": lambda arguments: (settings.engine(arguments),),
    "models": _models,
    "planned": lambda arguments: (settings.planned(arguments), arguments.format),
    "shell, parser": lambda arguments: (arguments.shell, parser()),
}
"""Values that the function of a command is called with, by what flags.toml calls them."""

_ALL = {
    name: Subcommand(table["help"], table["runs"], VALUES[table.get("given", "")])
    for name, table in flags.tables().items()
    if "runs" in table
}
COMMANDS = {name: command for name, command in _ALL.items() if not name.startswith("bench ")}
BENCHES = {name.removeprefix("bench "): command for name, command in _ALL.items() if name not in COMMANDS}


FIRST_STEPS = f"""\
Deltic {__version__} serves Qwen's hybrid models and Qwen3-TTS on this machine. What to do next:

  deltic serve                 a small built-in model, with a page to chat on
  deltic doctor                which models this machine can run, how fast, and which to get
  deltic pull qwen3.5:4b       gets a real one of 2.7 GB; deltic list shows those on this disk
  deltic serve qwen3.5:4b      serves it; so do a name on the hub, owner/model, or a directory
  deltic chat                  a conversation in this terminal

`deltic --help` lists every command, `deltic COMMAND --help` its flags."""
"""Text that `deltic` alone prints."""


class _CommandParser(argparse.ArgumentParser):
    """Knows flags of other servers, before argparse takes `-hf` for `-h`. A part of a flag is none."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        for word in () if self._subparsers else args or ():
            flag = word.partition("=")[0]
            if flag.startswith("-") and flag not in self._option_string_actions and (advice := flags.advice(flag)):
                self.error(f"there is no {flag} here: {advice}")
        return super().parse_known_args(args, namespace)


def parser() -> argparse.ArgumentParser:
    """The whole command line; the command chosen is in `command`, its own parser in `used`."""
    top = argparse.ArgumentParser(
        "deltic", description="A serving engine for the Qwen gated-DeltaNet hybrids.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"deltic {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_CommandParser)
    _add(commands, COMMANDS)
    bench = commands.add_parser(
        "bench", help="measure a server, a GPU or a quantised model", description="Measure.", allow_abbrev=False
    )
    _add(bench.add_subparsers(title="benches", metavar="WHAT", required=True), BENCHES)
    return top


def _add(under: argparse._SubParsersAction[_CommandParser], commands: dict[str, Subcommand]) -> None:
    for name, command in commands.items():
        summary = command.help[0].upper() + command.help[1:] + "."
        sub = under.add_parser(name, help=command.help, description=summary, allow_abbrev=False)
        sub.set_defaults(command=command, used=sub)
        flags.add_table(sub, sub.prog.removeprefix("deltic "))


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with status 2 and the subcommand's usage where it is wrong."""
    top, known = parser(), {*COMMANDS, "bench"}
    if words and words[0] not in known and not words[0].startswith("-"):
        hint = flags.advice(words[0]) or nearest(words[0], known) or "deltic alone says what to do next"
        top.error(f"there is no command {words[0]!r}; {hint}")
    if (
        len(words) > 1
        and words[0] == "run"
        and re.fullmatch(r"[\w./-]*\w:[\w.-]+", words[1])
        and not Path(words[1]).exists()
    ):
        top.error(f"deltic run answers a file of requests, IN.jsonl OUT.jsonl. To chat, give deltic chat {words[1]}")
    for gone in ("ablate", "allreduce"):
        if list(words[:2]) == ["bench", gone]:
            top.error(f"bench {gone} is for developers: python -m bench.gpu.{gone}, in a copy of the repository")
    cut = words.index("--") if words and words[0] == "launch" and "--" in words else len(words)
    arguments, left = top.parse_known_args(words[:cut])
    arguments.behind = [*words[cut + 1 :]]  # an agent's own
    if left:
        known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", arguments.used.format_help()))
        hint = nearest(left[0].partition("=")[0], known)
        arguments.used.error(f"unrecognized arguments: {' '.join(left)}{hint and '; ' + hint}")
    return arguments


def finished(run: Callable[[], Result]) -> int:
    """Runs a command and prints the text it comes to; its exit status.

    2: wrong settings, 1: what may pass, 130: interrupted.
    """
    try:
        check_environment()
        result = run()
        if isinstance(result, str):
            print(printable(result))
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        # ConfigError and the loaders' errors are ValueErrors meant for the user; any other is a defect and
        # keeps its trace.
        if type(error).__module__.partition(".")[0] != "deltic":
            raise
        print(f"deltic: {printable(str(error))}", file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt:
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status, 2 for wrong arguments."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        return finished(lambda: FIRST_STEPS)
    # argparse would take no more than the MODEL of `--and=MODEL` as what stands behind it.
    words = [part for word in words for part in (("--and", word[6:]) if word.startswith("--and=") else (word,))]
    arguments = parsed(words)
    return finished(lambda: arguments.command.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
