"""The messages of a chat on the wire, and what the chat template is given of them.

What a person or a program asks (system, developer, user) is read to the letter: an unknown field, or a part
that is not text, is a 400 that names it. What a model or a library wrote into the history (assistant, tool,
function, and their calls) may have any further field, as client libraries add their own
(`provider_specific_fields`, `thinking_blocks`, ...): those say nothing to the model, and are ignored. So are
an assistant's parts that are not text, but not a tool's, whose result would be missing.

Parts of people and tools may be pictures and videos: `find_pictures` puts a Sent into their place, and they
are read before the messages go to the template. What a template refuses of the order of messages, `settled`
puts so that it takes it, for every API.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any, Required, TypedDict

from msgspec import Meta, Struct

from deltic.json_types import JsonObject
from deltic.server.chat.arguments import given_arguments
from deltic.server.chat.picture_parts import MAX_FPS, READS, Sent, is_low, sent_in
from deltic.server.errors import UNKNOWN_FIELD, bad_request

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}(?!\n)$")]

Content = str | list[JsonObject]


class TemplateMessage(TypedDict, total=False):
    """A message as templates read it."""

    role: Required[str]
    content: Required[str | list[JsonObject]]
    reasoning_content: str
    tool_calls: list[JsonObject]
    tool_call_id: str
    name: str


MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields of a part that tell a prefix cache where to keep it; ignored, as this server's is automatic."""


class SystemMessage(Struct, tag="system", tag_field="role", kw_only=True, forbid_unknown_fields=True):
    content: Content
    name: str | None = None
    cache_control: Any = None
    """Accepted and ignored, as that of a content part: the prefix cache is automatic."""


class DeveloperMessage(SystemMessage, tag="developer", tag_field="role", kw_only=True):
    """OpenAI's newer name of the system message."""


class UserMessage(SystemMessage, tag="user", tag_field="role", kw_only=True):
    """A user's message, which the model answers."""


class ToolMessage(Struct, tag="tool", tag_field="role", kw_only=True):
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None


class FunctionMessage(Struct, tag="function", tag_field="role", kw_only=True):
    """OpenAI's older name of the tool message: the result of the assistant's `function_call`."""

    content: Content | None = None
    name: str | None = None


class CalledFunction(Struct):
    name: ToolName
    arguments: str | JsonObject | None = ""


class CalledCustom(Struct):
    """A call whose argument is text of any form, as OpenAI's models write."""

    name: ToolName
    input: str = ""


class ToolCall(Struct, kw_only=True):
    """Call of a function or of a custom tool: one of the two fields is set."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None


class AssistantMessage(Struct, tag="assistant", tag_field="role", kw_only=True):
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """Alias of `reasoning_content`, where it is a text."""
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    """OpenAI's older form of one call."""
    refusal: Any = None
    """Said instead of `content`."""
    audio: Any = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


def find_pictures(messages: list[Message]) -> list[Sent]:
    """The pictures and videos in messages, each of which comes into the place of its part. Raises ApiError
    (400).
    """
    pictures: list[Sent] = []
    for i, message in enumerate(messages):
        content = message.content
        if not isinstance(content, list) or isinstance(message, AssistantMessage):
            continue
        for j, part in enumerate(content):
            if read := _READERS.get(str(part.get("type"))):
                path, strict = f"messages[{i}].content[{j}]", isinstance(message, SystemMessage)
                content[j] = read(part, path, strict).part_of_message()
        pictures += sent_in(content)
    return pictures


def _picture(part: JsonObject, path: str, strict: bool) -> Sent:
    """strict: as of `_text`. Raises ApiError (400)."""
    named = _named(part, "image_url", path, {"url", "detail"}, strict)
    low = is_low(named.get("detail"), f"{path}.image_url.detail")
    return Sent(f"{path}.image_url", path, "image_url", url=named["url"], is_low=low)


def _file_of_video(part: JsonObject, path: str, strict: bool) -> Sent:
    """strict: as of `_text`. Raises ApiError (400)."""
    url = _named(part, "video_url", path, {"url"}, strict)["url"]
    return Sent(f"{path}.video_url", path, "video_url", url=url, is_video=True)


