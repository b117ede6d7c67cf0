"""The wire format of chats of the OpenAI API, what completions share with it, and how it becomes a Chat.

Every field that asks for something is either honoured or refused with a 400 that names it: an unknown field,
a value out of range, and a feature that is not supported unless its value asks for nothing (`echo: false`;
see decode.py). Extra fields are named as in vLLM, SGLang, llama.cpp and OpenRouter; those that say the same
as others are settled here, and nowhere else. The history of a chat is in server/chat/messages.py.

Accepted and ignored, since they ask for nothing that could show in an answer: `user`, `metadata`, `store`
(of a chat), `prediction`, `prompt_cache_*`, `safety_identifier`, `keep_alive`, `ttl`, `num_ctx`;
`add_special_tokens` and `spaces_between_special_tokens`, as the family's tokenizers have neither.
Wishes that an answer declines: `service_tier` (the answer says "default"), `verbosity` unless the template
reads it.
A tool's own description (all of `tools` but `cache_control`) goes to the template as it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from deltic.engine.messages import Handling, SamplingParams
from deltic.json_types import JsonObject
from deltic.server.api import decode
from deltic.server.chat import request as chats
from deltic.server.chat.messages import Message, ToolName
from deltic.server.chat.picture_parts import PictureBounds
from deltic.server.errors import bad_request
from deltic.text import SamplingDefaults

T = TypeVar("T")

Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
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


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chats and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: chats.Count | None = None
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
    min_tokens: chats.Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: chats.Count | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Requests with different salts share no cached prefixes."""
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
    """Number of the prompt's last tokens that are kept; -1: as many as leave room for the answer."""
    request_id: AnswerId | None = None
    """End of the answer's id, behind the API's prefix."""
    rid: AnswerId | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=1e-6, le=100.0)] | None = None
    repeat_last_n: int | None = None
    """Tokens that its penalty counts: -1, all; or 0, which is none."""
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    """Chunks tell how much of the prompt is computed, before the first token."""
    usage: UsageOptions | None = None
    response_format: object = None
    structured_outputs: object = None
    guided_json: str | JsonObject | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    """Name of one of vLLM's backends, where this server has its own; so it changes nothing."""
    grammar: str | None = None
    """llama.cpp's, as `json_schema`; "" asks for nothing. `regex` and `ebnf` are SGLang's."""
    json_schema: str | JsonObject | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    bad_words: Annotated[list[str], Meta(max_length=1024)] | None = None
    """Texts that may not come in the answer."""
    allowed_token_ids: list[int] | None = None
    """The only ids that may be drawn."""
    # Carry no promise about the answer.
    user: str | None = None
    metadata: JsonObject | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonObject | None = None
    keep_alive: object = None
    ttl: object = None
    num_ctx: Positive | None = None
    """Programs send a large one by habit; they get what there is."""
    add_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None


class ThinkingSwitch(Struct, forbid_unknown_fields=True):
    """Switch of Anthropic's, which other servers read on chats, too."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: chats.Count | None = None


class ReasoningSwitch(Struct, forbid_unknown_fields=True):
    """Switch of OpenRouter's."""

    effort: chats.Effort | None = None
    enabled: bool | None = None
    max_tokens: chats.Count | None = None
    exclude: bool | None = None
    """The thought is not shown."""
    summary: object = None


class ChatFields(SamplingFields, kw_only=True):
    """The fields that chats and responses share."""

    top_logprobs: chats.Count | None = None
    tools: list[JsonObject] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_budget: chats.Count | None = None
    """Tokens of the thought, if the prompt opens one."""
    chat_template_kwargs: JsonObject | None = None
    mm_processor_kwargs: PictureBounds | None = None


