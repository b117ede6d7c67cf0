"""From the JSON of a body to a checked struct: what is forgiven, what is refused and how that is said, and
what came in another server's words, or in older ones.

Forgiven are null fields, at any depth, that a struct does not know, and at the top those whose value asks for
nothing (NEUTRAL). msgspec says what is wrong with a value in a message; all that is read out of its words
stands in `fault_of`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from deltic.server.api import protocol
from deltic.server.errors import ApiError, bad_request

T = TypeVar("T")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's and Anthropic's
    "audio": (),
    "compaction": (),
    "modalities": (["text"],),
    "moderation": (),
    "suffix": ("",),
    "web_search_options": (),
    # vLLM's and SGLang's
    "early_stopping": (False,),
    "echo": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # llama.cpp's and its kin's
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "id_slot": (-1,),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "n_keep": (0,),
    "n_probs": (0,),
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "return_progress": (False,),
    "samplers": ([],),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # OpenRouter's
    "transforms": ([],),
}
"""Fields that are known and not supported, and their values, besides null, that ask for nothing: with these
they are accepted.
"""


class Fault(NamedTuple):
    """What msgspec has found wrong with a value."""

    kind: Literal["unknown", "missing", "only_false", "value"]
    """unknown, missing: the value has such a field, or lacks it; only_false: it is true, and may not be."""
    path: str
    """Of the value, as `messages[0]`; "" for the whole."""
    field: str
    """Name of the field that is unknown or missing."""
    reason: str
    """In msgspec's words."""