def _named(part: JsonObject, field: str, path: str, known: set[str], strict: bool) -> JsonObject:
    """The object in a part's field, which has a URL. Raises ApiError (400)."""
    given = part.get(field)
    named = {"url": given} if isinstance(given, str) else given
    if not isinstance(named, dict) or not isinstance(named.get("url"), str):
        raise bad_request(f"{path}.{field}", "expected a URL, or an object with one")
    unknown = [f"{path}.{name}" for name in part.keys() - MARKS - {"type", field}]
    unknown += [f"{path}.{field}.{name}" for name in named.keys() - known]
    if strict and unknown:
        raise bad_request(min(unknown), UNKNOWN_FIELD, "unknown_field")
    return named


def _video(part: JsonObject, path: str, strict: bool) -> Sent:
    """A file, or a list of pictures. strict: as of `_text`. Raises ApiError (400)."""
    given, fps = part.get("video"), part.get("fps")
    sent = Sent(f"{path}.video", path, "video", is_video=True)
    if isinstance(given, str):
        sent.url = given
    elif isinstance(given, list) and given and all(isinstance(url, str) for url in given):
        sent.frames = [Sent(f"{path}.video[{i}]", path, url=url) for i, url in enumerate(given)]
    else:
        raise bad_request(sent.path, "expected URLs of its frames, or the URL of a file")
    if strict and (unknown := part.keys() - MARKS - {"type", "video", "fps"}):
        raise bad_request(f"{path}.{min(unknown)}", UNKNOWN_FIELD, "unknown_field")
    if fps is not None:
        if not sent.frames:
            raise bad_request(f"{path}.fps", "is for a list of frames. For a file, give mm_processor_kwargs.fps.")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
            raise bad_request(f"{path}.fps", f"expected a number above 0, at most {MAX_FPS:g}")
        sent.fps = float(fps)
    return sent


_READERS = {"image_url": _picture, "video_url": _file_of_video, "video": _video}
"""Readers of parts, by the part's type."""


def template_messages(messages: list[Message]) -> list[TemplateMessage]:
    """Messages as the template expects them: text parts joined, unless there is a picture among them,
    arguments as objects, absent fields left out.

    Raises ApiError (400) for parts that are not text and for arguments that are not a JSON object.
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


REMINDER = "<system-reminder>"
"""Beginning of what agents tell a model in the middle of a conversation."""


def settled(messages: list[TemplateMessage], takes_systems: bool, takes_no_user: bool) -> list[TemplateMessage]:
    """A template's messages, as one takes them that wants a single system message, the first, unless
    takes_systems, and a question of the user's, unless takes_no_user.

    The system messages before all others become one. A later one is a reminder in the user's turn: moved to
    the front it would change the prompt's beginning, which the prefix cache needs. It goes with what the user
    or a tool said before it, else with what the user says next, since as a question of its own it would have
    the template drop the thoughts before it. Without a question there is an empty one before all turns.
    """
    n = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first, rest = messages[:n], messages[n:]
    if not takes_systems:
        first = [_joined(first)] if first else []
        rest = _with_reminders(rest)
    if not takes_no_user and not any(map(_is_question, rest)):
        rest = [{"role": "user", "content": ""}, *rest]
    return first + rest


def _with_reminders(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    turns: list[list[TemplateMessage]] = []
    is_open = False  # the last turn ends with a reminder, and what the user says next belongs to it
    for message in messages:
        takers: tuple[str, ...] = ("user",) if is_open and message["role"] == "user" else ()
        if is_late := message["role"] == "system":
            if not message["content"]:
                continue
            begin, end = ({"type": "text", "text": tag} for tag in (f"{REMINDER}\n", "\n</system-reminder>"))
            parts = [begin, *_parts(message["content"]), end]
            is_text = isinstance(message["content"], str)
            content = "".join(part["text"] for part in parts) if is_text else parts
            message, takers = {"role": "user", "content": content}, ("user", "tool")
        if turns and turns[-1][0]["role"] in takers:
            turns[-1].append(message)
        else:
            turns.append([message])
        is_open = is_late and turns[-1][0]["role"] == "user"
    return list(map(_joined, turns))


def _joined(messages: list[TemplateMessage]) -> TemplateMessage:
    """Messages as one, paragraphs of the first's."""
    contents = [message["content"] for message in messages if message["content"]]
    if len(messages) == 1 or not contents:
        return messages[0]
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return messages[0] | {"content": "\n\n".join(texts)}
    apart = {"type": "text", "text": "\n\n"}
    return {**messages[0], "content": [part for content in contents for part in (apart, *_parts(content))][1:]}


