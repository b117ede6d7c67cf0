"""Choice of the replica that a request goes to: the one that has its conversation's beginning in its cache,
most likely.

A rendezvous hash of the beginning: any number of routers choose alike without a word between them, and a
replica that comes or goes moves its own share only. Knows nothing of Ray.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b

import msgspec
from msgspec import Raw, Struct

from deltic.json_types import Json
from deltic.server.transport import SESSION_HEADERS

PROMPT_CHARACTERS = 1024
"""Characters of a prompt without messages that are taken for its beginning."""

IMBALANCE = 8
"""Requests that a replica may have beyond the least busy one, before a request goes elsewhere."""


class _PromptFields(Struct):
    """Fields that may begin a prompt, in the bodies of all APIs. Raw: the replica checks them."""

    model: Raw = Raw(b"")
    system: Raw = Raw(b"")
    instructions: Raw = Raw(b"")
    messages: Raw = Raw(b"")
    input: Raw = Raw(b"")
    prompt: Raw = Raw(b"")


def key_of(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Returns what a request shares with those before it: its session, or its model and the prompt up to the
    first message of a user. Empty where there is none. headers: names in lower case.
    """
    given = dict(headers)
    for name in SESSION_HEADERS:
        if given.get(name):
            return b"session:" + given[name]
    try:
        asked = msgspec.json.decode(body, type=_PromptFields)
        starts = [_text(_decoded(raw)) for raw in (asked.system, asked.instructions)]
        for raw in (asked.messages, asked.input):
            items = _decoded(raw)
            starts += _beginning(items) if isinstance(items, list) else [_text(items)[:PROMPT_CHARACTERS]]
        starts.append(_text(_decoded(asked.prompt))[:PROMPT_CHARACTERS])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b""
    if not any(starts):
        return b""
    return b"\0".join([bytes(asked.model), *(start.encode("utf-8", "surrogatepass") for start in starts)])


def _decoded(raw: Raw) -> Json:
    """Decodes a field; None for what is not there."""
    value: Json = msgspec.json.decode(raw) if bytes(raw) else None
    return value


def _beginning(items: list[Json]) -> list[str]:
    """The messages up to the first of a user."""
    starts = []
    for item in items:
        starts.append(_text(item.get("content") if isinstance(item, dict) else item))
        if not isinstance(item, dict) or item.get("role") == "user":
            break
    return starts


def _text(content: Json) -> str:
    """A message's content without what changes between turns, as the marks of Anthropic's cache do."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\1".join(map(_text, content))
    if isinstance(content, dict):
        if isinstance(content.get("text"), str):
            return str(content["text"])
        return msgspec.json.encode({name: content[name] for name in content if name != "cache_control"}).decode()
    return "" if content is None else repr(content)


def ranked(key: bytes, loads: Mapping[str, int], imbalance: int = IMBALANCE) -> list[str]:
    """Replicas in the order in which they are to be asked. loads: of each, by its name, the requests it has.

    Those with more than `imbalance` requests beyond the least busy one come last. Without a key one of the
    least busy ones is first.
    """
    if not loads:
        return []
    least, salt = min(loads.values()), blake2b(key or os.urandom(8)).digest()

    def rank(name: str) -> tuple[bool, int, bytes]:
        weight = blake2b(name.encode(), key=salt, digest_size=8).digest()
        return loads[name] > least + imbalance, 0 if key else loads[name], weight

    return sorted(loads, key=rank)
