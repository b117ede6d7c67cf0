"""Addresses: where the server listens, a port or a Unix socket, with TLS or without; and where it tells of
its cache, under which topics (host/kv_events.py does it).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltic.config import ConfigError, EngineConfig, MayPass, ServerConfig
from deltic.host.launch import EventSockets

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("deltic.server")

BACKLOG = 2048
"""Connections that may wait to be accepted."""

SOCKET_MODE = 0o660
"""Mode of a Unix socket: whoever may write to it may send requests."""

EVENTS_ADDRESS = r"tcp://(\*|[^\s:/@\[\]]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}|ipc://\S+"
"""Pattern of addresses of --kv-events, that ZeroMQ binds, and other machines or processes reach."""


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """The socket to accept from; a Unix socket's file is removed in the end. Raises ConfigError."""
    listener = listen(config)
    path = config.uds
    own = path.stat().st_ino if path is not None else None
    try:
        yield listener
    finally:
        listener.close()
        if path is not None:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == own:  # not another server's that came after it
                    path.unlink()


def listen(config: ServerConfig) -> socket.socket:
    """The socket of `uds`, or of `host` and `port`, which listens: a port that was only bound could be
    another's, too.

    Raises ConfigError.
    """
    if config.uds is not None:
        return _listen_on_path(config.uds)
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(error)(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}). Choose another --host or --port."
        ) from error
    return listener


def _listen_on_path(path: Path) -> socket.socket:
    """Raises ConfigError. The file of a server that has gone without removing it is replaced."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"--uds {path} exists and is no socket. Remove it, or choose another path.")
        if _is_answered(path):
            raise MayPass(f"--uds {path}: another server listens there. Choose another path.")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o777 & ~SOCKET_MODE)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or error
        raise _refusal(error)(f"cannot listen on --uds {path} ({why}). Choose another path.") from error
    finally:
        os.umask(before)
    return listener


def _refusal(error: OSError) -> type[ConfigError]:
    return MayPass if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else ConfigError


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # one that is not ours, or that does not accept at the moment
            return True
    return True


def listens_on_loopback(host: str) -> bool:
    """Returns whether every address that `host` names is a loopback address."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def check_transfer(config: ServerConfig, models: Sequence[EngineConfig]) -> None:
    """Raises ConfigError where anybody who reaches the server could put what they like into its cache."""
    is_guarded = config.api_key or config.api_key_file or config.uds or listens_on_loopback(config.host)
    if any(model.allow_cache_transfer for model in models) and not is_guarded:
        raise ConfigError(
            f"--allow-cache-transfer with --host {config.host}: an import decides what is answered to everybody. Give --api-key or "
            "--api-key-file, or listen on 127.0.0.1 or --uds."
        )


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Returns where clients find the server, for people."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    address, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{address}]" if ":" in address else address
    return f"{scheme}://{host}:{port}{config.root_path}"


def tls(config: ServerConfig) -> ssl.SSLContext | None:
    """The TLS context of connections, if they are secured. Raises ConfigError."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile")
        return None
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    load_certificates(context, config)
    return context


def load_certificates(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Has the connections that come from now on use what the files hold. Raises ConfigError; what was loaded
    before may be lost then.
    """
    import ssl

    assert config.ssl_certfile is not None
    keyfile = config.ssl_keyfile or config.ssl_certfile
    try:
        # An empty password is wrong for a key that has one; none would be asked for in the terminal.
        context.load_cert_chain(config.ssl_certfile, keyfile, lambda: config.ssl_keyfile_password or "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with the key in {keyfile} cannot be used ({_reason(error)}). Give PEM "
            "files that belong together, and --ssl-keyfile-password for a key that has one."
        ) from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used ({_reason(error)})") from error
        context.verify_mode = ssl.CERT_REQUIRED


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def event_sockets(config: ServerConfig, models: Sequence[EngineConfig]) -> EventSockets | None:
    """The addresses of --kv-events; None: nobody is told. Raises ConfigError for what no cache could tell."""
    publish, replay, topic = config.kv_events, config.kv_events_replay, config.kv_events_topic
    for flag, address in (("--kv-events", publish), ("--kv-events-replay", replay)):
        if address is not None and not re.fullmatch(EVENTS_ADDRESS, address):
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
