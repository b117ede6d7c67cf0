"""Questions with a closed set of answers: how likely the model is to say each, without a text of its own.

What is asked about is a prompt, and each question a branch behind it (`engine.messages.Branch`), so that is
computed once however many questions there are. An answer is a label, as `B` or `yes`; its score is the sum of
the log-probabilities of its tokens, each behind those before it. Over the labels of a question the scores
become probabilities by a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import islice, product
from operator import index as as_index
from string import ascii_uppercase
from typing import Any, Literal

from msgspec import Struct

from deltic.engine import messages as engine
from deltic.server.chat.answer import Update, WayOut
from deltic.server.chat.calls import AnswerDelta
from deltic.server.chat.request import context_limit, text_ids
from deltic.server.chat.template import Prompt
from deltic.server.errors import PromptTooLong, bad_request
from deltic.text import Tokenizer, n_alike

GROUP = 16
"""Branches of one request of the engine, at most: each takes a batch slot as soon as the first has one."""

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10

Kind = Literal["predicate", "choice", "score"]
Label = tuple[int, ...]


PAIRS = [*map("".join, product(ascii_uppercase, repeat=2))]


class ShownQuestion(Struct, frozen=True):
    """A question, as it is shown to the model."""

    instructions: str
    options: Sequence[str]
    """Meanings of the labels, in their order; "" of one that has none."""
    labels: Sequence[str]
    """The answers, one of which the model would begin with: all of them, or those to choose from."""
    n: int
    """The number of answers."""
    form: str
    """Name of what the model answers with."""
    field: str
    """The client's name of it."""

    def text(self, labels: Sequence[str]) -> str:
        """The question with these labels."""
        lines = [f"{label}: {option}" for label, option in zip(labels, self.options, strict=False) if option]
        return "\n".join([self.instructions, *lines, f"Answer with {self.form} only."])


def question_of(kind: Kind, instructions: str, options: Sequence[str], field: str) -> ShownQuestion:
    """The question of a kind. options: of a choice or a score, in their order, with their descriptions; of a
    predicate what yes and no mean, if that was said. field: the client's name of the question.
    """
    n = len(options)
    match kind:
        case "predicate":
            instructions = f"Is this true of what stands above? {instructions}"
            return ShownQuestion(instructions, options, ("yes", "no"), 2, "yes or no", field)
        case "score":
            levels = [str(i) for i in range(n)]
            return ShownQuestion(instructions, options, levels, n, "the number of one level", field)
    if n <= len(ascii_uppercase):
        return ShownQuestion(instructions, options, ascii_uppercase[:n], n, "the letter of one option", field)
    return ShownQuestion(instructions, options, PAIRS, n, "the two letters of one option", field)


class AskedIds(Struct, frozen=True):
    """A question as token ids: those behind the prompt, and those of each label behind them."""

    ids: list[int]
    labels: list[Label]
    field: str = ""
    """The client's name of it, if it has one."""


class AskedPrompt(Struct, frozen=True):
    """A prompt, and what is asked behind it."""

    ids: list[int]
    asked: list[AskedIds]
    boundaries: list[int] = []
    pictures: list[engine.Picture] = []
    field: str = "prompt"
    """The client's name of it."""


def asked_prompt(tokenizer: Tokenizer, prompt: Prompt, questions: Iterable[ShownQuestion], limit: int) -> AskedPrompt:
    """Questions behind a prompt that `template.render` has made for them. limit: of the context. Raises
    ApiError (400).
    """
    tail = prompt.tail
    if "<think>" in tail.rpartition("</think>")[2]:
        tail += "\n</think>\n\n"  # the answer comes without a thought
    rest = tokenizer.encode(tail, "trusted")
    known = cache(partial(_ids_behind, tokenizer, tail, rest))
    asked = []
    for question in questions:
        labels = question.labels
        if len(labels) > question.n:  # a label of one token needs no branch of its own
            single = [*islice((label for label in labels if len(known(label)) == 1), question.n)]
            labels = single if len(single) == question.n else labels[: question.n]
        ids = text_ids(tokenizer, question.text(labels), limit, question.field) + rest
        asked.append(
            AskedIds(ids, [known(label) or label_ids(tokenizer, tail, rest, label) for label in labels], question.field)
        )
    return AskedPrompt(prompt.ids, asked, prompt.boundaries, prompt.pictures, "messages")


def label_ids(tokenizer: Tokenizer, text: str, ids: list[int], label: str) -> Label:
    """The ids of a label behind a text, whose own ids they leave as they are. Raises ApiError (400)."""
    own = _ids_behind(tokenizer, text, ids, label)
    if not own:
        message = f"this model cannot decide: where its answers begin, {label!r} is not a token of its own"
        raise bad_request("model", message, "unsupported_model")
    return own


def _ids_behind(tokenizer: Tokenizer, text: str, ids: list[int], label: str) -> Label:
    """The ids of a label behind a text; none where those of the text would be others."""
    whole = tokenizer.encode(text + label, "trusted")
    return tuple(whole[len(ids) :]) if whole[: len(ids)] == ids else ()


