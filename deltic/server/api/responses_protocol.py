"""The wire format of OpenAI's Responses API, and how it becomes the Chat that every API shares.

As in protocol.py, a field is honoured or refused by name, but for those of items that a model or a library
wrote. Beside OpenAI's there are the extras of a chat (`top_k`, `seed`, ...).
Accepted and ignored, since they ask for nothing that could show in an answer: `client_metadata`,
`max_tool_calls` and what `include` names of hosted tools, of which there are none, and `reasoning.summary`: a
thought is given whole, as the content of a reasoning item, and never summed up.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from deltic.json_types import JsonObject
from deltic.server.api import decode, protocol, responses_items
from deltic.server.api.responses_items import InputItem
from deltic.server.chat import messages as history
from deltic.server.chat.arguments import given_arguments
from deltic.server.chat.picture_parts import Sent, is_low, sent_in
from deltic.server.chat.request import ANY, Chat, Count, Effort, Form, Tool, ToolChoice, ToolGrammar, calls_of
from deltic.server.errors import UNKNOWN_FIELD, ApiError, bad_request
from deltic.text import SamplingDefaults

THOUGHT = "deltic-thought-"
"""Begins the `encrypted_content` that we give.

It is the thought in base64: opaque to a client, not secret from it.
"""

Summary = Literal["auto", "concise", "detailed", "none"]


class Reasoning(Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    """The older name of `summary`."""
    context: Literal["auto", "all_turns"] | None = None
    """all_turns: thoughts of earlier turns are shown to the model, where its template can."""
    mode: Literal["standard"] | None = None


class JsonFormat(Struct, tag="json_object", forbid_unknown_fields=True):
    """JSON object of any form."""


class SchemaFormat(Struct, tag="json_schema", kw_only=True, forbid_unknown_fields=True):
    name: str
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: protocol.AnyText | JsonFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: history.ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Every tool is loaded from the start."""
    allowed_callers: Annotated[list[Literal["direct"]], Meta(min_length=1)] | None = None


class GrammarText(ToolGrammar, tag="grammar", forbid_unknown_fields=True):
    """A form of the text, named as in chats, but one level higher."""


class CustomTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that takes a text. The model has it as a function with one parameter, `input`."""

    type: Literal["custom"]
    name: history.ToolName
    description: str | None = None
    format: protocol.AnyText | GrammarText | None = None
    defer_loading: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Meta(min_length=1)] | None = None


class NamespaceTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """Tools under a name of their own, as agents send those of a tool server."""

    type: Literal["namespace"]
    name: history.ToolName
    tools: list[JsonObject]
    description: str | None = None


Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(protocol.ChatFields, kw_only=True):
    """POST /v1/responses."""

    input: str | list[Raw] | None = None
    """Items stay as they were sent: see `parse_item`."""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: protocol.Positive | None = None
    include: list[Includable] | None = None
    """Further parts of the answer. Those of hosted tools and of what was sent are accepted: there are none
    here.
    """
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    """auto: what is too long loses its oldest turns."""
    background: Literal[False] | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    # Carry no promise about the answer.
    max_tool_calls: Count | None = None
    """Calls of hosted tools at most."""
    client_metadata: JsonObject | None = None
    # Known, and refused unless null.
    conversation: object = None
    prompt: object = None
    context_management: object = None
    moderation: object = None
    access_programs: object = None
    image: object = None
    background_options: object = None


_HOSTED = re.compile(
    r"(web_search|web_search_preview|image_generation|file_search|code_interpreter|mcp)(_\d{4}_\d{2}_\d{2})?"
)
"""Tools that OpenAI's servers run."""
_GIVEN = ("function", "custom", "namespace")
_KIND = re.compile(r"[a-z0-9_]{1,64}")
"""Names that a kind of tools may have that we do not know."""


def is_left_out(tool: JsonObject) -> bool:
    """Returns whether the model goes without a tool: it is of a kind that only the models know which were
    trained for it.
    """
    kind = tool.get("type")
    return kind not in _GIVEN and isinstance(kind, str) and _KIND.fullmatch(kind) is not None


def left_out(asked: ResponsesRequest) -> list[str]:
    """The kinds of tools that the model goes without, each once, for the log."""
    tools = [inner for tool in asked.tools or () for inner in (tool, *_inner(tool))]
    return list(dict.fromkeys(tool["type"] for tool in tools if is_left_out(tool)))


def _inner(tool: JsonObject) -> list[JsonObject]:
    tools = tool.get("tools")
    return [inner for inner in tools if isinstance(inner, dict)] if isinstance(tools, list) else []


