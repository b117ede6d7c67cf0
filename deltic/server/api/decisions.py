"""Decisions: typed questions about an input, answered by probabilities without a text. OpenAI's
`/v1/decisions`, in the form of the types of its Python client 3.57, and TypeSafe's `/v1/systemone`, in that
of its API reference and its SDK 0.7.

Both become a chat, and questions behind it (`server/chat/decisions.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.engine.messages import EngineInfo, Handling
from deltic.engine.messages import Request as EngineRequest
from deltic.json_types import JsonObject
from deltic.server.api import decode
from deltic.server.api import responses_protocol as wire
from deltic.server.api.completions import check, computed
from deltic.server.api.embeddings import VectorOut
from deltic.server.api.responses_items import Reference, parse_item
from deltic.server.chat import decisions, joint
from deltic.server.chat.messages import UserMessage
from deltic.server.chat.picture_parts import Pictures, Sent
from deltic.server.chat.request import Chat, context_limit
from deltic.server.chat.template import render
from deltic.server.errors import bad_request, naming
from deltic.server.limits import Usage
from deltic.server.preparation import Preparation, prepared
from deltic.server.service import Service
from deltic.server.transport import LargeResponse

Text = Annotated[str, Meta(min_length=1)]
Instructions = Text | Annotated[list[JsonObject], Meta(min_length=1)]
Content = Text | JsonObject | list[Any]


class ChoiceOption(Struct, forbid_unknown_fields=True):
    """An option of a choice."""

    value: Text | bool
    description: str = ""


class Level(Struct, forbid_unknown_fields=True):
    """A level of a score."""

    label: Text
    description: str = ""


class PredicateQuestion(Struct, tag="predicate", tag_field="type", forbid_unknown_fields=True):
    """A statement about the input: how likely is it to be true?"""

    instructions: Instructions
    name: str | None = None


class ChoiceQuestion(Struct, tag="choice", tag_field="type", forbid_unknown_fields=True):
    """A choice from options."""

    instructions: Instructions
    choices: Annotated[list[ChoiceOption], Meta(min_length=2, max_length=decisions.MAX_CHOICES)]
    name: str | None = None


class ScoreQuestion(Struct, tag="score", tag_field="type", forbid_unknown_fields=True):
    """A rating on ordered levels."""

    instructions: Instructions
    levels: Annotated[list[Level], Meta(min_length=2, max_length=decisions.MAX_LEVELS)]
    name: str | None = None


DecisionQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/decisions."""

    model: str | None = None
    input: Text | Annotated[list[Raw], Meta(min_length=1)]
    """A text, or messages and calls of tools with their results, as of /v1/responses."""
    questions: Annotated[list[DecisionQuestion], Meta(min_length=1, max_length=decisions.MAX_QUESTIONS)]
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonObject | None = None
    safety_identifier: str | None = None


class NoulCriteria(Struct, rename={"true_": "true", "false_": "false"}, forbid_unknown_fields=True):
    """Meanings of yes and no."""

    true_: Content | None = None
    false_: Content | None = None


class NoulQuestion(Struct, tag="noul", tag_field="type", forbid_unknown_fields=True):
    """A question of yes or no."""

    instructions: Content
    criteria: NoulCriteria | None = None


class SystemOneChoice(Struct, tag="choice", tag_field="type", forbid_unknown_fields=True):
    """A choice from options."""

    instructions: Content
    criteria: Annotated[dict[str, Content | None], Meta(min_length=1, max_length=decisions.MAX_CHOICES)]
    """Options with their descriptions."""


class SystemOneScore(Struct, tag="score", tag_field="type", forbid_unknown_fields=True):
    """A rating on ordered levels."""

    instructions: Content
    criteria: Annotated[list[Content], Meta(min_length=2, max_length=decisions.MAX_LEVELS)]
    """Levels, the lowest first."""


SystemOneQuestion = NoulQuestion | SystemOneChoice | SystemOneScore


class SystemOneRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/systemone."""

    model: str | None = None
    state: Content
    """State that is judged: a text, or any JSON."""
    questions: Annotated[dict[str, SystemOneQuestion], Meta(min_length=1, max_length=decisions.MAX_QUESTIONS)]
    """Questions by names of the client's own. A model with a joint head sees the names, and others do not."""


class PredicateAnswer(Struct, tag="predicate", tag_field="type"):
    """Probability of a statement."""

    name: str | None
    probability: float


