"""The wire format of the OpenAI API, and how it becomes a Request of the engine.

Every field that asks for something is either honoured or refused with a 400 that names it: an unknown field,
a value out of range, and a feature that is not supported unless its value asks for nothing (`echo: false`;
see decode.py). Extra fields are named as in vLLM, SGLang, llama.cpp and OpenRouter; see `decode.settle` for
those that say the same as others. The history of a chat is in messages.py.

Accepted and ignored, since they ask for nothing that could show in an answer: `user`, `metadata`, `store`
(of a chat), `prediction`, `prompt_cache_*`, `safety_identifier`, `keep_alive`, `ttl`, `num_ctx`;
`add_special_tokens` and `spaces_between_special_tokens`, as the family's tokenizers have neither.
Wishes that an answer declines: `service_tier` (the answer says "default"), `verbosity` unless the template
reads it.
A tool's own description (all of `tools` but `cache_control`) goes to the template as it was sent.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from deltic.config import ServerConfig
from deltic.engine.messages import MAX_BIASES, MAX_LOGPROBS, EngineInfo, SamplingParams
from deltic.ops.geometry import PAGE_SIZE
from deltic.server.api.messages import Message
from deltic.server.chat.picture_parts import PictureBounds
from deltic.server.errors import PromptTooLong, bad_request
from deltic.text import SamplingDefaults

MAX_STOPS = 32
MAX_STOP_LENGTH = 1024
"""Characters of one stop string."""
SHORT_ANSWER = 16
"""Tokens of a completion that asks for no length."""
END_OF_TEXT = "<|endoftext|>"
"""The prompt of a completion that has none."""
GREEDY_BELOW = 1e-4
"""A temperature under this draws as 0 does: the most likely token; dividing by it would overflow float32."""

Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
AnswerId = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}(?!\n)$")]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """The counts so far in every chunk; with include_usage."""
    include_obfuscation: bool | None = None
    """Random characters in each chunk, so that its length tells nothing."""


class UsageOptions(Struct, forbid_unknown_fields=True):
    """OpenRouter's form of `stream_options.include_usage`."""

    include: bool | None = None


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chats and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=100.0)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=128)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_prompt: bool | None = None
    """False: neither read nor feed the prefix cache."""
    best_of: Positive | None = None
    """Equal to n, or 1."""
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """The tokens of log-probabilities are called `token_id:N`."""
    detokenize: bool | None = None
    """False: ids only, with return_token_ids."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Only the last so many tokens of the prompt; -1: as many as leave room for the answer."""
    request_id: AnswerId | None = None
    """In the answer's id."""
    rid: AnswerId | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=1e-6, le=100.0)] | None = None
    repeat_last_n: int | None = None
    """Tokens that its penalty counts: -1, all; or 0, which is none."""
    timings_per_token: bool | None = None
    usage: UsageOptions | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    """Of vLLM's, where this server has one; so it changes nothing."""
    grammar: str | None = None
    """llama.cpp's, as `json_schema`; "" asks for nothing. `regex` and `ebnf` are SGLang's."""
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    bad_words: Annotated[list[str], Meta(max_length=1024)] | None = None
    allowed_token_ids: list[int] | None = None
    # Carry no promise about the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    keep_alive: Any = None
    ttl: Any = None
    num_ctx: Positive | None = None
    """Programs send a large one by habit; they get what there is."""
    add_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
"""The least first; a template that does not know one is given another (server/chat/template.py)."""


class ThinkingSwitch(Struct, forbid_unknown_fields=True):
    """As Anthropic's, which other servers read on chats, too."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count | None = None


class ReasoningSwitch(Struct, forbid_unknown_fields=True):
    """OpenRouter's."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Count | None = None
    exclude: bool | None = None
    """The thought is not shown."""
    summary: Any = None


class Conversing(Sampling, kw_only=True):
    """The fields that chats and responses share."""

    top_logprobs: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_budget: Count | None = None
    """Tokens of the thought, if the prompt opens one."""
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: PictureBounds | None = None


class ChatRequest(Conversing):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None
    """False: the thought is not shown."""
    thinking: ThinkingSwitch | None = None
    reasoning: ReasoningSwitch | None = None
    documents: list[dict[str, Any]] | None = None
    """For the template."""
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    """Instead of the model's own, where the server trusts requests so far."""
    prediction: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    """The older form of `tools`; a call comes in the older form, too."""
    function_call: Literal["auto", "none"] | dict[str, Any] | None = None
    """Of `tool_choice`."""


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | list[Any] | None = None
    """None: the end of a text, behind which another begins."""
    echo: bool | None = None
    logprobs: Count | None = None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text, or a chat as /v1/chat/completions would render it."""

    model: str | None = None
    return_token_strs: bool = False
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Changes nothing: the family's tokenizers add none."""
    parse_special_tokens: bool | None = None
    """Whether `<|im_end|>` written in the prompt is the token (unless false) or its letters."""
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: PictureBounds | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None
    skip_special_tokens: bool = False


