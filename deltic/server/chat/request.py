"""A chat as all APIs ask for it, in no API's words: what is rendered, constrained, generated and answered.

The `*_protocol` file of an API converts a body to a Chat, or to a Completion. Everything is decided there
once: other names of a field, what contradicts, the form of the answer, the tools that may be called. Paths of
tools and forms are those of the client. `Chat.origin` names the other fields as the client knows them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from deltic.config import ServerConfig
from deltic.engine.messages import MAX_BIASES, MAX_LOGPROBS, EngineInfo, Handling, Request, SamplingParams
from deltic.json_types import JsonObject
from deltic.ops.geometry import PAGE_SIZE
from deltic.server.chat.messages import Message, ToolName
from deltic.server.chat.picture_parts import PictureBounds
from deltic.server.errors import PromptTooLong, bad_request
from deltic.text import SamplingDefaults, Tokenizer

SHORT_ANSWER = 16
"""Tokens of a completion that asks for no length."""
GREEDY_BELOW = 1e-4
"""A temperature under this draws as 0 does: the most likely token; dividing by it would overflow float32."""
MAX_STOPS = 32
MAX_STOP_LENGTH = 1024
"""Characters of one stop string."""

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
"""The least first; a template that does not know one is given another (server/chat/template.py)."""
SWITCHES = ("enable_thinking", "preserve_thinking")
"""Settings of a template that are true or false."""
NO_DEFAULTS = SamplingDefaults()
ANY = {"type": "object"}
"""The schema of any JSON object."""


FormKind = Literal["json", "regex", "choice", "grammar", "tag"]


class Form(Struct, frozen=True):
    """The form that the answer has to have."""

    field: str
    """The client's field that asks for it."""
    path: str
    """Path of `value`, within that field."""
    kind: FormKind
    value: Any
    """Schema (json), texts (choice), StructuralTag (tag), or text."""


class TagStructure(Struct, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: JsonObject | bool = True
    """Schema of the JSON between them."""


class StructuralTag(Struct, forbid_unknown_fields=True):
    """Free text in which each trigger starts a structure that begins with it, as in vLLM."""

    structures: Annotated[list[TagStructure], Meta(min_length=1, max_length=128)]
    triggers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=128)]
    type: Literal["structural_tag"] = "structural_tag"


class ToolGrammar(Struct, forbid_unknown_fields=True):
    syntax: Literal["lark", "regex"]
    definition: str


