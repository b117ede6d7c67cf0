r"""Calls in an answer: a stream of text split into content and tool calls.

White space next to the markers belongs to the format and is dropped. Forms understood, when the request has
tools:

    <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
    <tool_call>\n{"name": NAME, "arguments": {…}}\n</tool_call>

Qwen3.5 and Coder write the first, Hermes and Qwen3-Next the second. The first is streamed: its name when the
first parameter shows that it is a call, string values as they come, others when complete, converted by the
tool's JSON schema. What models get wrong is tolerated, as far as it is clear what was meant; tests/null/drift
has the cases. Where it is not clear:

- A value ends at a closing tag that the format goes on behind: `</parameter>` before other text is a part of
  the value. So is a whole example of a call, whatever follows it.
- A function without `<tool_call>` in a fence is an example, and content.
- A parameter that is written a second time is content.
- A call of an unknown tool is passed on, for the client to refuse it, if `<tool_call>` opened it outside of a
  thought.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping

import msgspec

from deltic.json_types import JsonObject
from deltic.server.chat import markup
from deltic.server.chat.arguments import convert, read_calls, schema_of, to_json, value_types

_MAX_PUSH = 4096
"""Characters that are read at once: each step copies what is left of them."""


class CallDelta(msgspec.Struct):
    """A piece of a tool call: id and name with its first piece, JSON text of the arguments in all."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class AnswerDelta(msgspec.Struct):
    """The parts that some text added to the message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def add(self, other: AnswerDelta) -> None:
        self.reasoning += other.reasoning
        self.content += other.content
        for call in other.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


Tools = Mapping[str, JsonObject]
"""JSON schemas of the arguments of tools, by name."""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class CallParser:
    """Parser of a text that has no thoughts: content, and calls in the JSON and the function form.

    `push` text, then `finish` once; each returns what became certain.
    """

    def __init__(self, tools: Tools | None, call_id: Callable[[], str], exact: bool, trial: bool = False) -> None:
        """tools: None: no calls. exact: a grammar makes the calls, so no value has closing tags in it. trial:
        the text is a call, or `rejected` says that it is none.
        """
        self._tools = tools
        self._call_id = call_id
        self._is_exact = exact
        self._is_trial = trial
        self._text = ""
        self._unread: list[str] = []  # text behind `_text`, the next piece last
        self._is_ended = self._final = self._truncated = False  # final: and no more text is behind `_text`
        self._advance: Callable[[], bool] = self._content
        self._delta = AnswerDelta()
        self.rejected = False
        self.n_calls = 0
        self.is_call_open = False
        """True if the answer was cut inside a call, which has arguments that are not complete."""
        self._gap = ""  # what came before a candidate call and is dropped with it: white space, `<tool_call>`
        self._is_tagged = False  # whether that has a `<tool_call>`
        self._named: str | None = None  # the function whose arguments the JSON candidate is
        self._scanned = 0  # part of a JSON candidate, or of a value, known not to end it
        self._in_string = False  # what `_scanned` ends in
        self._schema: JsonObject = {}
        self._keys: set[str] = set()
        self._is_repeated = False  # the parameter was there before
        self._value_schema: object = None
        self._streams_value = False
        # Whether it may be an object or array, and how many characters were searched for quotes.
        self._is_json, self._n_quoted = (False, 0)
        self._value_begun = False
        self._newline = "\n"  # around the value
        self._n_nested = 0  # `<parameter` tags in a value that nothing closed yet
        self._inner: list[str] = []  # what ends the examples of calls in it that have begun
        self._line = ""  # the beginning of the last line of what was said
        self._is_in_code = False  # whether a fence is open before that

    def push(self, text: str) -> AnswerDelta:
        self._read_on(text)
        while self._unread:
            self._text += self._unread.pop()
            self._final = self._is_ended and not self._unread
            while self._advance():
                pass
        delta, self._delta = self._delta, AnswerDelta()
        return delta

    def finish(self, truncated: bool = False) -> AnswerDelta:
        """truncated: something else than the model ended the answer, so an open call stays open."""
        self._is_ended = True
        self._truncated = truncated
        return self.push("")

    def _read_on(self, text: str) -> None:
        """Puts `text` before what is not read yet."""
        starts = range(0, len(text) or 1, _MAX_PUSH)
        self._unread += [text[at : at + _MAX_PUSH] for at in reversed(starts)]

    # Each state consumes from `_text` and returns whether to go on (True: another state, or more of the
    # same).

    def _to(self, state: Callable[[], bool], consumed: int) -> bool:
        self._text = self._text[consumed:]
        self._advance = state
        return True

    # Content, and what calls look like.

    def _say(self, text: str) -> None:
        self._delta.content += text
        self._note_fences(text)

    def _note_fences(self, text: str) -> None:
        *lines, last = text.split("\n")
        for line in lines:
            self._is_in_code ^= bool(markup.FENCE.fullmatch(self._line + line))
            self._line = ""
        self._line += last[: markup.MAX_TAG - len(self._line)]

    def _is_example(self, gap: str) -> bool:
        """Returns whether what follows what was said, and this white space, stands in a fence."""
        return self._is_in_code ^ ("\n" in gap and bool(markup.FENCE.fullmatch(self._line)))

    def _content(self) -> bool:
        text = self._text
        if self._tools is None:
            self._delta.content += text
            self._text = ""
            return False
        opener = markup.CALL_OPENER.search(text) if "<" in text else None
        if opener:
            n = markup.n_before_space(text, opener.start())
            self._say(text[:n])
            self._gap = text[n : opener.start()]
            self._is_tagged = False
            if opener[0] != markup.TOOL_CALL and self._is_example(self._gap):
                self._say(self._gap + opener[0])
                return self._to(self._content, opener.end())
            return self._to(self._call, opener.start())
        if self._final:
            if text.strip() or not self.n_calls:
                self._delta.content += text
            self._text = ""
            return False
        n = markup.n_before_space(text, len(text) - markup.n_held(text, markup.CALL_OPENERS))
        self._say(text[:n])
        self._text = text[n:]
        return False

    def _call(self) -> bool:
        """`_text` starts with a call's opener, or `_gap` ends with one: decide which form it has, or that it
        is none.
        """
        text = self._text.lstrip()
        n_space = len(self._text) - len(text)
        if n_space > markup.MAX_SPACE:
            return self._reject()
        if text.startswith(markup.TOOL_CALL):
            self._gap += self._text[: n_space + len(markup.TOOL_CALL)]
            self._is_tagged = True
            return self._to(self._call, n_space + len(markup.TOOL_CALL))
        if self._is_tagged and (start := markup.JSON_START.match(text)):
            return self._to_json(n_space + start.end() - 1)
        if not text.startswith(markup.FUNCTIONS):
            possible = markup.starts_any(text, markup.CALL_OPENERS) or bool(markup.MAYBE_JSON.fullmatch(text))
            return self._wait_or_reject(possible)
        head = markup.FUNCTION.match(text)
        if head is None:
            return self._wait_or_reject(">" not in text and "\n" not in text)
        name = head[1]
        assert self._tools is not None
        if name not in self._tools and (self._is_trial or not self._is_tagged):
            return self._reject()
        body = text[head.end() :].lstrip()
        if len(text) - head.end() - len(body) > markup.MAX_SPACE:
            return self._reject()
        if body.startswith("{"):
            self._named = name
            return self._to_json(len(self._text) - len(body))
        if body.startswith(markup.AFTER_NAME) or (self._is_tagged and not body and self._final and not self._truncated):
            self._open_call(name)
            return self._to(self._function, len(self._text) - len(body))
        return self._wait_or_reject(markup.starts_any(body, markup.AFTER_NAME))

    def _wait_or_reject(self, possible: bool) -> bool:
        return False if possible and not self._final and len(self._text) <= markup.MAX_TAG else self._reject()

    def _reject(self) -> bool:
        """Takes the opener for content, since it begins no call, and looks afresh at what follows."""
        if self._is_trial and not self.n_calls:
            self.rejected = True
            self._advance = lambda: False
            return False
        n = 0 if self._is_tagged else 1
        self._say(self._gap + self._text[:n])
        return self._to(self._content, n)

    def _open_call(self, name: str, arguments: str = "") -> None:
        assert self._tools is not None
        self._schema = self._tools.get(name, {})
        self._keys = set()
        self._delta.calls.append(CallDelta(self.n_calls, self._call_id(), name, arguments))
        self.n_calls += 1

    def _argue(self, text: str) -> None:
        """Adds JSON text to the open call's arguments."""
        calls = self._delta.calls
        if calls and calls[-1].index == self.n_calls - 1:
            calls[-1].arguments += text
        elif text:
            calls.append(CallDelta(self.n_calls - 1, arguments=text))

    # The JSON form.

    def _to_json(self, start: int) -> bool:
        """start: where the candidate's first bracket is. What is before it is dropped with a call."""
        self._gap += self._text[:start]
        self._is_tagged = "<" in self._gap
        self._scanned, self._in_string = 0, False
        return self._to(self._json_call, start)

    def _json_call(self) -> bool:
        """Reads up to a tag outside of JSON's strings, or to what JSON does not have there.

        Each character is read once for a candidate. Of two candidates one is inside a string where the other
        is not, and what opens the next (`<`) rejects the latter: so all candidates together cost no more than
        the text is long.
        """
        text = self._text
        while True:
            scan = markup.IN_STRING if self._in_string else markup.OUTSIDE_STRING
            match = scan.match(text, self._scanned)
            assert match
            at = self._scanned = match.end()
            if not text.startswith('"', at):
                break
            self._in_string = not self._in_string
            self._scanned += 1
        rest = "" if self._in_string else text[at : at + max(map(len, markup.AFTER_JSON))]
        tag = next((tag for tag in markup.AFTER_JSON if rest.startswith(tag)), "")
        is_cut = not tag and markup.starts_any(rest, markup.AFTER_JSON)  # it may still come
        if is_cut and not self._final:
            return False
        named, self._named = self._named, None
        complete = bool(tag) or not self._truncated
        body = text[:at].rstrip().removesuffix("```" if "```" in self._gap else "")
        calls = read_calls(body, named, complete) if tag or is_cut else None
        known = self._tools or {}
        if not calls or (self._is_trial and not self.n_calls and any(name not in known for name, _ in calls)):
            return self._reject()
        for name, arguments in calls:
            self._open_call(name, arguments)
        return self._to(self._closing, len(text) if is_cut else at + (len(tag) if tag in markup.CLOSING else 0))

    # The function form.

    def _function(self) -> bool:
        """Reads what is between the parameters of a call."""
        text = self._text = self._text.lstrip()
        tag = next((tag for tag in markup.IN_FUNCTION if text.startswith(tag)), None)
        if tag in markup.PARAMETERS:
            head = markup.PARAMETER.match(text)
            key = markup.unquoted(head[1]) if head else ""
            if head and key:
                return self._open_value(key, head.end())
            if not head and not markup.is_over(text) and not self._final:
                return False
            tag = None
        if tag == "</parameter>" or tag in markup.STRAY_TAGS:
            return self._to(self._function, len(tag))
        if tag is not None:
            self._close_call()
            return self._to(self._closing, len(tag) if tag in markup.CLOSING else 0)
        if markup.starts_any(text, markup.IN_FUNCTION) or (self._truncated and markup.CUT_PARAMETER.match(text)):
            if self._final:
                self._text = ""
                self._end_call()
            return False
        self._delta.content += text[0]
        return self._to(self._junk, 1)

    def _junk(self) -> bool:
        """Text inside a call that belongs to no parameter: content, up to the next tag."""
        end = self._text.find("<")
        junk = self._text if end < 0 else self._text[:end]
        self._delta.content += junk
        if end < 0 and not self._final:
            self._text = ""
            return False
        return self._to(self._function, len(junk))

    def _open_value(self, key: str, consumed: int) -> bool:
        self._value_schema = schema_of(key, self._schema)
        types = value_types(self._value_schema, self._schema)
        self._is_repeated = key in self._keys
        self._streams_value = types == {"string"} or self._is_repeated
        self._is_json = bool(types & {"object", "array"})
        self._value_begun = False
        self._scanned = self._n_nested = self._n_quoted = 0
        self._in_string = False
        self._inner = []
        if not self._is_repeated:
            prefix = ", " if self._keys else "{"
            self._argue(f"{prefix}{to_json(key)}: " + ('"' if self._streams_value else ""))
            self._keys.add(key)
        return self._to(self._value, consumed)

    def _value(self) -> bool:
        text, at = self._text, self._scanned
        if not self._value_begun:
            if text == "\r" and not self._final:
                return False
            self._newline = "\r\n" if text.startswith("\r\n") else "\n"
        while event := (markup.INNER_EVENT if self._inner else markup.VALUE_EVENT).search(text, at):
            ends: bool | None = False
            at = event.end()
            if not self._is_quoted(event):
                if event[0] in markup.CALL_OPENERS and self._is_exact:
                    continue
                if event[0] in markup.CALL_OPENERS:
                    ends, at = self._enter_example(text, event)
                elif self._inner:
                    ends, at = self._leave_example(text, event)
                else:
                    ends = self._ends_value(text, event)
                    if ends is False and "parameter" in event[0]:
                        self._n_nested = max(0, self._n_nested + (-1 if "/" in event[0] else 1))
            if ends or (ends is None and self._final):
                self._end_value(text[: event.start()], closed=True)
                return self._to(self._function, event.start())
            if ends is None:
                break
        n_held = markup.n_held(text, markup.LINE_TAGS if self._inner else markup.VALUE_TAGS, markup.LINE_TAGS)
        n_sure = event.start() if event else max(at, len(text) - n_held)
        if self._newline == "\r\n" and text[:n_sure].endswith("\r") and not self._final:
            n_sure -= 1
        if self._final:
            self._end_value(text[:n_sure], closed=not self._truncated)
            self._end_call()
            self._advance, self._text = self._content, ""
        elif self._streams_value:
            self._add_value(text[:n_sure])
            self._text, self._scanned = text[n_sure:], 0
        else:
            self._scanned = n_sure
        return False

    def _enter_example(self, text: str, event: re.Match[str]) -> tuple[bool | None, int]:
        """Enters an example of a call in a value, if one begins at `event`. Returns False, or None where it
        has to show yet, and where to go on.
        """
        if opener := markup.INNER_CALL.match(text, event.start()):
            self._inner.append("tool_call" if event[0] == markup.TOOL_CALL else "function")
            return False, opener.end()
        rest = text[event.end() :].lstrip()
        possible = event[0] != markup.TOOL_CALL or rest[:1] in ("", "<", "[", "{")
        is_open = possible and len(text) - event.start() < markup.MAX_INNER and not self._final
        return (None if is_open else False), event.end()

    def _leave_example(self, text: str, event: re.Match[str]) -> tuple[bool | None, int]:
        """Leaves examples that the closing tags at `event` end. Returns as `_enter_example`; None, if nothing
        comes behind: the example has no end, and the tag is the value's.
        """
        at, behind, level, inner = event.start(), event.end(), 0, [*self._inner]
        while closer := markup.CLOSER.match(text, at):
            if not inner or (this := markup.CLOSERS[closer[1]]) <= level:
                break
            level, at = this, closer.end()
            if closer[1] == inner[-1]:
                inner.pop()
                behind = at
        rest = text[at : at + markup.MAX_SPACE + 30]
        tag = rest.lstrip()
        if not closer and len(rest) - len(tag) <= markup.MAX_SPACE and markup.starts_any(tag, markup.IN_FUNCTION):
            return None, behind
        self._inner = inner
        return False, behind

    def _is_quoted(self, event: re.Match[str]) -> bool:
        """Returns whether the tag is in a string of an object or an array, which has no newline in it."""
        if not self._is_json or not markup.JSON_VALUE.match(self._text):
            return False
        for mark in markup.QUOTE.finditer(self._text, self._n_quoted, event.start()):
            self._in_string ^= mark[0] == '"'
        self._n_quoted = event.start()
        self._in_string &= not event[0].startswith("\n")
        return self._in_string

    def _ends_value(self, text: str, event: re.Match[str]) -> bool | None:
        """Returns whether the tag at `event` ends the value, or is a part of it; None: what follows has to
        tell.
        """
        if "/" not in event[0]:
            if not event[0].startswith("\n"):
                return False
            start = event.start() + 1
            head = markup.PARAMETER.match(text, start)
            if head is None:
                return False if markup.is_over(text[start : start + markup.MAX_TAG]) else None
            properties = self._schema.get("properties")
            return not properties or not isinstance(properties, Mapping) or markup.unquoted(head[1]) in properties
        at, level, n_levels = event.start(), 0, 0
        for _ in range(8):
            closer = markup.CLOSER.match(text, at)
            if closer is None:
                break
            this = markup.CLOSERS[closer[1]]
            if closer[1] in markup.STRAY and this <= level:
                at = closer.end()
                continue
            if this < level or (this == level == 1 and (self._n_nested or markup.is_better(event[0], closer[0]))):
                return False  # the later one ends the value, this one something in it
            n_levels += this > level
            level, at = this, closer.end()
        rest = text[at : at + markup.MAX_SPACE + 20]
        tag = rest.lstrip()
        if len(rest) - len(tag) <= markup.MAX_SPACE:
            if tag.startswith(markup.AFTER_VALUE):
                return True
            if markup.starts_any(tag, markup.IN_FUNCTION):
                return None
        return n_levels >= 2

    def _add_value(self, text: str) -> None:
        """Adds text to a value that is streamed."""
        raw = self._begin_value(text)
        if self._is_repeated:
            self._say(raw)
        else:
            self._argue(to_json(raw)[1:-1])

    def _end_value(self, text: str, closed: bool) -> None:
        raw = self._begin_value(text)
        if closed and self._newline == "\r\n":
            raw = raw.removesuffix("\r")
        if self._is_repeated:
            self._say(raw)
        elif self._streams_value:
            self._argue(to_json(raw)[1:-1] + ('"' if closed else ""))
        else:
            self._argue(to_json(convert(raw, self._value_schema, self._schema)) if closed else raw)

    def _begin_value(self, text: str) -> str:
        """Drops the one newline that the format has before a value."""
        if text and not self._value_begun:
            self._value_begun = True
            return text.removeprefix(self._newline)
        return text

    def _close_call(self) -> None:
        self._argue("}" if self._keys else "{}")

    def _end_call(self) -> None:
        """The answer ends inside a call: by the model, who may leave out the end, or by something else."""
        self.is_call_open = self._truncated
        if not self._truncated:
            self._close_call()

    def _closing(self) -> bool:
        """Drops closing tags behind a call: however many there are, they are the format's."""
        text = self._text.lstrip()
        n_space = len(self._text) - len(text)
        tags = (*markup.CLOSING, *markup.STRAY_TAGS)
        tag = next((tag for tag in tags if text.startswith(tag)), "") if n_space <= markup.MAX_SPACE else ""
        if tag:
            return self._to(self._closing, n_space + len(tag))
        if markup.starts_any(text, tags) and not self._final and n_space <= markup.MAX_SPACE:
            return False
        return self._to(self._content, 0)
