"""Facts of each route for /openapi.json, beside its body: what it answers, and an example of the body."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from deltic.json_types import JsonObject
from deltic.server.api import answers, anthropic_answers, ollama_answers, responses_answers


class Described(NamedTuple):
    """Facts of one route."""

    answer: Any = None
    """The type of its JSON; None: any JSON, or no JSON."""
    event: Any = None
    """The type of the data of an event, or of a line, of its streams."""
    query: type[Struct] | None = None
    """The struct of what its query may have, beside `model`."""
    example: JsonObject | None = None
    """A body to begin with."""


class ReplayQuery(Struct):
    """Query of a response that is held."""

    stream: Literal["true", "false"] | None = None
    """True: the events of the response, instead of its JSON."""
    starting_after: Annotated[int, Meta(ge=0, lt=10**9)] | None = None
    """Number of the last event that is known."""


class ListQuery(Struct, kw_only=True):
    """Query of a list."""

    limit: Annotated[int, Meta(ge=1, le=100)] | None = None
    """Entries of a page."""
    order: Literal["asc", "desc"] | None = None
    """The newest first (desc), or the oldest."""
    after: str | None = None
    """Id of the last entry of the page before."""


class FilesQuery(ListQuery, kw_only=True):
    """Query of the list of files."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """Entries of a page."""
    purpose: str | None = None
    """The purpose of the files."""


DESCRIBED = {
    "POST /v1/chat/completions": Described(
        answers.ChatCompletion,
        answers.ChatCompletionChunk,
        example={"messages": [{"role": "user", "content": "How much is 12 + 30?"}], "max_tokens": 100},
    ),
    "POST /v1/completions": Described(
        answers.TextCompletion, answers.CompletionChunk, example={"prompt": "Once upon a time", "max_tokens": 50}
    ),
    "POST /v1/chat/completions/render": Described(
        answers.RenderedPrompt, example={"messages": [{"role": "user", "content": "Hello"}]}
    ),
    "POST /v1/completions/render": Described(list[answers.RenderedPrompt], example={"prompt": "Hello"}),
    "POST /infill": Described(
        answers.GapText | list[answers.GapText],
        answers.GapText,
        example={"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "n_predict": 20},
    ),
    "POST /v1/messages": Described(
        anthropic_answers.AnthropicMessage,
        anthropic_answers.MessageEvent,
        example={
            "model": "built-in",
            "messages": [{"role": "user", "content": "How much is 12 + 30?"}],
            "max_tokens": 100,
        },
    ),
    "POST /v1/messages/count_tokens": Described(
        anthropic_answers.CountedTokens,
        example={"model": "built-in", "messages": [{"role": "user", "content": "Hello"}]},
    ),
    "POST /v1/responses": Described(
        responses_answers.ResponseAnswerBody,
        responses_answers.ResponseEvent,
        example={"input": "How much is 12 + 30?", "max_output_tokens": 100},
    ),
    "POST /v1/responses/input_tokens": Described(responses_answers.CountedInput, example={"input": "Hello"}),
    "GET /v1/responses/{response_id}": Described(
        responses_answers.ResponseAnswerBody, responses_answers.ResponseEvent, ReplayQuery
    ),
    "DELETE /v1/responses/{response_id}": Described(responses_answers.ResponseDeleted),
    "GET /v1/responses/{response_id}/input_items": Described(responses_answers.InputItemList, query=ListQuery),
    "POST /v1/files": Described(answers.FileEntry),
    "GET /v1/files": Described(answers.FileList, query=FilesQuery),
    "GET /v1/files/{file_id}": Described(answers.FileEntry),
    "DELETE /v1/files/{file_id}": Described(answers.FileDeleted),
    "POST /v1/batches": Described(
        answers.BatchEntry,
        example={"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    "GET /v1/batches": Described(answers.BatchList, query=ListQuery),
    "GET /v1/batches/{batch_id}": Described(answers.BatchEntry),
    "POST /v1/batches/{batch_id}/cancel": Described(answers.BatchEntry),
    "POST /api/chat": Described(
        ollama_answers.OllamaChatAnswer,
        ollama_answers.OllamaChatAnswer,
        example={"model": "built-in", "messages": [{"role": "user", "content": "Hello"}], "stream": False},
    ),
    "POST /api/generate": Described(
        ollama_answers.OllamaText,
        ollama_answers.OllamaText,
        example={"model": "built-in", "prompt": "Hello", "stream": False},
    ),
    "GET /api/tags": Described(ollama_answers.OllamaModels),
    "GET /api/ps": Described(ollama_answers.OllamaModels),
    "POST /api/show": Described(ollama_answers.OllamaShown, example={"model": "built-in"}),
    "POST /api/pull": Described(
        ollama_answers.OllamaStatus, ollama_answers.OllamaStatus, example={"model": "built-in", "stream": False}
    ),
    "DELETE /api/delete": Described(example={"model": "built-in"}),
    "GET /api/version": Described(answers.ServerVersion),
    "GET /v1/models": Described(answers.ModelList),
    "GET /v1/models/{model:path}": Described(answers.ModelEntry),
    "POST /v1/models/load": Described(answers.Done, example={"model": "built-in"}),
    "POST /v1/models/unload": Described(answers.Done, example={"model": "built-in"}),
    "POST /pdf/text": Described(answers.PdfText),
    "POST /tokenize": Described(answers.Tokenized, example={"prompt": "Hello, world."}),
    "POST /detokenize": Described(answers.Detokenized, example={"tokens": [72, 105]}),
    "GET /server_info": Described(answers.ServerInfo),
    "GET /model_info": Described(answers.ModelFacts),
    "GET /is_sleeping": Described(answers.Sleeping),
    "GET /load": Described(answers.ServerLoad),
    "GET /cache": Described(answers.CacheContents),
    "POST /cache/reset": Described(answers.CacheContents),
    "POST /cache/import": Described(answers.CacheImported),
    "POST /page/markdown": Described(answers.DrawnTexts, example={"texts": ["Some *Markdown*."]}),
    "GET /live": Described(answers.LiveNumbers),
    "GET /health": Described(answers.ServerStatus),
    "GET /ping": Described(answers.ServerStatus),
    "GET /ready": Described(answers.ServerStatus),
    "GET /version": Described(answers.ServerVersion),
    "POST /v1/load_lora_adapter": Described(example={"lora_name": "sql", "lora_path": "/adapters/sql"}),
    "POST /v1/unload_lora_adapter": Described(example={"lora_name": "sql"}),
    "POST /cache/export": Described(example={"messages": [{"role": "user", "content": "Hello"}]}),
}
"""Routes by method and path. Those of speech say it in their rows (server/speech/routes.py)."""
