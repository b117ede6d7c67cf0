"""The wire format of Ollama's API, and how it becomes a Chat, or with `raw` a Completion.

Fields that could not show in an answer are accepted: `keep_alive` (without --models-from models stay), and
the options that say how a model is loaded and computed (`num_gpu`, `num_thread`, ...). `num_ctx` is the most
that prompt and answer may have, where it is less than what the server has; programs that send a large one by
habit get what there is, and a prompt that does not fit is refused, not shortened. What messages of the
history have beyond the fields below is passed over.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from deltic.json_types import JsonObject
from deltic.server.api import protocol
from deltic.server.api.decode import REFUSED, UNSUPPORTED
from deltic.server.chat import messages
from deltic.server.chat import request as chats
from deltic.server.chat.picture_parts import Sent
from deltic.server.errors import bad_request
from deltic.server.offered import duration
from deltic.text import SamplingDefaults

API_VERSION = "0.13.0"
"""The Ollama whose API this is: programs ask for a version, and some for a least one."""


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of sampling, and beside them what Ollama's own runner wants to know."""

    num_predict: int | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: protocol.Probability | None = None
    min_p: protocol.Probability | None = None
    seed: protocol.Seed | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Meta(ge=1e-6, le=100.0)] | None = None
    repeat_last_n: int | None = None
    presence_penalty: protocol.Penalty | None = None
    frequency_penalty: protocol.Penalty | None = None
    num_ctx: chats.Count | None = None
    # Supported only with a value that asks for nothing: see refused.toml.
    typical_p: object = None
    tfs_z: object = None
    mirostat: object = None
    penalize_newline: object = None
    # Carry no promise about the answer.
    mirostat_tau: object = None
    mirostat_eta: object = None
    num_keep: object = None
    num_batch: object = None
    num_gpu: object = None
    main_gpu: object = None
    num_thread: object = None
    numa: object = None
    low_vram: object = None
    f16_kv: object = None
    use_mmap: object = None
    use_mlock: object = None


class AnswerRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that requests for both kinds of answers share."""

    model: str
    stream: bool | None = None
    """Unless false."""
    format: str | JsonObject | None = None
    options: Options | None = None
    think: bool | Literal["", chats.Effort] | None = None
    logprobs: bool | None = None
    top_logprobs: chats.Count | None = None
    keep_alive: str | float | None = None
    truncate: object = None
    shift: object = None


class EmbedRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    """False: a text that is too long is refused, instead of cut."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Elements of a vector, from its front; all of them unless it is given."""
    options: Options | None = None
    keep_alive: str | float | None = None


class EmbedOneRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, which /api/embed has replaced."""

    model: str
    prompt: str
    options: Options | None = None
    keep_alive: str | float | None = None


class OllamaFunction(Struct):
    name: messages.ToolName
    arguments: JsonObject | str | None = None


class OllamaToolCall(Struct):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """Pictures, in base64; those of the assistant's are passed over."""
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(AnswerRequest):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    """Messages to answer; without any the model is only to be loaded, which it is."""
    tools: list[JsonObject] | None = None


class GenerateRequest(AnswerRequest):
    """POST /api/generate."""

    prompt: str | None = None
    """Empty: as a chat without messages."""
    system: str | None = None
    raw: bool | None = None
    """The prompt is the whole text, which no template sees."""
    suffix: str | None = None
    """The text behind the gap that the answer fills, which no template sees either; "" asks for nothing."""
    template: object = None
    context: object = None
    images: list[str] | None = None


class NamedRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request about a model, not for an answer of it."""

    model: str = ""
    name: str = ""
    """Alias of `model`, its older name."""


class DeleteRequest(NamedRequest):
    """DELETE /api/delete."""


class ShowRequest(NamedRequest):
    """POST /api/show."""

    verbose: bool | None = None


class PullRequest(NamedRequest):
    """POST /api/pull."""

    stream: bool | None = None
    insecure: bool | None = None


def check(asked: AnswerRequest) -> None:
    """Raises ApiError (400) for a field that asks for something that is not supported."""
    options, neutral = asked.options or Options(), REFUSED["ollama_neutral"]
    for value, path in ((asked, ""), (options, "options.")):
        for field in value.__struct_fields__:
            given = getattr(value, field)
            if given is not None and field in neutral and given != neutral[field]:
                raise bad_request(path + field, REFUSED["ollama"].get(field, UNSUPPORTED), "unsupported_field")
    if (options.num_predict or 0) < -2:
        raise bad_request("options.num_predict", "expected a number of tokens, or -1 for any number")
    if is_empty(asked) and asked.keep_alive in NO_TIME:
        message = (
            "0 and no prompt asks for the model to be unloaded. Models stay here: start the server with --models-from."
        )
        raise bad_request("keep_alive", message, "unsupported_field")


NO_TIME = (0, "0", "0s", "0m", "0h")
"""Times of `keep_alive` that ask for a model to be unloaded."""


def seconds_of(keep_alive: str | float) -> float:
    """Returns the seconds of `keep_alive`; infinite: for ever. Raises ApiError (400)."""
    try:
        return duration(keep_alive)
    except ValueError as error:
        raise bad_request("keep_alive", str(error)) from None


def is_empty(asked: AnswerRequest) -> bool:
    """Returns whether nothing is to be said: the model is asked to be there."""
    if isinstance(asked, OllamaChatRequest):
        return not asked.messages
    return not any(getattr(asked, field, None) for field in ("prompt", "images", "suffix"))


ORIGIN = {"max_tokens": "options.num_predict", "continue_final_message": "messages"}
"""Fields of a Chat, and what this API calls them."""


def chat_of(asked: AnswerRequest, defaults: SamplingDefaults) -> chats.Chat:
    """The chat that a checked body asks for. Raises ApiError (400)."""
    turns: list[messages.Message] = []
    tools = []
    if isinstance(asked, OllamaChatRequest):
        turns = [_message(message, f"messages[{i}].images") for i, message in enumerate(asked.messages or ())]
        tools = protocol.tools_of(asked.tools)
    elif isinstance(asked, GenerateRequest):
        if asked.system:
            turns.append(messages.SystemMessage(content=asked.system))
        turns.append(messages.UserMessage(content=_content(asked.prompt or "", asked.images, "images")))
    last = turns[-1]
    settings: JsonObject = {}
    if isinstance(asked.think, bool):
        settings["enable_thinking"] = asked.think
    elif asked.think:
        settings = {"reasoning_effort": asked.think, "enable_thinking": asked.think != "none"}
    return chats.Chat(
        messages=turns,
        sampling=_sampling(asked, defaults),
        model=asked.model,
        tools=tools,
        calls=chats.calls_of(tools, chats.ToolChoice()),
        settings=settings,
        continue_final_message=isinstance(last, messages.AssistantMessage) and not last.tool_calls,
        origin=ORIGIN,
    )


def completion_of(asked: GenerateRequest, longest: int, defaults: SamplingDefaults) -> chats.Completion:
    """The completion that a checked body with `raw` or a suffix asks for. longest: its answer where it says
    nothing. Raises ApiError (400).
    """
    for field in ("system", "think", "images"):
        if getattr(asked, field):
            beside = "beside suffix" if asked.suffix else "with raw: true"
            raise bad_request(field, f"has no meaning {beside}. Leave it out.")
    sampling = _sampling(asked, defaults)
    if sampling.max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=longest)
    return chats.Completion(sampling, [asked.prompt or ""], asked.model, suffix=asked.suffix or "", origin=ORIGIN)


_PARAMS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
"""Options that are parameters as they are."""


def _sampling(asked: AnswerRequest, defaults: SamplingDefaults) -> chats.Sampling:
    """Raises ApiError (400)."""
    options = asked.options or Options()
    n = options.num_predict
    if n == 0:
        raise bad_request("options.num_predict", "must be at least 1, or -1 for any number")
    if asked.top_logprobs and not asked.logprobs:
        raise bad_request("top_logprobs", "needs logprobs: true")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    penalty = chats.whole_penalty(options.repeat_penalty, options.repeat_last_n, "options.repeat_last_n")
    seed = None if options.seed == -1 else options.seed
    given = {name: getattr(options, name) for name in _PARAMS}
    given |= {"seed": seed, "repetition_penalty": penalty, "logprobs": logprobs}
    return chats.Sampling(
        params=chats.sampling_params(given, defaults),
        shown=chats.Shown(stops=chats.stop_strings(options.stop, "options.stop"), logprobs=logprobs is not None),
        max_tokens=None if n is None or n < 0 else n,
        form=_form(asked.format),
    )


def _form(given: str | JsonObject | None) -> chats.Form | None:
    """Raises ApiError (400)."""
    if not given and not isinstance(given, dict):
        return None
    if isinstance(given, str) and given != "json":
        raise bad_request("format", "expected 'json' or a JSON schema")
    return chats.Form("format", "format", "json", chats.ANY if given == "json" else given)


def _content(text: str, images: list[str] | None, path: str) -> messages.Content:
    """Content of a message: images before the text, as in Ollama's own prompts. path: the images' path."""
    if not images:
        return text
    sent = [Sent(f"{path}[{i}]", path, encoded=image) for i, image in enumerate(images)]
    return [*(picture.part_of_message() for picture in sent), {"type": "text", "text": text}]


def _message(message: OllamaMessage, path: str) -> messages.Message:
    """A message of a chat. path: the path of its images."""
    content = _content(message.content or "", message.images, path)
    if message.role == "system":
        return messages.SystemMessage(content=content)
    if message.role == "user":
        return messages.UserMessage(content=content)
    if message.role == "tool":
        return messages.ToolMessage(content=content, tool_call_id=message.tool_call_id, name=message.tool_name)
    calls = [
        messages.ToolCall(
            function=messages.CalledFunction(call.function.name, call.function.arguments or {}), id=call.id
        )
        for call in message.tool_calls or ()
    ]
    return messages.AssistantMessage(
        content=message.content or "", reasoning_content=message.thinking or None, tool_calls=calls or None
    )
