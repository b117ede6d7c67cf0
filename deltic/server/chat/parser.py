"""Chat on the way out: a stream of text split into reasoning, content and tool calls.

The result does not depend on how the text is cut, and reading takes time linear in its length. Nothing is
lost: what looks like a call and turns out not to be one comes out as content (in a thought: as reasoning).
A thought is first, `<think>…</think>`, or was opened by the prompt. Content and calls follow (`calls.py`).

In a thought that `</think>` ends, a call is a draft and stays reasoning, unless it is the thought's last word
and the answer's, too. In a thought that nothing ends, a call of a known tool ends it. Which it is shows at
the end only.

`Items` makes thoughts, texts and calls of that, one behind the other, for APIs whose answers are such lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from deltic.server.chat import markup
from deltic.server.chat.arguments import is_whole
from deltic.server.chat.calls import AnswerDelta, CallDelta, CallParser, Tools, new_call_id

_MAX_AFTER_DRAFT = 400
"""Characters that a thought may have behind a call, up to a line's end, before the call is a draft for
certain.
"""


class OutputParser(CallParser):
    """Parser of one sequence's answer: thoughts, and behind them content and calls."""

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Tools | None = None,
        call_id: Callable[[], str] = new_call_id,
        fixed: bool = False,
        exact: bool = False,
    ) -> None:
        """thinking: the prompt opened `<think>`. fixed: a grammar made what is behind the thought, calls or
        content; of the latter no character is a tag's. tools, exact: as of CallParser.
        """
        super().__init__(tools, call_id, exact)
        self._is_fixed = fixed
        self._advance = self._reasoning_start if thinking else self._fixed if fixed else self._opening
        self.in_reasoning = self._has_reasoned = thinking
        self._has_thought = False  # reasoning is not empty
        self._trial: CallParser | None = None
        self._draft_text: list[str] = []  # what the trial got
        self._draft_deltas: list[AnswerDelta] = []  # what it made of it
        self._n_after_draft = 0  # characters of that which are no call

    # Thoughts.

    def _opening(self) -> bool:
        """Reads what comes before any content: `<think>` opens a thought, or another one; a `</think>` more
        is dropped.
        """
        self.in_reasoning = False
        self._line, self._is_in_code = "", False
        if self._is_fixed:
            return self._to(self._gap_of_fixed, 0)
        if self._has_reasoned:
            self._text = self._text.lstrip("\n")
        return self._before(self._content if self._tools is None else self._beginning)

    def _gap_of_fixed(self) -> bool:
        """Drops line breaks between a thought and what a grammar made."""
        if self._text in ("", "\n") and not self._final:
            return False
        return self._to(self._fixed, len(self._text[:2]) - len(self._text[:2].lstrip("\n")))

    def _fixed(self) -> bool:
        """The beginning of what a grammar made: of calls, or of a text in which nothing means anything."""
        begins = self._text.startswith(markup.TOOL_CALL)
        if self._tools is not None and not begins:
            if markup.TOOL_CALL.startswith(self._text) and not self._final:
                return False
            self._tools = None
        return self._to(self._content, 0)

    def _before(self, otherwise: Callable[[], bool]) -> bool:
        """Drops a think tag here, and goes where it leads."""
        text = self._text.lstrip()
        n_space = len(self._text) - len(text)
        for tag, state in (("<think>", self._reasoning_start), ("</think>", self._opening)):
            if n_space > markup.MAX_SPACE:
                break
            if text.startswith(tag):
                self._has_reasoned = True
                return self._to(state, n_space + len(tag))
            if not self._final and tag.startswith(text):
                return False
        return self._to(otherwise, 0)

    def _beginning(self) -> bool:
        """Looks for a call before the first content: one in JSON may do without `<tool_call>` here, if it is
        of a known tool.
        """
        text = self._text.lstrip()
        n_space = len(self._text) - len(text)
        name = markup.BARE_NAME.match(text)
        assert self._tools is not None
        if n_space <= markup.MAX_SPACE and (name is None or name[1] in self._tools):
            if markup.BARE_CALL.match(text):
                self._gap = self._text[:n_space]
                return self._to_json(n_space)
            possible = markup.BARE.startswith(text) or text.startswith(markup.BARE)
            if possible and not self._final and len(text) <= markup.MAX_TAG:
                return False
        return self._to(self._content, 0)

    def _reasoning_start(self) -> bool:
        self.in_reasoning = True
        self._text = self._text.lstrip("\n")
        return self._before(self._next_thought)

    def _next_thought(self) -> bool:
        if self._text and self._has_thought:
            self._delta.reasoning += "\n\n"
        return self._to(self._reasoning, 0)

    def _think(self, text: str) -> None:
        self._delta.reasoning += text
        self._has_thought = self._has_thought or bool(text)
        self._note_fences(text)

    def _reasoning(self) -> bool:
        text = self._text
        end = opener = None
        n_held = 0
        if "<" in text:
            end = markup.THINK_END.search(text) or (markup.CUT_THINK_END.search(text) if self._final else None)
            if self._tools is not None and not self._is_fixed:
                opener = markup.CALL_OPENER.search(text, 0, end.start() if end else len(text))
            if not end:
                n_held = markup.n_held(text, markup.THOUGHT_TAGS) or markup.n_cut_think_end(text)
        if opener:
            n = markup.n_before_space(text, opener.start(), "\n")
            self._think(text[:n])
            self._gap = text[n : opener.start()]
            if opener[0] != markup.TOOL_CALL and self._is_example(self._gap):
                self._think(self._gap + opener[0])
                return self._to(self._reasoning, opener.end())
            self._trial = CallParser(self._tools, call_id=str, exact=False, trial=True)
            self._draft_text, self._draft_deltas, self._n_after_draft = [], [], 0
            return self._to(self._draft, opener.start())
        if end:
            self._think(text[: markup.n_before_space(text, end.start(), "\n")])
            return self._to(self._opening, end.end())
        n = len(text) if self._final else markup.n_before_space(text, len(text) - n_held, "\n")
        self._think(text[:n])
        self._text = text[n:]
        return False

    # Drafts.

    def _draft(self) -> bool:
        """Holds a thought from a call's opener on, until it shows what it is.

        A trial reads it, line by line, so that where it is given up does not depend on the cuts.
        """
        text, trial = self._text, self._trial
        assert trial is not None
        end = markup.THINK_END.search(text) or (markup.CUT_THINK_END.search(text) if self._final else None)
        n_held = 0 if end or self._final else markup.n_held(text, ("</think>",)) or markup.n_cut_think_end(text)
        stop = end.start() if end else len(text) - n_held
        at = 0
        while at < stop:
            line = text[at : (text.find("\n", at, stop) + 1) or stop]
            at += len(line)
            self._draft_text.append(line)
            self._add_draft(trial.push(line))
            if trial.rejected or (line.endswith("\n") and self._n_after_draft > _MAX_AFTER_DRAFT):
                return self._reject_draft(text[at:])
        if end:
            self._add_draft(trial.finish())
            if trial.n_calls and not self._n_after_draft:
                return self._to(self._after_draft, end.end())
            self._keep_draft()
            return self._to(self._opening, end.end())
        self._text = text[at:]
        if self._final:
            self._add_draft(trial.finish(self._truncated))
            if trial.rejected:
                return self._reject_draft("")
            if self._truncated and self._n_after_draft:
                self._keep_draft(final=True)
            else:
                self._take_draft(trial)
        return False

    def _after_draft(self) -> bool:
        """Settles a draft that ends the thought: it was one if anything follows."""
        assert self._trial is not None
        if self._text.strip() or len(self._text) > markup.MAX_SPACE or (self._final and self._truncated):
            self._keep_draft()
            return self._to(self._opening, 0)
        if self._final:
            self._take_draft(self._trial)
        return False

    def _add_draft(self, delta: AnswerDelta) -> None:
        self._draft_deltas.append(delta)
        self._n_after_draft += sum(map(len, delta.content.split()))

    def _reject_draft(self, rest: str) -> bool:
        """Turns the trial's text into thought, up to the next opener in it, if any. rest: the text that it
        did not read.
        """
        text = "".join(self._draft_text)
        opener = markup.CALL_OPENER.match(text)
        assert self._trial and opener
        n = max(opener.end(), len(self._trial._gap)) if self._trial.rejected else len(text)
        n = len(text[:n].rstrip("\n"))
        self._think(self._gap + text[:n])
        self._text, self._advance = "", self._reasoning
        self._read_on(text[n:] + rest)
        return False

    def _keep_draft(self, final: bool = False) -> None:
        """The draft is a part of the thought."""
        text = self._gap + "".join(self._draft_text)
        self._think(text if final else text.rstrip("\n"))

    def _take_draft(self, trial: CallParser) -> None:
        """The draft was no draft: it ends the thought, and the answer."""
        self.in_reasoning = False
        self.n_calls, self.is_call_open = trial.n_calls, trial.is_call_open
        whole = AnswerDelta(calls=[])
        for delta in self._draft_deltas:
            whole.add(delta)
        for call in whole.calls:
            call.id = self._call_id()
        self._delta.add(whole)
        self._advance = self._content