class ChatRequest(ChatFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: chats.Count | None = None
    logprobs: bool | None = None
    reasoning_effort: chats.Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None
    """False: the thought is not shown."""
    thinking: ThinkingSwitch | None = None
    reasoning: ReasoningSwitch | None = None
    documents: list[JsonObject] | None = None
    """Documents for the template."""
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    """Instead of the model's own, where the server trusts requests so far."""
    prediction: JsonObject | None = None
    functions: list[JsonObject] | None = None
    """The older form of `tools`; a call comes in the older form, too."""
    function_call: Literal["auto", "none"] | JsonObject | None = None
    """Older form of `tool_choice`."""


class EmptyRequest(Struct, forbid_unknown_fields=True):
    """POST /cache/reset: there is nothing to say."""


def chat_of(request: ChatRequest, defaults: SamplingDefaults = chats.NO_DEFAULTS) -> chats.Chat:
    """The chat that a body asks for. Raises ApiError (400)."""
    tools, choice = _tools_and_choice(request)
    thinking, reasoning = request.thinking, request.reasoning or ReasoningSwitch()
    effort: chats.Effort | None = _agreed(
        "reasoning_effort", request.reasoning_effort, {"reasoning.effort": reasoning.effort}
    )
    switches = {
        "thinking.type": thinking.type != "disabled" if thinking else None,
        "reasoning.enabled": reasoning.enabled,
    }
    enabled = _agreed("enable_thinking", request.enable_thinking, switches)
    budgets = {
        "thinking.budget_tokens": thinking.budget_tokens if thinking else None,
        "reasoning.max_tokens": reasoning.max_tokens,
    }
    budget = _agreed("thinking_budget", request.thinking_budget, budgets)
    excluded = {"reasoning.exclude": False if reasoning.exclude else None}
    included = _agreed("include_reasoning", request.include_reasoning, excluded)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs", "needs logprobs: true")
    length, newer = longest(request), request.max_completion_tokens
    if length is not None and newer not in (None, length):
        raise bad_request("max_tokens", "differs from max_completion_tokens. Give one of the two.")
    if 0 in (length, newer):
        raise bad_request("max_tokens" if newer is None else "max_completion_tokens", "must be at least 1")
    length = length if newer is None else newer
    return chats.Chat(
        messages=request.messages,
        sampling=sampling_of(
            request,
            defaults,
            max_tokens=length,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            hides_thought=included is False,
        ),
        model=request.model,
        tools=tools,
        calls=chats.calls_of(tools, choice),
        settings=template_settings(request.chat_template_kwargs, effort, enabled, request.preserve_thinking),
        documents=request.documents,
        verbosity=request.verbosity,
        thinking_budget=thinking_budget(request, budget),
        chat_template=request.chat_template,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        picture_bounds=request.mm_processor_kwargs,
        origin={"tool_choice": "function_call"} if request.function_call else {},
    )


def longest(request: SamplingFields) -> int | None:
    """max_tokens, or llama.cpp's n_predict. Raises ApiError (400)."""
    n = 2**31 - 1 if request.n_predict == -1 else request.n_predict
    return _agreed("max_tokens", request.max_tokens, {"n_predict": n})


def _agreed(name: str, value: T | None, others: Mapping[str, T | None]) -> T | None:
    """The value of a field that has other names. Raises ApiError (400) for a contradiction."""
    for field, other in others.items():
        if None not in (value, other) and value != other:
            raise bad_request(field, f"contradicts {name}. Give one of the two.")
        value = value if other is None else other
    return value


_PARAMS = frozenset(SamplingParams.__struct_fields__) & frozenset(SamplingFields.__struct_fields__) - {"max_tokens"}
"""Fields that are parameters as they are."""


def sampling_of(
    request: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    hides_thought: bool = False,
    forms: list[chats.Form] | None = None,
) -> chats.Sampling:
    """The shared part of a request. forms: what its API asks for instead of `response_format`.

    Raises ApiError (400).
    """
    penalty = _agreed("repetition_penalty", request.repetition_penalty, {"repeat_penalty": request.repeat_penalty})
    penalty = chats.whole_penalty(penalty, request.repeat_last_n, "repeat_last_n")
    if request.best_of not in (None, 1, request.n):
        raise bad_request("best_of", "not supported unless it equals n", "unsupported_field")
    if request.detokenize is False and not (request.return_token_ids and not request.stop):
        raise bad_request("detokenize", "false needs return_token_ids: true, and no stop")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "only for a stream. Set stream to true.")
    if request.return_progress and not request.stream:
        raise bad_request("return_progress", "only for a stream. Set stream to true.")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs", "not available in a stream. Set stream to false.")
    scored = request.prompt_logprobs
    if logprobs is not None and getattr(request, "echo", None):
        scored = max(scored or 0, logprobs)
    own_forms = _response_format(request.response_format) if forms is None else forms
    stop_token_ids = tuple(request.stop_token_ids or ())
    given = {name: getattr(request, name) for name in _PARAMS} | {
        "repetition_penalty": penalty,
        "stop_token_ids": stop_token_ids,
        "logprobs": logprobs,
        "prompt_logprobs": scored,
    }
    return chats.Sampling(
        params=chats.sampling_params(given, defaults),
        shown=chats.Shown(
            stops=chats.stop_strings(request.stop),
            stop_token_ids=stop_token_ids,
            skip_special_tokens=request.skip_special_tokens is not False,
            logprobs=logprobs is not None,
            is_silent=max_tokens == 0,
            includes_stop=bool(request.include_stop_str_in_output),
            gives_ids=bool(request.return_token_ids),
            gives_text=request.detokenize is not False,
            hides_thought=hides_thought,
        ),
        max_tokens=max_tokens,
        form=chats.form_of([*own_forms, *_structured(request)]),
        allowed_token_ids=request.allowed_token_ids,
        bad_words=request.bad_words or [],
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        handling=handling_of(request),
    )


