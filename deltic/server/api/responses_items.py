"""Items that a response is made from and of, and responses that can be continued.

Responses are held in memory; of whoever has the most the least recently used go first. A response's history
is a tuple of turns, which it shares with the responses that it continues; a turn goes when no response needs
it any more. All is kept as JSON, so what it takes is known to the byte, near enough.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import Struct

from deltic.json_types import JsonObject
from deltic.server.api import decode
from deltic.server.chat.messages import ToolName
from deltic.server.errors import bad_request

Status = Literal["in_progress", "completed", "incomplete"]


class InputItem(Struct, kw_only=True):
    """An item of a request."""

    id: str | None = None


class MessageItem(InputItem, kw_only=True):
    """A message. The assistant's, like all that a model or a library wrote, may have any further field."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[JsonObject]
    type: Literal["message"] = "message"


class StrictMessageItem(MessageItem, kw_only=True, forbid_unknown_fields=True):
    """A message of anybody else."""

    status: Status | None = None
    phase: str | None = None


class CallItem(InputItem, kw_only=True):
    call_id: str
    name: ToolName
    arguments: str
    namespace: str | None = None


class CustomCallItem(InputItem, kw_only=True):
    """A call whose argument is text of any form, as OpenAI's models write."""

    call_id: str
    name: ToolName
    input: str
    namespace: str | None = None


class CallOutputItem(InputItem, kw_only=True):
    output: str | list[JsonObject]
    call_id: str


class ReasoningItem(InputItem, kw_only=True):
    summary: list[JsonObject] | None = None
    content: list[JsonObject] | None = None
    encrypted_content: str | None = None


class HostedItem(InputItem):
    """A call of a tool that no model here can call, made by another one.

    It is ignored: the model's own message tells of it.
    """


class ToolsItem(InputItem, kw_only=True):
    """Tools beside those of the request, which agents send where they learn of them."""

    tools: list[JsonObject]


class Reference(InputItem, kw_only=True, forbid_unknown_fields=True):
    id: str
    type: Literal["item_reference"] | None = None


class _Kind(Struct):
    type: str | None = None
    role: str | None = None


ITEMS: dict[str, type[InputItem]] = {
    "message": StrictMessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "additional_tools": ToolsItem,
    "item_reference": Reference,
}
_HOSTED_ITEMS = """
web_search_call file_search_call image_generation_call code_interpreter_call mcp_list_tools mcp_call
mcp_approval_request mcp_approval_response tool_search_call tool_search_output local_shell_call
local_shell_call_output shell_call shell_call_output apply_patch_call apply_patch_call_output
"""
ITEMS |= dict.fromkeys(_HOSTED_ITEMS.split(), HostedItem)
ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def parse_item(item: bytes, path: str) -> InputItem:
    """An input item from its JSON. Raises ApiError (400) naming the field, under `path`."""
    kind = decode.parse(item, _Kind, path=path)
    name = kind.type or ("message" if kind.role is not None else "item_reference")
    if name not in ITEMS:
        known = ", ".join(kind for kind, struct in ITEMS.items() if struct is not HostedItem)
        raise bad_request(f"{path}.type", f"{name!r} is not supported. This server knows {known}.")
    is_assistants = (name, kind.role) == ("message", "assistant")
    struct: type[InputItem] = MessageItem if is_assistants else ITEMS[name]
    return decode.parse(item, struct, path=path)


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
        return self._own[owner].items.get(item_id) if owner in self._own else None  # any thread may ask

    def resolved(self, item: bytes, path: str, owner: str) -> bytes:
        """Returns an item's JSON; if it is a reference, that of what it refers to. Raises ApiError (400)."""
        parsed = parse_item(item, path)
        if not isinstance(parsed, Reference):
            return item
        kept = self.item(parsed.id, owner)
        if kept is None:
            raise bad_request(f"{path}.id", f"Item with id {parsed.id!r} not found.", "item_not_found")
        return kept


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


def opened(body: bytes, path: Iterable[str] = ("output", "content", "logprobs")) -> JsonObject:
    """A response's JSON, whose log-probabilities are left encoded: there may be millions."""
    fields: JsonObject = {}
    name, *rest = path
    for field, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        if field != name:
            fields[field] = msgspec.json.decode(value)
            continue
        items = msgspec.json.decode(value, type=list[msgspec.Raw])
        fields[field] = [opened(item, rest) for item in items] if rest else items
    return fields