class ToolFunction(Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    cache_control: Any = None
    grammar: ToolGrammar | None = None
    """Grammar of `input`, the one parameter of a tool that takes a text; shown, and enforced if possible."""


class Tool(Struct, frozen=True):
    """A function that the model may know of."""

    function: ToolFunction
    shown: JsonObject
    """The tool as the template gets it."""
    path: str
    """The client's path of its name and the like."""
    schema_path: str
    """The client's path of the schema of its arguments."""
    is_custom: bool = False
    """The client knows it as a tool that takes a text."""


class ToolChoice(Struct, frozen=True, kw_only=True):
    """The calls that a request allows or demands."""

    names: list[str] | None = None
    """Tools that may be called; None: all."""
    must: bool = False
    single: bool = False
    """The answer makes at most one call."""
    field: str = "tool_choice"
    path: str = "tool_choice"
    """The client's path of the names."""


class Calls(Struct, frozen=True):
    """The tools that an answer may call."""

    tools: list[Tool]
    must: bool
    most: int | None
    """Number of calls at most; None: any number."""


class Shown(Struct, frozen=True, kw_only=True):
    """The parts of each sequence that an answer shows."""

    stops: list[str] = []
    stop_token_ids: tuple[int, ...] = ()
    """The request's own; like `stops`, they cut the answer short, and a call in it."""
    skip_special_tokens: bool = True
    logprobs: bool = False
    is_silent: bool = False
    """The prompt is all that was asked for (max_tokens 0); the one token drawn is not shown."""
    includes_stop: bool = False
    """The stop string, or the stop token of the request's own, is shown."""
    gives_ids: bool = False
    gives_text: bool = True
    """Text is wanted, and not ids alone."""
    hides_thought: bool = False
    """Reasoning is left out."""


class Sampling(Struct, frozen=True, kw_only=True):
    """The part that chats and completions share: how tokens are drawn, and what is shown of them."""

    params: SamplingParams = SamplingParams()
    """Parameters but for max_tokens and constraint, which the prompt decides (`checked_params`)."""
    shown: Shown = Shown()
    max_tokens: int | None = None
    form: Form | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    truncate_prompt_tokens: int | None = None
    """Number of the prompt's last tokens that are kept; -1: as many as leave room for the answer."""
    handling: Handling = msgspec.field(default_factory=Handling)


class Completion(Struct, frozen=True):
    """Texts to go on with."""

    sampling: Sampling
    prompts: list[str | list[int]]
    """Texts or token ids."""
    model: str | None = None
    echo: bool = False
    suffix: str = ""
    """The text behind each prompt, where there is a gap between them to fill."""
    origin: dict[str, str] = {}
    """The client's names of fields that are called otherwise here."""


class Chat(Struct, frozen=True, kw_only=True):
    """Messages to answer."""

    messages: list[Message]
    sampling: Sampling = Sampling()
    model: str | None = None
    tools: list[Tool] = []
    calls: Calls | None = None
    """Tools that may be called; None: the model may call none, and the template shows none."""
    settings: JsonObject = {}
    """Variables for the template."""
    documents: list[JsonObject] | None = None
    verbosity: str | None = None
    """Given to the template, as `documents` are, where it reads it."""
    thinking_budget: int | None = None
    """Tokens of the thought, if the prompt opens one."""
    chat_template: str | None = None
    """Template to render with, not the model's own; None: that."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    picture_bounds: PictureBounds | None = None
    origin: dict[str, str] = {}
    """The client's names of fields that are called otherwise here."""

    @property
    def schemas(self) -> dict[str, JsonObject] | None:
        """Name to schema of the arguments of the tools that the answer may call; None: it may call none."""
        if self.calls is None:
            return None
        return {tool.function.name: tool.function.parameters or {} for tool in self.calls.tools}

    @property
    def is_fixed(self) -> bool:
        """True where a grammar makes all that is behind the thought: a form, or calls that are to come."""
        return self.sampling.form is not None or (self.calls is not None and self.calls.must)


def calls_of(tools: list[Tool], choice: ToolChoice) -> Calls | None:
    """The calls that may be made; None: there are no tools, or none may be called. Raises ApiError (400)."""
    known: dict[str, Tool] = {}
    for tool in tools:
        name = tool.function.name
        if name in known:
            raise bad_request(f"{tool.path}.name", f"{name!r} is the name of an earlier tool, too")
        known[name] = tool
    names = list(known) if choice.names is None else choice.names
    if (unknown := next((name for name in names if name not in known), None)) is not None:
        raise bad_request(choice.path, f"{unknown!r} is not the name of one of the tools")
    if choice.must and not names:
        raise bad_request(choice.field, "asks for a call, and there are no tools")
    allowed = [known[name] for name in dict.fromkeys(names)]
    return Calls(allowed, choice.must, 1 if choice.single else None) if allowed else None


def form_of(forms: list[Form]) -> Form | None:
    """The one form that a request asks for, perhaps several times. Raises ApiError (400)."""
    for other in forms[1:]:
        if (other.kind, other.value) != (forms[0].kind, forms[0].value):
            raise bad_request(other.path, f"excludes {forms[0].field}. Give one of the two.")
    return forms[0] if forms else None


def stop_strings(stop: str | list[str] | None, field: str = "stop") -> list[str]:
    """Raises ApiError (400) for one that is empty or very long, or too many."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise bad_request(field, f"may have at most {MAX_STOPS} strings")
    for i, text in enumerate(stops):
        if not text:
            raise bad_request(f"{field}[{i}]" if isinstance(stop, list) else field, "is an empty string")
        if len(text) > MAX_STOP_LENGTH:
            raise bad_request(field, f"a stop string may have at most {MAX_STOP_LENGTH} characters")
    return stops


def whole_penalty(penalty: float | None, last_n: int | None, field: str) -> float | None:
    """The repetition penalty. last_n: tokens that it counts; -1: all. Raises ApiError (400) for some."""
    if last_n == 0:
        return 1.0
    if penalty not in (None, 1) and last_n not in (None, -1):
        message = "the penalty counts all tokens of prompt and answer (-1). Leave it out."
        raise bad_request(field, message, "unsupported_field")
    return penalty


_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_params(given: dict[str, Any], defaults: SamplingDefaults) -> SamplingParams:
    """given: fields of SamplingParams; None: the server's default, else the neutral value."""
    asked = {name: value for name, value in given.items() if value is not None}
    settled = {name: getattr(defaults, name) for name in _DEFAULTED} | asked
    if settled["top_p"] == 0.0:  # no probability at all: what is left is the most likely token
        settled |= {"top_p": 1.0, "top_k": 1}
    if settled["temperature"] < GREEDY_BELOW:
        settled["temperature"] = 0.0
    return SamplingParams(**settled | {"top_k": max(0, settled["top_k"])})


def context_limit(info: EngineInfo) -> int:
    """Tokens that one sequence may have, prompt and answer together."""
    return min(info.max_model_len, info.n_pages * PAGE_SIZE)


def text_ids(tokenizer: Tokenizer, text: str, limit: int, field: str, n_before: int = 0) -> list[int]:
    """Ids of a client's text, in which nothing is special, behind `n_before` others.

    Raises PromptTooLong where all together are `limit` or more. Of such a text no more is read than that
    takes.
    """
    room = limit - n_before
    ids, n = list[int](), tokenizer.least_tokens(text, room)
    if n < room:
        ids = tokenizer.encode_start(text, room)
        n = len(ids)
    if n >= room:
        raise PromptTooLong(field, n_before + n, limit, at_least=True)
    return ids


def answer_length(asked: Chat | Completion, n_prompt: int, info: EngineInfo, default: int | None) -> int:
    """max_tokens of the answer: what was asked for, and no more than the context leaves.

    default: where nothing was asked for; None: what the context leaves of a chat, 16 of a completion.

    Raises ApiError (400) when the prompt leaves no room, with the limit and the length.
    """
    limit, is_chat = context_limit(info), isinstance(asked, Chat)
    prompt = "messages" if is_chat else "prompt"
    if n_prompt == 0:
        raise bad_request(prompt, "is empty. The answer needs at least one token to start from.")
    if n_prompt >= limit:
        raise PromptTooLong(prompt, n_prompt, limit)
    wanted = asked.sampling.max_tokens
    if wanted is None:
        wanted = default or (limit if is_chat else SHORT_ANSWER)
    return min(wanted, limit - n_prompt)


def kept_tokens(sampling: Sampling, info: EngineInfo, default: int | None) -> int | None:
    """Number of a prompt's last tokens that `truncate_prompt_tokens` keeps; None: all.

    Raises ApiError (400) for more than the context holds. default: the server's length of an answer; so
    many tokens are left for the answer where the request bounds it by -1.
    """
    most, limit = sampling.truncate_prompt_tokens, context_limit(info)
    if most is None:
        return None
    if most == 0 or most >= limit:
        raise bad_request("truncate_prompt_tokens", f"must be -1, or from 1 to {limit - 1}")
    if most == -1:
        lengths = [n for n in (sampling.max_tokens, default, SHORT_ANSWER) if n is not None and n < limit]
        most = max(1, limit - max(1, lengths[0])) if lengths else 1
    return most


def checked_params(asked: Chat | Completion, max_tokens: int, info: EngineInfo, config: ServerConfig) -> SamplingParams:
    """The request's parameters, checked against what this engine has. Raises ApiError (400)."""
    sampling, params = asked.sampling, asked.sampling.params
    most = min(config.max_n, info.max_num_seqs)
    if params.n > most:
        raise bad_request("n", f"{params.n} is more than this server gives at once ({most})")
    for field, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
    ):
        for token_id in ids:
            if not 0 <= token_id < info.vocab_size:
                raise bad_request(field, f"{token_id} is not a token id. They go from 0 to {info.vocab_size - 1}.")
    if len(params.logit_bias) > MAX_BIASES:
        raise bad_request("logit_bias", f"may have at most {MAX_BIASES} entries")
    if params.min_tokens > max_tokens:
        raise bad_request("min_tokens", f"{params.min_tokens} is more than the answer may have ({max_tokens} tokens)")
    most = min(config.max_logprobs, MAX_LOGPROBS, info.vocab_size)
    if (params.logprobs or 0) > most:
        raise bad_request("top_logprobs" if isinstance(asked, Chat) else "logprobs", f"may be at most {most}")
    if (params.prompt_logprobs or 0) > most:
        raise bad_request("prompt_logprobs", f"may be at most {most}")
    return replace(params, max_tokens=max(1, max_tokens))


def engine_request(
    request_id: str, prompt_ids: list[int], params: SamplingParams, sampling: Sampling, boundaries: list[int]
) -> Request:
    """The engine's Request for one prompt. boundaries: token offsets at which its messages end."""
    return Request(
        id=request_id, prompt_ids=prompt_ids, params=params, boundaries=boundaries, **asdict(sampling.handling)
    )
