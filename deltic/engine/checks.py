"""Refusals: what a request may not ask of an engine. One that passes harms nobody else in its steps."""

from __future__ import annotations

import math
from itertools import chain

from deltic.engine.cache.cache import pages_for
from deltic.engine.messages import MAX_BIASES, MAX_GRAMMAR, MAX_LOGPROBS, MAX_SCORED, Constraint, EngineInfo, Request
from deltic.ops.geometry import TOKEN_BYTES, TOKEN_FRAMES


class RequestError(ValueError):
    """A request that this engine cannot run; the message says why and what would do."""


def check_request(request: Request, info: EngineInfo) -> None:
    """Refuses a request that the sampler could not handle, so that it cannot harm others in the same step.

    Raises RequestError.
    """
    p, vocab_size = request.params, info.vocab_size
    most_logprobs = min(vocab_size, MAX_LOGPROBS)
    ranges: list[tuple[str, float, float, float]] = [
        ("max_tokens", p.max_tokens, 0, math.inf),
        ("min_tokens", p.min_tokens, 0, math.inf),
        ("temperature", p.temperature, 0.0, 1e6),
        ("top_k", p.top_k, 0, 2**31 - 1),
        ("top_p", p.top_p, 0.0, 1.0),
        ("min_p", p.min_p, 0.0, 1.0),
        ("repetition_penalty", p.repetition_penalty, 1e-6, 1e6),
        ("presence_penalty", p.presence_penalty, -1e6, 1e6),
        ("frequency_penalty", p.frequency_penalty, -1e6, 1e6),
        ("seed", p.seed or 0, -(2**63), 2**63 - 1),
        ("logprobs", p.logprobs or 0, 0, most_logprobs),
        ("prompt_logprobs", p.prompt_logprobs or 0, 0, most_logprobs),
        ("the number of stop_token_ids", len(p.stop_token_ids), 0, MAX_BIASES - len(info.eos_token_ids) - 1),
        ("the number of entries of logit_bias", len(p.logit_bias), 0, MAX_BIASES),
    ]
    for name, value, least, most in ranges:
        if not least <= value <= most:  # false for NaN too
            raise RequestError(f"{name} = {value}: must be from {least} to {most}")
    check_pictures(request, info)
    check_branches(request, info)
    if (request.pooling is None) != (info.embedder is None):
        what = "writes, and makes no vectors" if info.embedder is None else "makes vectors, and does not write"
        raise RequestError(f"this model {what}")
    if request.reads_hidden and (p.max_tokens or p.n != 1 or request.branches):
        raise RequestError("nothing is drawn of a vector or a decision: max_tokens must be 0, n 1, and no branches")
    if request.questions and not info.has_joint_head:
        raise RequestError("this model has no joint head")
    for question in request.questions:
        spans = [question.instruction, *question.options]
        if not question.options or not all(0 <= a < b <= len(request.prompt_ids) for a, b in spans):
            raise RequestError("a question needs options, and tokens of the prompt for each of its parts")
        if question.kind not in (0, 1, 2):
            raise RequestError(f"there is no kind of question {question.kind}")
    c = p.constraint or Constraint()
    n_prompt_ids = info.n_prompt_ids or vocab_size
    if request.prompt_ids and not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < n_prompt_ids:
        raise RequestError(f"prompt has a token id outside the vocabulary (0 to {n_prompt_ids - 1})")
    for name, ids in (
        ("stop_token_ids", p.stop_token_ids),
        ("logit_bias", p.logit_bias),
        ("constraint.bad_ids", tuple(chain.from_iterable(c.bad_ids))),
        ("constraint", (*c.close_ids, *c.begin_ids, *(() if c.think_end_id is None else (c.think_end_id,)))),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise RequestError(f"{name} has a token id outside the vocabulary (0 to {vocab_size - 1})")
    if not all(math.isfinite(bias) for bias in p.logit_bias.values()):
        raise RequestError("logit_bias has a value that is not finite")
    if len(c.grammar) > MAX_GRAMMAR:
        raise RequestError(f"constraint.grammar has {len(c.grammar)} characters, and may have {MAX_GRAMMAR}")
    if not all(c.bad_ids):
        raise RequestError("constraint.bad_ids has an entry without ids")
    if c.think_budget is not None and (c.think_budget < 0 or c.think_end_id not in c.close_ids):
        raise RequestError("think_budget must be 0 or more, and close_ids must have think_end_id")


def check_branches(request: Request, info: EngineInfo) -> None:
    """Refuses branches that do not belong to the request's sequences. Raises RequestError."""
    p, branches = request.params, request.branches
    if not branches:
        return
    if info.is_speech:
        raise RequestError("a speech model scores nothing; leave branches out")
    if len(branches) != p.n or p.max_tokens or p.prompt_logprobs is not None or p.constraint is not None:
        raise RequestError("branches need n of their number, max_tokens 0, and neither logprobs nor a constraint")
    for i, branch in enumerate(branches):
        ids, behind = [*branch.ids, *(id for _, id in branch.scored)], [n for n, _ in branch.scored]
        if not 1 <= len(behind) <= MAX_SCORED or behind != sorted(behind):
            raise RequestError(f"branches[{i}] scores {len(behind)} ids: it may have 1 to {MAX_SCORED}, in their order")
        if not 0 <= behind[0] <= behind[-1] <= len(branch.ids):
            raise RequestError(f"branches[{i}] scores what is not behind its tokens")
        if not 0 <= min(ids) <= max(ids) < info.vocab_size:
            raise RequestError(f"branches[{i}] has a token id outside the vocabulary (0 to {info.vocab_size - 1})")


def check_pictures(request: Request, info: EngineInfo) -> None:
    """Refuses pictures that the vision tower or the prompt has no room for. Raises RequestError."""
    if request.pictures and info.pictures is None:
        raise RequestError("this model reads text only: its prompts have no pictures")
    end = 0
    for i, picture in enumerate(request.pictures):
        sides = min(picture.rows, picture.columns, picture.n_frames)
        wanted = picture.n_frames * picture.n_tokens * TOKEN_BYTES
        if sides < 1 or picture.n_frames > TOKEN_FRAMES or len(picture.pixels) != wanted or len(picture.key) != 16:
            raise RequestError(f"picture {i}: {len(picture.pixels)} bytes are not its {wanted} of pixels")
        if picture.first < end or picture.end > len(request.prompt_ids):
            raise RequestError(f"picture {i} is not where the prompt has room for it")
        if info.pictures is not None and picture.n_tokens > info.pictures.max_tokens:
            raise RequestError(
                f"picture {i} has {picture.n_tokens} tokens, and this server takes {info.pictures.max_tokens} at most; make it"
                " smaller, or start the server with more --max-picture-tokens"
            )
        end = picture.end


def n_most_computed(n_prompt: int, max_tokens: int) -> int:
    """The most tokens of a sequence that are ever computed: all but the last one drawn."""
    return n_prompt + max(0, max_tokens - 1)


def n_answer_tokens(request: Request, n_prompt: int, info: EngineInfo, n_pages: int) -> int:
    """The max_tokens of a request, clipped to what max_model_len leaves behind a prompt of n_prompt tokens.

    n_pages: of the pool. Raises RequestError for a request that could not run even alone.
    """
    params = request.params
    if not request.prompt_ids:
        raise RequestError("the prompt is empty; it needs at least one token")
    if not 1 <= params.n <= info.max_num_seqs:
        raise RequestError(f"n = {params.n}: this engine runs 1 to {info.max_num_seqs} sequences at once")
    max_tokens = min(params.max_tokens, info.max_model_len - n_prompt)
    if max_tokens < min(params.max_tokens, 1):
        raise RequestError(
            f"the prompt has {n_prompt} tokens, and max_model_len is {info.max_model_len} for prompt and answer"
        )
    n_needed = pages_for(n_most_computed(n_prompt, max_tokens))
    if n_needed > n_pages:
        raise RequestError(
            f"prompt and answer of {n_prompt} + {max_tokens} tokens need {n_needed} pages, and the engine has"
            f" {n_pages}; ask for fewer tokens or start it with more --n-pages"
        )
    return max_tokens
