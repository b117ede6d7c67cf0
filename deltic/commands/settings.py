"""The settings that a command line and the file of --config make.

All raise ConfigError, before anything heavy is imported.
"""

from __future__ import annotations

import argparse

from deltic.config import Config, ConfigError, EngineConfig
from deltic.config_sources import config_file, read_config, resolve
from deltic.json_types import JsonObject


def given(arguments: argparse.Namespace | None, config_class: type[Config]) -> dict[str, object]:
    """The settings of `config_class` that were on the command line."""
    words = vars(arguments) if arguments else {}
    return {name: value for name, value in words.items() if name in config_class.__dataclass_fields__}


def engine(arguments: argparse.Namespace) -> EngineConfig:
    """An engine's, without a file."""
    return resolve(EngineConfig, given(arguments, EngineConfig))


def tables(arguments: argparse.Namespace) -> list[JsonObject]:
    """The settings that the file of --config has for each model. The first also has the server's."""
    path = config_file(vars(arguments).get("config"))
    return [{}] if path is None else read_config(path)


def planned(arguments: argparse.Namespace) -> EngineConfig:
    """The one engine that `deltic plan` is about."""
    table, *others = tables(arguments)
    if others:
        raise ConfigError("deltic plan is about one model, and the file of --config has several. Give it one's flags.")
    return resolve(EngineConfig, given(arguments, EngineConfig), table=table)


def server_arguments(arguments: argparse.Namespace) -> list[str]:
    """Arguments of `deltic serve` for a server child; none with --url.

    The settings are checked here, before it starts.
    """
    from deltic.commands.endpoint import Endpoint

    if arguments.url:
        # It refuses what is no address, and no file, before anything is opened.
        Endpoint(arguments.url, arguments.api_key, arguments.cacert)
        named = [
            name for name, value in given(arguments, EngineConfig).items() if value is not None and name != "model"
        ]
        if named:
            raise ConfigError(f"--url names a running server: {', '.join(sorted(named))} cannot be set from here")
        return []
    if arguments.cacert is not None:
        raise ConfigError("--cacert is for a running server. Name it with --url https://...")
    return own_arguments(arguments)


def own_arguments(arguments: argparse.Namespace) -> list[str]:
    """The same for a command that always starts a server, which has no --url."""
    from deltic.commands.endpoint import flags

    named = {name: value for name, value in given(arguments, EngineConfig).items() if value is not None}
    resolve(EngineConfig, named)
    model = [str(named.pop("model"))] if "model" in named else []
    return [*model, *flags(EngineConfig, named)]