class EmptyRequest(Struct, forbid_unknown_fields=True):
    """POST /cache/reset: there is nothing to say."""


def context_limit(info: EngineInfo) -> int:
    """Tokens that one sequence may have, prompt and answer together."""
    return min(info.max_model_len, info.n_pages * PAGE_SIZE)


def answer_length(
    request: ChatRequest | CompletionRequest, n_prompt: int, info: EngineInfo, default: int | None
) -> int:
    """max_tokens of the answer: what was asked for, and no more than the context leaves.

    default: where nothing was asked for; None: what the context leaves of a chat, 16 of a completion.

    Raises ApiError (400) when the prompt leaves no room, with the limit and the length.
    """
    limit = context_limit(info)
    prompt = "messages" if isinstance(request, ChatRequest) else "prompt"
    if n_prompt == 0:
        raise bad_request(prompt, "is empty; the answer needs at least one token to start from")
    if n_prompt >= limit:
        raise PromptTooLong(prompt, n_prompt, limit)
    asked = request.max_tokens
    if isinstance(request, ChatRequest):
        newer = request.max_completion_tokens
        if asked is not None and newer is not None and asked != newer:
            raise bad_request("max_tokens", "differs from max_completion_tokens; give one of the two")
        asked = newer if newer is not None else asked
        if asked == 0:
            raise bad_request("max_tokens" if newer is None else "max_completion_tokens", "must be at least 1")
    if asked is None:
        asked = default or (limit if isinstance(request, ChatRequest) else SHORT_ANSWER)
    return min(asked, limit - n_prompt)


def kept_tokens(request: Sampling, info: EngineInfo, default: int | None) -> int | None:
    """How many of a prompt's last tokens `truncate_prompt_tokens` keeps; None: all.

    Raises ApiError (400) for more than the context holds. default: as of `answer_length`; the prompt leaves
    room for so much where the answer may have any length.
    """
    most, limit = request.truncate_prompt_tokens, context_limit(info)
    if most is None:
        return None
    if most == 0 or most >= limit:
        raise bad_request("truncate_prompt_tokens", f"must be -1, or from 1 to {limit - 1}")
    if most == -1:
        asked = _first(request.max_tokens, getattr(request, "max_completion_tokens", None))
        lengths = [n for n in (asked, default, SHORT_ANSWER) if n is not None and n < limit]
        most = max(1, limit - max(1, lengths[0])) if lengths else 1
    return most