def check(asked: ResponsesRequest, skips_hosted: bool = False) -> None:
    """Raises ApiError (400) for what a Chat could not say. skips_hosted: the model may go without
    hosted tools.
    """
    for i, tool in enumerate(asked.tools or ()):
        if not skips_hosted and _HOSTED.fullmatch(str(tool.get("type"))):
            raise _unknown_tool(tool, f"tools[{i}]")
    for field, why in decode.REFUSED["responses"].items():
        if (value := getattr(asked, field)) is not None and value is not False:
            raise bad_request(field, why, "unsupported_field")
    if asked.n not in (None, 1):
        raise bad_request("n", "a response has one answer", "unsupported_field")
    if asked.stream_options is not None and not asked.stream:
        raise bad_request("stream_options", "only for a stream. Set stream to true.")


def add_tools(asked: ResponsesRequest, items: Iterable[tuple[str, InputItem]]) -> None:
    """The tools of items become tools of the request, but for those that it has."""
    tools = {f"{tool.get('type')} {tool.get('name')}": tool for tool in asked.tools or ()}
    n = len(tools)
    for _, item in items:
        for tool in item.tools if isinstance(item, responses_items.ToolsItem) else ():
            tools.setdefault(f"{tool.get('type')} {tool.get('name')}", tool)
    if len(tools) > n:
        asked.tools = [*(asked.tools or ()), *list(tools.values())[n:]]


def turn_starts(items: list[tuple[str, InputItem]]) -> tuple[int, list[int]]:
    """Finds where a history may be cut: after its first settings, and before each later message of a user."""
    n_settings = 0
    while n_settings < len(items) and _role(items[n_settings][1]) in ("system", "developer"):
        n_settings += 1
    starts = [i for i, (_, item) in enumerate(items) if i > n_settings and _role(item) == "user"]
    return n_settings, starts


def _role(item: InputItem) -> str | None:
    return item.role if isinstance(item, responses_items.MessageItem) else None


def wants(asked: ResponsesRequest, what: str) -> bool:
    return what in (asked.include or ())


def given_items(asked: ResponsesRequest) -> list[bytes]:
    """The JSON of the input's items."""
    if isinstance(asked.input, str):
        return [msgspec.json.encode({"type": "message", "role": "user", "content": asked.input})]
    return [bytes(item) for item in asked.input or ()]


ORIGIN = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Fields of a Chat, and what this API calls them."""


def chat_of(asked: ResponsesRequest, items: Iterable[tuple[str, InputItem]], defaults: SamplingDefaults) -> Chat:
    """The chat that a request asks for. items: (path, item), the whole history.

    Raises ApiError (400).
    """
    messages = Messages(asked.instructions)
    for path, item in items:
        messages.add(item, path)
    logprobs = wants(asked, "message.output_text.logprobs")
    reasoning, text = asked.reasoning or Reasoning(), asked.text or TextOptions()
    tools = _tools(asked.tools)
    return Chat(
        messages=messages.whole(),
        sampling=protocol.sampling_of(
            asked,
            defaults,
            max_tokens=asked.max_output_tokens,
            logprobs=(asked.top_logprobs or 0) if logprobs else None,
            forms=_forms(text.format),
        ),
        model=asked.model,
        tools=tools,
        calls=calls_of(tools, _choice(asked.tool_choice, asked.parallel_tool_calls)),
        settings=protocol.template_settings(
            asked.chat_template_kwargs,
            reasoning.effort,
            asked.enable_thinking,
            True if reasoning.context == "all_turns" else asked.preserve_thinking,
            "reasoning.effort",
        ),
        verbosity=text.verbosity,
        thinking_budget=protocol.thinking_budget(asked, asked.thinking_budget),
        picture_bounds=asked.mm_processor_kwargs,
        origin=ORIGIN,
    )


def flat_tools(tools: list[JsonObject] | None) -> Iterator[tuple[str, NamespaceTool | None, FunctionTool | CustomTool]]:
    """(path, namespace, tool) of all that the model may call. Raises ApiError (400)."""
    for i, tool in enumerate(tools or ()):
        space: NamespaceTool | None = None
        inner = {f"tools[{i}]": tool}
        if tool.get("type") == "namespace":
            space = decode.convert(tool, NamespaceTool, f"tools[{i}]")
            inner = {f"tools[{i}].tools[{j}]": entry for j, entry in enumerate(space.tools)}
        for path, entry in inner.items():
            if not is_left_out(entry):
                kind = {"function": FunctionTool, "custom": CustomTool}.get(str(entry.get("type")))
                if kind is None:
                    raise _unknown_tool(entry, path)
                yield path, space, decode.convert(entry, kind, path)


def _unknown_tool(tool: JsonObject, path: str) -> ApiError:
    message = f"{tool.get('type')!r} is not a tool of this server, which runs none itself. Leave it out, or declare a function of your own."
    return bad_request(f"{path}.type", message, "unsupported_tool")


def flat_name(name: str, namespace: str | None) -> str:
    """The name by which the model calls a function."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("_") else f"{namespace}__{name}"


