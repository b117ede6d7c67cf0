"""Models of the hub are downloaded before anything else of the server starts, visibly, and until a signal
comes. Meanwhile a server on the same socket tells how far it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from deltic.config import EngineConfig, ServerConfig
from deltic.logs import printable
from deltic.models.checkpoint import ALL_FILES, TEXT_FILES
from deltic.models.fields import CheckpointError
from deltic.models.gguf import chosen, models_among
from deltic.models.hub import Download, DownloadFailed, Outcome, Part, Progress, is_hub_name, told_of, wanted_of
from deltic.server.address import url_of
from deltic.server.local_models import cache_folder, towers_of

if TYPE_CHECKING:
    import ssl

    from rich.progress import TaskID

    from deltic.server.meanwhile import Meanwhile

log = logging.getLogger("deltic.server")

PROGRAM = (sys.executable, "-m", "deltic.models.hub")

LINE_EVERY_S = 5.0
"""Seconds between the lines of the log, where there is no terminal."""

ENDING_S = 2.0
"""Seconds that a download that was told to end may take to do so."""

MAX_NAMED = 3
"""Files in a line of the log."""

MAX_LINE_BYTES = 1 << 20

Show = Callable[[Progress], None]
Tell = Callable[[str, Progress], None]


class Expected(NamedTuple):
    """A file of a download."""

    name: str
    n_bytes: int
    n_here: int
    """Bytes of it that the cache has."""


def expected(wanted: Download) -> list[Expected]:
    """Asks the hub for the files of a download, and looks how much of them is in the cache. [] where the hub
    tells nothing: `fetched` then finds them in the cache, or says why not.

    Raises CheckpointError for a choice among GGUF files that is none.
    """
    name, _, what = wanted.name.partition(":")
    try:
        told = told_of(name, wanted.revision)
    except Exception:
        return []
    files = {file.rfilename: file for file in told.siblings or () if file.size is not None}
    picked = [path for path in files if any(fnmatch(path, pattern) for pattern in wanted.files)]
    if what or (models_among(files) and not any(path.endswith(".safetensors") for path in picked)):
        picked = chosen(name, files, what)
        picked += towers_of(picked[0], files)
    folder = cache_folder(Path(wanted.directory) if wanted.directory else None) / f"models--{name.replace('/', '--')}"
    found = []
    for path in picked:
        large = files[path].lfs
        blob = folder / "blobs" / str(large.sha256 if large else files[path].blob_id)
        places = (folder / "snapshots" / str(told.sha) / path, blob, blob.with_name(f"{blob.name}.incomplete"))
        here = next((place.stat().st_size for place in places if place.is_file()), 0)
        found.append(Expected(path, files[path].size or 0, here))
    return found


def _nobody(name: str, progress: Progress) -> None:
    """Hears of progress."""


async def fetch_all(
    models: Sequence[EngineConfig],
    stop: asyncio.Event,
    server: ServerConfig,
    listener: socket.socket,
    secured: ssl.SSLContext | None,
) -> list[EngineConfig] | None:
    """Fetches the files of all models (see `fetched`); the server tells on its socket how far it is, if that
    takes longer.

    Raises CheckpointError, ConfigError, OSError.
    """
    meanwhile: Meanwhile | None = None

    def tell(name: str, progress: Progress) -> None:
        nonlocal meanwhile
        if meanwhile is None:
            from deltic.server.meanwhile import Meanwhile  # no engine waits for its imports

            meanwhile = Meanwhile(server, listener, secured)
            log.info("listening on %s (its page shows how far the download is)", url_of(listener, server))
        meanwhile.stage = f"downloading {name}"
        meanwhile.done = min(1.0, progress.done_bytes / progress.total_bytes) if progress.total_bytes else 0.0

    configs = []
    try:
        for config in models:
            directories = await fetched(config, stop, tell)
            if directories is None:
                return None
            configs.append(directories)
        return configs
    finally:
        if meanwhile is not None:
            await meanwhile.stop()


async def fetched(config: EngineConfig, stop: asyncio.Event, tell: Tell = _nobody) -> EngineConfig | None:
    """The settings with directories for the hub names in them, whose files are there then; None: `stop` was
    set before.

    So nothing asks the network later, and all processes read the same commit. Raises CheckpointError,
    OSError.
    """
    asked = [("tokenizer", config.tokenizer, TEXT_FILES), ("draft_model", config.draft_model, ALL_FILES)]
    if config.dummy is None:
        asked.insert(0, ("model", config.model, ALL_FILES))
    for field, name, files in asked:
        if name is None or not is_hub_name(name):
            continue
        revision = config.revision if field == "model" else None
        path = await _fetch(wanted_of(name, files, revision, config.download_dir), stop, tell)
        if path is None:
            return None
        changes: dict[str, Any] = {field: str(path)} | ({"revision": None} if field == "model" else {})
        config = dataclasses.replace(config, **changes)
    return config


async def _fetch(wanted: Download, stop: asyncio.Event, tell: Tell) -> Path | None:
    """The directory; None: `stop` was set before. Raises CheckpointError, OSError."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        msgspec.json.encode(wanted).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the server
        env={"HF_HUB_VERBOSITY": "error", **os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        limit=MAX_LINE_BYTES,
    )
    assert process.stdin and process.stdout
    with _shown(wanted.name) as show:

        def note(progress: Progress) -> None:
            show(progress)
            tell(wanted.name, progress)

        reading = asyncio.create_task(_read(process.stdout, wanted.name, note))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            for task in (reading, stopping):
                task.cancel()
            await asyncio.gather(reading, stopping, return_exceptions=True)
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), ENDING_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _read(lines: asyncio.StreamReader, name: str, show: Show) -> Path:
    """Raises CheckpointError."""
    decoder = msgspec.json.Decoder(Progress | Outcome)
    async for line in lines:
        try:
            message = decoder.decode(line)
        except msgspec.DecodeError:
            continue  # what a library has printed
        if isinstance(message, Progress):
            show(message)
        elif message.directory is not None:
            return Path(message.directory)
        else:
            raise (DownloadFailed if message.may_pass else CheckpointError)(str(message.error))
    raise DownloadFailed(f"{name}: the download ended without a word. Start again.")


