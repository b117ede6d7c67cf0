"""Answers of Ollama's API, as /openapi.json describes them; see answers.py. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from deltic.json_types import JsonObject
from deltic.server.api.answers import ScoredToken


class OllamaCalled(Struct, kw_only=True):
    """A function that the model calls."""

    index: int
    name: str
    arguments: JsonObject
    """The arguments, as JSON."""


class OllamaCall(Struct, kw_only=True):
    """A call of a tool."""

    id: str | None
    function: OllamaCalled


class OllamaAnswerMessage(Struct, kw_only=True):
    """The words of the model."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaLine(Struct, kw_only=True):
    """Base of an answer: the whole of it, or a line of a stream. Counts come with the last line."""

    model: str
    created_at: str
    """ISO 8601."""
    done: bool
    """True in the last line."""
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    logprobs: list[ScoredToken] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    """The wait for a place."""
    prompt_eval_count: int | None = None
    """Tokens of the prompt."""
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    """Tokens of the answer."""
    eval_duration: int | None = None


class OllamaChatAnswer(OllamaLine, kw_only=True):
    """An answer to a chat, or a line of it."""

    message: OllamaAnswerMessage


class OllamaText(OllamaLine, kw_only=True):
    """An answer to a prompt, or a line of it."""

    response: str
    thinking: str | None = None


class OllamaDetails(Struct, kw_only=True):
    """The files of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct, kw_only=True):
    """A model that is served."""

    name: str
    model: str
    modified_at: str
    size: int
    """Bytes on the disk."""
    digest: str
    details: OllamaDetails
    expires_at: str | None = None
    """Time at which the model is unloaded, told by /api/ps."""
    context_length: int | None = None
    size_vram: int | None = None
    """Bytes on a GPU."""


class OllamaModels(Struct):
    """The models that are served."""

    models: list[OllamaModel]


class OllamaShown(Struct, kw_only=True):
    """The nature and abilities of a model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: JsonObject
    """Architecture, parameters and context, under the names of GGUF."""
    capabilities: list[str]
    modified_at: str


class OllamaVectors(Struct, kw_only=True):
    """Vectors of texts, in their order."""

    model: str
    embeddings: list[list[float]]
    """The vectors."""
    total_duration: int
    """Nanoseconds."""
    load_duration: int
    """Nanoseconds; 1, since loading is not told apart."""
    prompt_eval_count: int
    """Tokens of all texts."""


class OllamaVector(Struct):
    """The vector of a text."""

    embedding: list[float]
    """Elements of the vector."""


class OllamaStatus(Struct, kw_only=True):
    """Progress of a pull."""

    status: str
    digest: str | None = None
    total: int | None = None
    """Bytes of the download."""
    completed: int | None = None
    """Bytes that have come."""