def _parts(content: str | list[JsonObject]) -> list[JsonObject]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _is_question(message: TemplateMessage) -> bool:
    """Returns whether templates of the family take a message for a question: a tool's result in the user's
    words is none.
    """
    content = message["content"]
    text = content.strip() if isinstance(content, str) else ""
    is_result = text.startswith("<tool_response>") and text.endswith("</tool_response>")
    return message["role"] == "user" and not is_result


def _template_message(message: Message, path: str) -> TemplateMessage:
    if isinstance(message, AssistantMessage):
        return _template_assistant(message, path)
    role = str(message.__struct_config__.tag)
    plain: TemplateMessage = {
        "role": {"developer": "system", "function": "tool"}.get(role, role),
        "content": _content(message.content, f"{path}.content", strict=isinstance(message, SystemMessage)),
    }
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain | ({"name": message.name} if message.name is not None else {})


def _template_assistant(message: AssistantMessage, path: str) -> TemplateMessage:
    content = message.content
    if isinstance(content, list):
        content = [part for part in content if str(part.get("type")) in _SAID]
    text = _text(content, f"{path}.content", strict=False)
    if not text and isinstance(message.refusal, str):
        text = message.refusal
    if message.audio is not None and not text:
        raise bad_request(f"{path}.audio", "is not kept here. Give its transcript as content.")
    plain: TemplateMessage = {"role": "assistant", "content": text}
    reasoning = message.reasoning_content
    if reasoning is None and isinstance(message.reasoning, str):
        reasoning = message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    calls = [_template_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    if not calls and message.function_call is not None:
        calls = [_call(None, message.function_call, f"{path}.function_call")]
    return plain | ({"tool_calls": calls} if calls else {})


def _template_call(call: ToolCall, path: str) -> JsonObject:
    if call.function is not None:
        return _call(call.id, call.function, f"{path}.function")
    if call.custom is not None:
        return _call(call.id, CalledFunction(call.custom.name, {"input": call.custom.input}), path)
    raise bad_request(f"{path}.function", "is missing", "missing_field")


def _call(call_id: str | None, called: CalledFunction, path: str) -> JsonObject:
    arguments: str | JsonObject | None = called.arguments or ""
    if isinstance(arguments, str):
        arguments = given_arguments(arguments)
        if arguments is None:
            raise bad_request(f"{path}.arguments", "expected the text of a JSON object")
    return {"id": call_id, "type": "function", "function": {"name": called.name, "arguments": arguments}}


_SAID = {"text": "text", "output_text": "text", "refusal": "refusal"}
"""Parts that are text, and the field that has it; only an assistant's are of another type than `text`."""


def _content(content: Content | None, path: str, strict: bool) -> Content:
    """A text, or parts that are texts, pictures and videos. strict: as of `_text`. Raises ApiError (400)."""
    if not isinstance(content, list) or not any(sent_in(content)):
        return _text(content, path, strict)
    return [
        {"type": str(part["type"])} if any(sent_in([part])) else {"type": "text", "text": text}
        for part, text in zip(content, _texts(content, path, strict), strict=True)
    ]


def _text(content: Content | None, path: str, strict: bool) -> str:
    """strict: a part has no unknown fields. Raises ApiError (400)."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_texts(content, path, strict))


def _texts(content: list[JsonObject], path: str, strict: bool) -> list[str]:
    return texts_of(content, path, {"text": "text"} if strict else _SAID, MARKS if strict else None)


def texts_of(parts: list[JsonObject], path: str, fields: Mapping[str, str], known: Set[str] | None) -> list[str]:
    """The text of each part, "" for a picture. fields: those with the text, by the type of a part; known:
    further ones that it may have, None: any. Raises ApiError (400).
    """
    texts = []
    for i, part in enumerate(parts):
        if any(sent_in([part])):
            texts.append("")
            continue
        kind = part.get("type")
        field = fields.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise bad_request(f"{path}[{i}].type", f"{kind!r} is not supported. {READS}")
        text = part.get(field)
        if not isinstance(text, str):
            raise bad_request(f"{path}[{i}].{field}", "expected a string")
        if known is not None and (unknown := part.keys() - known - {"type", field}):
            raise bad_request(f"{path}[{i}].{min(unknown)}", UNKNOWN_FIELD)
        texts.append(text)
    return texts
