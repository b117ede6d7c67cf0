"""`deltic agents` and `deltic launch`: other people's coding agents against a server of ours.

An agent is a table in agents.toml: what it is called with, and the variables that tell it of the server. It
is started with these alone, and no file is written: what it has been set up for otherwise stays as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltic.commands.endpoint import Endpoint, EndpointError, asked_model, own_server, reached
from deltic.config import ConfigError, ServerConfig, nearest
from deltic.config_sources import resolve
from deltic.json_types import JsonObject
from deltic.logs import printable

TABLE = Path(__file__).with_name("agents.toml")

NO_KEY = "local"
"""Key that an agent is given for a server that wants none: most refuse to start without."""

MOST_OUTPUT = 16_384
"""Tokens of an answer that an agent is told to plan with, at most; a quarter of a small context."""


@dataclass(frozen=True)
class Agent:
    """Table of agents.toml."""

    name: str
    api: str
    install: str
    needs: int
    first: int
    command: list[str]
    default: list[str] = field(default_factory=list)
    env: Mapping[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ServerFacts:
    """A server as an agent is told of it."""

    url: str
    key: str
    model: str
    context: int

    def filled(self, text: str) -> str:
        """A text of agents.toml with this server's values."""
        values = {
            "url": self.url,
            "key": self.key,
            "model": self.model,
            "context": str(self.context),
            "output": str(min(MOST_OUTPUT, self.context // 4)),
        }
        if '"' in text:  # they stand in strings of JSON or TOML
            values = {name: json.dumps(value)[1:-1] for name, value in values.items()}
        return string.Template(text.strip()).substitute(values)


def known() -> dict[str, Agent]:
    """The agents by the names of their tables."""
    return {name: Agent(**table) for name, table in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()}


def named(name: str) -> Agent:
    """Raises ConfigError for one that is not known."""
    agents = known()
    if name not in agents:
        hint = nearest(name, agents) or f"there are {', '.join(agents)}"
        raise ConfigError(f"{name!r} is no agent of deltic launch; {hint}")
    return agents[name]


def settings(agent: Agent, target: ServerFacts) -> dict[str, str]:
    """Variables that the agent is started with."""
    return {name: target.filled(value) for name, value in agent.env.items()}


def words(agent: Agent, target: ServerFacts, own: list[str]) -> list[str]:
    """The agent's command line. own: what the user gives it."""
    return [*(target.filled(word) for word in agent.command), *(own or agent.default)]


def too_small(agent: Agent, context: int) -> str:
    """Says that a context is too small for the agent, and what to do; empty where it is not."""
    if context >= agent.needs:
        return ""
    first = f"its first prompt alone has about {agent.first:,}" if agent.first else "its prompts are long"
    return (
        f"{agent.name} needs a context of {agent.needs:,} tokens ({first}), and the server has {context:,}. "
        f"Start it with --max-model-len {agent.needs}; deltic plan says whether that fits."
    )


async def target_of(arguments: argparse.Namespace, endpoint: Endpoint) -> ServerFacts:
    """The server at `endpoint`. Raises EndpointError."""
    model = await asked_model(arguments, endpoint)
    _, body = await endpoint.json("GET", "/v1/models")
    cards = body.get("data", []) if isinstance(body, dict) else []
    card: JsonObject = next((card for card in cards if card.get("id") == model), {})
    context = card.get("context_length") or card.get("max_model_len") or 0
    return ServerFacts(endpoint.url, endpoint.api_key or NO_KEY, model, int(context))


def default_url() -> str:
    """The address at which `deltic serve` listens where nothing else is said."""
    config = resolve(ServerConfig, {})
    host = config.host if config.host not in ("0.0.0.0", "::", "") else "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}"


async def answers(url: str) -> bool:
    """Returns whether a server of ours is ready at `url`."""
    try:
        status, body = await Endpoint(url).json("GET", "/version")
        ready, _ = await Endpoint(url).json("GET", "/ready")
    except EndpointError:
        return False
    return status == ready == 200 and isinstance(body, dict) and "version" in body


def show(arguments: argparse.Namespace) -> str:
    """The command `deltic agents`: a list, or the shell lines that set one up."""
    if arguments.agent is None:
        return _listed()
    agent, url = named(arguments.agent), arguments.url or default_url()
    lines, notes = [], []
    endpoint = Endpoint(url, arguments.api_key, arguments.cacert)
    try:
        target = asyncio.run(target_of(argparse.Namespace(**vars(arguments) | {"url": url}), endpoint))
        notes.append(too_small(agent, target.context))
    except EndpointError as error:
        target = ServerFacts(
            url, arguments.api_key or NO_KEY, getattr(arguments, "model", None) or "MODEL", agent.needs
        )
        notes.append(f"{error} Below, MODEL and the context are to be filled in.")
    lines = [f"# {agent.name} at {target.url}", *(f"# {' '.join(note.split())}" for note in notes if note)]
    lines += [f"unset {name}" for name in agent.unset]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in settings(agent, target).items()]
    if shutil.which(agent.command[0]) is None:
        lines.append(f"# {agent.command[0]} is not installed: {agent.install}")
    return "\n".join([*lines, shlex.join(words(agent, target, []))])


def _listed() -> str:
    rows = [("", "", "context", "")]
    for name, agent in known().items():
        there = "installed" if shutil.which(agent.command[0]) else agent.install
        rows.append((name, agent.name, f"{agent.needs:,}", there))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
    return "\n".join(
        [*table, "", "`deltic launch NAME` starts one, `deltic agents NAME` prints what it sets (docs/agents.md)."]
    )


def launch(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command `deltic launch`: starts an agent; its exit status. Raises EndpointError, ServerFailed."""
    agent = named(arguments.agent)
    if shutil.which(agent.command[0]) is None:
        print(f"deltic: {agent.command[0]} is not installed. Install it: {agent.install}", file=sys.stderr)
        return 1
    with asyncio.Runner() as runner:
        if not arguments.url and not server_arguments:
            arguments.url = _running(runner)
        elif not arguments.url and "--max-model-len" not in server_arguments:
            server_arguments = [*server_arguments, "--max-model-len", str(agent.needs)]
        with own_server(arguments, server_arguments) as server:
            target = runner.run(target_of(arguments, runner.run(reached(arguments, server))))
            if problem := too_small(agent, target.context):
                print(f"deltic: {problem}", file=sys.stderr)
                if target.context < agent.needs // 2:
                    return 1
            return _run(agent, target, arguments.behind)


def _running(runner: asyncio.Runner) -> str:
    """The address of a server that runs where it is expected. Raises EndpointError."""
    url = default_url()
    if runner.run(answers(url)):
        return url
    raise EndpointError(
        f"no server is ready at {url}. Name a running one with --url, or a model to serve with --model: "
        "deltic launch NAME --model Qwen/Qwen3.5-4B --quantize int8"
    )


def _run(agent: Agent, target: ServerFacts, own: list[str]) -> int:
    """Says what is set, and runs the agent until it ends."""
    variables, command = settings(agent, target), words(agent, target, own)
    print(
        f"{agent.name} with {printable(target.model)} at {target.url}, context {target.context:,} tokens",
        file=sys.stderr,
    )
    for name in agent.unset:
        print(f"  {name} is not given", file=sys.stderr)
    for name, value in variables.items():
        shown = value.replace(target.key, "(the server's key)") if target.key != NO_KEY else value
        print(f"  {name}={printable(shown)}", file=sys.stderr)
    print(f"  {printable(shlex.join(command))}", file=sys.stderr)
    environment = {name: value for name, value in os.environ.items() if name not in agent.unset} | variables
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's
    try:
        status = subprocess.run(command, env=environment, preexec_fn=_interruptible).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status


def _interruptible() -> None:
    """Gives a child its own Ctrl-C back, which a process that ignores it passes on ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
