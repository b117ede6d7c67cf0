"""Address where the server listens: a port or a Unix socket, with TLS or without."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltic.config import ConfigError, EngineConfig, MayPass, ServerConfig

if TYPE_CHECKING:
    import ssl

BACKLOG = 2048
"""Connections that may wait to be accepted."""

SOCKET_MODE = 0o660
"""Mode of a Unix socket: whoever may write to it may send requests."""


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
