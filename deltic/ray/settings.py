"""Settings of what a replica serves, under the names of `--config`, checked before a replica is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from deltic.config import ConfigError, EngineConfig, ModelConfig, ServerConfig
from deltic.config_sources import check_environment, resolve, tables

SECURING = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
LISTENING = ("host", "port", "uds", *SECURING, "root_path", "client_timeout_s")
KEEPING = ("batch_dir", "batch_disk_gb", "batch_in_flight")
ROUTED = ("kv_events", "kv_events_replay", "kv_events_topic", "drain_notice_s", "metrics_names")
OF_MODELS = {
    "allow_cache_transfer": "a replica has no address of its own to move a prefix to. Let replicas share a cache-dir.",
    "stages": "machines with further layers serve one engine, and would keep all other replicas waiting.",
}
"""Settings of a model that a replica cannot have, and why."""

Config = TypeVar("Config", EngineConfig, ServerConfig)


@dataclasses.dataclass(frozen=True)
class Settings:
    """A server's, and those of each of its models."""

    models: tuple[tuple[EngineConfig, ModelConfig], ...]
    server: ServerConfig

    def placed(self, n_cpus: float, n_gpus: float) -> Settings:
        """Places each model (see `placed`). Raises ConfigError."""
        models = tuple((placed(engine, n_cpus, n_gpus), about) for engine, about in self.models)
        return dataclasses.replace(self, models=models)


def settings(whence: str, given: Mapping[str, object]) -> Settings:
    """The settings of a table as `--config` has it, and of this process's DELTIC_ variables.

    whence: for complaints. Raises ConfigError, also for what a replica cannot have.
    """
    check_environment()
    per_model = tables(whence, dict(given))
    for name in per_model[0]:
        if name in LISTENING:
            flag = name.replace("_", "-")
            raise ConfigError(f"{whence}: {flag}: Ray Serve listens, and not the replica. Give it in http_options.")
        if name in KEEPING:
            raise ConfigError(
                f"{whence}: {name.replace('_', '-')}: a replica would keep files that the others do not know. "
                "Use deltic run --ray to answer a file on a cluster."
            )
        if name in ROUTED:
            raise ConfigError(
                f"{whence}: {name.replace('_', '-')} is for routers in front of servers, and here Ray routes"
            )
    for name in (name for table in per_model for name in table if name in OF_MODELS):
        raise ConfigError(f"{whence}: {name.replace('_', '-')}: {OF_MODELS[name]}")
    server = resolve(ServerConfig, {}, table=per_model[0])
    models = tuple(
        (_own(resolve(EngineConfig, {}, table=table)), resolve(ModelConfig, {}, table=table)) for table in per_model
    )
    return Settings(models, _own(server))


def _own(config: Config) -> Config:
    """Drops what a DELTIC_ variable may say for servers beside Ray."""
    fields = config.__dataclass_fields__
    names = (*LISTENING, *KEEPING, *ROUTED, *OF_MODELS)
    defaults: dict[str, Any] = {name: fields[name].default for name in names if name in fields}
    return dataclasses.replace(config, **defaults)


def placed(engine: EngineConfig, n_cpus: float, n_gpus: float) -> EngineConfig:
    """The engine on what its replica may use: all of its GPUs, or as many threads as it has CPUs, so that
    replicas of one machine leave each other's alone. Raises ConfigError where the settings want more.
    """
    if n_gpus:
        n = max(1, int(n_gpus))
        if engine.device == "cpu":
            raise ConfigError(f"device = 'cpu' with num_gpus={n_gpus:g}: leave one of them out")
        if n not in (1, 2, 4, 8) or (engine.tensor_parallel not in (1, n)):
            raise ConfigError(
                f"num_gpus={n_gpus:g} with tensor-parallel = {engine.tensor_parallel}: a replica runs its model on all of "
                "its GPUs, 1, 2, 4 or 8. Give num_gpus alone."
            )
        return dataclasses.replace(engine, device="cuda", tensor_parallel=n)
    if engine.device == "cuda" or engine.tensor_parallel > 1:
        raise ConfigError(f"a replica without a GPU: give num_gpus={engine.tensor_parallel}")
    if n_cpus < 1 or (engine.threads is not None and engine.threads > n_cpus):
        raise ConfigError(
            f"num_cpus={n_cpus:g}{'' if engine.threads is None else f' with threads = {engine.threads}'}: a replica "
            "computes on the CPUs that Ray gives it. Give num_cpus=1 or more."
        )
    return dataclasses.replace(engine, device="cpu", threads=engine.threads or int(n_cpus))