class ValueProbability(Struct):
    """Probability of an option."""

    value: str | bool
    probability: float


class ChoiceAnswer(Struct, tag="choice", tag_field="type"):
    """The likeliest option."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ValueProbability]


class LevelProbability(Struct):
    """Probability of a level."""

    label: str
    probability: float
    value: int
    """The level's number, the first of which is 0."""


class ScoreAnswer(Struct, tag="score", tag_field="type"):
    """The expected level."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionCached(Struct):
    """Tokens of the input by where they came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class DecisionReasoning(Struct):
    """Tokens of thoughts: none."""

    reasoning_tokens: int = 0


class DecisionUsage(Struct):
    """Tokens of a decision: those of the input, once, and of each question."""

    input_tokens: int
    input_tokens_details: DecisionCached
    total_tokens: int
    reused_tokens: int
    """Tokens that questions took over from the input's computation, an extension."""
    timing: dict[str, float]
    output_tokens: int = 0
    output_tokens_details: DecisionReasoning = msgspec.field(default_factory=DecisionReasoning)


class Decision(Struct):
    """Answer of /v1/decisions."""

    model: str
    answers: list[DecisionAnswer]
    """Answers in the order of the questions."""
    usage: DecisionUsage


class NoulAnswer(Struct, tag="noul", tag_field="type"):
    """Probability of yes."""

    noul: float


class ChosenOption(Struct, tag="choice", tag_field="type"):
    """The likeliest option."""

    choice: str
    probabilities: dict[str, float]
    confidence: float


class RatedLevel(Struct, tag="score", tag_field="type"):
    """The expected level."""

    score: float
    legend: dict[str, str]
    """Levels by their numbers."""
    probabilities: dict[str, float]
    confidence: float


SystemOneAnswer = NoulAnswer | ChosenOption | RatedLevel


class SystemOneResult(Struct):
    """Answer of /v1/systemone."""

    model: str
    answers: dict[str, SystemOneAnswer]
    """Answers by the names of the questions."""
    usage: DecisionUsage


OPTION_BYTES = 64
"""Bytes of an answer for each option of each question, about. By them it is made in the event loop or not."""


def text_of(content: Any) -> str:
    """Content as the model reads it: a text as it is, all else as JSON."""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def asked_of(question: DecisionQuestion, path: str) -> decisions.ShownQuestion:
    """Raises ApiError (400)."""
    instructions = question.instructions
    if not isinstance(instructions, str):
        parts = enumerate(instructions)
        instructions = "\n".join(_part_text(part, f"{path}.instructions[{i}]") for i, part in parts)
    match question:
        case ChoiceQuestion(choices=choices):
            values = [(type(choice.value), choice.value) for choice in choices]
            if len(set(values)) < len(values):
                raise bad_request(f"{path}.choices", "has a value twice. Give each option its own.")
            options = [_described(text_of(choice.value), choice.description) for choice in choices]
            return decisions.question_of("choice", instructions, options, path)
        case ScoreQuestion(levels=levels):
            options = [_described(level.label, level.description) for level in levels]
            return decisions.question_of("score", instructions, options, path)
    return decisions.question_of("predicate", instructions, (), path)


def _described(name: str, description: str) -> str:
    return f"{name}: {description}" if description else name


def _part_text(part: JsonObject, path: str) -> str:
    """Text of a part of a question. Raises ApiError (400)."""
    match part:
        case {"type": "input_text", "text": str(text)}:
            return text
        case {"type": "input_json", "data": data}:
            return text_of(data)
    message = "a question has texts (input_text) and JSON (input_json). Put pictures into the input."
    raise bad_request(f"{path}.type", message, "unsupported_field")


def system_one_of(name: str, question: SystemOneQuestion) -> decisions.ShownQuestion:
    instructions, path = text_of(question.instructions), f"questions.{name}"
    match question:
        case SystemOneChoice(criteria=options):
            named = [_described(name, "" if about is None else text_of(about)) for name, about in options.items()]
            return decisions.question_of("choice", instructions, named, path)
        case SystemOneScore(criteria=levels):
            return decisions.question_of("score", instructions, [*map(text_of, levels)], path)
    criteria = question.criteria or NoulCriteria()
    meanings = [text_of(each) if each is not None else "" for each in (criteria.true_, criteria.false_)]
    return decisions.question_of("predicate", instructions, meanings, path)


