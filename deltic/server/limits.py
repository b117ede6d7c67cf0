"""API keys with their limits and rights, and a ticket for every request: its account, usage and deadline.

Two limits for each key. Requests at once: one more is refused. Tokens a minute, prompt and answer: a bucket
that holds a minute's worth and fills evenly. A request is admitted while the bucket is not empty, since the
length of its answer is unknown. Tokens beyond the bucket become a debt, which is paid off before the next
request. So a long prompt is never impossible, and over time a key gets exactly its rate.

Keys with names are namespaces that do not trust each other. None finds another's prefixes in the cache, and
only administrators see figures of all of them. A key without a name is the operator's.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from deltic.config import ConfigError, ServerConfig
from deltic.engine.turns import share_of
from deltic.json_types import JsonObject
from deltic.logs import counted
from deltic.server.errors import RETRY_LATER, ApiError
from deltic.server.fair_thread import FairThread
from deltic.server.metrics import KeyNumbers
from deltic.server.room import Held

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
PLACE = re.compile(r"key-\d+")
"""Names for keys without one."""

Limit = Annotated[int, Meta(ge=0)]

INLINE_BYTES = 8192
"""A body up to this size is parsed and tokenised in the event loop; a larger one in a thread beside it, and
counts as one that its key has in memory.
"""

LARGE_BYTES = 1_000_000
"""Bytes of a body and its answer from which on memory is given back after the request."""


class Usage(Struct):
    """Token counts of one HTTP request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    timing: dict[str, float] = {}
    """Milliseconds of each part of its time."""
    n_drafted: int = 0
    """Tokens that were guessed ahead for it."""
    n_accepted: int = 0
    """Number of drafted tokens that were drawn, too."""

    def told_timing(self) -> dict[str, float]:
        """Returns the request's time, and what drafts saved of it, if there were any."""
        drafts = {"drafted_tokens": self.n_drafted, "accepted_tokens": self.n_accepted}
        return self.timing | (drafts if self.n_drafted else {})

    def timings(self) -> dict[str, float]:
        """llama.cpp's form of the same."""
        n_prompt = self.prompt_tokens - self.cached_tokens
        fields: dict[str, float] = {"cache_n": self.cached_tokens}
        for name, n, ms in (
            ("prompt", n_prompt, self.timing["prefill_ms"]),
            ("predicted", self.completion_tokens, self.timing["decode_ms"]),
        ):
            fields |= {f"{name}_n": n, f"{name}_ms": ms, f"{name}_per_token_ms": ms / max(1, n)}
            fields[f"{name}_per_second"] = n / ms * 1e3 if ms else 0.0
        return fields | ({"draft_n": self.n_drafted, "draft_n_accepted": self.n_accepted} if self.n_drafted else {})

    def plain(self) -> JsonObject:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "timing": self.told_timing(),
        }


class KeyEntry(Struct, forbid_unknown_fields=True):
    """Table of `--api-key-file`, whose name is the key's. Limits: None is the default, 0 none."""

    key: str
    max_concurrent: Limit | None = None
    tokens_per_minute: Limit | None = None
    admin: bool | None = None
    """True if the key may see and change what all keys share; None: where it is the only name."""


class Account:
    """The usage and limits of one name. Keys of one name share it."""

    def __init__(
        self, name: str, max_concurrent: int, tokens_per_minute: int, *, is_admin: bool = True, namespace: str = ""
    ) -> None:
        """namespace: accounts of one namespace find each other's prefixes in the cache. The others: of
        `allow`."""
        self.name = name
        self.namespace = namespace
        self.numbers = KeyNumbers(name)
        self._tokens_per_minute, self._level = 0, 0.0
        self._filled_at_s = time.monotonic()
        self.allow(max_concurrent, tokens_per_minute, is_admin)

    def allow(self, max_concurrent: int, tokens_per_minute: int, is_admin: bool) -> None:
        """Sets its limits, 0 for none, and whether it may see and change what all keys share."""
        self.is_admin = is_admin
        self._max_concurrent = max_concurrent
        if tokens_per_minute != self._tokens_per_minute:
            self._tokens_per_minute, self._level = tokens_per_minute, float(tokens_per_minute)

    def enter(self, *, generates: bool = True) -> None:
        """Counts one more open request. generates: it takes tokens. Raises ApiError (429)."""
        numbers, most = self.numbers, self._max_concurrent
        if most and numbers.n_open >= most:
            raise self._refusal("requests", f"has {counted(most, 'request')} open, as many as it may", 1)
        if generates:
            self.check_tokens()
        numbers.n_open += 1

    def check_tokens(self) -> None:
        """Raises ApiError (429) while none are left."""
        if self._tokens_per_minute and self._fill() <= 0:
            wait_s = math.ceil((1 - self._level) * 60 / self._tokens_per_minute)
            raise self._refusal("tokens", f"has used up its {self._tokens_per_minute} tokens a minute", wait_s)

    def leave(self) -> None:
        self.numbers.n_open -= 1

    def take(self, n_tokens: int) -> None:
        self._level -= n_tokens

    def _fill(self) -> float:
        now_s = time.monotonic()
        gained = (now_s - self._filled_at_s) * self._tokens_per_minute / 60
        self._level, self._filled_at_s = min(self._tokens_per_minute, self._level + gained), now_s
        return self._level

    def _refusal(self, limit: str, why: str, wait_s: int) -> ApiError:
        self.numbers.limited[limit] += 1
        message = f"key {self.name!r} {why}. Try again in {wait_s} s."
        return ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(wait_s)})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The limits and what is left of them, under OpenAI's names; "requests" are those at once."""
        fields: dict[str, object] = {}
        if most := self._max_concurrent:
            fields |= {"limit-requests": most, "remaining-requests": max(0, most - self.numbers.n_open)}
        if rate := self._tokens_per_minute:
            level = self._fill()
            fields |= {"limit-tokens": rate, "remaining-tokens": max(0, int(level))}
            fields["reset-tokens"] = f"{(rate - level) * 60 / rate:.1f}s"
        return [(f"x-ratelimit-{name}".encode(), str(value).encode()) for name, value in fields.items()]


