"""The wire format of Anthropic's Messages API, and how it becomes a Chat.

Anthropic's API differs from OpenAI's in these points:

- Without `thinking` the model does not think, unless its template has no switch. Thoughts given back go to
  the template.
- Messages of one role in a row are one turn. Tool results come first in theirs and in the order of the calls,
  since a template that shows no ids tells them apart by their places; then the user's text.
- A last message of the assistant is continued.

Accepted and ignored, since they ask for nothing that could show in an answer: `metadata`, `service_tier`,
`thread` that is created, and what stands last in MessagesRequest; `cache_control` (the prefix cache is
automatic), `eager_input_streaming` (always), `defer_loading` (every tool is loaded from the start),
`citations` and `caller` of blocks given back, redacted thoughts (nobody here can read them), and whatever
else stands in what the model said or a tool gave.
"""

from __future__ import annotations

import base64
import binascii
import re
import tomllib
from collections.abc import Sequence, Set
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from deltic.json_types import JsonObject
from deltic.server.api import decode, protocol
from deltic.server.chat import messages as history
from deltic.server.chat import request as chats
from deltic.server.chat.picture_parts import Sent
from deltic.server.errors import THREAD_NOT_FOUND, UNKNOWN_FIELD, ApiError, bad_request
from deltic.text import SamplingDefaults

ATTRIBUTION = "x-anthropic-billing-header:"
"""Beginning of a line that some agents put before their system prompt.

It is for Anthropic's servers and other in every request, so with it no prompt would begin as the one before.
"""

MARK = b"deltic:"
"""The beginning of our signatures, before base64."""


class TextBlock(Struct, forbid_unknown_fields=True):
    text: str
    type: object = None
    cache_control: object = None
    citations: object = None


class GivenText(TextBlock, forbid_unknown_fields=False):
    """Text of a model or a tool."""


class Image(Struct, forbid_unknown_fields=True):
    source: object
    type: object = None
    cache_control: object = None


class GivenImage(Image, forbid_unknown_fields=False):
    """Picture that a tool gave."""


class ToolReference(Struct):
    tool_name: str


class ToolResult(Struct):
    tool_use_id: str
    content: str | list[JsonObject] | None = None
    is_error: bool | None = None


class ToolUse(Struct):
    id: str
    name: history.ToolName
    input: JsonObject


class Thinking(Struct):
    thinking: str
    signature: str = ""


Block = TextBlock | Image | ToolReference | ToolResult | ToolUse | Thinking
KINDS: dict[str, dict[str, type[Block]]] = {
    "user": {"text": TextBlock, "image": Image, "tool_result": ToolResult},
    "assistant": {"text": GivenText, "tool_use": ToolUse, "thinking": Thinking},
    "system": {"text": TextBlock},
    "tool_result": {"text": GivenText, "image": GivenImage, "tool_reference": ToolReference},
}
"""The content blocks that are understood, by where they stand.

Of the assistant's, others are ignored: a model wrote them.
"""


class ReadResult(NamedTuple):
    """A tool result, with texts and pictures in place of its blocks."""

    call_id: str
    pieces: list[str | Sent]


ReadBlock = TextBlock | Sent | ToolReference | ReadResult | ToolUse | Thinking
"""A content block that was checked."""


class UserTurn(Struct, tag="user", tag_field="role", forbid_unknown_fields=True):
    content: str | list[JsonObject]


class SystemTurn(UserTurn, tag="system", tag_field="role"):
    """A change of settings, as agents tell of it."""


class AssistantTurn(UserTurn, tag="assistant", tag_field="role", forbid_unknown_fields=False):
    """Turn of the model; perhaps a whole answer, as it was given."""


Message = UserTurn | SystemTurn | AssistantTurn


