"""The sampler for one row: logits, parameters, seed and position in, one token id out.

The order of the steps is the contract: bias, repetition, frequency and presence penalties, bans, the mask,
then greedy, or temperature, top-k, softmax, min-p, top-p and one draw. The draw uses a counter-based
generator, so a token depends on (logits, seed, position) alone: Salmon et al. 2011, "Parallel random numbers:
as easy as 1, 2, 3" (Philox4x32-10). `params` is read by attribute: temperature, top_k (0: all), top_p, min_p,
repetition_penalty, frequency_penalty, presence_penalty, logit_bias, min_tokens, stop_token_ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int], n_rounds: int = 10
) -> tuple[int, int, int, int]:
    """Four 32-bit words from a 128-bit counter and a 64-bit key, each given as 32-bit words, low first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(n_rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The one number in [0, 1), a multiple of 2^-24, that belongs to a 64-bit seed and a token position."""
    word, _, _, _ = philox4x32((position, 0, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return (word >> 8) * 2.0**-24


def banned_ids(params: Any, eos_token_ids: Iterable[int], n_output: int) -> set[int]:
    """Ids that would end the sequence, while it is shorter than min_tokens."""
    return {*eos_token_ids, *params.stop_token_ids} if n_output < params.min_tokens else set()


def processed_logits(
    logits: Tensor,
    params: Any,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    banned: Iterable[int] = (),
    n_real_vocab: int | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """logits [V] float32 after bias, penalties, bans and the mask (-inf); the input is not changed.

    allowed: bool [V]; None: all.
    """
    row = logits.float().clone()
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in {*prompt_ids, *output_ids}:
        penalty = params.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, count in Counter(output_ids).items():
        row[token] -= params.frequency_penalty * count
        row[token] -= params.presence_penalty
    for token in banned:
        row[token] = -torch.inf
    if allowed is not None:
        row[~allowed] = -torch.inf
    row[n_real_vocab if n_real_vocab is not None else row.shape[0] :] = -torch.inf
    return row


def candidates(row: Tensor, params: Any) -> tuple[Tensor, Tensor]:
    """Ids that may be drawn, ascending, and their float64 probabilities, from processed logits [V].

    Temperature must be above 0. The probabilities add up to less than 1 where min-p or top-p cut some off.
    """
    scaled = row / params.temperature
    # stable, so that of equal values the lower ids come first, here and in every cut below
    values, ids = scaled.sort(descending=True, stable=True)
    n_kept = params.top_k if params.top_k > 0 else row.shape[0]
    values, ids = values[:n_kept], ids[:n_kept]
    p = values.softmax(0)
    kept = (p >= params.min_p * p[0]) & (p > 0)
    p, ids = p[kept].double(), ids[kept]
    if params.top_p < 1:
        before = p.cumsum(0) - p  # what the more likely ones add up to
        kept = before < params.top_p * p.sum()
        kept[0] = True
        p, ids = p[kept], ids[kept]
    order = ids.argsort()
    return ids[order], p[order]


def draw(ids: Tensor, p: Tensor, u: float) -> int:
    """The first id at which the running sum of p exceeds u of the whole; the last one if none does."""
    threshold = u * float(p.sum())
    total = 0.0
    for token, probability in zip(ids.tolist(), p.tolist(), strict=True):
        total += probability
        if total > threshold:
            return int(token)
    return int(ids[-1])


def sample(
    logits: Tensor,
    params: Any,
    seed: int,
    position: int,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    banned: Iterable[int] = (),
    n_real_vocab: int | None = None,
    allowed: Tensor | None = None,
) -> int:
    """One token id from logits [V] float32. `position` is the index in the sequence that the token takes."""
    row = processed_logits(logits, params, prompt_ids, output_ids, banned, n_real_vocab, allowed)
    if params.temperature == 0:
        return int(row.argmax())
    return draw(*candidates(row, params), uniform(seed, position))


def token_logprobs(logits: Tensor, n_real_vocab: int | None = None) -> Tensor:
    """Log-probabilities [V] float32 of the model itself, before any processing; padding ids are -inf."""
    row = logits.float().clone()
    row[n_real_vocab if n_real_vocab is not None else row.shape[0] :] = -torch.inf
    return row.log_softmax(0)
