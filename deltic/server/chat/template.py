"""Chat on the way in: messages through the checkpoint's own template to token ids.

The template is executed as shipped (Jinja in an immutable sandbox, with the few globals that templates of
this family expect). Only special tokens written by the template itself become ids: their literals are marked
in the template's source (see `text.TRUSTED`), so no content, tool name or argument can end a turn or start
another, not even in pieces. A picture is such a token of the template's, too,
which becomes as many as it takes. The way out, reasoning and tool calls, is in `parser.py`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import get_args

import jinja2
import jinja2.meta
import msgspec

from deltic.config import ConfigError, nearest
from deltic.engine.messages import Picture
from deltic.json_types import JsonObject
from deltic.models.gguf_config import read_settings
from deltic.server.chat.constraint import NotInline, in_event_loop
from deltic.server.chat.grammar import CallForm
from deltic.server.chat.messages import AssistantMessage, TemplateMessage, settled, template_messages
from deltic.server.chat.metered import LARGEST_SOURCE, MeteredEnvironment, TooMuch
from deltic.server.chat.picture_parts import Pictures, check_room, expanded, not_shown, pictures_of, sent_in
from deltic.server.chat.request import SWITCHES, Chat, Effort
from deltic.server.chat.videos import Clip
from deltic.server.errors import ApiError, PromptTooLong, bad_request, naming
from deltic.text import TRUSTED, Tokenizer, TokenizerError

CUT = "\udcfe"
"""Put at the end of a message that the answer continues; the rendered text is cut there.

No user can write it.
"""

PICTURE = "<|image_pad|>"
"""Mark that templates write for a picture."""
VIDEO = "<|video_pad|>"
AROUND = "<|vision_start|>", "<|vision_end|>"
"""Tokens that templates write before and behind a mark."""

_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "documents"})
_GLOBALS = frozenset({"raise_exception", "strftime_now"})
_THINKING = frozenset({"enable_thinking", "preserve_thinking", "reasoning_effort"})
"""Accepted for every template: one without the switch has one behaviour only."""
_EFFORTS: tuple[str, ...] = get_args(Effort)
"""The least first."""


_REFUSALS = (jinja2.TemplateError, RecursionError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""Errors that a template raises when it cannot render its messages."""


class Prompt(msgspec.Struct, frozen=True):
    """A rendered chat: its ids, where messages end in them, and whether the answer begins inside a thinking
    block.
    """

    ids: list[int]
    boundaries: list[int]
    thinking: bool
    pictures: list[Picture] = []
    """Pictures with their places in `ids`."""
    tail: str = ""
    """Rendered text behind the place of a question that is asked later (`render`)."""
    effort: str = ""
    """Effort that the template does not know, and the one it was rendered as; "" where it knows it."""