class DeclaredTool(Struct, kw_only=True, forbid_unknown_fields=True):
    name: history.ToolName
    input_schema: JsonObject
    description: str | None = None
    strict: bool | None = None
    input_examples: list[JsonObject] | None = None
    type: object = None
    allowed_callers: list[object] | str | None = None
    cache_control: object = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class ChoiceFields(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: protocol.Positive | None = None
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the thought travels in its signature only.

    There are no summaries, shown thoughts are whole.
    """


class OutputFormat(Struct, forbid_unknown_fields=True):
    schema: JsonObject
    type: Literal["json_schema"]


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: chats.Effort | None = None
    format: OutputFormat | None = None


class NewThread(Struct, tag="create", tag_field="type", forbid_unknown_fields=True):
    """The server may hold the conversation, so that the next turn sends what is new. This one does not."""


class HeldThread(Struct, tag="continue", tag_field="type", forbid_unknown_fields=True):
    """The messages are what is new behind an answer."""

    previous_message_id: str


class ContextManagement(Struct, forbid_unknown_fields=True):
    edits: list[JsonObject] = []


class CountTokensRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: ChoiceFields | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: object = None
    thread: NewThread | HeldThread | None = None
    mcp_servers: Annotated[list[object], Meta(max_length=0)] | None = None
    speed: Literal["standard"] | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: chats.Count
    """0: the prompt is computed, and nothing is said."""
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: protocol.Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    metadata: JsonObject | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    # Of an organization at Anthropic, and for models that decline: nothing of them could show in an answer.
    inference_geo: str | None = None
    diagnostics: JsonObject | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    billing_policy: JsonObject | None = None
    fallbacks: str | list[object] | None = None
    fallback_credit_token: object = None


ORIGIN = {"thinking_budget": "thinking.budget_tokens", "continue_final_message": "messages"}
"""Fields of a Chat, and what this API calls them."""


def chat_of(
    asked: CountTokensRequest, variables: Set[str], thinks: bool | None, defaults: SamplingDefaults
) -> chats.Chat:
    """The chat that a body asks for. variables: the settings of the model's template; thinks: whether it
    thinks where the body does not say (None: the operator's setting holds). Raises ApiError (400).
    """
    if isinstance(asked.thread, HeldThread):
        message = "thread: this server holds none. Send the whole history."
        raise ApiError(404, message, param="thread", code=THREAD_NOT_FOUND)
    messages, continued = _messages(asked)
    thinking, output = asked.thinking or ThinkingConfig("disabled"), asked.output_config or OutputConfig()
    if (thinking.budget_tokens is None) == (thinking.type == "enabled"):
        raise bad_request("thinking.budget_tokens", "is needed with type 'enabled', and with no other")
    settings: JsonObject = {}
    if output.effort is not None:
        settings["reasoning_effort"] = output.effort
    if _keeps_thoughts(asked) and "preserve_thinking" in variables:
        settings["preserve_thinking"] = True
    if (enabled := thinks if asked.thinking is None else thinking.type != "disabled") is not None:
        settings["enable_thinking"] = enabled
    form, field = None, "output_config.format"
    if output.format is not None:
        form = chats.Form(field, f"{field}.schema", "json", output.format.schema)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or ())]
    return chats.Chat(
        messages=messages,
        sampling=_sampling(asked, form, defaults),
        model=asked.model,
        tools=tools,
        calls=chats.calls_of(tools, _choice(asked.tool_choice or ChoiceFields("auto"))),
        settings=settings,
        thinking_budget=thinking.budget_tokens,
        continue_final_message=continued,
        origin=ORIGIN,
    )


def _choice(choice: ChoiceFields) -> chats.ToolChoice:
    """Raises ApiError (400)."""
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request("tool_choice.name", "is needed with type 'tool', and with no other")
    names = [] if choice.type == "none" else [choice.name] if choice.name is not None else None
    single = choice.type == "tool" or bool(choice.disable_parallel_tool_use)
    return chats.ToolChoice(names=names, must=choice.type in ("any", "tool"), single=single, path="tool_choice.name")


def _sampling(asked: CountTokensRequest, form: chats.Form | None, defaults: SamplingDefaults) -> chats.Sampling:
    """Raises ApiError (400)."""
    if not isinstance(asked, MessagesRequest):
        return chats.Sampling(form=form)
    given = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
    return chats.Sampling(
        params=chats.sampling_params(given, defaults),
        shown=chats.Shown(stops=chats.stop_strings(asked.stop_sequences, "stop_sequences")),
        max_tokens=max(1, asked.max_tokens),
        form=form,
    )


def _keeps_thoughts(asked: CountTokensRequest) -> bool:
    """Returns whether the thoughts of all turns are to stay, not of the last one only.

    Raises ApiError (400) for other edits.
    """
    keeps = False
    for i, edit in enumerate(asked.context_management.edits if asked.context_management else []):
        keep = edit.get("keep", _LAST_TURN)
        if edit.get("type") != "clear_thinking_20251015" or keep not in ("all", {"type": "all"}, _LAST_TURN):
            message = "no history is edited here. Send none but clear_thinking_20251015 that keeps all, or one turn."
            raise bad_request(f"context_management.edits[{i}]", message)
        keeps = keep != _LAST_TURN
    return keeps


_LAST_TURN = {"type": "thinking_turns", "value": 1}
"""The default of the family's templates."""


def _tool(plain: JsonObject, path: str) -> chats.Tool:
    """A tool as the chat has it. Raises ApiError (400)."""
    if plain.get("type") not in (None, "custom"):
        written_out = described(plain)
        if written_out is None:
            message = f"{plain['type']!r} is not a tool here. Declare one of your own, with a name and an input_schema."
            raise bad_request(f"{path}.type", message)
        plain = written_out
    tool = decode.convert(plain, DeclaredTool, path)
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise bad_request(f"{path}.allowed_callers", "a tool is called by the model itself: 'direct'")
    schema = tool.input_schema
    if tool.input_examples:
        schema = schema | {"examples": tool.input_examples}
    described_as = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name} | described_as | {"parameters": schema} | ({"strict": True} if tool.strict else {})
    return protocol.function_tool(function, path, "input_schema")


def _messages(asked: CountTokensRequest) -> tuple[list[history.Message], bool]:
    """The chat's messages, and whether the answer continues the last one. Raises ApiError (400)."""
    system = _texts(_blocks(asked.system or [], "system", "system"))
    if system and system[0].startswith(ATTRIBUTION):
        system[0] = system[0].partition("\n")[2]
    turns: list[tuple[str, list[ReadBlock]]] = []
    for i, message in enumerate(asked.messages):
        role = str(message.__struct_config__.tag)
        blocks = _blocks(message.content, f"messages[{i}].content", role)
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    messages: list[history.Message] = []
    if text := "\n\n".join(filter(None, system)):
        messages.append(history.SystemMessage(content=text))
    called: list[str] = []
    for role, blocks in turns:
        if role == "system":
            messages.append(history.SystemMessage(content="\n\n".join(_texts(blocks))))
        elif role == "user":
            messages += _user_messages(blocks, called)
        else:
            messages.append(_assistant_message(blocks))
            called = [block.id for block in blocks if isinstance(block, ToolUse)]
    continued = bool(turns) and turns[-1][0] == "assistant"
    if continued and called:
        raise bad_request(
            f"messages[{len(asked.messages) - 1}].content", "ends with a tool_use. Send its tool_result behind it."
        )
    return messages, continued


def _blocks(content: str | Sequence[JsonObject], path: str, place: str) -> list[ReadBlock]:
    """Reads content blocks. Raises ApiError (400)."""
    if isinstance(content, str):
        return [TextBlock(content)]
    blocks: list[ReadBlock] = []
    for i, plain in enumerate(content):
        name = plain.get("type")
        kind = KINDS[place].get(name) if isinstance(name, str) else None
        if kind is None and place == "assistant":
            continue
        if kind is None:
            expected = ", ".join(KINDS[place])
            raise bad_request(f"{path}[{i}].type", f"{name!r} is not supported here. Supported are {expected}.")
        block = decode.convert(plain, kind, f"{path}[{i}]")
        if isinstance(block, Image):
            blocks.append(_picture(block.source, f"{path}[{i}]"))
        elif isinstance(block, ToolResult):
            pieces = _pieces(_blocks(block.content or [], f"{path}[{i}].content", "tool_result"))
            text = next((piece for piece in pieces[:1] if isinstance(piece, str)), None)
            if block.is_error and (text or "")[:5].lower() != "error":
                pieces[: text is not None] = [f"Error: {text or ''}"]
            blocks.append(ReadResult(block.tool_use_id, pieces or [""]))
        else:
            blocks.append(block)
    return blocks


_SOURCES = {"base64": "data", "url": "url"}


def _picture(given: object, part: str) -> Sent:
    """The picture in the `source` of a block. part: the block's path. Raises ApiError (400)."""
    source, path = given if isinstance(given, dict) else {}, f"{part}.source"
    kind = source.get("type")
    if kind == "file":
        message = "'file' is not supported, as files are not kept for this here. Send base64."
        raise bad_request(f"{path}.type", message, "unsupported_field")
    field = _SOURCES.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise bad_request(f"{path}.type", "expected base64 or url")
    if not isinstance(data := source.get(field), str):
        raise bad_request(f"{path}.{field}", "expected a string")
    if unknown := source.keys() - {"type", "media_type", field}:
        raise bad_request(f"{path}.{min(unknown)}", UNKNOWN_FIELD)
    is_url = field == "url"
    return Sent(path, part, "image", url=data if is_url else "", encoded="" if is_url else data)


def _pieces(blocks: Sequence[ReadBlock]) -> list[str | Sent]:
    """Texts and pictures in blocks."""
    pieces: list[str | Sent] = []
    for block in blocks:
        pieces += [block] if isinstance(block, Sent) else _texts([block])
    return pieces


def _content(pieces: Sequence[str | Sent]) -> str | list[JsonObject]:
    """Content of a message: a text, or parts where a picture is among them."""
    parts: list[JsonObject] = []
    for piece in pieces:
        if isinstance(piece, Sent):
            parts.append(piece.part_of_message())
        elif parts and "text" in parts[-1]:
            parts[-1]["text"] += f"\n\n{piece}"
        else:
            parts.append({"type": "text", "text": piece})
    if len(parts) == 1 and "text" in parts[0]:
        return str(parts[0]["text"])
    return parts or ""


def _texts(blocks: Sequence[ReadBlock]) -> list[str]:
    return [
        block.text if isinstance(block, TextBlock) else f"{block.tool_name} is loaded"
        for block in blocks
        if isinstance(block, TextBlock | ToolReference)
    ]


def _user_messages(blocks: list[ReadBlock], called: list[str]) -> list[history.Message]:
    """called: ids of the calls before.

    A reminder beside results goes with the last of them: a message of its own would be a question to the
    template, which drops the thoughts before one.
    """
    results = [block for block in blocks if isinstance(block, ReadResult)]
    order = {call_id: i for i, call_id in enumerate(called)}
    results.sort(key=lambda result: order.get(result.call_id, len(called)))
    pieces = _pieces(blocks)
    if results:
        reminders = [piece for piece in pieces if isinstance(piece, str) and piece.startswith(history.REMINDER)]
        results[-1].pieces.extend(reminders)
        pieces = [piece for piece in pieces if piece not in reminders]
    messages: list[history.Message] = [
        history.ToolMessage(content=_content(result.pieces), tool_call_id=result.call_id) for result in results
    ]
    if pieces or not messages:
        messages.append(history.UserMessage(content=_content(pieces)))
    return messages


def _assistant_message(blocks: list[ReadBlock]) -> history.AssistantMessage:
    thoughts = [_thought(block) for block in blocks if isinstance(block, Thinking)]
    calls = [
        history.ToolCall(function=history.CalledFunction(block.name, block.input), id=block.id)
        for block in blocks
        if isinstance(block, ToolUse)
    ]
    return history.AssistantMessage(
        content="".join(_texts(blocks)),
        reasoning_content="\n\n".join(thoughts) if any(thoughts) else None,
        tool_calls=calls or None,
    )


def _thought(block: Thinking) -> str:
    """Text of a thought; one that was not shown comes back in its signature."""
    if block.thinking:
        return block.thinking
    try:
        signed = base64.b64decode(block.signature, validate=True)
        return signed.removeprefix(MARK).decode() if signed.startswith(MARK) else ""
    except (binascii.Error, ValueError):
        return ""


def signature(thought: str, hidden: bool) -> str:
    """Signature that comes back with a thought; hidden: instead of it."""
    return base64.b64encode(MARK + (thought.encode() if hidden else b"")).decode()


@cache
def _client_tools() -> JsonObject:
    return tomllib.loads(Path(__file__).with_name("client_tools.toml").read_text())


def described(tool: JsonObject) -> JsonObject | None:
    """A tool of a type that client_tools.toml knows, written out as one of the client's own; None: the type
    is another.
    """
    kind, table = tool.get("type"), _client_tools()
    for known in table["tools"]:
        if isinstance(kind, str) and re.fullmatch(known["type"], kind):
            parameters = table["parameters"] | known.get("own", {})
            commands = {"type": "string", "enum": known.get("commands"), "description": "What to do."}
            properties = {"command": commands} if "commands" in known else {}
            properties |= {name: parameters[name] for name in known["parameters"]}
            required = {"required": known["required"]} if "required" in known else {}
            schema = {"type": "object", "properties": properties} | required
            own = {name: value for name, value in tool.items() if name not in ("type", "max_characters")}
            return own | {"description": known["description"], "input_schema": schema}
    return None
