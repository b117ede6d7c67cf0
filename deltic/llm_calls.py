"""Calls of the offline API (llm.py): what they ask for, how far they are, and what they bring."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from deltic.engine.messages import Output, Request, SamplingParams, TokenLogprob
from deltic.json_types import JsonObject
from deltic.logs import counted
from deltic.server.chat.answer import Choice, Message
from deltic.server.chat.decisions import QuestionScores, probabilities
from deltic.server.chat.picture_parts import file_of


class AnswerParams(SamplingParams, frozen=True, kw_only=True):
    """SamplingParams with what the engine need not know; `deltic.SamplingParams` is this."""

    stop: str | Sequence[str] = ()
    """Texts before which the answer ends."""
    response_format: Any = None
    """Form of the answer: OpenAI's `response_format`, a JSON schema, or a type: a model of pydantic's, a
    Struct of msgspec's, a dataclass or a TypedDict.
    """
    structured_outputs: JsonObject | None = None
    """Form as vLLM has it: one of `json`, `regex`, `choice`, `grammar`."""


@dataclass
class Completion:
    """Answer to a prompt. With n > 1 a prompt has n of them, next to each other."""

    prompt_index: int
    index: int
    """0 to n - 1."""
    prompt_ids: list[int]
    text: str = ""
    """Text without the stop string or token; from `chat`, without reasoning and tool calls."""
    token_ids: list[int] = field(default_factory=list)
    """Ids that were drawn, the stop token included."""
    finish_reason: str | None = None
    """"stop", "length", "tool_calls", "error" or "abort".

    A call that was cut short has another than tool_calls.
    """
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    """Calls, each with `id`, `name` and `arguments` (JSON text); from `chat` with tools."""
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities, one for each of token_ids."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had; with n > 1 in the completion of index 0 alone."""
    error: str | None = None
    """Reason of the failure, when finish_reason is "error"."""
    embedding: NDArray[np.float32] | None = None
    """The prompt's vector, from an embedder."""
    parsed: Any = None
    """The answer as a value, where a `response_format` is JSON: of its type, if it is one. None of an answer
    that was cut, and of one that its type refuses.
    """


@dataclass
class ContinuationScores:
    """Scores of the continuations of a prompt, in their order."""

    logprobs: list[float]
    """Log-probability of each: the sum of those of its tokens, each behind those before it."""
    probabilities: list[float]
    """Softmax over them: they add up to 1."""


@dataclass
class CallScores:
    """The scores that a call brings."""

    scores: QuestionScores
    places: Sequence[Sequence[tuple[int, int]]] | None = None
    """Places of each prompt's continuations: the number of a question, and of one of its labels. None: all
    labels of a question, in their order.
    """

    def taken(self, completions: Iterable[Completion]) -> list[ContinuationScores]:
        """The scores of each prompt or question. completions: one of each branch. Raises ValueError."""
        for out, completion in zip(self.scores.outs, completions, strict=True):
            if completion.prompt_logprobs is None:
                raise ValueError(completion.error or "the call was ended")
            out.take(completion.prompt_logprobs, completion.cached_tokens)
        found = self.scores.logprobs()
        if self.places is not None:
            found = [[found[question][label] for question, label in own] for own in self.places]
        return [ContinuationScores(each, probabilities(each)) for each in found]


@dataclass(slots=True)
class AnswerPiece:
    """A piece of a streamed answer: what one step, or a few, added to it."""

    prompt_index: int
    index: int
    text: str
    reasoning: str
    completion: Completion
    """The answer so far: its token ids and what came with them; its text and calls when it is complete."""

    @property
    def finish_reason(self) -> str | None:
        """Reason why the answer ended, in its last piece; else None."""
        return self.completion.finish_reason