def sampling_params(
    request: ChatRequest | CompletionRequest,
    max_tokens: int,
    info: EngineInfo,
    defaults: SamplingDefaults,
    config: ServerConfig,
) -> SamplingParams:
    """The request's parameters, checked against what this engine has. Raises ApiError (400)."""
    n = request.n or 1
    most = min(config.max_n, info.max_num_seqs)
    if n > most:
        raise bad_request("n", f"{n} is more than this server gives at once ({most})")
    for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        for token_id in getattr(request, field) or ():
            if not 0 <= token_id < info.vocab_size:
                raise bad_request(field, f"{token_id} is not a token id; they go from 0 to {info.vocab_size - 1}")
    if len(request.logit_bias or ()) > MAX_BIASES:
        raise bad_request("logit_bias", f"may have at most {MAX_BIASES} entries")
    if (request.min_tokens or 0) > max_tokens:
        raise bad_request("min_tokens", f"{request.min_tokens} is more than the answer may have ({max_tokens} tokens)")
    most_logprobs = min(config.max_logprobs, MAX_LOGPROBS, info.vocab_size)
    logprobs = _n_logprobs(request, most_logprobs)
    if (request.prompt_logprobs or 0) > most_logprobs:
        raise bad_request("prompt_logprobs", f"may be at most {most_logprobs}")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs", "not available in a stream; set stream to false")
    temperature = _first(request.temperature, defaults.temperature)
    top_p, top_k = _first(request.top_p, defaults.top_p), _first(request.top_k, defaults.top_k)
    if top_p == 0.0:  # no probability at all: what is left is the most likely token
        top_p, top_k = 1.0, 1
    prompt_logprobs = request.prompt_logprobs
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, request.logprobs)
    return SamplingParams(
        max_tokens=max(1, max_tokens),
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=max(0, top_k),
        top_p=top_p,
        min_p=_first(request.min_p, defaults.min_p),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=request.logit_bias or {},
        seed=request.seed,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def _n_logprobs(request: ChatRequest | CompletionRequest, most: int) -> int | None:
    """How many alternatives a token's log-probability comes with; None: no log-probabilities."""
    if isinstance(request, CompletionRequest):
        field, wanted, k = "logprobs", request.logprobs is not None, request.logprobs or 0
    else:
        field, wanted, k = "top_logprobs", bool(request.logprobs), request.top_logprobs or 0
        if request.top_logprobs and not wanted:
            raise bad_request("top_logprobs", "needs logprobs: true")
    if k > most:
        raise bad_request(field, f"may be at most {most}")
    return k if wanted else None


def stop_strings(request: Sampling) -> list[str]:
    """Raises ApiError (400) for one that is empty or very long, or too many."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise bad_request("stop", f"may have at most {MAX_STOPS} strings")
    for i, stop in enumerate(stops):
        if not stop:
            raise bad_request(f"stop[{i}]" if isinstance(request.stop, list) else "stop", "is an empty string")
        if len(stop) > MAX_STOP_LENGTH:
            raise bad_request("stop", f"a stop string may have at most {MAX_STOP_LENGTH} characters")
    return stops


def prompts(request: CompletionRequest, info: EngineInfo) -> list[str | list[int]]:
    """The prompts of a completion: each a text or ids. Raises ApiError (400)."""
    prompt = END_OF_TEXT if request.prompt is None else request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt", "is an empty list")
    if all(isinstance(entry, str) for entry in prompt):
        return list(prompt)
    if not any(isinstance(entry, list) for entry in prompt):
        return [_token_ids("prompt", prompt, info)]
    return [_token_ids(f"prompt[{i}]", entry, info) for i, entry in enumerate(prompt)]


def _token_ids(param: str, ids: Any, info: EngineInfo) -> list[int]:
    try:
        checked = msgspec.convert(ids, list[int])
    except msgspec.ValidationError:
        raise bad_request(param, "expected a text, a list of texts, token ids, or a list of token id lists") from None
    if checked and not 0 <= min(checked) <= max(checked) < info.vocab_size:
        raise bad_request(param, f"has an id outside the vocabulary, which goes from 0 to {info.vocab_size - 1}")
    return checked


def check_tokenize(request: TokenizeRequest) -> None:
    """Raises ApiError (400) unless the request has a prompt or messages, and no field of the other."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("prompt", "give either prompt or messages")
    form, other = ("prompt", _CHAT_ONLY) if request.messages is None else ("messages", _PROMPT_ONLY)
    for field in other:
        if getattr(request, field) is not None:
            raise bad_request(field, f"has no meaning with {form}; leave it out")


_PROMPT_ONLY = ("parse_special_tokens",)
_CHAT_ONLY = (
    "tools",
    "tool_choice",
    "enable_thinking",
    "preserve_thinking",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)


SWITCHES = ("enable_thinking", "preserve_thinking")


def template_settings(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Variables for the chat template; `reasoning_effort` also sets `enable_thinking`.

    Raises ApiError (400).
    """
    settings = dict(request.chat_template_kwargs or {})
    settings.pop("thinking_budget", None)  # ours, not the template's
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in settings:
            raise bad_request(f"chat_template_kwargs.{name}", "is a field of the request, not a template setting")
    given = [(f"chat_template_kwargs.{name}", name, settings[name]) for name in SWITCHES if name in settings]
    given += [(name, name, value) for name in SWITCHES if (value := getattr(request, name)) is not None]
    if request.reasoning_effort is not None:
        given.append(("reasoning_effort", "enable_thinking", request.reasoning_effort != "none"))
        settings["reasoning_effort"] = request.reasoning_effort
    first: dict[str, str] = {}
    for field, name, value in given:
        if not isinstance(value, bool):
            raise bad_request(field, "expected true or false")
        if settings.setdefault(name, value) != value:
            raise bad_request(field, f"contradicts {first[name]}; give one of the two")
        first.setdefault(name, field)
    return settings


def shown_by_template(request: ChatRequest | TokenizeRequest, variables: Set[str]) -> dict[str, Any]:
    """Variables that a template has only where it reads them.

    Raises ApiError (400) for documents that nobody would see.
    """
    documents, verbosity = getattr(request, "documents", None), getattr(request, "verbosity", None)
    if documents and "documents" not in variables:
        raise bad_request(
            "documents", "this model's chat template shows none; put them into a message", "unsupported_field"
        )
    shown = {"documents": documents or None, "verbosity": verbosity if "verbosity" in variables else None}
    return {name: value for name, value in shown.items() if value is not None}
