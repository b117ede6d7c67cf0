"""The n-gram embedding of Qwen3.8-Flash-Next (PLE): its sizes, and the integers by which n-grams are hashed.

One layer adds to its residual streams what a table holds of the last n-grams of tokens. A head of an n-gram
of length n reads row

    (xor over p < n of token[t - p] * multipliers[p]) mod primes[head] + offsets[head]

of the table. Everything is exact in signed 64 bits. Where a token before t does not exist, or an end of text
lies between, the end of text stands for it. Source: transformers, models/qwen4_exp. Nothing here imports
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltic.models.fields import (
    UnsupportedModelError,
    at_most,
    json_table,
    multiple,
    positive_int,
    refuse_limits,
    within,
)

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
MAX_NGRAM = 8
"""Longest n-gram: a step has as many ids of every token, less one."""
MAX_HEADS = 64
"""Heads of the n-grams of one length."""


@dataclass(frozen=True, kw_only=True)
class NgramShape:
    """Geometry of the one layer that has an n-gram embedding."""

    layer: int
    """Number of the layer, from 0."""
    width: int
    """Width of a token's rows together."""
    size: int
    """Tokens of the longest n-gram; the convolution's taps are as many tokens apart."""
    conv_width: int
    eos_id: int
    multipliers: tuple[int, ...]
    """Factor of each token of an n-gram, the last token's first."""
    primes: tuple[int, ...]
    """Rows of each head: as many heads of 2 tokens, then of 3, and so on."""
    offsets: tuple[int, ...]
    """First row of each head."""
    n_rows: int
    """Rows of the table, those that no head reads included."""

    @property
    def n_heads(self) -> int:
        return len(self.primes)

    @property
    def head_width(self) -> int:
        """Width of a row of the table."""
        return self.width // self.n_heads

    @property
    def window(self) -> int:
        """Tokens before one that its convolution reads."""
        return (self.conv_width - 1) * self.size

    @property
    def n_params(self) -> int:
        """Parameters of the table."""
        return self.n_rows * self.head_width


def read_ngrams(text: Mapping[str, object], eos_ids: Sequence[int], linear_layers: Sequence[int]) -> NgramShape:
    """Reads the fields of a text_config, and `ngram_hash` of one that was made of a GGUF file.

    eos_ids: those that this config names; linear_layers: numbers of the layers without attention, from 0.
    Raises UnsupportedModelError.
    """
    layers = text.get("ple_layer_ids")
    if not isinstance(layers, list | tuple) or len(layers) != 1 or type(layers[0]) is not int:
        raise UnsupportedModelError("ple_layer_ids", layers, "a list of one layer, counted from 1")
    if layers[0] - 1 not in linear_layers:
        raise UnsupportedModelError("ple_layer_ids", layers, "a layer of linear_attention, counted from 1")
    if not eos_ids:
        raise UnsupportedModelError("eos_token_id", text.get("eos_token_id"), "an id: n-grams end there")
    size, per_ngram = positive_int(text, "ngram_size", 3), positive_int(text, "heads_per_ngram", 8)
    width = positive_int(text, "ple_embed_dim", positive_int(text, "hidden_size"))
    n_heads = (size - 1) * per_ngram
    refuse_limits(
        within("ngram_size", size, 2, MAX_NGRAM),
        at_most("heads_per_ngram", per_ngram, MAX_HEADS),
        ("ple_embed_dim", width, width % max(1, n_heads) == 0, f"a multiple of {n_heads} heads"),
        multiple("ple_embed_dim", width, 32),
    )
    made = _given(text, size, n_heads) if "ngram_hash" in text else _derived(text, size, n_heads)
    conv_width = positive_int(text, "ple_conv_kernel_size", 4)
    return NgramShape(
        **{"eos_id": eos_ids[0]} | made, layer=layers[0] - 1, width=width, size=size, conv_width=conv_width
    )


def _derived(text: Mapping[str, object], size: int, n_heads: int) -> dict[str, Any]:
    """The integers as the published code derives them of the sizes and a seed, for the first layer that has
    them.
    """
    least = max(1, ((2**63 - 1) // positive_int(text, "vocab_size")) // 2)
    seed = 1234 if text.get("seed") is None else text["seed"]
    if type(seed) is not int or not 0 <= seed <= _MASK:
        raise UnsupportedModelError("seed", seed, "an integer of 64 bits, at least 0")
    multipliers = tuple(2 * (_splitmix64(seed + _GAMMA * (i + 1)) % least) + 1 for i in range(size))
    primes, at = list[int](), positive_int(text, "ngram_vocab_size_base", 20_000_000)
    while len(primes) < n_heads:
        if _is_prime(at):
            primes.append(at)
        at += 1
    offsets = tuple(sum(primes[:i]) for i in range(n_heads))
    multiple = positive_int(text, "make_ngram_vocab_size_divisible_by", 128)
    n_rows = -(-sum(primes) // multiple) * multiple
    return {"multipliers": multipliers, "primes": tuple(primes), "offsets": offsets, "n_rows": n_rows}


def _given(text: Mapping[str, object], size: int, n_heads: int) -> dict[str, Any]:
    """The integers as a file says them."""
    said = json_table(text, "ngram_hash")
    lists = {"multipliers": size, "primes": n_heads, "offsets": n_heads}
    values: dict[str, list[int]] = {}
    for name, n in lists.items():
        found = said.get(name)
        if not isinstance(found, list) or len(found) != n or any(type(i) is not int or i < 0 for i in found):
            raise UnsupportedModelError(f"ngram_hash.{name}", found, f"{n} integers")
        values[name] = found
    n_rows, vocab_size = positive_int(said, "n_rows"), positive_int(text, "vocab_size")
    eos_id = said.get("eos_id")
    # another one would hash to rows that there are not
    if type(eos_id) is not int or not 0 <= eos_id < vocab_size:
        raise UnsupportedModelError("ngram_hash.eos_id", eos_id, f"an id below {vocab_size}")
    last = max(prime + offset for prime, offset in zip(values["primes"], values["offsets"], strict=True))
    if min(values["primes"]) < 1 or last > n_rows:
        raise UnsupportedModelError("ngram_hash.primes", said["primes"], f"heads within {n_rows} rows")
    if max(values["multipliers"]) * (vocab_size - 1) >= 2**63:
        raise UnsupportedModelError("ngram_hash.multipliers", said["multipliers"], "products below 2^63")
    return {name: tuple(found) for name, found in values.items()} | {"n_rows": n_rows, "eos_id": eos_id}


def _splitmix64(value: int) -> int:
    """A step of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _is_prime(n: int) -> bool:
    """Returns whether n, below 2^31, is a prime: the test of Miller and Rabin, whose bases suffice so far."""
    bases = (2, 3, 5, 7)
    if n < 11 or any(n % base == 0 for base in bases):
        return n in bases
    twos = ((n - 1) & -(n - 1)).bit_length() - 1
    for base in bases:
        x = pow(base, (n - 1) >> twos, n)
        if x not in (1, n - 1) and all((x := x * x % n) != n - 1 for _ in range(twos - 1)):
            return False
    return True
