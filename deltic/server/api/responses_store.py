"""Responses that can be continued: held in memory, of whoever has the most the least recently used go first.

A response's history is a tuple of turns, which it shares with the responses that it continues; a turn goes
when no response needs it any more. All is kept as JSON, so what it takes is known to the byte, near enough.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict, defaultdict

import msgspec

from deltic.json_types import JsonObject
from deltic.server.api.responses_protocol import ID_PREFIXES

MAX_BYTES = 256_000_000
"""The stored responses of all keys may take so much together."""
_OVERHEAD_BYTES = 300
"""An entry of any kind takes so much beside its JSON: Python's objects."""


class ResponseTurn(msgspec.Struct, eq=False):
    """The items of one request, or of its answer: (id, JSON)."""

    items: list[tuple[str, bytes]]
    n_uses: int = 0

    def n_bytes(self) -> int:
        return sum(len(item) + _OVERHEAD_BYTES for _, item in self.items)


class StoredResponse(msgspec.Struct, eq=False):
    """A response: the JSON of its answer, what it was made from, and the items of the answer itself."""

    owner: str
    """Name of the API key that asked; nobody else's finds it."""
    body: bytes
    input: tuple[ResponseTurn, ...]
    output: ResponseTurn
    ends: list[array[int]] = []
    """Ends of deltas, for each item of the answer: how many characters had been said as a delta ended, and
    how many log-probabilities, one behind the other.
    """

    @property
    def history(self) -> tuple[ResponseTurn, ...]:
        return (*self.input, self.output)

    def n_bytes(self) -> int:
        n_bytes = sum(len(ends) * ends.itemsize + _OVERHEAD_BYTES for ends in self.ends)
        return len(self.body) + _OVERHEAD_BYTES + 8 * len(self.input) + n_bytes


class _Own:
    """Responses and items of one owner, and their bytes."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.items: dict[str, bytes] = {}
        self.n_bytes = 0


class ResponseStore:
    """The responses of one server, at most `most` of them.

    Where there is no room for one more, the owner who has the most loses those that it used least recently:
    many of one key throw away none of another's who has fewer.
    """

    def __init__(self, most: int, max_bytes: int = MAX_BYTES) -> None:
        self.most = most
        self._max_bytes = max_bytes
        self._own: defaultdict[str, _Own] = defaultdict(_Own)

    def __len__(self) -> int:
        return sum(len(own.responses) for own in self._own.values())

    @property
    def n_bytes(self) -> int:
        return sum(own.n_bytes for own in self._own.values())

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        responses = self._own[owner].responses
        stored = responses.get(response_id)
        if stored is not None:
            responses.move_to_end(response_id)
        return stored

    def add(self, response_id: str, stored: StoredResponse) -> None:
        """Keeps it, unless it alone is more than may be held."""
        own = self._own[stored.owner]
        own.responses[response_id] = stored
        own.n_bytes += stored.n_bytes()
        for turn in stored.history:
            if not turn.n_uses:
                own.n_bytes += turn.n_bytes()
                own.items.update(turn.items)
            turn.n_uses += 1
        while len(self) > self.most:
            self._drop_oldest(max(self._own, key=lambda owner: len(self._own[owner].responses)))
        while self.n_bytes > self._max_bytes:
            self._drop_oldest(max(self._own, key=lambda owner: self._own[owner].n_bytes))

    def _drop_oldest(self, owner: str) -> None:
        self.remove(next(iter(self._own[owner].responses)), owner)

    def remove(self, response_id: str, owner: str) -> None:
        own = self._own[owner]
        stored = own.responses.pop(response_id)
        own.n_bytes -= stored.n_bytes()
        for turn in stored.history:
            turn.n_uses -= 1
            if not turn.n_uses:
                own.n_bytes -= turn.n_bytes()
                for item_id, item in turn.items:
                    if own.items.get(item_id) is item:  # another's of this id may have come since
                        del own.items[item_id]

    def item(self, item_id: str, owner: str) -> bytes | None:
        """The JSON of an item of any response that is held."""
        return self._own[owner].items.get(item_id)


def turn_of(items: list[bytes]) -> ResponseTurn:
    """A turn of checked input items, each with an id and in its full form, as /input_items lists them."""
    return ResponseTurn([_full_item(msgspec.json.decode(item)) for item in items])


def _full_item(item: JsonObject) -> tuple[str, bytes]:
    kind = item.setdefault("type", "message")
    item_id: str = item.get("id") or f"{ID_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": content}]
    if kind != "reasoning":
        item.setdefault("status", "completed")
    return item_id, msgspec.json.encode({"id": item_id} | item | {"id": item_id})