def _tools(tools: list[JsonObject] | None) -> list[Tool]:
    """Raises ApiError (400)."""
    converted: list[Tool] = []
    described = None
    for path, space, tool in flat_tools(tools):
        name = decode.convert(flat_name(tool.name, space.name if space else None), history.ToolName, f"{path}.name")
        descriptions = [tool.description]
        if space is not None and space is not described:  # once is enough
            descriptions.insert(0, space.description)
            described = space
        description = "\n\n".join(filter(None, descriptions))
        if isinstance(tool, CustomTool):
            grammar = tool.format if isinstance(tool.format, GrammarText) else None
            function = protocol.text_function(name, description, grammar)
        else:
            described_as = {"description": description} if description else {}
            strict = {"strict": True} if tool.strict else {}
            function = {"name": name, **described_as, "parameters": tool.parameters or {}, **strict}
        converted.append(protocol.function_tool(function, path))
    return converted


class NamedTool(Struct, tag="function", forbid_unknown_fields=True):
    name: str


class NamedCustom(Struct, tag="custom", forbid_unknown_fields=True):
    name: str


class AllowedTools(Struct, tag="allowed_tools", forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool | NamedCustom]


def _choice(choice: object, parallel: bool | None) -> ToolChoice:
    """Raises ApiError (400)."""
    if not isinstance(choice, dict):
        return protocol.worded_choice(choice, parallel)
    asked = decode.convert(choice, NamedTool | NamedCustom | AllowedTools, "tool_choice")
    if isinstance(asked, AllowedTools):
        names = [tool.name for tool in asked.tools]
        return ToolChoice(names=names, must=asked.mode == "required", single=parallel is False)
    return ToolChoice(names=[asked.name], must=True, single=True)


def _forms(wanted: protocol.AnyText | JsonFormat | SchemaFormat | None) -> list[Form]:
    field = "text.format"
    if isinstance(wanted, SchemaFormat):
        return [Form(field, f"{field}.schema", "json", wanted.schema)]
    return [Form(field, field, "json", ANY)] if isinstance(wanted, JsonFormat) else []


_REASONING, _CONTENT, _CALLS = range(3)
"""The order within a message of the assistant."""


class Messages:
    """Items put together to messages: what the assistant thought, said and called without a break is one."""

    def __init__(self, instructions: str | None) -> None:
        self._messages: list[history.Message] = (
            [] if instructions is None else [history.SystemMessage(content=instructions)]
        )
        self._assistant: history.AssistantMessage | None = None
        self._stage = _REASONING

    def whole(self) -> list[history.Message]:
        """Raises ApiError (400) if there is none."""
        if not self._messages:
            raise bad_request("input", "is missing or empty")
        return self._messages

    def add(self, item: InputItem, path: str) -> None:
        """Raises ApiError (400) for what is not text, and for arguments that are not a JSON object."""
        if isinstance(item, responses_items.ReasoningItem):
            thought = _thought(item, path)
            if thought:
                self._at(_REASONING).reasoning_content = thought
        elif isinstance(item, responses_items.CallItem):
            function = history.CalledFunction(flat_name(item.name, item.namespace), _arguments(item, path))
            self._call(history.ToolCall(function=function, id=item.call_id))
        elif isinstance(item, responses_items.CustomCallItem):
            called = history.CalledCustom(flat_name(item.name, item.namespace), item.input)
            self._call(history.ToolCall(custom=called, id=item.call_id))
        elif isinstance(item, responses_items.CallOutputItem):
            self._other(history.ToolMessage(content=_content(item.output, f"{path}.output"), tool_call_id=item.call_id))
        elif isinstance(item, responses_items.MessageItem):
            if item.role == "assistant":
                self._at(_CONTENT).content = _text(item.content, f"{path}.content", by=item.role)
            else:
                for sent in sent_in(item.content if item.role != "user" else ""):
                    raise bad_request(f"{sent.part}.type", "a picture is for a message of the user, or a tool")
                kind = history.UserMessage if item.role == "user" else history.SystemMessage
                self._other(kind(content=_content(item.content, f"{path}.content", by=item.role)))

    def _call(self, call: history.ToolCall) -> None:
        message = self._at(_CALLS)
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append(call)

    def _other(self, message: history.Message) -> None:
        self._assistant = None
        self._messages.append(message)

    def _at(self, stage: int) -> history.AssistantMessage:
        """The message of the assistant that goes on with `stage`: a new one unless all before it comes
        earlier.
        """
        message = self._assistant
        if message is None or self._stage > stage or self._stage == stage != _CALLS:
            message = history.AssistantMessage()
            self._other(message)
            self._assistant = message
        self._stage = stage
        return message