@contextlib.contextmanager
def _shown(name: str) -> Iterator[Show]:
    """Takes progress, for bars in a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield _lines(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        shown: dict[tuple[str, int], TaskID] = {}

        def draw(state: Progress) -> None:
            rows = {(f"downloading {name}", state.total_bytes): state.done_bytes}
            for file in state.files:
                text, done = _at(file)
                rows[f"  {text}", file.total_bytes] = done
            for gone in shown.keys() - rows.keys():
                bars.remove_task(shown.pop(gone))
            for (text, total), done in rows.items():
                if (text, total) not in shown:  # with what has come before, which is none of the speed
                    shown[text, total] = bars.add_task(text, total=total or None, completed=done)
                bars.update(shown[text, total], completed=done)

        yield draw


def _at(file: Part) -> tuple[str, int]:
    """Returns what is done with a file, in few words, and how many bytes have come of that."""
    name = printable(file.name)
    return (f"checking {name}", file.checked_bytes) if file.stage == "checking" else (name, file.done_bytes)


def _lines(name: str) -> Show:
    """Writes a line of the log every few seconds."""
    last_s, last_bytes = float("-inf"), -1

    def log_line(progress: Progress) -> None:
        nonlocal last_s, last_bytes
        now_s = time.monotonic()
        if now_s - last_s < LINE_EVERY_S:
            return
        unit, scale = ("GB", 1e9) if progress.total_bytes >= 1e9 else ("MB", 1e6)
        of = f" of {progress.total_bytes / scale:.2f}" if progress.total_bytes else ""
        line = f"{progress.done_bytes / scale:.2f}{of} {unit}"
        if last_bytes >= 0:
            line += f", {max(0, progress.done_bytes - last_bytes) / (now_s - last_s) / 1e6:.1f} MB/s"
        at = [(*_at(file), max(1, file.total_bytes)) for file in progress.files]
        files = [f"{text} {done / total:.0%}" for text, done, total in at]
        if len(files) > MAX_NAMED:
            files[MAX_NAMED:] = [f"{len(files) - MAX_NAMED} more"]
        log.info("downloading %s: %s", name, "; ".join([line, *files]))
        last_s, last_bytes = now_s, progress.done_bytes if progress.total_bytes else -1

    return log_line
