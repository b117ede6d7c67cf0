"""Answers of OpenAI's API and of the routes about the server, as /openapi.json describes them.

Answers are written as bytes where they are made, since a token costs one small encoding there. So nothing
constructs these structs; tests hold real answers to them, and find a field that is missing here.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from deltic.json_types import JsonObject
from deltic.server.chat.answer import PromptProgress

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ErrorDetail(Struct, kw_only=True):
    """The error, and what to do about it."""

    message: str
    """Sentences for a person."""
    type: str
    """Kind of error, as OpenAI names them: `invalid_request_error`, `rate_limit_error`, ..."""
    param: str | None = None
    """The field at fault, such as `messages[0].content`."""
    code: str | None = None
    """A word that a program can test, such as `context_length_exceeded`."""


class ErrorAnswer(Struct):
    """An error in OpenAI's form."""

    error: ErrorDetail


class OllamaErrorAnswer(Struct):
    """An error in Ollama's form."""

    error: str
    """The error, and what to do about it."""


class RequestTiming(Struct, kw_only=True):
    """Milliseconds of each part of a request's time, and what drafts saved of it."""

    queue_ms: float
    """Time from the request to its place in the steps."""
    prefill_ms: float
    """Time until the first token."""
    decode_ms: float
    """Time from the first token to the last."""
    total_ms: float
    drafted_tokens: int | None = None
    """Tokens that were guessed ahead, if any were."""
    accepted_tokens: int | None = None
    """Guesses that were right."""


class PromptDetails(Struct):
    """Parts of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(Struct):
    """Parts of the answer's tokens."""

    reasoning_tokens: int


class AnswerUsage(Struct, kw_only=True):
    """Token counts of a request, over all its prompts and choices, and where its time went."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    timing: RequestTiming


class LlamaTimings(Struct, kw_only=True):
    """Counts and times in llama.cpp's form, for requests with `timings_per_token`."""

    cache_n: int
    """Tokens of the prompt that the prefix cache had."""
    prompt_n: int
    """Tokens of the prompt that were computed."""
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    """Tokens that were written."""
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | None = None
    draft_n_accepted: int | None = None


class TokenChance(Struct):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenChance):
    """A token of an answer, and the likeliest ones in its place."""

    top_logprobs: list[TokenChance]


class ChatLogprobs(Struct):
    """Log-probabilities of an answer to a chat."""

    content: list[ScoredToken]


class PromptChance(Struct):
    """A possible token in a place of the prompt."""

    logprob: float
    decoded_token: str
    """The token's text."""
    rank: int | None = None
    """1 for the likeliest; null where it was not computed."""


PromptChances = list[dict[str, PromptChance] | None] | None


class FunctionAnswer(Struct):
    """A function that the model calls."""

    name: str
    arguments: str
    """JSON, as a text."""


class CustomToolAnswer(Struct):
    """A tool that takes a text of any form."""

    name: str
    input: str


class AnswerCall(Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function", "custom"]
    function: FunctionAnswer | None = None
    custom: CustomToolAnswer | None = None


class ChatAnswerMessage(Struct, kw_only=True):
    """The words of the model."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall] | None = None
    function_call: FunctionAnswer | None = None
    """The call in its older form, where the request has `functions`."""


class ChatChoice(Struct, kw_only=True):
    """Base of an answer to a chat, and of what a chunk adds to it."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatAnswerChoice(ChatChoice, kw_only=True):
    """An answer to a chat, of several."""

    message: ChatAnswerMessage


class AnswerHead(Struct, kw_only=True):
    """Base of answers and their chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: Literal["default"] | None = None
    timings: LlamaTimings | None = None


class ChatCompletion(AnswerHead, kw_only=True):
    """An answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatAnswerChoice]
    usage: AnswerUsage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptChances = None


class EmbeddingUsage(Struct):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingEntry(Struct):
    """The vector of a text."""

    object: Literal["embedding"]
    index: int
    """Number of the text in `input`."""
    embedding: list[float] | str
    """Numbers, or float32, little-endian, in base64."""


class EmbeddingList(Struct):
    """Vectors of texts, in their order."""

    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage


class FunctionPart(Struct, kw_only=True):
    """An addition to a call of a function."""

    arguments: str
    """A part of the JSON."""
    name: str | None = None


class CustomToolPart(Struct, kw_only=True):
    """An addition to a call of a tool that takes a text."""

    input: str
    name: str | None = None


class CallPart(Struct, kw_only=True):
    """An addition to a call."""

    index: int
    id: str | None = None
    """Comes with the first part."""
    type: Literal["function", "custom"] | None = None
    function: FunctionPart | None = None
    custom: CustomToolPart | None = None