def continuations_asked(
    tokenizer: Tokenizer, prompts: Any, continuations: Any
) -> tuple[list[AskedPrompt], list[list[tuple[int, int]]]]:
    """Continuations of each prompt as labels: those that begin at the same token are a question's. Both are
    texts, or lists of token ids. Beside them the place of each prompt's continuations: the number of a
    question, and of one of its labels. Raises ValueError.
    """
    wanted = _texts_or_ids("continuations", continuations)
    asked, places, n_questions = [], [], 0
    for prompt in [prompts] if isinstance(prompts, str) else _texts_or_ids("prompts", prompts):
        cuts: dict[int, tuple[int, list[Label]]] = {}  # by the tokens of the prompt before them
        own, at = tokenizer.encode(prompt, "parse") if isinstance(prompt, str) else prompt, []
        for each in wanted:
            whole, n = _whole(tokenizer, prompt, own, each)
            question, labels = cuts.setdefault(n, (n_questions + len(cuts), []))
            at.append((question, len(labels)))
            labels.append(tuple(whole[n:]))
        if not all(n and all(labels) for n, (_, labels) in cuts.items()) or not cuts:
            raise ValueError("a prompt and its continuations need a token each, and at least one continuation")
        questions = [AskedIds(own[min(cuts) : n], labels) for n, (_, labels) in cuts.items()]
        asked.append(AskedPrompt(own[: min(cuts)], questions))
        places.append(at)
        n_questions += len(questions)
    return asked, places


def _texts_or_ids(name: str, given: Any) -> list[str | list[int]]:
    """An argument that is a list of texts, or of lists of token ids. Raises ValueError."""
    try:
        if not isinstance(given, str):
            return [each if isinstance(each, str) else [*map(as_index, each)] for each in given]
    except TypeError:
        pass
    raise ValueError(f"{name}: takes a list of texts, or of lists of token ids. Put brackets around a single one.")


def _whole(tokenizer: Tokenizer, prompt: Any, own: list[int], more: Any) -> tuple[list[int], int]:
    """The ids of a prompt and a continuation, both texts or ids, and how many stand before the continuation.
    own: the prompt's ids. Raises ValueError.
    """
    if isinstance(prompt, str) != isinstance(more, str):
        raise ValueError("prompts and continuations are both texts, or both token ids")
    if isinstance(prompt, str):
        whole = tokenizer.encode(prompt + more, "parse")
        if n := n_alike(own, whole):
            return whole, n
        more = tokenizer.encode(more, "parse")
    return [*own, *more], len(own)