class Taken(msgspec.Struct, frozen=True):
    """Inputs that a template takes, as trying it shows."""

    systems: bool = True
    """System messages behind the first, wherever they stand."""
    no_user: bool = True
    """A chat without a question of the user's."""
    efforts: tuple[str, ...] = _EFFORTS


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class ChatTemplate:
    """A checkpoint's chat template(s), compiled once."""

    def __init__(
        self, sources: Mapping[str, str], tokenizer: Tokenizer, variables: Mapping[str, str] | None = None
    ) -> None:
        """sources: "default" and perhaps "tool_use"; variables: eos_token and the like.

        Raises TokenizerError.
        """
        environment = MeteredEnvironment()
        self._meter = environment.meter
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        environment.finish()
        self._tokenizer = tokenizer
        text = "".join(sources.values())
        self.call_form: CallForm | None = "xml" if "<function=" in text else "json" if "<tool_call>" in text else None
        """Form of a tool call that the template shows the model."""
        self._constants = {name: tokenizer.trust(text) for name, text in (variables or {}).items()}
        self._compiled: dict[str, jinja2.Template] = {}
        self.reads: set[str] = set()
        """Names that the template reads."""
        for name, source in sources.items():
            if len(source) > LARGEST_SOURCE:
                raise TokenizerError(f"the chat template has more than {LARGEST_SOURCE} characters")
            try:
                self._compiled[name] = environment.from_string(tokenizer.trust(source))
                self.reads |= jinja2.meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateSyntaxError as error:
                raise TokenizerError(f"the chat template is not valid Jinja: line {error.lineno}: {error}") from error
            except (SyntaxError, RecursionError, MemoryError) as error:  # from Python, which it becomes
                raise TokenizerError(f"the chat template is nested too deeply ({error})") from error
        self.variables = self.reads - _OWN_VARIABLES - _GLOBALS - self._constants.keys()
        """Names that a request may set, of those that the template reads."""
        self.defaults: JsonObject = {}
        """Settings for chats that do not say otherwise."""

    def set_defaults(self, settings: JsonObject) -> None:
        """Settings for chats that do not say otherwise.

        Raises ConfigError for what the template does not have.
        """
        for name, value in settings.items():
            if error := self.unknown(name):
                raise ConfigError(f"--default-chat-template-kwargs: {name}: {error}")
            if name in SWITCHES and not isinstance(value, bool):
                raise ConfigError(f"--default-chat-template-kwargs: {name}: expected true or false")
        self.defaults = dict(settings)

    def unknown(self, name: str) -> str | None:
        """The message for a setting's name that is not known."""
        if name in self.variables or name in _THINKING:
            return None
        known = ", ".join(sorted(self.variables)) or "none"
        return f"this model's chat template has no such setting: {nearest(name, self.variables) or 'it has ' + known}"

    def replaced(self, source: str) -> ChatTemplate:
        """A template that a request brings.

        Raises ApiError (400); NotInline where the event loop would compile it.
        """
        if in_event_loop():
            raise NotInline
        try:
            other = ChatTemplate({"default": source}, self._tokenizer)
        except TokenizerError as error:
            raise bad_request("chat_template", str(error)) from None
        other._constants, other.defaults = self._constants, self.defaults
        other.variables -= self._constants.keys()
        return other

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer, override: Path | None = None) -> ChatTemplate | None:
        """Loads `override`, `chat_template.jinja`, or tokenizer_config.json; None when there is none.

        Raises TokenizerError for one that cannot be read, or that takes too much even for a chat of one word.
        """
        template = cls._read(directory, tokenizer, override)
        if template is not None:
            chat = {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": True}
            for compiled in template._compiled.values():
                try:
                    template._text(compiled, template._constants | chat, is_inline=False)
                except ApiError as error:  # one that wants other messages is none the worse
                    if isinstance(error.__cause__, TooMuch):
                        message = f"the chat template takes too much even for a chat of one word: {error.__cause__}"
                        raise TokenizerError(message) from error
            template.taken  # noqa: B018  # so that no request has to find out
        return template

    @cached_property
    def taken(self) -> Taken:
        """Inputs that the template takes, of those that it might refuse. Raises NotInline where the event
        loop would find out.
        """
        compiled = self._compiled.get("default") or next(iter(self._compiled.values()))
        self._meter.start(in_event_loop())  # for all tries together

        def shows(*roles: str, **settings: object) -> bool:
            messages = [{"role": role, "content": f"message {i}."} for i, role in enumerate(roles)]
            try:
                text = compiled.render(
                    self._constants | {"messages": messages, "add_generation_prompt": True} | settings
                )
            except TooMuch:
                raise
            except _REFUSALS:
                return False
            return all(message["content"] in text for message in messages)

        try:
            if not shows("user"):  # it wants something else
                return Taken()
            reads = "reasoning_effort" in self.reads
            return Taken(
                shows("system", "system", "user", "assistant", "system", "user"),
                shows("system", "assistant"),
                tuple(
                    word for word in _EFFORTS if not reads or shows("user", enable_thinking=True, reasoning_effort=word)
                ),
            )
        except TooMuch:
            if in_event_loop():
                raise NotInline from None
            return Taken()

    def _known_effort(self, effort: object) -> object:
        """The effort that the template has for one that it may not have: the next higher, else its highest.

        None: thinking is off, and it has no word for that.
        """
        known = self.taken.efforts
        if effort not in _EFFORTS or effort in known or not known:
            return effort
        if effort == "none":
            return None
        higher = [other for other in known if _EFFORTS.index(other) >= _EFFORTS.index(effort)]
        return (higher or known[-1:])[0]

    @classmethod
    def _read(cls, directory: Path, tokenizer: Tokenizer, override: Path | None) -> ChatTemplate | None:
        """Raises TokenizerError, CheckpointError."""
        settings = read_settings(directory / "tokenizer_config.json")
        variables = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = settings.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                variables[name] = token
        path = override or directory / "chat_template.jinja"
        if override or path.exists():
            try:
                return cls({"default": path.read_text(encoding="utf-8")}, tokenizer, variables)
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"chat template {path} cannot be read: {error}") from error
        shipped = settings.get("chat_template") or read_settings(directory / "chat_template.json").get("chat_template")
        if isinstance(shipped, str):
            return cls({"default": shipped}, tokenizer, variables)
        if isinstance(shipped, list):
            try:
                named = msgspec.convert(shipped, list[_NamedTemplate])
            except msgspec.ValidationError as error:
                raise TokenizerError(f"{directory / 'tokenizer_config.json'}: chat_template: {error}") from error
            if named:
                return cls({entry.name: entry.template for entry in named}, tokenizer, variables)
        return None

    def render(
        self,
        messages: list[TemplateMessage],
        tools: list[JsonObject] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        settings: JsonObject | None = None,
        limit: int | None = None,
        kept: int | None = None,
        pictures: Sequence[Picture | Clip] = (),
    ) -> Prompt:
        """Messages to ids. settings: further variables, e.g. enable_thinking, over the defaults; kept: only
        so many ids, from the end, are wanted; pictures: of the messages, in their order, and videos.

        Raises ApiError (400) when the template refuses the messages, or (without `kept`) when the rendered
        text is certain to have `limit` tokens or more, which is found out without encoding it.
        """
        messages = settled(messages, self.taken.systems, self.taken.no_user)
        if continue_final_message:
            messages = [*messages[:-1], messages[-1] | {"content": f"{messages[-1]['content']}{CUT}"}]
        compiled = self._compiled.get("tool_use") if tools else None
        compiled = compiled or self._compiled.get("default") or next(iter(self._compiled.values()))
        variables: dict[str, object] = {**self._constants, **self.defaults, **(settings or {})}
        effort = variables.pop("reasoning_effort", None)
        if (known := self._known_effort(effort)) is not None:
            variables["reasoning_effort"] = known
        own = list(messages)
        variables |= {"messages": own, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._text(compiled, variables, is_inline=in_event_loop())
        finally:
            # A template with a macro and its arguments hold each other until the garbage collector runs.
            own.clear()
        tail = ""
        if continue_final_message:
            text, cut, tail = text.partition(CUT)
            if not cut:
                raise bad_request("continue_final_message", "the chat template drops the end of the last message")
        if kept is None and limit is not None and (n := self._tokenizer.least_tokens(text, limit)) >= limit:
            raise PromptTooLong("messages", n, limit, at_least=True)
        told = f"{effort}, as {known}" if known != effort and known else ""
        return msgspec.structs.replace(self._prompt(text, kept, pictures), tail=tail, effort=told)

    def _text(self, compiled: jinja2.Template, variables: Mapping[str, object], is_inline: bool) -> str:
        """Raises ApiError (400); NotInline for what takes longer than the event loop may be held up
        (is_inline).
        """
        self._meter.start(is_inline)
        try:
            return compiled.render(variables)
        except TooMuch as error:
            if is_inline:
                raise NotInline from None
            raise bad_request("messages", f"the chat template takes too much for them: {error}") from error
        except jinja2.TemplateError as error:
            raise bad_request("messages", f"the chat template refuses them: {error}") from error
        except RecursionError as error:
            raise bad_request("messages", "nested too deeply") from error
        except _REFUSALS as error:
            raise bad_request("messages", f"the chat template cannot render them: {error}") from error

    def _prompt(self, text: str, kept: int | None, pictures: Sequence[Picture | Clip]) -> Prompt:
        placed: list[Picture] = []
        if kept is None:
            text = _with_times(text, [clip for clip in pictures if isinstance(clip, Clip)])
            ids = first = self._tokenizer.encode(text, "trusted")
            if pictures:
                marks = self._tokenizer.special_id(PICTURE), self._tokenizer.special_id(VIDEO)
                ids, placed = expanded(ids, marks, [part for picture in pictures for part in pictures_of(picture)])
        else:
            first = next(self._tokenizer.encode_pieces(text, "trusted"), [])
            ids = self._tokenizer.encode_end(text, kept, "trusted")
        # A turn starts with the special token that the prompt starts with (<|im_start|>); where one starts,
        # the message before it has ended. Such an offset is a token boundary by construction.
        boundaries: list[int] = []
        if first and first[0] in self._tokenizer.special_ids:
            try:
                while True:
                    boundaries.append(ids.index(first[0], boundaries[-1] + 1 if boundaries else 1))
            except ValueError:
                pass
        answer = text[text.rfind(TRUSTED) :] if TRUSTED in text else text
        thinking = "<think>" in answer.rpartition("</think>")[2]
        return Prompt(ids, boundaries, thinking, placed)


def _with_times(text: str, clips: Sequence[Clip]) -> str:
    """A rendered chat with a mark for each pair of frames where the template wrote one for a video, each
    behind its time. Those around the template's mark go. Raises ApiError (400).

    It is a matter of the text: a time may share a token with what stands before it.
    """
    if not clips:
        return text
    start, end = (TRUSTED + literal for literal in AROUND)
    mark = TRUSTED + VIDEO
    places = list(re.finditer(f"{re.escape(start + mark + end)}|{re.escape(mark)}", text))
    if len(places) != len(clips):
        raise not_shown(len(places), len(clips))
    parts, done = [], 0
    for place, clip in zip(places, clips, strict=True):
        parts.append(text[done : place.start()])
        parts += [f"<{time_s:.1f} seconds>{start}{mark}{end}" for time_s in clip.seconds]
        done = place.end()
    return "".join(parts) + text[done:]


def render(
    template: ChatTemplate | None,
    chat: Chat,
    limit: int | None = None,
    kept: int | None = None,
    pictures: Pictures | None = None,
    *,
    is_asked: bool = False,
) -> Prompt:
    """The chat's prompt.

    limit, kept: as in ChatTemplate.render. pictures: those that `find_pictures` has found in the messages.
    is_asked: it ends where a last message of the user's begins, and `Prompt.tail` is what stands behind that.
    Raises ApiError (400).
    """
    if template is None:
        raise no_template()
    if chat.chat_template:
        template = template.replaced(chat.chat_template)
    with naming(chat.origin):
        continued = chat.continue_final_message
        if continued and chat.add_generation_prompt:
            raise bad_request("continue_final_message", "excludes add_generation_prompt: the last message goes on")
        if continued and not isinstance(chat.messages[-1], AssistantMessage):
            raise bad_request("continue_final_message", "needs a last message of the assistant")
        sent = [picture for message in chat.messages for picture in sent_in(message.content)]
        shown = [(pictures or {})[part.path] for part in sent]
        if sent and kept is not None:
            raise bad_request("truncate_prompt_tokens", "is not available for a chat with pictures")
        messages, read = template_messages(chat.messages), _shown(chat, template.reads)
        if is_asked:
            messages.append({"role": "user", "content": ""})
        for name in chat.settings:
            if error := template.unknown(name):
                raise bad_request(f"chat_template_kwargs.{name}", error)
        prompt = template.render(
            messages,
            [tool.shown for tool in chat.tools] if chat.calls else None,
            add_generation_prompt=not continued and chat.add_generation_prompt is not False,
            continue_final_message=continued or is_asked,
            settings=chat.settings | read,
            limit=limit,
            kept=kept,
            pictures=shown,
        )
        if limit is not None and len(prompt.ids) >= limit:
            check_room(shown, sent, len(prompt.ids), limit)
        return prompt


def _shown(chat: Chat, variables: Set[str]) -> JsonObject:
    """Variables that a template has only where it reads them.

    Raises ApiError (400) for documents that nobody would see.
    """
    if chat.documents and "documents" not in variables:
        raise bad_request(
            "documents", "this model's chat template shows none. Put them into a message.", "unsupported_field"
        )
    shown = {"documents": chat.documents or None, "verbosity": chat.verbosity if "verbosity" in variables else None}
    return {name: value for name, value in shown.items() if value is not None}


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the checkpoints were trained on: keys in their order, no escapes, `, ` and `: ` between."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def no_template() -> ApiError:
    """The answer to a chat when the checkpoint has no template."""
    return ApiError(
        400, "this model has no chat template. Use /v1/completions, or start the server with --chat-template FILE."
    )
