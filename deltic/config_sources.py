"""Sources of settings: flags, then DELTIC_ variables, then the file of `--config`, then defaults.

Such a file says what the flags say, as TOML or YAML:

model = "Qwen/Qwen3.5-4B"
port = 8080
served-model-name = ["chat", "gpt-*"]

[[and]]                 # a further model, as behind --and
model = "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from deltic.aliases import spelled_out
from deltic.commands.flags import advice, json_object, scalar
from deltic.config import ENV_PREFIX, Config, ConfigError, EngineConfig, ModelConfig, ServerConfig, nearest, pinned_cpus
from deltic.json_types import JsonObject

T = TypeVar("T", EngineConfig, ModelConfig, ServerConfig)

AND = "and"
"""The key of the list of further models."""


def resolve(
    cls: type[T],
    given: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    table: Mapping[str, object] = MappingProxyType({}),
) -> T:
    """Flags over `DELTIC_<FIELD>` variables over those of a file over defaults; unknown flags and malformed
    values are errors.

    A short name of a model becomes its name on the hub. table: of a file, which its `config` is; what is not
    of `cls` is passed over. Raises ConfigError.
    """
    environ, hints = _ours(environ), get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = given.keys() - fields.keys()
    if unknown:
        name = min(unknown)
        raise ConfigError(f"unknown setting {name!r}; {nearest(name, fields) or 'known: ' + ', '.join(sorted(fields))}")
    values: dict[str, Any] = {}
    called: dict[str, str] = {}
    for name in fields:
        kind, many = scalar(hints[name])
        variable, flag = ENV_PREFIX + name.upper(), name.replace("_", "-")
        called[name] = f"--{flag}"
        if name in given:
            value = given[name]
            values[name] = tuple(value) if many else _path(value) if kind is Path and value is not None else value
            continue
        if variable in environ:
            text = environ[variable]
            items: Sequence[object] = [item.strip() for item in text.split(",")] if many else [text]
            whence = f"{variable}={text!r}"
        elif name in table:
            entry = table[name]
            items = entry if many and isinstance(entry, list) else [entry]
            called[name] = f"--config {table['config']}: {flag}" if "config" in table else flag
            whence = f"{called[name]} = {entry!r}"
        else:
            continue
        parsed = _parsed(kind, items, whence)
        values[name] = tuple(parsed) if many else parsed[0]
    for name, value in values.items():
        _check(fields[name], value, called[name])
    if cls is EngineConfig and "model" in values:
        values["model"], values["revision"] = spelled_out(values["model"], values.get("revision"))
    config = cls(**values)
    if isinstance(config, EngineConfig) and config.pin_threads:
        pinned_cpus(config.threads or 1)
    return config


def _parsed(kind: type, items: Sequence[object], whence: str) -> list[object]:
    """The value of a field, from texts or from a file's values. Raises ConfigError."""
    try:
        return [_value(kind, item) for item in items]
    except (TypeError, ValueError):
        raise ConfigError(f"{whence}: expected {EXPECTED.get(kind, kind.__name__)}") from None


EXPECTED = {bool: "on or off", dict: "a JSON object", str: "a text", Path: "a path"}
ON, OFF = ("on", "1", "true", "yes"), ("off", "0", "false", "no")


def _value(kind: type, item: object) -> object:
    """Raises ValueError, TypeError."""
    if isinstance(item, str):
        return {bool: _switch, dict: json_object, Path: _path}.get(kind, kind)(item)
    if type(item) is kind and kind in (bool, dict):
        return item
    if type(item) in (int, float) and kind in (int, float, str):
        return kind(str(item))
    raise TypeError


def _path(value: str | Path) -> Path:
    """Replaces `~` by the home directory: shells do so in `--flag ~/x` alone."""
    return Path(value).expanduser()


def _switch(text: str) -> bool:
    """Raises ValueError."""
    word = text.strip().lower()
    if word not in ON + OFF:
        raise ValueError
    return word in ON


