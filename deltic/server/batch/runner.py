"""Batches: files of requests that are answered behind everybody else's, and go on after a restart.

A line is sent through the application itself, as a request of its key, so it means what it means online. It
has no HTTP connection, the last priority in the engine, and does not count as one of the requests that a key
may have open; its tokens count. Batches have at most half of each model's batch slots (`--batch-in-flight`).
Each key has one batch that runs, the others wait for it; keys share these batch slots.

An answer is appended to a file as it comes. Who reads these files again knows what is still to do, so nothing
else is kept while a batch runs, and a line that was under way when the process ended is sent once more.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine
from pathlib import Path

import msgspec
from msgspec import Raw
from starlette.types import ASGIApp

from deltic.batch_lines import BatchLine, ForeignFile, wait_s
from deltic.config import ServerConfig
from deltic.host.client import EngineClient, EngineFailed
from deltic.json_types import JsonObject
from deltic.server.batch.file_store import MIN_BYTES, Card, FileStore, append, unwritable, write_whole
from deltic.server.batch.lines import Find, Input, ask
from deltic.server.batch.record import UNFINISHED, BatchRecord, Results, line_error, result_line
from deltic.server.errors import ApiError
from deltic.server.limits import Account, Accounts

log = logging.getLogger("deltic.server")

MAX_BATCHES = 10_000
"""Batches of one key at most."""
AGAIN_S = 30.0
"""Seconds after which a batch that the disk or the engine stopped is tried again."""
ROOM_S = 2.0
"""Seconds between two looks of a batch that waits for room on the disk."""

BROKEN = "an error inside the server. Its log has more."

OURS = re.compile(r"batch_[0-9a-f]{24}")
"""Names of batches; files in their directory with other names are somebody else's."""