def _arguments(item: responses_items.CallItem, path: str) -> JsonObject:
    arguments = given_arguments(item.arguments)
    if arguments is None:
        raise bad_request(f"{path}.arguments", "expected the text of a JSON object")
    return arguments


def _thought(item: responses_items.ReasoningItem, path: str) -> str:
    """The thought of an item, by whichever of its fields came back."""
    if item.content:
        return _text(item.content, f"{path}.content", by="assistant")
    given = item.encrypted_content or ""
    if given.startswith(THOUGHT):
        try:
            return base64.b64decode(given.removeprefix(THOUGHT), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise bad_request(f"{path}.encrypted_content", "is damaged. Send it as it was given.") from None
    return _text(item.summary, f"{path}.summary", by="assistant") if item.summary else ""


def encrypted(thought: str) -> str:
    """Writes a thought for `_thought` to read, for clients that give back nothing else."""
    return THOUGHT + base64.b64encode(thought.encode()).decode()


_TEXT_FIELDS = {
    **dict.fromkeys(("input_text", "output_text", "text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
_PART_FIELDS = history.MARKS | {"annotations", "logprobs"}


def find_pictures(items: Iterable[tuple[str, InputItem]]) -> list[Sent]:
    """The pictures in (path, item)s, each of which replaces its part.

    Raises ApiError (400).
    """
    pictures: list[Sent] = []
    for path, item in items:
        if isinstance(item, responses_items.MessageItem) and item.role != "assistant":
            parts, inner, strict = item.content, f"{path}.content", True
        elif isinstance(item, responses_items.CallOutputItem):
            parts, inner, strict = item.output, f"{path}.output", False
        else:
            continue
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(parts, list) and part.get("type") == "input_image":
                parts[i] = _picture(part, f"{inner}[{i}]", strict).part_of_message()
        pictures += sent_in(parts)
    return pictures


def _picture(part: JsonObject, path: str, strict: bool) -> Sent:
    """strict: it has no unknown fields. Raises ApiError (400)."""
    if part.get("file_id") is not None:
        message = "files are not kept for this here. Send the picture as image_url."
        raise bad_request(f"{path}.file_id", message, "unsupported_field")
    if not isinstance(url := part.get("image_url"), str):
        raise bad_request(f"{path}.image_url", "expected a URL")
    if strict and (unknown := part.keys() - history.MARKS - {"type", "image_url", "file_id", "detail"}):
        raise bad_request(f"{path}.{min(unknown)}", UNKNOWN_FIELD)
    low = is_low(part.get("detail"), f"{path}.detail")
    return Sent(f"{path}.image_url", path, "input_image", url=url, is_low=low)


def _content(content: str | list[JsonObject], path: str, by: str = "tool") -> str | list[JsonObject]:
    """A text, or the parts of a chat's message where a picture is among them. Otherwise as `_text`."""
    if not any(sent_in(content)):
        return _text(content, path, by)
    parts = content if isinstance(content, list) else []
    return [
        part if any(sent_in([part])) else {"type": "text", "text": text}
        for part, text in zip(parts, _texts(parts, path, by), strict=True)
    ]


def _text(content: str | list[JsonObject], path: str, by: str = "tool") -> str:
    """by: who wrote it. Raises ApiError (400) for a part that is not text, unless it is the assistant's."""
    return content if isinstance(content, str) else "".join(_texts(content, path, by))


def _texts(parts: list[JsonObject], path: str, by: str) -> list[str]:
    if by == "assistant":
        parts = [part for part in parts if str(part.get("type")) in _TEXT_FIELDS]
    return history.texts_of(parts, path, _TEXT_FIELDS, None if by in ("assistant", "tool") else _PART_FIELDS)
