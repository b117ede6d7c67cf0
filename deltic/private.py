"""Directories whose files are believed: weights, prefixes and voices that an earlier run has kept."""

from __future__ import annotations

import os
from pathlib import Path

from deltic.config import ConfigError


def is_ours(uid: int) -> bool:
    """Returns whether a file of this owner is as good as this user's own."""
    return uid in (os.geteuid(), 0)


def make_private(flag: str, directory: Path) -> None:
    """Makes a directory for this user alone, unless it is there. flag: of the setting that names it.

    Raises ConfigError when others own it or may write to it, so that its files may be anybody's; OSError when
    it cannot be made.
    """
    directory.mkdir(0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if not is_ours(status.st_uid):
        why = f"belongs to user {status.st_uid}, and this server runs as {os.geteuid()}"
    elif status.st_mode & 0o022:
        why = f"is writable for others (mode {status.st_mode & 0o7777:04o})"
    else:
        return
    raise ConfigError(
        f"{flag} {directory}: {why}, and what is found there is believed. Name a directory below it that is not there yet, which "
        "is made for this user alone, or empty this one and make it this user's: chown, chmod go-w."
    )