def _read_items(asked: DecisionRequest) -> tuple[wire.ResponsesRequest, list[tuple[str, Any]], list[Sent]]:
    """The input as the items of a response, and the pictures in it. Raises ApiError (400)."""
    if isinstance(asked.input, str):
        given = [msgspec.json.encode({"type": "message", "role": "user", "content": asked.input})]
    else:
        given = [_without_json(bytes(item), f"input[{i}]") for i, item in enumerate(asked.input)]
    items = [(f"input[{i}]", parse_item(item, f"input[{i}]")) for i, item in enumerate(given)]
    for path, item in items:
        if isinstance(item, Reference):
            raise bad_request(path, "a decision refers to nothing that is stored. Send the item itself.")
    request = wire.ResponsesRequest(model=asked.model)
    return request, items, wire.find_pictures(items)


def _without_json(item: bytes, path: str) -> bytes:
    """An item whose parts of JSON have become texts, which `/v1/responses` knows. Raises ApiError (400)."""
    if b"input_json" not in item:
        return item
    fields = decode.parse(item, dict[str, Any], path=path)
    for part in parts if isinstance(parts := fields.get("content"), list) else ():
        if isinstance(part, dict) and part.get("type") == "input_json" and "data" in part:
            part |= {"type": "input_text", "text": text_of(part.pop("data"))}
    return msgspec.json.encode(fields)


def scores_of(
    service: Service, chat: Chat, questions: list[decisions.ShownQuestion], info: EngineInfo, pictures: Pictures
) -> decisions.QuestionScores:
    """Slow for long chats and many questions, so it is a step of a Preparation. Raises ApiError (400)."""
    with naming(chat.origin):
        check(service, chat)
        chat = msgspec.structs.replace(chat, settings=chat.settings | {"enable_thinking": False})
        limit = context_limit(info)
        prompt = render(service.template, chat, limit, pictures=pictures, is_asked=True)
        asked = decisions.asked_prompt(service.tokenizer, prompt, questions, limit)
        return decisions.QuestionScores([asked], info, f"decision-{secrets.token_hex(16)}")


async def run_scores(service: Service, request: Request, scores: decisions.QuestionScores) -> Usage:
    """Has the engine score. Raises ApiError."""
    request.scope["deltic.answer_id"] = scores.requests[0].id.rpartition("-")[0]
    usage = await computed(service, request, scores.requests, scores.outs, scores.at_once)
    service.metrics.n_scored += len(scores.asked)
    return usage


def _usage(usage: Usage, scores: decisions.QuestionScores) -> DecisionUsage:
    cached = DecisionCached(usage.cached_tokens)
    n = usage.prompt_tokens
    return DecisionUsage(n, cached, n, scores.n_reused, usage.told_timing())


def answer_of(question: DecisionQuestion, parts: Sequence[float]) -> DecisionAnswer:
    """parts: the probability of each label."""
    name = question.name
    match question:
        case ChoiceQuestion(choices=choices):
            each = [ValueProbability(choice.value, part) for choice, part in zip(choices, parts, strict=True)]
            return ChoiceAnswer(name, each[decisions.likeliest(parts)].value, decisions.confidence(parts), each)
        case ScoreQuestion(levels=levels):
            rated = [
                LevelProbability(level.label, part, i)
                for i, (level, part) in enumerate(zip(levels, parts, strict=True))
            ]
            return ScoreAnswer(name, decisions.expected(parts), decisions.confidence(parts), rated)
    return PredicateAnswer(name, parts[0])


def system_one_answer(question: SystemOneQuestion, parts: Sequence[float]) -> SystemOneAnswer:
    """parts: the probability of each label."""
    match question:
        case SystemOneChoice(criteria=options):
            named = dict(zip(options, parts, strict=True))
            return ChosenOption([*options][decisions.likeliest(parts)], named, decisions.confidence(parts))
        case SystemOneScore(criteria=levels):
            legend = {str(i): text_of(level) for i, level in enumerate(levels)}
            rated = dict(zip(legend, parts, strict=True))
            return RatedLevel(decisions.expected(parts), legend, rated, decisions.confidence(parts))
    return NoulAnswer(parts[0])