def handling_of(request: SamplingFields) -> Handling:
    """The wishes about a request that its answer does not show."""
    return Handling(
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        use_cache=request.cache_prompt is not False,
        wants_progress=bool(request.return_progress),
    )


# Settings of the template.


def template_settings(
    kwargs: JsonObject | None,
    effort: chats.Effort | None,
    enable_thinking: bool | None,
    preserve_thinking: bool | None,
    effort_field: str = "reasoning_effort",
) -> JsonObject:
    """Variables for the chat template; an effort also sets `enable_thinking`.

    kwargs: `chat_template_kwargs`. Raises ApiError (400).
    """
    settings = dict(kwargs or {})
    settings.pop("thinking_budget", None)  # ours, not the template's
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in settings:
            raise bad_request(f"chat_template_kwargs.{name}", "is a field of the request, not a template setting")
    given = [(f"chat_template_kwargs.{name}", name, settings[name]) for name in chats.SWITCHES if name in settings]
    own = zip(chats.SWITCHES, (enable_thinking, preserve_thinking), strict=True)
    given += [(name, name, value) for name, value in own if value is not None]
    if effort is not None:
        given.append((effort_field, "enable_thinking", effort != "none"))
        settings["reasoning_effort"] = effort
    first: dict[str, str] = {}
    for field, name, value in given:
        if not isinstance(value, bool):
            raise bad_request(field, "expected true or false")
        if settings.setdefault(name, value) != value:
            raise bad_request(field, f"contradicts {first[name]}. Give one of the two.")
        first.setdefault(name, field)
    return settings


def thinking_budget(request: ChatFields, own: int | None) -> int | None:
    """Tokens that the thought may have. own: the number in fields of the API. Raises ApiError (400)."""
    path = "chat_template_kwargs.thinking_budget"
    inner = (request.chat_template_kwargs or {}).get("thinking_budget")
    budget: int | None = _agreed(path, inner, {"thinking_budget": own})
    return None if budget is None else decode.convert(budget, chats.Count, path)


# Tools.


class ChatTool(Struct, forbid_unknown_fields=True):
    function: chats.ToolFunction
    type: Literal["function"] = "function"
    cache_control: object = None
    """A mark of Anthropic's prompt cache, which gateways leave here; so is the function's.

    The model is not shown it.
    """


class AnyText(Struct, tag="text", forbid_unknown_fields=True):
    """Text without a constraint."""


class TextOf(Struct, tag="grammar", forbid_unknown_fields=True):
    grammar: chats.ToolGrammar