def _check(field: dataclasses.Field[object], value: Any, flag: str) -> None:
    """Raises ConfigError for a value that no model and no machine could make right. flag: its name."""
    if isinstance(value, tuple) and not all(item.strip() for item in value):
        variable = ENV_PREFIX + field.name.upper()
        raise ConfigError(f"{flag} (or {variable}) has an empty value. Leave it out, or give one.")
    about = field.metadata
    if "choices" in about and value is not None and value not in about["choices"]:
        raise ConfigError(f"{flag} {value!r}: must be one of {', '.join(about['choices'])}")
    if "least" in about and value is not None:
        least, most = about["least"], about.get("most", math.inf)
        if not (least <= value <= most and value < math.inf):
            expected = f"at least {least}" if math.isinf(most) else f"from {least} to {most}"
            raise ConfigError(f"{flag} {value}: must be {expected}")


_OF_A_SERVICE = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)")
"""Pattern of what Kubernetes tells every pod of a Service whose name begins with `deltic`, behind our prefix.
"""


def _ours(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with our prefix, without those that Kubernetes makes of a Service of that name."""
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(ENV_PREFIX)
        and not _OF_A_SERVICE.fullmatch(name.removeprefix(ENV_PREFIX))
        and not (name.endswith("PORT") and text.startswith(("tcp://", "udp://", "sctp://")))
    }


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError for a DELTIC_ variable that names no setting: a typo must not be ignored."""
    classes = (EngineConfig, ModelConfig, ServerConfig)
    known = {f.name.upper() for cls in classes for f in dataclasses.fields(cls)} | {"CONFIG"}
    for variable in _ours(environ):
        if variable.removeprefix(ENV_PREFIX) not in known:
            hint = nearest(variable, {ENV_PREFIX + name for name in known}) or "unset it or correct its name"
            raise ConfigError(f"{variable} is not a setting of Deltic; {hint}")


def config_file(given: str | None) -> Path | None:
    """The file of settings, by --config or DELTIC_CONFIG."""
    named = os.environ.get(ENV_PREFIX + "CONFIG") if given is None else given
    return None if named is None else Path(named)


def read_config(path: Path) -> list[JsonObject]:
    """The file's settings for each model, by the names of fields; the server's are with the first.

    Values are as the file has them. `config` is the file, for complaints.
    Raises ConfigError for a file that cannot be read, and for a key that is no setting.
    """
    return [table | {"config": path} for table in tables(f"--config {path}", _load(path))]


def tables(whence: str, top: JsonObject) -> list[JsonObject]:
    """Reads the tables of a file (see `read_config`). whence: for complaints. Raises ConfigError."""
    top = dict(top)
    further = top.pop(AND, [])
    if not isinstance(further, list) or not all(isinstance(table, dict) for table in further):
        raise ConfigError(f"{whence}: {AND!r} must be a list of tables, one for each further model")
    models = [_fields(whence, top, (EngineConfig, ModelConfig, ServerConfig))]
    for table in further:
        models.append(_fields(whence, table, (EngineConfig, ModelConfig)))
        if not {"model", "dummy"} & models[-1].keys():
            raise ConfigError(f"{whence}: each table of {AND!r} needs a model (or dummy)")
    return models


def _load(path: Path) -> JsonObject:
    """Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            content: object = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            content = _yaml(text)
        else:
            raise ConfigError(f"--config {path}: expected a file called .toml, .yaml or .yml")
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read ({error.strerror})") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, no YAML
        raise ConfigError(f"--config {path}: {error}") from None
    if content is None:  # an empty YAML
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected settings, each a name with its value")
    return content


def _yaml(text: str) -> object:
    """Raises ValueError, also for a key that is there twice."""
    import yaml  # here: most have none

    class Once(yaml.SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: object) -> object:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"{key.value} is there twice", key.start_mark)
                seen.add(str(key.value))
            return node

    try:
        return yaml.load(text, Once)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _fields(whence: str, table: JsonObject, classes: tuple[type[Config], ...]) -> JsonObject:
    """A table under the names of fields. Raises ConfigError for what is none of `classes`'."""
    known = {field.name for cls in classes for field in dataclasses.fields(cls)}
    fields: JsonObject = {}
    for key, value in table.items():
        name = str(key).replace("-", "_")
        if name not in known:
            if name in ServerConfig.__dataclass_fields__:
                raise ConfigError(f"{whence}: {key} is the whole server's. Put it at the top of the file.")
            hint = advice(f"--{name.replace('_', '-')}") or nearest(name, known).replace("_", "-")
            hint = hint or "deltic serve --help lists them"
            raise ConfigError(f"{whence}: {key} is not a setting of Deltic; {hint}")
        if name in fields:
            raise ConfigError(f"{whence}: {key} is there twice")
        fields[name] = value
    return fields