class ChatDelta(Struct, kw_only=True):
    """The addition of a chunk to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPart] | None = None
    function_call: FunctionPart | None = None
    """A part of the call in its older form, where the request has `functions`."""


class ChatChunkChoice(ChatChoice, kw_only=True):
    """The addition of a chunk to one of the answers."""

    delta: ChatDelta


class AnswerChunk(AnswerHead, kw_only=True):
    """Base of the data of an event of a streamed answer. The last event is `[DONE]`."""

    usage: AnswerUsage | None = None
    prompt_progress: PromptProgress | None = None
    obfuscation: str | None = None


class ChatCompletionChunk(AnswerChunk, kw_only=True):
    """The data of an event of a streamed answer. The last event is `[DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Struct, kw_only=True):
    """Log-probabilities of a completion: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """The place of each token in the text, in characters."""


class CompletionChoice(Struct, kw_only=True):
    """A text of several, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptChances = None


class CompletionChunk(AnswerChunk, kw_only=True):
    """The data of an event of a streamed completion. The last event is `[DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TextCompletion(AnswerHead, kw_only=True):
    """Texts that go on."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: AnswerUsage


class GapText(Struct, kw_only=True):
    """The text that fills a gap, or a chunk of it, in llama.cpp's form. `response_fields` leaves some out."""

    index: int | None = None
    content: str | None = None
    """The text, or what a chunk adds to it."""
    tokens: list[int] | None = None
    """Ids of the text, where `return_tokens` asks for them."""
    stop: bool | None = None
    """True in a whole answer, and in the last chunk."""
    model: str | None = None
    system_fingerprint: str | None = None
    tokens_predicted: int | None = None
    """Tokens that were written."""
    tokens_evaluated: int | None = None
    """Tokens of the prompt."""
    generation_settings: JsonObject | None = None
    """The settings that held."""
    prompt: str | None = None
    """The prompt that was made of the request."""
    has_new_line: bool | None = None
    """True if the text has more than one line."""
    truncated: bool | None = None
    """True if something of the request did not fit the context."""
    stop_type: Literal["eos", "limit", "word"] | None = None
    """Reason why the text ended."""
    stopping_word: str | None = None
    """The text that ended it."""
    tokens_cached: int | None = None
    """Tokens of the prompt that the prefix cache had."""
    timings: LlamaTimings | None = None
    prompt_progress: PromptProgress | None = None


class RenderedPrompt(Struct, kw_only=True):
    """The ids of a prompt, and where its pictures stand."""

    model: str
    token_ids: list[int]
    features: JsonObject | None
    """Hashes and places of pictures and videos: `mm_hashes`, `mm_placeholders`."""


class ModelEntry(Struct, kw_only=True):
    """A model that is served, under one of its names."""

    id: str
    """The name that requests give as `model`."""
    object: Literal["model"]
    type: Literal["model"]
    created: int
    created_at: str
    """The same in ISO 8601."""
    owned_by: str
    root: str
    """The first of the model's names; of an adapter its path."""
    parent: str | None = None
    """The model below an adapter."""
    display_name: str
    lifecycle: str
    max_model_len: int | None
    """Tokens that a prompt and its answer may have together; null until the model is loaded."""
    context_length: int | None
    context_window: int | None
    max_input_tokens: int | None
    max_tokens: int | None
    status: JsonObject | None = None
    """State of a model that is loaded on demand, in the form of llama.cpp's router; `deletable`: who asks may
    delete it.
    """
    input_modalities: list[str] | None = None
    """Kinds of input, where prompts may have more than text."""
    speech: JsonObject | None = None
    """Languages, speakers and formats of a model that speaks."""


class Done(Struct):
    """Answer to what needs no other."""

    success: Literal[True]


class ModelList(Struct, kw_only=True):
    """The models and adapters that are served."""

    object: Literal["list"]
    data: list[ModelEntry]
    first_id: str
    last_id: str
    has_more: bool
    may_pull: bool | None = None
    """True if who asks may fetch models and delete them; null where models stay."""


class Tokenized(Struct, kw_only=True):
    """The tokens of a text or a chat."""

    count: int
    tokens: list[int]
    max_model_len: int | None
    token_strs: list[str] | None = None
    """The texts of the tokens."""


class Detokenized(Struct):
    """The text of tokens."""

    prompt: str


class PdfText(Struct):
    """The text of a PDF."""

    pages: list[str]
    """The text of each page that was read."""
    n_pages: int
    """Pages that there are."""
    unread: list[int]
    """Numbers of those among `pages` that cannot be read, or take too long, from 1 on."""


class DrawnTexts(Struct):
    """Markdown as the blocks that the page shows."""

    drawn: list[list[object]]
    """The blocks of each text: the line that a block begins in, and its node."""
    ms: float
    """Milliseconds of a processor that it took."""


class CacheImported(Struct, kw_only=True):
    """The prefix that was taken into the cache."""

    object: Literal["cache.import"]
    model: str
    tokens: int
    """Tokens of the prefix."""
    bytes: int
    seconds: float
    """Seconds that it took."""


class FileEntry(Struct, kw_only=True):
    """A file that this server keeps."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    status_details: str | None


class Listing(Struct, kw_only=True):
    """Base of a page of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Listing, kw_only=True):
    """A page of the files of this key."""

    data: list[FileEntry]


