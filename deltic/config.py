"""Every knob of Deltic, in two stages: as given (flags, environment) and resolved (frozen, complete).

This is the only file that reads the environment or invents a default. `--help` and the command line's parser are
made from the fields below: a field is a flag, its metadata the help text.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILT_IN = "built-in"
"""Name of the model served when none is given."""

ENV_PREFIX = "DELTIC_"

MAX_THREADS = 256
"""The thread pool's array of tickets (csrc/pool.cpp, MAX_THREADS) has as many."""


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
    quantize: str | None = knob(
        None, "round the weights at load, to 8.25 or 4.5 bits (default: as stored)", choices=("int8", "int4", "int4-symmetric"),
    )  # fmt: skip
    weights_cache: Path | None = knob(
        None, "keep packed weights in this directory: later starts map them instead of loading", metavar="DIR"
    )
    threads: int | None = knob(None, "CPU threads of the engine (default: the CPUs this process may use)")
    memory_gb: float | None = knob(
        None,
        "memory for weights, workspace, pages and slots (default: weights, workspace, and 2 GiB of pages and slots; "
        "at most 80 %% of what is free)",
        metavar="GB",
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
    max_itl_ms: float = knob(
        250.0, "target for the time between a running sequence's tokens: prefill shrinks to meet it, to 64 tokens a step "
        "at the least; 0 sets none", metavar="MS",
    )  # fmt: skip
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
    max_queue: int = knob(256, "sequences that may wait (n of a request counts n); more are answered 429")
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
                values[name] = tuple(kind(t.strip()) for t in text.split(",")) if many else kind(text)
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


RANGES: dict[str, tuple[float, float]] = {
    "threads": (1, MAX_THREADS), "max_model_len": (1, math.inf), "max_num_seqs": (1, math.inf),
    "max_step_tokens": (1, math.inf), "max_itl_ms": (0.0, math.inf), "n_pages": (1, math.inf),
    "memory_gb": (0.01, math.inf), "port": (0, 65535), "max_queue": (0, math.inf), "max_body_mb": (0.001, math.inf),
    "max_n": (1, math.inf), "max_logprobs": (0, math.inf), "drain_s": (0.0, math.inf), "default_max_tokens": (1, math.inf),
}  # fmt: skip
"""Least and greatest value of a setting, whatever the model is; an infinite one is never meant."""


def _check(config: EngineConfig | ServerConfig) -> None:
    """Raises ConfigError for a value that no model and no machine could make right."""
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), "--" + field.name.replace("_", "-")
        if isinstance(value, tuple) and not all(item.strip() for item in value):
            raise ConfigError(
                f"{flag} (or {ENV_PREFIX}{field.name.upper()}) has an empty value; leave it out, or give one"
            )
        choices = field.metadata["choices"]
        if choices and value is not None and value not in choices:
            raise ConfigError(f"{flag} {value!r}: must be one of {', '.join(choices)}")
        least, most = RANGES.get(field.name, (-math.inf, math.inf))
        if field.name in RANGES and value is not None and not (least <= value <= most and value < math.inf):
            expected = f"at least {least}" if math.isinf(most) else f"from {least} to {most}"
            raise ConfigError(f"{flag} {value}: must be {expected}")
    if isinstance(config, EngineConfig) and config.dummy and config.model != BUILT_IN:
        raise ConfigError("--dummy makes random weights: give a model or --dummy, not both")


def n_usable_cpus() -> int:
    """CPUs this process may use, as threads to start: its affinity mask, and the container's quota when there is one
    (cgroup v2); at most MAX_THREADS."""
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            n_cpus = min(n_cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return min(n_cpus, MAX_THREADS)


MEMORY_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)  # fmt: skip
"""A container's limit, its usage, and the lines of `memory.stat` beside them that are file cache: cgroup v2, then v1."""


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still take: the machine's available memory, or less under a container limit.

    The file cache counts as free in both: the kernel drops it when memory is asked for, and a checkpoint that was
    just downloaded is all file cache.
    """
    available = int(_table(meminfo)["MemAvailable:"]) * 1024
    for limit_file, usage_file, cache_lines in MEMORY_FILES:
        try:
            limit = int((cgroup / limit_file).read_text())  # "max" where there is none
            used = int((cgroup / usage_file).read_text())
            stat = _table((cgroup / limit_file).with_name("memory.stat"))
            cache = sum(int(stat.get(line, 0)) for line in cache_lines)
        except (OSError, ValueError):
            continue
        available = min(available, max(0, limit - used + cache))
    return available


def _table(path: Path) -> dict[str, str]:
    """First and second word of each line."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}
