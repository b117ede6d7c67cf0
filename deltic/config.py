"""Every knob of Deltic, in two stages: as given (flags, environment) and resolved (frozen, complete).

This is the only file that reads the environment or invents a default. `--help` and the command line's parser are
made from the fields below: a field is a flag, its metadata the help text.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILT_IN = "built-in"
"""Name of the model served when none is given."""

ENV_PREFIX = "DELTIC_"


class ConfigError(ValueError):
    """A setting that cannot be honoured; the message says which, why, and what would work."""


def knob(
    default: Any, text: str, *, choices: tuple[str, ...] | None = None, metavar: str | None = None
) -> Any:
    """A dataclass field that is a command-line flag: its default and its help text."""
    metadata = {"help": text, "choices": choices, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine process needs. Values of None are decided at start from the model and the machine."""

    model: str = knob(BUILT_IN, "checkpoint directory or hub name", metavar="MODEL")
    dummy: str | None = knob(None, "random weights at a published shape, e.g. qwen3.5-0.8b", metavar="SHAPE")
    threads: int | None = knob(None, "CPU threads of the engine (default: the CPUs this process may use)")
    memory_gb: float | None = knob(
        None, "memory for weights, pages, slots and workspace (default: 80 %% of what is free)", metavar="GB"
    )
    max_model_len: int | None = knob(
        None,
        "longest sequence, prompt and answer together (default: the model's, at most 32768)",
        metavar="TOKENS",
    )
    max_num_seqs: int | None = knob(
        None, "sequences that run at once (default: 32, fewer if they do not fit)"
    )
    max_step_tokens: int = knob(512, "most tokens of one step: decodes first, then prefill", metavar="TOKENS")
    max_itl_ms: float | None = knob(
        None,
        "target for the time between a running sequence's tokens; prefill shrinks to meet it",
        metavar="MS",
    )
    n_pages: int | None = knob(None, "KV pages of 64 tokens (default: what fits, at most what can be used)")
    seed: int = knob(0, "seed of dummy weights")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the HTTP process needs."""

    host: str = knob("127.0.0.1", "address to listen on")
    port: int = knob(8000, "port to listen on; 0 takes a free one")
    api_key: tuple[str, ...] = knob((), "accept only requests with this key; may be given several times")
    cors_origin: tuple[str, ...] = knob((), "allow this origin in browsers; may be given several times")
    served_model_name: str | None = knob(None, "name in /v1/models and answers (default: the model's own)")
    chat_template: Path | None = knob(None, "Jinja file to use instead of the checkpoint's chat template")
    max_queue: int = knob(256, "requests that may wait; one more is answered 429")
    max_body_mb: float = knob(16.0, "largest request body", metavar="MB")
    max_n: int = knob(16, "largest n of a request")
    max_logprobs: int = knob(20, "most alternatives per token a request may ask for")
    drain_s: float = knob(30.0, "after SIGTERM, seconds that running requests get to finish")
    default_max_tokens: int | None = knob(
        None, "answer length when a request names none (default: whatever the context leaves)"
    )
    log_level: str = knob("info", "server log level", choices=("debug", "info", "warning", "error"))


T = typing.TypeVar("T", EngineConfig, ServerConfig)


def add_flags(parser: argparse.ArgumentParser, cls: type[T], skip: tuple[str, ...] = ()) -> None:
    """Adds a flag for each field of `cls`; only flags that were given appear in the parsed namespace."""
    hints = typing.get_type_hints(cls)
    group = parser.add_argument_group(cls.__name__.removesuffix("Config").lower())
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        kind, many = _scalar(hints[field.name])
        text = field.metadata["help"]
        if field.default not in (None, ()):
            text += f" (default: {field.default})"
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            action="append" if many else "store",
            default=argparse.SUPPRESS,
            choices=field.metadata["choices"],
            metavar=field.metadata["metavar"]
            or (None if field.metadata["choices"] else kind.__name__.upper()),
            help=text,
        )


def _scalar(hint: Any) -> tuple[type, bool]:
    """The type of one value of a field, and whether the flag may be repeated."""
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    return hint, False


def resolve(cls: type[T], given: dict[str, Any], environ: typing.Mapping[str, str] = os.environ) -> T:
    """Flags over `DELTIC_<FIELD>` variables over defaults; unknown names and malformed values are errors.

    Raises ConfigError.
    """
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = set(given) - known
    if unknown:
        raise ConfigError(f"unknown setting {sorted(unknown)[0]!r}; known: {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for name in known:
        kind, many = _scalar(hints[name])
        variable = ENV_PREFIX + name.upper()
        if name in given:
            values[name] = tuple(given[name]) if many else given[name]
        elif variable in environ:
            text = environ[variable]
            try:
                values[name] = tuple(kind(t) for t in text.split(",") if t) if many else kind(text)
            except ValueError:
                raise ConfigError(f"{variable}={text!r}: expected {kind.__name__}") from None
    config = cls(**values)
    _check(config)
    return config


def check_environment(environ: typing.Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError for a DELTIC_ variable that names no setting: a typo must not be ignored."""
    known = {f.name.upper() for cls in (EngineConfig, ServerConfig) for f in dataclasses.fields(cls)}
    for variable in environ:
        if variable.startswith(ENV_PREFIX) and variable.removeprefix(ENV_PREFIX) not in known:
            raise ConfigError(f"{variable} is not a setting of Deltic; unset it or correct its name")


def _check(config: EngineConfig | ServerConfig) -> None:
    """Ranges that hold whatever the model is."""
    at_least = {
        "threads": 1, "max_model_len": 1, "max_num_seqs": 1, "max_step_tokens": 1, "max_itl_ms": 1.0, "n_pages": 1,
        "memory_gb": 0.01, "port": 0, "max_queue": 0, "max_body_mb": 0.001, "max_n": 1, "max_logprobs": 0, "drain_s": 0.0,
        "default_max_tokens": 1,
    }  # fmt: skip
    for name, least in at_least.items():
        value = getattr(config, name, None)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if isinstance(config, EngineConfig) and config.dummy and config.model != BUILT_IN:
        raise ConfigError("--dummy makes random weights: give a model or --dummy, not both")


def n_usable_cpus() -> int:
    """CPUs this process may use: its affinity mask, and the container's quota when there is one (cgroup v2)."""
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            n_cpus = min(n_cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return n_cpus


def free_memory_bytes() -> int:
    """Bytes this process may still take: the machine's available memory, or less under a container limit."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return available