class FileDeleted(Struct, kw_only=True):
    """The file is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchCounts(Struct):
    """Requests of a batch."""

    total: int
    completed: int
    failed: int


class InputDetails(Struct):
    """Parts of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int | None = None
    """0: writing to the cache costs nothing extra."""


class OutputDetails(Struct):
    """Parts of the output's tokens."""

    reasoning_tokens: int


class ItemUsage(Struct, kw_only=True):
    """Token counts, as the Responses API has them."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    timing: RequestTiming | None = None
    """Times of a response; a batch has none."""


class BatchEntry(Struct, kw_only=True):
    """A batch and how far it is. Times are seconds of the epoch, null for what has not happened."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    completion_window: str
    status: str
    """State: validating, in_progress, finalizing, completed, failed, expired, cancelling or cancelled."""
    errors: JsonObject | None
    """Reasons why the input file was refused: `{"object": "list", "data": [...]}`."""
    metadata: dict[str, str] | None
    request_counts: BatchCounts
    usage: ItemUsage
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None


class BatchList(Listing, kw_only=True):
    """A page of the batches of this key."""

    data: list[BatchEntry]


class LoadProgress(Struct):
    """Progress of a start."""

    stage: str
    done: float
    """0 to 1."""


class ServerStatus(Struct, kw_only=True):
    """State of the server; with several models that of the one that is worst off."""

    status: Literal["ready", "starting", "restarting", "draining", "stopping", "stopped", "failed"]
    message: str | None = None
    """Reason why no requests are taken."""
    loading: LoadProgress | None = None
    models: dict[str, JsonObject] | None = None
    """The same for each of several models, by name."""
    model: str | None = None
    kind: Literal["text", "speech"] | None = None
    """Kind of the first model, told by /health and /ready."""
    start_s: dict[str, float] | None = None
    """Seconds of each part of the start, told by /ready."""


class ServerVersion(Struct):
    """The version of the API or the server."""

    version: str


class ServerLoad(Struct):
    """The load of the server."""

    server_load: int
    """Sequences that run or wait."""


class Sleeping(Struct):
    """The sleep of a server, which Deltic does not have."""

    is_sleeping: bool
    """False."""


class ServerInfo(Struct, kw_only=True):
    """The room that a server has. Sizes come once the engine was ready."""

    version: str
    status: str
    model_id: str
    served_model_name: str
    model_path: str | None
    dp_size: int
    tp_size: int
    max_queued_requests: int
    max_model_len: int | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    """Tokens that the KV pages hold."""
    max_prefill_tokens: int | None = None
    """Tokens of a step."""
    max_running_requests: int | None = None
    max_num_reqs: int | None = None
    max_batch_size: int | None = None
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    device: str | None = None


class ModelFacts(Struct, kw_only=True):
    """Facts of the model."""

    served_model_name: str
    is_generation: bool
    has_image_understanding: bool
    model_path: str | None = None
    tokenizer_path: str | None = None
    model_type: str | None = None
    architectures: list[str] | None = None


class CacheContents(Struct, kw_only=True):
    """The contents of the prefix cache."""

    enabled: bool
    page_tokens: int | None = None
    """Tokens of a page."""
    page_bytes: int | None = None
    checkpoint_bytes: int | None = None
    """Bytes of the state of a checkpoint."""
    tiers: dict[str, JsonObject] | None = None
    """Pages, checkpoints and bytes of each tier: device, host, disk."""
    counters: JsonObject | None = None
    """Counts since the start, as in /metrics."""
    checkpoints: list[JsonObject]
    """Places where a prompt can resume: how many tokens stand before each, and its kind."""


class LiveNumbers(Struct, kw_only=True):
    """The work of the engine at the moment. The page's live view is made of it; its fields may change."""

    model: str
    version: str
    status: str
    message: str | None = None
    loading: LoadProgress | None = None
    uptime_s: float
    n_restarts: int
    engine: JsonObject | None
    """Sizes and settings of the engine; null until it was ready."""
    stats: JsonObject
    """Gauges and counters, as in /metrics."""
    steps: list[list[float]]
    """The last steps: seconds ago, milliseconds, sequences running, prompt tokens, generated tokens."""