async def decide(service: Service, request: Request) -> ASGIApp:
    """POST /v1/decisions: probabilities of the answers to questions about an input."""
    info = service.admit()
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(DecisionRequest)
        given, items, sent = await preparation.run(_read_items, asked)
        pictures = await preparation.read_sent(sent, None, Handling())

        def prepare() -> decisions.QuestionScores:
            questions = [asked_of(question, f"questions[{i}]") for i, question in enumerate(asked.questions)]
            return scores_of(service, wire.chat_of(given, items, service.defaults), questions, info, pictures)

        scores = await preparation.run(prepare)
    usage = await run_scores(service, request, scores)

    def answer() -> Decision:
        parts = map(decisions.probabilities, scores.logprobs())
        answers = [answer_of(question, each) for question, each in zip(asked.questions, parts, strict=True)]
        return Decision(service.model_name, answers, _usage(usage, scores))

    return await _answered(service, request, preparation.size, scores.n_options, answer)


def joint_of(name: str, question: SystemOneQuestion) -> joint.JointAsked:
    """A question as a joint head takes it."""
    match question:
        case SystemOneChoice(criteria=options):
            return joint.asked_choice(name, question.instructions, options)
        case SystemOneScore(criteria=levels):
            return joint.asked_score(name, question.instructions, levels)
    criteria = question.criteria or NoulCriteria()
    said = {"true": criteria.true_, "false": criteria.false_}
    return joint.asked_noul(name, question.instructions, {key: each for key, each in said.items() if each is not None})


async def _answered(
    service: Service, request: Request, size: int, n_options: int, make: Callable[[], Decision | SystemOneResult]
) -> ASGIApp:
    """The answer, made where it holds up no others. size: bytes of the body; n_options: of all questions."""

    def encoded() -> bytes:
        return msgspec.json.encode(make())

    return LargeResponse(await prepared(service, request, size + OPTION_BYTES * n_options, encoded))


async def system_one(service: Service, request: Request) -> ASGIApp:
    """POST /v1/systemone: the same in TypeSafe's form."""
    info = service.admit()
    return await (_joint if info.has_joint_head else _by_branches)(service, request, info)


async def _by_branches(service: Service, request: Request, info: EngineInfo) -> ASGIApp:
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(SystemOneRequest)

        def prepare() -> decisions.QuestionScores:
            chat = Chat(
                messages=[UserMessage(content=text_of(asked.state))], model=asked.model, origin={"messages": "state"}
            )
            return scores_of(service, chat, [system_one_of(*named) for named in asked.questions.items()], info, {})

        scores = await preparation.run(prepare)
    usage = await run_scores(service, request, scores)

    def answer() -> SystemOneResult:
        parts = map(decisions.probabilities, scores.logprobs())
        each = zip(asked.questions.items(), parts, strict=True)
        answers = {name: system_one_answer(question, part) for (name, question), part in each}
        return SystemOneResult(service.model_name, answers, _usage(usage, scores))

    return await _answered(service, request, preparation.size, scores.n_options, answer)


async def _joint(service: Service, request: Request, info: EngineInfo) -> ASGIApp:
    """The answer of a model with a joint head, which reads all questions at once."""
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(SystemOneRequest)
        service.check_model(asked.model)

        def prepare() -> tuple[list[joint.JointAsked], EngineRequest]:
            jointly = [joint_of(name, question) for name, question in asked.questions.items()]
            return jointly, joint.joint_request(service.tokenizer, info, asked.state, jointly)

        jointly, sent = await preparation.run(prepare)
    out = VectorOut(0)
    request.scope["deltic.answer_id"] = sent.id
    usage = await computed(service, request, [sent], [out])
    service.metrics.n_scored += len(jointly)

    def answer() -> SystemOneResult:
        found, answers = joint.joint_logits(out.vector, jointly), dict[str, SystemOneAnswer]()
        for (name, question), each, logits in zip(asked.questions.items(), jointly, found, strict=True):
            parts = dict(zip(logits, decisions.probabilities([*logits.values()]), strict=True))
            order: list[Any] = [option for option, _ in each.options]
            if isinstance(question, SystemOneChoice):
                order = [*question.criteria]
            answers[name] = system_one_answer(question, [parts[option] for option in order])
        counts = DecisionUsage(usage.prompt_tokens, DecisionCached(0), usage.prompt_tokens, 0, usage.told_timing())
        return SystemOneResult(service.model_name, answers, counts)

    n_options = sum(len(each.options) for each in jointly)
    return await _answered(service, request, preparation.size, n_options, answer)
