"""Scores of pairs of texts, as vLLM's `/score`, and documents in the order of how well they answer a query,
as `/rerank` of Jina, Cohere and vLLM.

A score is the probability of "yes" in the form of Qwen's rerankers (`server/chat/decisions.py`).
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.engine.messages import EngineInfo
from deltic.server.api.decisions import run_scores
from deltic.server.chat.decisions import Query, QuestionScores, Reranker, relevance
from deltic.server.chat.request import context_limit
from deltic.server.errors import bad_request
from deltic.server.preparation import Preparation
from deltic.server.service import Service
from deltic.server.transport import LargeResponse

MAX_PAIRS = 1000

_encode = msgspec.json.Encoder().encode


class RerankDocument(Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PAIRS)]


class ScoreRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score: one text with each of the others, or as many of both, in pairs."""

    model: str | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    """The same as text_1."""
    documents: Texts | None = None
    """The same as text_2."""
    instruction: str | None = None


class RerankRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank."""

    model: str | None = None
    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_PAIRS)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """The number of results; None or 0: all."""
    return_documents: bool | None = None
    """Results have their documents; /v2/rerank leaves them out unless it is true."""
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Tokens of a document that are read, from its beginning."""
    instruction: str | None = None
    """Instruction that says what is looked for; None: passages that answer the query."""


class PairUsage(Struct):
    """Tokens of the texts: a query counts once."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class PairScore(Struct):
    """Score of a pair."""

    index: int
    score: float
    """Probability that the second text is what the first one asks for."""
    object: str = "score"


class ScoreList(Struct):
    """Answer of /v1/score."""

    id: str
    created: int
    model: str
    data: list[PairScore]
    usage: PairUsage
    object: str = "list"


class Ranked(Struct, omit_defaults=True):
    """A document in its place."""

    index: int
    """Place in the request."""
    relevance_score: float
    document: RerankDocument | None = None


class Ranking(Struct):
    """Answer of /v1/rerank: the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PairUsage


def _pairs(asked: ScoreRequest) -> list[Query]:
    """Queries with their documents. Raises ApiError (400)."""
    if asked.queries is not None or asked.documents is not None:
        if asked.text_1 is not None or asked.text_2 is not None:
            raise bad_request("queries", "is another name of text_1. Give one of the two.")
        names, given = ("queries", "documents"), (asked.queries, asked.documents)
    else:
        names, given = ("text_1", "text_2"), (asked.text_1, asked.text_2)
    for name, texts in zip(names, given, strict=True):
        if texts is None:
            raise bad_request(name, "is missing. Give one text, or several.")
    queries, documents = map(_by_name, names, given)
    if len(queries) == 1:
        return [Query(*query, documents) for query in queries.items()]
    if len(queries) != len(documents):
        message = f"{len(queries)} texts are no pairs with {len(documents)}. Give one, or as many."
        raise bad_request(names[0], message)
    return [Query(*query, dict([document])) for query, document in zip(queries.items(), documents.items(), strict=True)]


def _by_name(name: str, texts: Texts | None) -> dict[str, str]:
    """Texts by the client's names of them."""
    return {name: texts} if isinstance(texts, str) else {f"{name}[{i}]": text for i, text in enumerate(texts or ())}


def _scores(
    service: Service, queries: list[Query], instruction: str | None, most: int | None, info: EngineInfo
) -> QuestionScores:
    """Slow for many documents, so it is a step of a Preparation. Raises ApiError (400)."""
    reranker = Reranker(service.tokenizer, service.model_name, context_limit(info))
    prompts = [reranker.prompt(query, instruction, most) for query in queries]
    return QuestionScores(prompts, info, f"score-{secrets.token_hex(16)}")


async def score(service: Service, request: Request) -> ASGIApp:
    """POST /v1/score: how likely each second text is what the first one asks for."""
    info = service.admit()
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(ScoreRequest)
        service.check_model(asked.model)
        pairs = await preparation.run(_pairs, asked)
        scores = await preparation.run(_scores, service, pairs, asked.instruction, None, info)
    usage = await run_scores(service, request, scores)
    data = [PairScore(i, relevance(each)) for i, each in enumerate(scores.logprobs())]
    counts = PairUsage(usage.prompt_tokens, usage.prompt_tokens)
    answer_id = request.scope["deltic.answer_id"]
    return LargeResponse(_encode(ScoreList(answer_id, int(time.time()), service.model_name, data, counts)))


async def rerank(service: Service, request: Request) -> ASGIApp:
    """POST /v1/rerank: documents by how likely they answer a query."""
    return await _ranked(service, request, is_shown=True)


async def cohere_rerank(service: Service, request: Request) -> ASGIApp:
    """POST /v2/rerank: the same; documents are in the results only if they are asked for."""
    return await _ranked(service, request, is_shown=False)


async def _ranked(service: Service, request: Request, is_shown: bool) -> ASGIApp:
    """is_shown: whether results have their documents where the request does not say."""
    info = service.admit()
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(RerankRequest)
        service.check_model(asked.model)
        texts = [document if isinstance(document, str) else document.text for document in asked.documents]
        queries, most = [Query("query", asked.query, _by_name("documents", texts))], asked.max_tokens_per_doc
        scores = await preparation.run(_scores, service, queries, asked.instruction, most, info)
    usage = await run_scores(service, request, scores)
    if asked.return_documents is not None:
        is_shown = asked.return_documents
    found = [relevance(each) for each in scores.logprobs()]
    order = sorted(range(len(found)), key=lambda i: (-found[i], i))[: asked.top_n or None]
    results = [Ranked(i, found[i], RerankDocument(texts[i]) if is_shown else None) for i in order]
    counts = PairUsage(usage.prompt_tokens, usage.prompt_tokens)
    return LargeResponse(_encode(Ranking(request.scope["deltic.answer_id"], service.model_name, results, counts)))