class QuestionScores:
    """The scores of some prompts' questions: requests of the engine, and what comes of them."""

    def __init__(self, prompts: Sequence[AskedPrompt], info: engine.EngineInfo, request_id: str) -> None:
        """Raises ApiError (400) for what does not fit."""
        self.requests: list[engine.Request] = []
        self.outs: list[ScoreOut] = []
        """The way out of each branch, in the order of requests and branches."""
        self.asked = [asked for prompt in prompts for asked in prompt.asked]
        self._found: list[dict[tuple[Label, int], float]] = [{} for _ in self.asked]
        most, limit, number = max(1, min(GROUP, info.max_num_seqs // 2)), context_limit(info), 0
        for prompt in prompts:
            branches: list[engine.Branch] = []
            for asked in prompt.asked:
                longest = len(prompt.ids) + len(asked.ids) + max(map(len, asked.labels))
                if longest > limit:
                    field = asked.field if len(prompt.ids) < limit else ""
                    raise PromptTooLong(field or prompt.field, longest, limit)
                first = len(self.outs)
                for branch, keys in branches_of(asked):
                    branches.append(branch)
                    self.outs.append(ScoreOut(len(self.outs), self._found[number], keys))
                self.outs[first].n_asked = len(asked.ids)  # once, though each branch reads them
                number += 1
            for start in range(0, len(branches), most):
                group = branches[start : start + most]
                self.requests.append(
                    engine.Request(
                        id=f"{request_id}-{len(self.requests)}",
                        prompt_ids=prompt.ids,
                        params=engine.SamplingParams(max_tokens=0, temperature=0.0, n=len(group)),
                        branches=group,
                        boundaries=prompt.boundaries,
                        pictures=[*prompt.pictures],
                    )
                )
        self.at_once = 2 * info.max_num_seqs
        """Sequences that are open at once: enough to keep the engine busy."""

    @property
    def n_options(self) -> int:
        """Answers that are possible, of all questions together."""
        return sum(len(asked.labels) for asked in self.asked)

    @property
    def n_reused(self) -> int:
        """Tokens that branches took over instead of computing them."""
        return sum(out.n_reused for out in self.outs)

    def logprobs(self) -> list[list[float]]:
        """The score of each label of each question: the sum of its tokens' log-probabilities."""
        return [
            [math.fsum(found[label[:i], label[i]] for i in range(len(label))) for label in asked.labels]
            for asked, found in zip(self.asked, self._found, strict=True)
        ]


def branches_of(asked: AskedIds) -> Iterable[tuple[engine.Branch, list[tuple[Label, int]]]]:
    """Yields the branches of a question, and for each what it scores: an id behind the beginning of a label.

    All labels of a token have one together, and so have all longer ones that differ in their last token.
    """
    wanted: dict[Label, dict[tuple[Label, int], None]] = {(): {}}
    for label in asked.labels:
        wanted[()][(), label[0]] = None
        if len(label) > 1:
            keys = [(label[:i], label[i]) for i in range(1, len(label))]
            wanted.setdefault(label[:-1], {}).update(dict.fromkeys(keys))
    for beginning, of_label in wanted.items():
        places = sorted(of_label, key=lambda key: len(key[0]))
        for start in range(0, len(places), engine.MAX_SCORED):
            part = places[start : start + engine.MAX_SCORED]
            scored = [(len(asked.ids) + len(before), id) for before, id in part]
            yield engine.Branch([*asked.ids, *beginning], scored), part


class ScoreOut(WayOut):
    """The way out of a branch: its log-probabilities go where its question finds them."""

    def __init__(self, index: int, found: dict[tuple[Label, int], float], keys: list[tuple[Label, int]]) -> None:
        super().__init__(index)
        self._found, self._keys = found, keys
        self.n_reused = 0

    def take(self, logprobs: Iterable[engine.TokenLogprob | None], n_reused: int) -> None:
        """Takes the branch's log-probabilities. n_reused: tokens before it that were not computed."""
        values = (entry.logprob for entry in logprobs if entry is not None)
        self._found.update(zip(self._keys, values, strict=True))
        self.n_reused = n_reused

    def push(self, output: engine.Output) -> Update:
        if output.prompt_logprobs is not None:
            self.take(output.prompt_logprobs, output.cached_tokens)
        self.finish_reason = output.finish_reason
        return Update(self.index, AnswerDelta(), finish_reason=self.finish_reason)


def probabilities(logprobs: Sequence[float]) -> list[float]:
    """Softmax of scores, which may all be tiny."""
    top = max(logprobs)
    if top == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(logprob - top) for logprob in logprobs]
    whole = math.fsum(weights)
    return [weight / whole for weight in weights]


def confidence(parts: Sequence[float]) -> float:
    """Measures how far the likeliest answer is above chance: 0 if all are alike, 1 if it is certain."""
    n = len(parts)
    return 1.0 if n == 1 else min(1.0, max(0.0, (max(parts) - 1 / n) / (1 - 1 / n)))


def expected(parts: Sequence[float]) -> float:
    """The expected level, the first of which is 0."""
    return math.fsum(i * part for i, part in enumerate(parts))


def likeliest(parts: Sequence[float]) -> int:
    return max(range(len(parts)), key=parts.__getitem__)


INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of Qwen's rerankers where the request has none."""

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEFORE = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Query(Struct, frozen=True):
    """A query, and the documents that are scored with it."""

    field: str
    """The client's name of the query."""
    text: str
    documents: dict[str, str]
    """Documents by the client's names of them."""


class Reranker:
    """Prompts of Qwen's rerankers: is a document an answer to a query? Source: the model card of
    Qwen3-Reranker. The query is the prompt, and each document a branch.
    """

    def __init__(self, tokenizer: Tokenizer, model_name: str, limit: int) -> None:
        """limit: of the context. Raises ApiError (400) for a model that does not know the form."""
        self._tokenizer, self._limit = tokenizer, limit
        for literal in ("<|im_start|>", "<|im_end|>"):
            if tokenizer.special_id(literal) is None:
                message = f"{model_name!r} cannot judge documents: its vocabulary has no {literal}"
                raise bad_request("model", message, "unsupported_model")
        behind = tokenizer.trust(_BEHIND)
        self._before = tokenizer.encode(tokenizer.trust(_BEFORE), "trusted")
        self._behind = tokenizer.encode(behind, "trusted")
        self._labels = [label_ids(tokenizer, behind, self._behind, label) for label in ("yes", "no")]

    def prompt(self, query: Query, instruction: str | None, most: int | None) -> AskedPrompt:
        """most: tokens of a document that are read; None: all. Raises ApiError (400)."""
        head = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query.text}\n<Document>:"
        ids = self._before + text_ids(self._tokenizer, head, self._limit, query.field, len(self._before))
        asked = [
            AskedIds(self._read(f" {document}", most, field) + self._behind, self._labels, field)
            for field, document in query.documents.items()
        ]
        return AskedPrompt(ids, asked, field=query.field)

    def _read(self, text: str, most: int | None, field: str) -> list[int]:
        if most is not None and most < self._limit:
            return self._tokenizer.encode_start(text, most)
        return text_ids(self._tokenizer, text, self._limit, field)


def relevance(logprobs: Sequence[float]) -> float:
    """Probability of yes, of yes and no."""
    return probabilities(logprobs)[0]
