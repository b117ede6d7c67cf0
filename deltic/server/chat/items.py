"""An answer as items: thoughts, texts and tool calls, one behind the other, each of which begins, grows and
ends.

For the APIs whose answers are lists of such items: Responses, and Anthropic's with its content blocks. A chat
of OpenAI's or Ollama's has one message with a field for each kind, and tells of a piece as it is (see
`answer`).
"""

from __future__ import annotations

from typing import Literal

from deltic.server.chat.arguments import is_whole
from deltic.server.chat.parser import CallDelta, Delta

Kind = Literal["thought", "text", "call"]


class Item:
    """One piece of an answer: thought, text or call."""

    def __init__(self, kind: Kind, call: CallDelta | None = None) -> None:
        """call: the first piece of a call, which has its id and name."""
        self.kind = kind
        self.call = call
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        """Its text so far; of a call, JSON of its arguments."""
        return "".join(self.parts)


class Items:
    """The items of one answer.

    A subclass writes what tells of them: `begun`, `grown` and `ended` return bytes of its stream. Items are
    never interleaved: a call may go on behind text inside of it, so that text waits for the call's end.
    """

    waits_for_calls = False
    """Whether text behind a call that is whole waits, too, until another item begins or the answer ends."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False
        """Whether the last of them goes on."""
        self._late: list[str] = []
        """Text that waits for a call's end."""

    def begun(self, item: Item) -> bytes:
        """`item`, the last one, is there, and empty."""
        raise NotImplementedError

    def grown(self, item: Item, text: str) -> bytes:
        """`text`, which is not empty, was added to the last item."""
        raise NotImplementedError

    def ended(self, item: Item, is_cut: bool) -> bytes:
        """Nothing more is added to the last item. is_cut: the answer breaks off here."""
        raise NotImplementedError

    def is_open(self, kind: Kind) -> bool:
        return self._is_open and self.items[-1].kind == kind

    def take(self, delta: Delta) -> bytes:
        """Adds what comes next."""
        calls, written = delta.calls, b""
        if calls and calls[0].id is None:  # it goes on with the call before what follows that
            written = self._grow(calls[0].arguments)
            calls = calls[1:]
        if delta.reasoning:
            written += self.say("thought", delta.reasoning)
        if delta.content and self.is_open("call") and self._waits():
            self._late.append(delta.content)
        elif delta.content:
            written += self.say("text", delta.content)
        for call in calls:
            written += self.close() + self._begin(Item("call", call)) + self._grow(call.arguments)
        return written

    def say(self, kind: Kind, text: str) -> bytes:
        """Adds to the item of this kind that is open, or to a new one."""
        if self.is_open(kind):
            return self._grow(text)
        return self.end_item() + self._begin(Item(kind)) + self._grow(text)

    def close(self, is_cut: bool = False) -> bytes:
        """Ends the item that is open, and the text that waited for that."""
        late, self._late = self._late, []
        if self.waits_for_calls and late:
            late = ["".join(late)]
        return b"".join([self.say("text", text) for text in late]) + self.end_item(is_cut)

    def end_item(self, is_cut: bool = False) -> bytes:
        """Ends the item that is open, if one is; what waits for that waits on."""
        was_open, self._is_open = self._is_open, False
        return self.ended(self.items[-1], is_cut) if was_open else b""

    def _waits(self) -> bool:
        """Whether text that comes now, as a call is open, waits for its end."""
        return self.waits_for_calls or bool(self._late) or not is_whole(self.items[-1].text)

    def _begin(self, item: Item) -> bytes:
        self.items.append(item)
        self._is_open = True
        return self.begun(item)

    def _grow(self, text: str) -> bytes:
        item = self.items[-1]
        item.parts.append(text)
        return self.grown(item, text) if text else b""