Kind = Literal["thought", "text", "call"]


class Item:
    """Item of an answer: a thought, a text or a call."""

    def __init__(self, kind: Kind, call: CallDelta | None = None) -> None:
        """call: the first update of a call, which has its id and name."""
        self.kind = kind
        self.call = call
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        """Text of the item so far; of a call, JSON of its arguments."""
        return "".join(self.parts)


class Items:
    """The items of one answer.

    A subclass writes what tells of them: `begun`, `grown` and `ended` return bytes of its stream. Items are
    never interleaved: a call may go on behind text inside of it, so that text waits for the call's end.
    """

    waits_for_calls = False
    """True if text behind a call that is whole waits, too, until another item begins or the answer ends."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False
        """True while the last item goes on."""
        self._late: list[str] = []
        """Text that waits for a call's end."""

    def begun(self, item: Item) -> bytes:
        """Tells that `item`, the last one, is there, and empty."""
        raise NotImplementedError

    def grown(self, item: Item, text: str) -> bytes:
        """Tells that `text`, which is not empty, was added to the last item."""
        raise NotImplementedError

    def ended(self, item: Item, is_cut: bool) -> bytes:
        """Tells that nothing more is added to the last item. is_cut: the answer breaks off here."""
        raise NotImplementedError

    def is_open(self, kind: Kind) -> bool:
        return self._is_open and self.items[-1].kind == kind

    def take(self, delta: AnswerDelta) -> bytes:
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
        """Returns whether text that comes now, while a call is open, waits for the call's end."""
        return self.waits_for_calls or bool(self._late) or not is_whole(self.items[-1].text)

    def _begin(self, item: Item) -> bytes:
        self.items.append(item)
        self._is_open = True
        return self.begun(item)

    def _grow(self, text: str) -> bytes:
        item = self.items[-1]
        item.parts.append(text)
        return self.grown(item, text) if text else b""