RATE_HEADERS = [
    f"x-ratelimit-{name}"
    for name in ("limit-requests", "remaining-requests", "limit-tokens", "remaining-tokens", "reset-tokens")
]


class Ticket:
    """Record of one HTTP request on its way through the server.

    Made by the Envelope, under TICKET in the request's scope.
    """

    def __init__(
        self,
        config: ServerConfig | None = None,
        *,
        is_batch: bool = False,
        labels: dict[str, str] | None = None,
        worker: FairThread | None = None,
    ) -> None:
        """config: says how long it may take, and wait. is_batch: a line of a batch, which waits behind all
        others, and is ended with its batch's window only: others may take its place from it again and again.
        labels: what its client, or a router, calls it, for logs and traces. worker: counts its body.
        """
        self._worker = worker
        self.labels = labels or {}
        config = config or ServerConfig()
        timeout_s = 0.0 if is_batch else config.request_timeout_s
        self.queue_timeout_s = 0.0 if is_batch else config.queue_timeout_s
        self.is_batch = is_batch
        self.started_s = time.monotonic()
        self.account: Account | None = None
        """Account of the key that the request came with; None without keys, and on routes that need none."""
        self.model = ""
        """The model's name, where the server has several models."""
        self.usage: Usage | None = None
        """The token usage of its answer, once that has ended in any way."""
        self.first_s: float | None = None
        """time.monotonic() of its first token."""
        self.body = bytearray()
        """The request's body, if the log is to contain it."""
        self.notes: dict[str, str] = {}
        """Notes that the log adds: what was made of a wish that could not be met to the letter."""
        self.held: Held | None = None
        """Share that the request's pictures have of the room for pixels; the engine leaves it, too."""
        self.leave_model: Callable[[], None] | None = None
        """Lets the request's model be unloaded; None: it always stays."""
        self._deadline_s = self.started_s + timeout_s if timeout_s else None
        self._is_open = False

    @property
    def tenant(self) -> str:
        """The name of the request's key, or "": what keys share is divided by it, and taken in turns."""
        return self.account.name if self.account else ""

    @property
    def turns(self) -> str:
        """The queue in whose turns it runs, here and in the engine: its key's, or that of its key's batches.

        A batch costs its key no turns.
        """
        return f"{self.tenant}/batches" if self.is_batch else self.tenant

    @property
    def namespace(self) -> str:
        """The namespace among whose requests prefixes in the cache are shared."""
        return self.account.namespace if self.account else ""

    def left_s(self) -> float | None:
        """Seconds until it must have ended; None for any number."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def enter(self, *, generates: bool = True) -> None:
        """Admits the request under its key's limits, unless that was done before. Raises ApiError (429)."""
        if self.account and self.is_batch:
            self.account.check_tokens()
        elif self.account and not self._is_open:
            self.account.enter(generates=generates)
            self._is_open = True

    def hold_body(self, size: int) -> None:
        """Counts so many bytes as what it has of its body by now. Raises ApiError (429): its key has too much
        beside.
        """
        if self._worker and size > INLINE_BYTES and not self._worker.hold(self.turns, self, size):
            message = "too many large requests wait to be read. Try again in a few seconds."
            raise ApiError(429, message, code="too_many_large_requests", headers=RETRY_LATER)

    def drop_body(self) -> None:
        """Drops the body, which was read, or is given up."""
        if self._worker:
            self._worker.leave(self.turns, self)

    def take(self, n_tokens: int) -> None:
        """Counts tokens of its prompt or answer."""
        if self.account:
            self.account.take(n_tokens)

    def end(self, status: int) -> None:
        """Ends the request, which was answered with `status`."""
        self.drop_body()
        if self.held is not None:
            self.held.leave()
        if self.leave_model is not None:
            self.leave_model()
        if self.account:
            if self._is_open:
                self.account.leave()
            numbers = self.account.numbers
            numbers.responses[status] += 1
            if self.usage:
                numbers.n_prompt_tokens += self.usage.prompt_tokens
                numbers.n_cached_tokens += self.usage.cached_tokens
                numbers.n_generated_tokens += self.usage.completion_tokens