class BatchRunner:
    """The batches of one server, and the tasks that answer them."""

    app: ASGIApp
    """Answers the lines; set when it is made."""

    def __init__(self, config: ServerConfig, accounts: Accounts, files: FileStore, find: Find) -> None:
        """Raises OSError."""
        self.files = files
        self._config = config
        self._accounts = accounts
        self._find = find
        self._directory = files.directory / "batches"
        self._batches: dict[str, BatchRecord] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Task of each batch that has not ended."""
        self._turns: dict[str, asyncio.Lock] = {}
        """Lock of each key: one of its batches runs."""
        self._stops: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Event of each batch that has not ended: it is to be cancelled."""
        self._places: dict[EngineClient, asyncio.Semaphore] = {}
        self._n_written: Counter[str] = Counter()
        """Bytes in the results of those that are not finished."""
        self._load()

    def start(self) -> None:
        """Goes on with what the last process left. Call it in the event loop."""
        for batch in self._batches.values():
            is_ours = bool(self._accounts.named(batch.owner)) if self._accounts else not batch.owner
            if is_ours:
                self._take_up(batch)
            elif batch.status in UNFINISHED:
                whose = f"of the key {batch.owner!r}" if batch.owner else "of a server without keys"
                log.warning("batch %s is %s, and waits until one is started with that", batch.id, whose)

    async def stop(self) -> None:
        """Ends all that runs; it goes on when the next process starts."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Lets another process have the directory. Nothing may run any more."""
        self.files.close()

    def get(self, batch_id: str, owner: str) -> BatchRecord:
        """Raises ApiError (404)."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise ApiError(404, f"No batch found with id '{batch_id}'.", param="id", code="not_found")
        return batch

    def all(self, owner: str) -> list[BatchRecord]:
        """Returns the owner's batches, in the order in which they were made."""
        return [batch for batch in self._batches.values() if batch.owner == owner]

    def add(self, batch: BatchRecord) -> None:
        """Raises ApiError (409) when its key has too many, or the disk is full."""
        own, old = self.all(batch.owner), None
        if len(own) >= MAX_BATCHES:
            old = next((b for b in own if b.status not in UNFINISHED), None)
            if old is None:
                raise ApiError(409, f"{MAX_BATCHES} batches are not finished. Wait.", code="too_many_batches")
        try:
            self._save(batch)
        except OSError as error:
            raise unwritable("the batch", error) from None
        if old is not None:
            del self._batches[old.id]
            self._path(old, ".json").unlink(missing_ok=True)
        self._batches[batch.id] = batch
        self.files.in_use[batch.input_file_id] += 1
        self._take_up(batch)

    def cancel(self, batch: BatchRecord) -> None:
        """Ends it, with what it has.

        Raises ApiError (409) for one that has ended. Where that cannot be written it ends all the same,
        unless the process does first: the next one goes on with it.
        """
        if batch.status not in UNFINISHED:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise ApiError(409, message, code="batch_ended", headers={"x-should-retry": "false"})
        if batch.status in ("validating", "in_progress"):
            self._stops[batch.id].set()
            self._take_up(batch)
            try:
                self._enter(batch, "cancelling")
            except OSError as error:
                log.warning(
                    "batch %s is to end, which cannot be written (%s): it ends in this process only", batch.id, error
                )
                batch.status, batch.times = "cancelling", batch.times | {"cancelling_at": int(time.time())}

    def _take_up(self, batch: BatchRecord) -> None:
        if batch.status in UNFINISHED and batch.id not in self._tasks:
            if batch.status == "cancelling":
                self._stops[batch.id].set()
            task = self._tasks[batch.id] = asyncio.get_running_loop().create_task(self._run(batch))
            task.add_done_callback(lambda _: self._tasks.pop(batch.id))

    async def _run(self, batch: BatchRecord) -> None:
        """A batch to its end. What the disk or the engine stops is tried again."""
        while batch.status in UNFINISHED:
            try:
                if batch.status == "validating" and not self._stops[batch.id].is_set():
                    await self._check(batch)
                else:
                    await self._in_turn(batch)
            except (OSError, EngineFailed) as error:
                log.warning("batch %s cannot go on, and is tried again: %s", batch.id, error)
                await asyncio.sleep(AGAIN_S)
            except Exception:
                log.exception("batch %s cannot go on, and is tried again", batch.id)
                await asyncio.sleep(AGAIN_S)

    async def _check(self, batch: BatchRecord) -> None:
        """Reads the input file, after which the batch runs or has failed.

        Raises OSError when that cannot be written.
        """
        try:
            total, model, errors = await self.files.in_thread(batch.owner, self._input(batch).check)
        except OSError as error:
            total, model, errors = 0, None, [line_error(None, "file_unreadable", str(error))]
        except Exception:
            log.exception("batch %s", batch.id)
            total, model, errors = 0, None, [line_error(None, "server_error", BROKEN)]
        if batch.status != "validating" or self._stops[batch.id].is_set():
            return
        batch.total, batch.model, batch.errors = total, model, errors
        if errors:
            self._end(batch, "failed")
        else:
            self._enter(batch, "in_progress")

    def _input(self, batch: BatchRecord) -> Input:
        path = self.files.path(batch.input_file_id)
        return Input(path, batch.endpoint, self._config.body_mb(pictures=True), self._find)

    async def _in_turn(self, batch: BatchRecord) -> None:
        """Works on a batch when no other one of its key runs.

        One that is cancelled has nothing to wait for.
        """
        turn = self._turns.setdefault(batch.owner, asyncio.Lock())
        has_turn = await self._unless_cancelled(batch, turn.acquire())
        try:
            if batch.final is None:
                await self._work(batch)
            await self._publish(batch)
        except (OSError, EngineFailed):
            raise
        except Exception as error:
            if batch.final is not None:  # it can only be tried again
                raise
            self._finish(batch, "failed", self._reason(batch, error))
        finally:
            if has_turn:
                turn.release()

    def _reason(self, batch: BatchRecord, error: Exception) -> JsonObject:
        """Entry of `errors` for what ended a batch."""
        if isinstance(error, ForeignFile):
            return line_error(None, "damaged", f"what was kept of its results is damaged: {error}")
        if isinstance(error, ApiError):  # its model is not there any more
            return line_error(None, error.code or "invalid_request", error.message)
        log.error("batch %s", batch.id, exc_info=error)
        return line_error(None, "server_error", BROKEN)

    async def _unless_cancelled(
        self, batch: BatchRecord, work: Coroutine[object, None, object], timeout_s: float | None = None
    ) -> bool:
        """Returns whether `work` came to its end before the batch was cancelled, and in time; it is ended
        then.

        Raises what it does.
        """
        tasks = working, _ = [asyncio.create_task(c) for c in (work, self._stops[batch.id].wait())]
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, batch: BatchRecord) -> None:
        """Answers what is left of a batch."""
        stop = self._stops[batch.id]
        results = await self.files.in_thread(batch.owner, Results, self._path(batch, ".out"), self._path(batch, ".err"))
        try:
            self._note(batch, results)
            if results.done:
                log.info("batch %s goes on: %s", batch.id, batch.counts)
            is_whole = batch.status == "finalizing"
            if batch.status == "in_progress" and not stop.is_set():
                left_s = max(0.0, batch.expires_at - time.time())
                is_whole = await self._unless_cancelled(batch, self._feed(batch, results), left_s)
            if not is_whole:
                await self._settle(batch, results, expired=not stop.is_set())
        finally:
            await self.files.in_thread(batch.owner, results.close)
        self._finish(batch, "cancelled" if stop.is_set() else "completed" if is_whole else "expired")

    def _finish(self, batch: BatchRecord, status: str, error: JsonObject | None = None) -> None:
        """Ends the work on a batch: nothing more is done for its lines."""
        errors = batch.errors if error is None else [error]
        now = "cancelling" if batch.status == "cancelling" else "finalizing"
        self._enter(batch, now, final=status, errors=errors)

    async def _feed(self, batch: BatchRecord, results: Results) -> None:
        """Has every line answered that is not; raises what a line's task does."""
        _, client = self._find(batch.model)
        account = self._accounts.named(batch.owner)
        info = await client.ready()
        n = self._config.batch_in_flight or max(1, info.max_num_seqs // 2)
        places = self._places.setdefault(client, asyncio.Semaphore(n))
        own = asyncio.Semaphore(n)
        left = self._input(batch).left(results.done)

        async def one(job: BatchLine) -> None:
            try:
                await self._answer(batch, results, job, account, places)
            finally:
                own.release()

        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await own.acquire()
                    await self._wait_for_room(batch)
                    job: BatchLine | None = await self.files.in_thread(batch.owner, next, left, None)
                    if job is None:
                        break
                    group.create_task(one(job))
        except* OSError as failures:
            raise failures.exceptions[0] from None

    async def _wait_for_room(self, batch: BatchRecord) -> None:
        is_told = False
        while not self.files.has_room(batch.owner):
            self.files.sweep(now=True)
            if not is_told:
                log.warning("batch %s waits for room in --batch-dir (--batch-disk-gb)", batch.id)
                is_told = True
            await asyncio.sleep(ROOM_S)

    async def _answer(
        self, batch: BatchRecord, results: Results, job: BatchLine, account: Account | None, places: asyncio.Semaphore
    ) -> None:
        n_tries = 0
        while True:
            n_tries += 1
            async with places:
                status, headers, body = await ask(self.app, job, account)
            wait = wait_s(status, headers, n_tries)
            if wait is None:
                break
            n_tries -= status in (429, 503)
            await asyncio.sleep(wait)
        if b"\n" in body:
            body = msgspec.json.format(body, indent=-1)
        response = {"status_code": status, "request_id": headers.get("x-request-id"), "body": Raw(body)}
        line = result_line(job, response, None)
        is_good = status < 400
        await self.files.in_thread(batch.owner, append, results.out if is_good else results.err, line)
        if is_good:
            batch.completed += 1
            batch.usage.add(body)
        else:
            batch.failed += 1
        self._count_written(batch, len(line))

    async def _settle(self, batch: BatchRecord, results: Results, *, expired: bool) -> None:
        """Counts what was written, after lines were ended on their way. expired: those without an answer get
        an error each.
        """

        def settle() -> None:
            results.read()
            message = "This request could not be executed before the completion window expired."
            for job in self._input(batch).left(results.done) if expired else ():
                append(results.err, result_line(job, None, {"code": "batch_expired", "message": message}))
            results.read()

        await self.files.in_thread(batch.owner, settle)
        self._note(batch, results)

    def _note(self, batch: BatchRecord, results: Results) -> None:
        """Takes over what the results' files hold."""
        batch.completed, batch.failed, batch.usage = results.n_out, results.n_err, results.usage
        self._count_written(batch, results.n_bytes - self._n_written[batch.id])

    async def _publish(self, batch: BatchRecord) -> None:
        """Makes files of the results, and ends the batch."""
        for suffix, field, name in ((".out", "output_file_id", "output"), (".err", "error_file_id", "error")):
            path = self._path(batch, suffix)
            n_bytes = path.stat().st_size if path.exists() else 0
            if not n_bytes:
                path.unlink(missing_ok=True)
                continue
            now = int(time.time())
            card = Card(
                id=getattr(batch, field) or f"file-{secrets.token_hex(12)}",
                owner=batch.owner,
                bytes=n_bytes,
                created_at=now,
                expires_at=now + batch.output_s,
                filename=f"{batch.id}_{name}.jsonl",
                purpose="batch_output",
            )
            setattr(batch, field, card.id)
            self._save(batch)  # its id first: who comes after a crash finds the file by it
            await self.files.add(path, card)
            self.files.count(batch.owner, max(MIN_BYTES, n_bytes))
        self.files.count(batch.owner, -self._n_written.pop(batch.id, 0))
        self._end(batch, batch.final or "completed")

    def _count_written(self, batch: BatchRecord, n_bytes: int) -> None:
        self._n_written[batch.id] += n_bytes
        self.files.count(batch.owner, n_bytes)

    def _enter(self, batch: BatchRecord, status: str, **changes: object) -> None:
        """Raises OSError; the batch is as before then, and so the same step is taken again."""
        changes |= {"status": status, "times": batch.times | {f"{status}_at": int(time.time())}}
        self._save(msgspec.structs.replace(batch, **changes))
        for name, value in changes.items():
            setattr(batch, name, value)

    def _end(self, batch: BatchRecord, status: str) -> None:
        self._enter(batch, status)
        self._stops.pop(batch.id, None)
        self.files.in_use[batch.input_file_id] -= 1
        log.info("batch %s %s: %s", batch.id, status, batch.counts)

    def _path(self, batch: BatchRecord, suffix: str) -> Path:
        return self._directory / (batch.id + suffix)

    def _save(self, batch: BatchRecord) -> None:
        write_whole(self._path(batch, ".json"), msgspec.json.encode(batch))

    def _load(self) -> None:
        batches = []
        for path in self._directory.glob("*.json"):
            if not OURS.fullmatch(path.stem):
                continue
            try:
                batch = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
            except msgspec.DecodeError:
                batch = None
            if batch is not None and batch.id == path.stem:
                batches.append(batch)
            else:
                log.warning("%s is no batch, and is left alone", path)
        for batch in sorted(batches, key=lambda batch: batch.created_at):
            self._batches[batch.id] = batch
            self.files.in_use[batch.input_file_id] += batch.status in UNFINISHED