@dataclass
class OpenCompletion:
    """A completion in the making."""

    completion: Completion
    params: AnswerParams
    choice: Choice
    message: Message = field(default_factory=Message)

    def take(self, output: Output) -> AnswerPiece:
        """Adds an output. The answer may be complete before the engine knows, by a stop string."""
        done, message = self.completion, self.message
        done.token_ids += output.token_ids
        done.cached_tokens = max(done.cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            done.prompt_logprobs = list(output.prompt_logprobs)
        if output.logprobs is not None:
            done.logprobs = (done.logprobs or []) + output.logprobs
        if output.vector:
            done.embedding = np.frombuffer(output.vector, np.float32)
        update = self.choice.push(output)
        message.add(update)
        if message.finish_reason is not None:
            done.text, done.reasoning = "".join(message.content), "".join(message.reasoning)
            done.tool_calls = [
                {"id": call.id or "", "name": call.name or "", "arguments": call.arguments} for call in message.calls
            ]
            done.finish_reason = message.finish_reason
            done.error = output.error if message.finish_reason == output.finish_reason else None
            if self.params.response_format is not None and done.finish_reason == "stop":
                done.parsed = _parsed(done.text, self.params.response_format)
        return AnswerPiece(done.prompt_index, done.index, update.delta.content, update.delta.reasoning, done)


@dataclass
class PreparedCall:
    """The answers of a call, and for each prompt what makes its Request of an id, the prompt's ids and the
    parameters.
    """

    answers: list[OpenCompletion]
    requests: Sequence[partial[Request]]


@dataclass(eq=False)
class OpenCall:
    """A call whose answers are on their way."""

    answers: list[OpenCompletion]
    open: dict[tuple[str, int], OpenCompletion] = field(default_factory=dict)
    """Answers that are not complete, by the ids of their requests and their indices."""
    outputs: deque[Output] = field(default_factory=deque)
    """Outputs that came, and were not taken yet."""
    n_read: dict[str, int] = field(default_factory=dict)
    """Tokens of each prompt that are computed."""
    n_tokens: int = 0
    """Tokens of all answers."""


TELL_S = 0.1
"""Seconds between two looks of a bar at its call."""


class Bar:
    """A bar in stderr, if that is a terminal, while the block runs."""

    def __init__(self, is_wanted: bool) -> None:
        console = Console(stderr=True)
        self.is_shown = is_wanted and console.is_terminal
        self._bar = Progress(console=console, transient=True, disable=not self.is_shown)
        self._task = self._bar.add_task("", total=1.0)
        self._told_s = 0.0

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, text: str, done: float) -> None:
        """done: 0 to 1."""
        self._bar.update(self._task, completed=done, description=text)

    def tell(self, call: OpenCall) -> None:
        """Shows how far a call is, now and then."""
        now_s = time.monotonic()
        if not self.is_shown or (now_s - self._told_s < TELL_S and call.open):
            return
        self._told_s = now_s
        n, n_open, n_read = len(call.answers), len(call.open), sum(call.n_read.values())
        n_prompt = sum(len(answer.completion.prompt_ids) for answer in call.answers if not answer.completion.index)
        # Where nothing is said yet, the bar is that of the prompts.
        done = (n - n_open) / n if call.n_tokens else n_read / max(1, n_prompt)
        read = "" if call.n_tokens else f", prompts {n_read / max(1, n_prompt):.0%} read"
        self.show(f"{n - n_open}/{n} answers, {counted(call.n_tokens, 'token')}{read}", done)


def stacked(completions: Sequence[Completion]) -> NDArray[np.float32]:
    """The vectors of the prompts, float32 [N, D]. Raises ValueError where one could not be computed."""
    for each in completions:
        if each.embedding is None:
            raise ValueError(f"text {each.prompt_index} has no vector: {each.error or each.finish_reason}")
    return np.stack([each.embedding for each in completions if each.embedding is not None])


FORMATS = ("text", "json_object", "json_schema", "structural_tag")
"""Types of OpenAI's `response_format`, which are none of a JSON schema."""


def form_fields(params: AnswerParams) -> JsonObject:
    """The fields of a request for the form of its answer. Raises ValueError."""
    asked, fields = params.response_format, {}
    if asked is not None:
        fields["response_format"] = asked
        if not isinstance(asked, Mapping) or asked.get("type") not in FORMATS:
            schema = asked if isinstance(asked, Mapping) else _schema_of(asked)
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if params.structured_outputs is not None:
        fields["structured_outputs"] = params.structured_outputs
    return fields


def _schema_of(kind: Any) -> JsonObject:
    """The JSON schema of a type, whose objects have no more than its fields. Raises ValueError."""
    if isinstance(kind, type) and hasattr(kind, "model_json_schema"):
        schema = kind.model_json_schema()
    else:
        try:
            schema = msgspec.json.schema(kind)
        except TypeError as error:
            raise ValueError(f"response_format: no JSON schema can be made of {kind!r} ({error})") from None
    _close(schema)
    return dict(schema)


def _close(part: Any) -> None:
    """Lets the objects of a schema have no properties but those that it names, where it says nothing."""
    if isinstance(part, dict):
        if part.get("type") == "object" and isinstance(part.get("properties"), dict):
            part.setdefault("additionalProperties", False)
        part = [*part.values()]
    for inner in part if isinstance(part, list) else ():
        _close(inner)


def _parsed(text: str, kind: Any) -> Any:
    """An answer as a value, None if it is none. kind: the `response_format`."""
    try:
        if isinstance(kind, type) and hasattr(kind, "model_validate_json"):
            return kind.model_validate_json(text)
        is_type = not isinstance(kind, Mapping)
        return msgspec.json.decode(text, type=kind) if is_type else msgspec.json.decode(text)
    except (ValueError, RecursionError):  # pydantic's errors and msgspec's are ValueErrors
        return None


ASIDE = "deltic-picture:"
"""Begins the URL of a picture that JSON cannot say."""


def sendable(messages: Iterable[object], files: list[bytes]) -> list[object]:
    """Messages with a URL for each picture that is none; the picture is added to `files`. Raises ValueError,
    OSError.
    """

    def part_of(part: object) -> object:
        if isinstance(part, dict) and part.get("type") == "image" and "image" in part:
            return {"type": "image_url", "image_url": {"url": url_of(part["image"])}}
        if isinstance(part, dict) and part.get("type") == "video" and "video" in part:
            video = part["video"]
            return part | {"video": [*map(url_of, video)] if isinstance(video, list | tuple) else url_of(video)}
        return part

    def url_of(file: object) -> str:
        if isinstance(file, str) and file.startswith(("data:", "http:", "https:")):
            return file
        files.append(file_of(file))
        return f"{ASIDE}{len(files) - 1}"

    return [
        message | {"content": [part_of(part) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