_PLACE = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?(.*?)`)?$", re.DOTALL)
_KINDS: tuple[tuple[Literal["unknown", "missing", "only_false"], re.Pattern[str]], ...] = (
    ("unknown", re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)),
    ("missing", re.compile(r"Object missing required field `(.*)`", re.DOTALL)),
    ("only_false", re.compile(r"Invalid enum value True()")),
)


def fault_of(error: msgspec.ValidationError) -> Fault:
    """Reads msgspec's message, which ends in the path of the value: ` - at `$.messages[0].role``."""
    match = _PLACE.match(str(error))
    reason, path = (match[1], match[2] or "") if match else (str(error), "")
    for kind, pattern in _KINDS:
        if named := pattern.fullmatch(reason):
            return Fault(kind, path, named[1], reason)
    return Fault("value", path, "", reason)


def parse(body: bytes, kind: type[T], note: Callable[[str], None] | None = None) -> T:
    """The JSON in a request's body as `kind`. note: takes the names of fields at its top that are not known,
    which are left out then.

    Raises ApiError (400) naming the field at fault.
    """
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            value = msgspec.json.decode(body)
            if isinstance(value, dict):
                _drop_unasked(value, kind, note)
        try:
            return msgspec.json.decode(msgspec.json.encode(value), type=kind)
        except msgspec.ValidationError as error:
            kept: T = _without_null_fields(value, kind, "", error)
            return kept
    except msgspec.DecodeError as error:
        raise bad_request(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    except UnicodeDecodeError as error:
        raise bad_request(None, f"the body is not valid UTF-8: {error.reason}", "invalid_json") from None
    except RecursionError:
        raise bad_request(None, "the body is nested too deeply", "invalid_json") from None


def convert(value: Any, kind: Any, path: str) -> Any:
    """A part of a request that was left as it is, as `kind`. Raises ApiError (400)."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return _without_null_fields(copy.deepcopy(value), kind, path, error)


def _drop_unasked(value: dict[str, Any], kind: Any, note: Callable[[str], None] | None) -> None:
    """Deletes fields that `kind` does not know and that ask for nothing, or, with `note`, whatever they ask
    for.

    Raises ApiError (400) for one of NEUTRAL that asks for something.
    """
    config = getattr(kind, "__struct_config__", None)
    if config is None or not config.forbid_unknown_fields:
        return
    for name in [name for name in value if name not in kind.__struct_encode_fields__]:
        if value[name] is not None and value[name] not in NEUTRAL.get(name, ()):
            if note is None and name in NEUTRAL:
                raise bad_request(name, "not supported by this server; leave it out", "unsupported_field")
            if note is None or name == config.tag_field:
                continue
            note(name)
        del value[name]


MAX_NULL_FIELDS = 32

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def _without_null_fields(value: Any, kind: Any, root: str, error: msgspec.ValidationError) -> Any:
    """`value` as `kind`, less fields that `kind` does not know and that are null: a client library's own
    structs have such, and they ask for nothing. `value` is changed. error: what was wrong so far. Raises
    ApiError (400).
    """
    for _ in range(MAX_NULL_FIELDS):
        fault = fault_of(error)
        if fault.kind != "unknown" or not _drop_nulls(value, _STEP.findall(fault.path), fault.field):
            break
        try:
            return msgspec.json.decode(msgspec.json.encode(value), type=kind)
        except msgspec.ValidationError as another:
            error = another
    raise _refusal(fault_of(error), root)


def _drop_nulls(value: Any, steps: list[str], field: str) -> bool:
    """Deletes `field` where it is null: at this place, and at those that differ from it in an index only.

    Whether there was one.
    """
    if not steps:
        if not isinstance(value, dict) or value.get(field, 0) is not None:
            return False
        del value[field]
        return True
    if steps[0].startswith("["):
        items = value if isinstance(value, list) else []
        return any([_drop_nulls(item, steps[1:], field) for item in items])
    return isinstance(value, dict) and _drop_nulls(value.get(steps[0]), steps[1:], field)


_REFUSALS = {
    "unknown": ("unknown field; it is not supported, leave it out", "unknown_field"),
    "missing": ("is missing", "missing_field"),
    "only_false": ("not supported by this server; leave it out", "unsupported_field"),
}


def _refusal(fault: Fault, root: str) -> ApiError:
    """The 400. root: the path of what was read."""
    path = f"{root}.{fault.path}" if root and fault.path and fault.path[0] != "[" else root + fault.path
    if fault.kind == "value":
        return bad_request(path or None, fault.reason[:1].lower() + fault.reason[1:], "invalid_value")
    return bad_request(".".join(filter(None, (path, fault.field))), *_REFUSALS[fault.kind])


def settle(request: protocol.Sampling) -> None:
    """Writes what came in another server's words into the fields that are read. May run again on its result.

    Raises ApiError (400) for a contradiction.
    """

    def put(field: str, name: str, value: Any) -> None:
        if value is None:
            return
        if getattr(request, name) not in (None, value):
            raise bad_request(field, f"contradicts {name}; give one of the two")
        setattr(request, name, value)

    put("n_predict", "max_tokens", 2**31 - 1 if request.n_predict == -1 else request.n_predict)
    put("repeat_penalty", "repetition_penalty", request.repeat_penalty)
    request.repeat_penalty = None
    if request.repeat_last_n == 0:
        request.repetition_penalty = 1.0
    elif request.repetition_penalty not in (None, 1) and request.repeat_last_n not in (None, -1):
        said = "the penalty counts all tokens of prompt and answer (-1); leave it out"
        raise bad_request("repeat_last_n", said, "unsupported_field")
    if request.best_of not in (None, 1, request.n):
        raise bad_request("best_of", "not supported unless it equals n", "unsupported_field")
    if request.detokenize is False and not (request.return_token_ids and not request.stop):
        raise bad_request("detokenize", "false needs return_token_ids: true, and no stop")
    if not isinstance(request, protocol.ChatRequest):
        return
    if switch := request.thinking:
        put("thinking.type", "enable_thinking", switch.type != "disabled")
        put("thinking.budget_tokens", "thinking_budget", switch.budget_tokens)
    if asked := request.reasoning:
        put("reasoning.effort", "reasoning_effort", asked.effort)
        put("reasoning.enabled", "enable_thinking", asked.enabled)
        put("reasoning.max_tokens", "thinking_budget", asked.max_tokens)
        put("reasoning.exclude", "include_reasoning", False if asked.exclude else None)


def take_functions(chat: protocol.ChatRequest) -> None:
    """Makes tools of `functions`, and a choice of them of `function_call`; once, before all else.

    Raises ApiError (400).
    """
    choice = chat.function_call
    if chat.functions:
        if chat.tools:
            raise bad_request("functions", "is the older form of tools; give one of the two")
        chat.tools = [{"type": "function", "function": function} for function in chat.functions]
        chat.parallel_tool_calls = False  # the older form has room for one
    elif isinstance(choice, dict) and not chat.tools:
        raise bad_request("function_call", "names a function, and there are none")
    named = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    if named is not None and chat.tool_choice not in (None, named):
        raise bad_request("function_call", "contradicts tool_choice; give one of the two")
    chat.tool_choice = chat.tool_choice if named is None else named


def older_names(chat: protocol.ChatRequest) -> dict[str, str]:
    """What `functions` and `function_call` have become, where those were sent; for errors."""
    functions = {"tools[].function": "functions[]"} if chat.functions else {}
    return functions | (
        {"tool_choice": "function_call", "tool_choice.function": "function_call"} if chat.function_call else {}
    )