TICKET = "deltic.ticket"
ASKING: ContextVar[Ticket] = ContextVar("ticket")
"""Ticket that the work at hand belongs to, for what lies too deep to be told: see `asking`."""


def asking() -> Ticket:
    """The ticket of the request that is worked on, in the event loop or a thread of ours; else that of
    nobody.
    """
    return ASKING.get(None) or Ticket()


BATCH = "deltic.batch"
"""Key in the scope of a line of a batch: the Account of its key, None without keys.

No HTTP connection's scope has it.
"""

BATCH_PRIORITY = 2**31 - 1
"""The engine's priority of a batch's line: behind all others."""


class Accounts:
    """Accounts of all API keys.

    Of each only a digest is kept: looking one up takes the same time however much of it is right.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for keys that cannot be meant, without printing any."""
        self._config = config
        self._accounts: dict[str, Account] = {}
        self._of_digest: dict[bytes, str] = {}
        self._numbers: list[KeyNumbers] = []
        self.read()

    def read(self) -> None:
        """Reads the keys, again if they were read before: a name that stays keeps what it has used.

        Raises ConfigError, and changes nothing then.
        """
        config = self._config
        # The file first: its limits hold for a name that is given in both.
        entries = [*_in_file(config), *_given(config.api_key)]
        is_only = len({name for name, _, _ in entries}) == 1
        if not entries and (config.max_concurrent_per_key or config.tokens_per_minute_per_key):
            raise ConfigError(
                "--max-concurrent-per-key and --tokens-per-minute-per-key need --api-key or --api-key-file"
            )
        accounts: dict[str, tuple[str, int, int, bool]] = {}
        of_digest: dict[bytes, str] = {}
        for name, namespace, entry in entries:
            if namespace and PLACE.fullmatch(name):
                raise ConfigError(f"API key {name!r}: keys without a name are called so. Give it another.")
            limits = (
                config.max_concurrent_per_key if entry.max_concurrent is None else entry.max_concurrent,
                config.tokens_per_minute_per_key if entry.tokens_per_minute is None else entry.tokens_per_minute,
            )
            is_admin = is_only if entry.admin is None else entry.admin
            accounts.setdefault(name, ("" if config.share_cache else namespace, *limits, is_admin))
            if of_digest.setdefault(_digest(entry.key.strip().encode()), name) != name:
                raise ConfigError(f"API key {name!r} is also the key of another name. Give each its own.")
        before, self._accounts, self._of_digest = self._accounts, {}, of_digest
        for name, (namespace, most, rate, is_admin) in accounts.items():
            account = before.get(name) or Account(name, most, rate, is_admin=is_admin, namespace=namespace)
            account.allow(most, rate, is_admin)
            self._accounts[name] = account
        self._numbers[:] = [account.numbers for account in self._accounts.values()]

    def __bool__(self) -> bool:
        return bool(self._accounts)

    @property
    def n_tenants(self) -> int:
        """Number of tenants among whom what is shared out is divided; without keys everybody is one."""
        return max(1, len(self._accounts))

    def share(self, most: int) -> int:
        """Returns what each tenant may have of `most`, and nobody can take from it."""
        return share_of(most, self.n_tenants)

    def find(self, key: bytes) -> Account | None:
        name = self._of_digest.get(_digest(key))
        return None if name is None else self._accounts[name]

    def named(self, name: str) -> Account | None:
        return self._accounts.get(name)

    def numbers(self) -> list[KeyNumbers]:
        """Numbers of every account: a list that stays up to date."""
        return self._numbers


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _given(values: Iterable[str]) -> Iterable[tuple[str, str, KeyEntry]]:
    """The entries of `--api-key` with name and namespace.

    An entry is NAME=KEY, or KEY alone: that is the operator's and is named by its place.
    """
    for place, value in enumerate(values, 1):
        name, separator, key = value.strip().partition("=")
        if not separator:
            yield f"key-{place}", "", KeyEntry(name, admin=True)
        elif NAME.fullmatch(name) and key.strip("="):
            yield name, name, KeyEntry(key)
        else:
            raise ConfigError(
                f"--api-key number {place} has a '=', and so is NAME=KEY, but not with a name of letters, digits, '_', '.' "
                "and '-' and a key behind it. A key that has a '=' itself needs a name: NAME=KEY="
            )


def _in_file(config: ServerConfig) -> Iterable[tuple[str, str, KeyEntry]]:
    path = config.api_key_file
    if path is None:
        return
    name = ""
    try:
        for name, table in msgspec.toml.decode(path.read_bytes()).items():
            entry = msgspec.convert(table, KeyEntry)
            if not NAME.fullmatch(name) or not entry.key.strip():
                raise ValueError("needs a name of letters, digits, '_', '.' and '-', and a key")
            yield name, name, entry
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read ({error.strerror})") from None
    except ValueError as error:  # what msgspec raises for no TOML, and for a table of another form
        raise ConfigError(f"--api-key-file {path}: {f'{name!r}: ' * bool(name)}{error}") from None
    if not name:
        raise ConfigError(f"--api-key-file {path} has no keys. Leave it out to need none.")
