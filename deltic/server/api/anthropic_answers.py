"""Answers of Anthropic's API, as /openapi.json describes them; see answers.py."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from deltic.json_types import JsonObject

StopReason = Literal["end_turn", "tool_use", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class AnthropicErrorDetail(Struct, kw_only=True):
    """The error, and what to do about it."""

    type: str
    """Kind of error, as Anthropic names them: `invalid_request_error`, `overloaded_error`, ..."""
    message: str
    details: JsonObject | None = None
    """`{"error_code": ...}`, where clients act on it."""


class AnthropicError(Struct, kw_only=True, tag_field="type", tag="error"):
    """An error in Anthropic's form; in a stream the data of its last event."""

    error: AnthropicErrorDetail
    request_id: str
    """The id in the header `request-id`."""


class ThinkingDetails(Struct):
    """Parts of the answer's tokens."""

    thinking_tokens: int
    """Tokens of thoughts."""


class MessageUsage(Struct, kw_only=True):
    """Token counts of a message."""

    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_creation_input_tokens: int
    """0: writing to the cache costs nothing extra."""
    cache_read_input_tokens: int
    """Tokens of the prompt that the prefix cache had."""
    output_tokens: int
    output_tokens_details: ThinkingDetails
    service_tier: Literal["standard"]


class TextContent(Struct, tag_field="type", tag="text"):
    """Text for the user."""

    text: str


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    """A thought of the model."""

    thinking: str
    signature: str
    """To be sent back with the thought."""


class ToolUseContent(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: JsonObject
    """The arguments."""


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class AnthropicMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """An answer to messages."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(Struct):
    """The length of the prompt."""

    input_tokens: int


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The first event: the message without content."""

    message: AnthropicMessage


class MessagePing(Struct, tag_field="type", tag="ping"):
    """Says that the server is still there."""


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: ContentBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """A further piece of a text."""

    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """A further piece of a thought."""

    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thought that has ended."""

    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    """A further piece of a call's arguments."""

    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """A block has ended."""

    index: int


class MessageEnd(Struct):
    """Reason why the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The end of the message, and its counts."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event."""


MessageEvent = (
    MessageStart | MessagePing | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicError
)
"""The data of an event, by its `type`."""
