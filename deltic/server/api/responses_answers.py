"""Answers of the Responses API, as /openapi.json describes them; see answers.py."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from deltic.json_types import JsonObject
from deltic.server.api.answers import ItemUsage, Listing, ScoredToken

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """A text of a message."""

    text: str
    annotations: list[JsonObject]
    """Empty."""
    logprobs: list[ScoredToken]


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """A text of a thought."""

    text: str


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """A thought of the model."""

    id: str
    status: ItemStatus
    summary: list[JsonObject]
    """Empty, as thoughts are shown whole."""
    content: list[ReasoningText]
    encrypted_content: str | None = None
    """The thought for clients that keep no state, where `include` asks for it."""


class OutputCall(Struct, kw_only=True, tag_field="type"):
    """Base of a call."""

    id: str
    status: ItemStatus
    call_id: str
    """To be sent back with the result."""
    name: str
    namespace: str | None = None


class OutputFunctionCall(OutputCall, kw_only=True, tag="function_call"):
    """A call of a function."""

    arguments: str
    """JSON, as a text."""


class OutputCustomCall(OutputCall, kw_only=True, tag="custom_tool_call"):
    """A call of a tool that takes a text of any form."""

    input: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall
OutputPart = OutputText | ReasoningText


class IncompleteDetails(Struct):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    """Reason why a response failed."""

    code: str
    message: str


class ResponseReasoning(Struct):
    """The thinking that was asked for."""

    effort: str | None
    summary: None


class ResponseAnswerBody(Struct, kw_only=True):
    """A response: what was asked for, and the items of the answer."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ItemUsage | None
    store: bool
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    temperature: float
    text: JsonObject
    """The form of the text: `format` and `verbosity`."""
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseDeleted(Struct, kw_only=True):
    """The response is gone."""

    id: str
    object: Literal["response"]
    deleted: bool


class CountedInput(Struct, kw_only=True):
    """The length of the prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItemList(Listing, kw_only=True):
    """A page of the items that a response was made from, in the form in which they were sent."""

    data: list[JsonObject]


class NumberedEvent(Struct, kw_only=True, tag_field="type"):
    """Base of the events of a response."""

    sequence_number: int
    """0 for the first event."""


class WholeEvent(NumberedEvent, kw_only=True):
    """Base of the events that show the response."""

    response: ResponseAnswerBody


class ResponseCreated(WholeEvent, tag="response.created"):
    """The first event."""


class ResponseInProgress(WholeEvent, tag="response.in_progress"):
    """The model has begun."""


class ResponseCompleted(WholeEvent, tag="response.completed"):
    """The last event of a response that is whole."""


class ResponseIncomplete(WholeEvent, tag="response.incomplete"):
    """The last event of a response that was cut."""


class ResponseFailed(WholeEvent, tag="response.failed"):
    """The last event of a response that an error ended."""


class ItemEvent(NumberedEvent, kw_only=True):
    """Base of the events of an item."""

    output_index: int
    """The item's place in `output`."""


class OutputItemAdded(ItemEvent, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    item: OutputItem


class OutputItemDone(ItemEvent, kw_only=True, tag="response.output_item.done"):
    """An item has ended."""

    item: OutputItem


class SaidEvent(ItemEvent, kw_only=True):
    """Base of the events that tell what an item says."""

    item_id: str


class PartEvent(SaidEvent, kw_only=True):
    """Base of the events of a part of an item."""

    content_index: int
    """The part's place in `content`: always 0."""


class ContentPartAdded(PartEvent, kw_only=True, tag="response.content_part.added"):
    """A part begins."""

    part: OutputPart


class ContentPartDone(PartEvent, kw_only=True, tag="response.content_part.done"):
    """A part has ended."""

    part: OutputPart


class OutputTextDelta(PartEvent, kw_only=True, tag="response.output_text.delta"):
    """A further piece of a text."""

    delta: str
    logprobs: list[ScoredToken]
    obfuscation: str | None = None


class OutputTextDone(PartEvent, kw_only=True, tag="response.output_text.done"):
    """The whole text."""

    text: str
    logprobs: list[ScoredToken]


class ReasoningTextDelta(PartEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """A further piece of a thought."""

    delta: str
    obfuscation: str | None = None


class ReasoningTextDone(PartEvent, kw_only=True, tag="response.reasoning_text.done"):
    """The whole thought."""

    text: str


class ArgumentsDelta(SaidEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """A further piece of a call's arguments."""

    delta: str
    obfuscation: str | None = None


class ArgumentsDone(SaidEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """The arguments of a call, all of them."""

    arguments: str
    """JSON, as a text."""


class CustomInputDelta(SaidEvent, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """The text of a call, in one piece."""

    delta: str
    obfuscation: str | None = None


class CustomInputDone(SaidEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    """The whole text of a call."""

    input: str


class ResponseErrorEvent(NumberedEvent, kw_only=True, tag="error"):
    """An error after the answer has begun; `response.failed` follows."""

    code: str
    message: str
    param: str | None


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
    | ContentPartDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseErrorEvent
    | ResponseFailed
)
"""The data of an event, by its `type`."""
