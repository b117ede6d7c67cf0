"""Addresses and names under which the cache is told of, by the settings (host/kv_events.py does it)."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Sequence

from deltic.config import ConfigError, EngineConfig, ServerConfig
from deltic.host.launch import EventSockets

log = logging.getLogger("deltic.server")

ADDRESS = r"tcp://(\*|[^\s:/@\[\]]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}|ipc://\S+"
"""Pattern of addresses that ZeroMQ binds, and other machines or processes reach."""


def event_sockets(config: ServerConfig, models: Sequence[EngineConfig]) -> EventSockets | None:
    """The addresses; None: nobody is told. Raises ConfigError for what no cache could tell."""
    publish, replay, topic = config.kv_events, config.kv_events_replay, config.kv_events_topic
    for flag, address in (("--kv-events", publish), ("--kv-events-replay", replay)):
        if address is not None and not re.fullmatch(ADDRESS, address):
            raise ConfigError(f"{flag} {address!r}: give tcp://HOST:PORT, or tcp://*:PORT for every interface")
    if replay is not None and publish in (None, replay):
        raise ConfigError("--kv-events-replay tells again what --kv-events told: give that, too, and another address")
    if topic != ServerConfig.kv_events_topic and publish is None:
        raise ConfigError("--kv-events-topic needs --kv-events.")
    for name in re.findall(r"{([^}]*)", topic):
        if name not in ("host", "port", "model"):
            raise ConfigError(f"--kv-events-topic {topic!r}: {{{name}}} is none of {{host}}, {{port}} and {{model}}")
    if publish is None:
        return None
    if not all(model.prefix_cache for model in models):
        raise ConfigError("--kv-events tells what the prefix cache holds: leave it out, or --no-prefix-cache")
    return EventSockets(publish, replay)


def topics(names: Sequence[str | None], config: ServerConfig, listener: socket.socket) -> list[str | None]:
    """Returns the topics with which the messages of each model begin. names: of the models, None for one that
    speaks: it tells nothing, since no router makes the rows of its prompts.

    Raises ConfigError where readers could not tell whose they are.
    """
    text, flag = config.kv_events_topic, "--kv-events-topic"
    telling = [name for name in names if name is not None]
    if not telling:
        raise ConfigError("--kv-events is for models that write, and this one speaks. Leave it out.")
    if len(telling) > 1 and "{model}" not in text:
        raise ConfigError(f"{flag} {text!r}: put {{model}} into it, since this server has {len(telling)} models")
    if config.uds is not None and ("{host}" in text or "{port}" in text):
        raise ConfigError(f"a server on --uds has no host and port. Give {flag} what readers know it by.")
    for name in telling:
        if "@" in name and text.startswith("kv@"):
            raise ConfigError(f"readers divide {flag} at '@'. Give {name!r} another --served-model-name.")
    if config.uds is None:
        host, port = listener.getsockname()[:2]
        host = socket.gethostname() if host in ("0.0.0.0", "::") else config.host
        text = text.replace("{host}", host).replace("{port}", str(port))
    result = [None if name is None else text.replace("{model}", name) for name in names]
    log.info("cache events at %s, topics: %s", config.kv_events, ", ".join(repr(t) for t in result if t is not None))
    return result
