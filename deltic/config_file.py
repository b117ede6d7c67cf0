"""A file of settings for `--config`: what the flags say, as TOML or YAML.

model = "Qwen/Qwen3.5-4B"
port = 8080
served-model-name = ["chat", "gpt-*"]

[[and]]                 # a further model, as behind --and
model = "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from deltic.commands.flags import advice
from deltic.config import ConfigError, EngineConfig, ModelConfig, ServerConfig, nearest

AND = "and"
"""The key of the list of further models."""


def read_config(path: Path) -> list[dict[str, Any]]:
    """The file's settings for each model, by the names of fields; the server's are with the first.

    Values are as the file has them. `config` is the file, for complaints.
    Raises ConfigError for a file that cannot be read, and for a key that is no setting.
    """
    return [table | {"config": path} for table in tables(f"--config {path}", _load(path))]


def tables(whence: str, top: dict[Any, Any]) -> list[dict[str, Any]]:
    """As `read_config`, of what the file holds. whence: for complaints. Raises ConfigError."""
    top = dict(top)
    further = top.pop(AND, [])
    if not isinstance(further, list) or not all(isinstance(table, dict) for table in further):
        raise ConfigError(f"{whence}: {AND!r} must be a list of tables, one for each further model")
    found = [_fields(whence, top, (EngineConfig, ModelConfig, ServerConfig))]
    for table in further:
        found.append(_fields(whence, table, (EngineConfig, ModelConfig)))
        if not {"model", "dummy"} & found[-1].keys():
            raise ConfigError(f"{whence}: each table of {AND!r} needs a model (or dummy)")
    return found


def _load(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            content: Any = tomllib.loads(text)
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


def _yaml(text: str) -> Any:
    """Raises ValueError, also for a key that is there twice."""
    import yaml  # here: most have none

    class Once(yaml.SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: Any) -> Any:
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


def _fields(whence: str, table: dict[Any, Any], classes: tuple[Any, ...]) -> dict[str, Any]:
    """A table under the names of fields. Raises ConfigError for what is none of `classes`'."""
    known = {field.name for cls in classes for field in dataclasses.fields(cls)}
    fields: dict[str, Any] = {}
    for key, value in table.items():
        name = str(key).replace("-", "_")
        if name not in known:
            if name in ServerConfig.__dataclass_fields__:
                raise ConfigError(f"{whence}: {key} is the whole server's; put it at the top of the file")
            hint = advice(f"--{name.replace('_', '-')}") or nearest(name, known).replace("_", "-")
            hint = hint or "deltic serve --help lists them"
            raise ConfigError(f"{whence}: {key} is not a setting of Deltic; {hint}")
        if name in fields:
            raise ConfigError(f"{whence}: {key} is there twice")
        fields[name] = value
    return fields