class Custom(Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    format: AnyText | TextOf | None = None


class ChatCustomTool(Struct, forbid_unknown_fields=True):
    """A tool that takes a text. The model has it as a function with one parameter, `input`."""

    custom: Custom
    type: Literal["custom"]
    cache_control: object = None


class Named(Struct, forbid_unknown_fields=True):
    name: str


class OneTool(Struct, tag="function", forbid_unknown_fields=True):
    function: Named


class OneCustom(Struct, tag="custom", forbid_unknown_fields=True):
    custom: Named


class AllowedToolList(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[OneTool | OneCustom]


class SomeTools(Struct, tag="allowed_tools", forbid_unknown_fields=True):
    allowed_tools: AllowedToolList


_TEXT_ONLY = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "All that the tool is given, as it is."}},
    "required": ["input"],
}
"""The parameters of a custom tool."""


def text_function(name: str, description: str | None, grammar: chats.ToolGrammar | None) -> JsonObject:
    """The function that a custom tool is to the model."""
    function = {"name": name} | ({"description": description} if description else {}) | {"parameters": _TEXT_ONLY}
    if grammar is not None:
        function["grammar"] = {"syntax": grammar.syntax, "definition": grammar.definition}
    return function


def function_tool(function: JsonObject, path: str, schema: str = "parameters", is_custom: bool = False) -> chats.Tool:
    """A tool of a function in OpenAI's form. path: the client's; schema: the client's name of its parameters.

    Raises ApiError (400).
    """
    read = decode.convert(function, chats.ToolFunction, path)
    return chats.Tool(
        read, {"type": "function", "function": _without_marks(function)}, path, f"{path}.{schema}", is_custom
    )


def tools_of(tools: list[JsonObject] | None) -> list[chats.Tool]:
    """Raises ApiError (400)."""
    converted = []
    for i, tool in enumerate(tools or ()):
        path = f"tools[{i}]"
        if tool.get("type") == "custom":
            custom = decode.convert(tool, ChatCustomTool, path).custom
            grammar = custom.format.grammar if isinstance(custom.format, TextOf) else None
            function = text_function(custom.name, custom.description, grammar)
            converted.append(function_tool(function, f"{path}.custom", is_custom=True))
        else:
            read = decode.convert(tool, ChatTool, path).function
            shown = _without_marks(tool) | {"function": _without_marks(tool["function"])}
            converted.append(chats.Tool(read, shown, f"{path}.function", f"{path}.function.parameters"))
    return converted


def _without_marks(plain: JsonObject) -> JsonObject:
    return {name: value for name, value in plain.items() if name != "cache_control"}


def choice_of(choice: object, parallel: bool | None = None) -> chats.ToolChoice:
    """`tool_choice` and `parallel_tool_calls`. Raises ApiError (400)."""
    if not isinstance(choice, dict):
        return worded_choice(choice, parallel)
    asked = decode.convert(choice, OneTool | OneCustom | SomeTools, "tool_choice")
    if isinstance(asked, SomeTools):
        names, must = [_named(tool) for tool in asked.allowed_tools.tools], asked.allowed_tools.mode == "required"
        return chats.ToolChoice(names=names, must=must, single=parallel is False, path="tool_choice.allowed_tools")
    return chats.ToolChoice(names=[_named(asked)], must=True, single=True, path=f"tool_choice.{choice['type']}")


def worded_choice(choice: object, parallel: bool | None) -> chats.ToolChoice:
    """A `tool_choice` that names no tools. Raises ApiError (400)."""
    if choice not in (None, "auto", "none", "required"):
        raise bad_request("tool_choice", "expected 'auto', 'none', 'required', or an object that names a function")
    names: list[str] | None = [] if choice == "none" else None
    return chats.ToolChoice(names=names, must=choice == "required", single=parallel is False)


def _named(tool: OneTool | OneCustom) -> str:
    return tool.function.name if isinstance(tool, OneTool) else tool.custom.name


def _tools_and_choice(request: ChatRequest) -> tuple[list[chats.Tool], chats.ToolChoice]:
    """The tools, and the choice among them, of which `functions` and `function_call` are older forms.

    Raises ApiError (400).
    """
    choice, parallel, tools = request.function_call, request.parallel_tool_calls, tools_of(request.tools)
    if request.functions:
        if tools:
            raise bad_request("functions", "is the older form of tools. Give one of the two.")
        tools = [function_tool(function, f"functions[{i}]") for i, function in enumerate(request.functions)]
        parallel = False  # the older form has room for one
    elif isinstance(choice, dict) and not tools:
        raise bad_request("function_call", "names a function, and there are none")
    named = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    if named is not None and request.tool_choice not in (None, named):
        raise bad_request("function_call", "contradicts tool_choice. Give one of the two.")
    if isinstance(choice, dict):
        name = decode.convert(choice, Named, "function_call").name
        return tools, chats.ToolChoice(names=[name], must=True, single=True, path="function_call")
    if choice is not None:
        return tools, msgspec.structs.replace(worded_choice(choice, parallel), field="function_call")
    return tools, choice_of(request.tool_choice, parallel)


# The form of the answer: `response_format`; vLLM's `structured_outputs` and its older `guided_*`; `grammar`
# and `json_schema` of llama.cpp, `regex` and `ebnf` of SGLang.


class JsonSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: JsonObject | bool | None = None
    strict: bool | None = None
    """Changes nothing: the answer follows the schema."""


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: JsonObject | bool | None = None
    """Schema of a json_object, as llama.cpp has it."""


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """Form of the answer as in vLLM: one of the fields is set."""

    json: str | JsonObject | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | JsonObject | None = None


def _response_format(value: object) -> Iterator[chats.Form]:
    """Raises ApiError (400)."""
    field = "response_format"
    if value is None:
        return
    if isinstance(value, dict) and value.get("type") == "structural_tag":
        yield chats.Form(field, field, "tag", decode.convert(value, chats.StructuralTag, field))
        return
    asked = decode.convert(value, ResponseFormat, field)
    if (asked.type == "json_schema") != (asked.json_schema is not None):
        message = "is missing" if asked.json_schema is None else "belongs to the type json_schema only"
        raise bad_request(f"{field}.json_schema", message)
    if asked.schema is not None and asked.type != "json_object":
        raise bad_request(f"{field}.schema", "belongs to the type json_object")
    if asked.json_schema is not None:
        schema = asked.json_schema.schema
        yield chats.Form(field, f"{field}.json_schema.schema", "json", chats.ANY if schema is None else schema)
    elif asked.type == "json_object":
        path = field if asked.schema is None else f"{field}.schema"
        yield chats.Form(field, path, "json", chats.ANY if asked.schema is None else asked.schema)


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_STRUCTURED = (*_GUIDED, "grammar", "ebnf", "regex", "json_schema")
"""Fields that ask for a form beside `response_format` and `structured_outputs`."""
_KINDS: dict[str, chats.FormKind] = {
    "json": "json", "schema": "json", "object": "json", "regex": "regex",
    "choice": "choice", "grammar": "grammar", "ebnf": "grammar", "tag": "tag",
}  # fmt: skip
"""Kinds by the last word of a field's name."""


def _structured(request: SamplingFields) -> Iterator[chats.Form]:
    """Raises ApiError (400)."""
    given = {name: getattr(request, name) for name in _STRUCTURED}
    given |= {name: given[name] or None for name in ("grammar", "ebnf", "regex")}
    if request.structured_outputs is not None:
        asked = decode.convert(request.structured_outputs, StructuredOutputs, "structured_outputs")
        given |= {f"structured_outputs.{name}": value for name, value in msgspec.structs.asdict(asked).items()}
    for path, value in given.items():
        if value is None or value is False:
            continue
        word = path.replace("_", ".").rpartition(".")[2]
        kind, value = _KINDS[word], chats.ANY if word == "object" else value
        if kind in ("json", "tag") and isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError) as error:
                raise bad_request(path, f"is not valid JSON: {error}") from None
        if kind == "tag":
            value = decode.convert(value, chats.StructuralTag, path)
        yield chats.Form(path, path, kind, value)
