"""ngram_rows, ngram_gate and ngram_conv: what a layer adds of the n-grams of tokens (csrc/ngrams.cpp has the
equations).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from deltic.ops.arrays import Array, bfloat16, stride
from deltic.ops.contract import check
from deltic.ops.cpu.gdn import GdnInputs
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import MAX_WINDOW

_TYPES = tuple(map(np.dtype, (bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn)))
"""Types of a table's rows, in the order of csrc/ngrams.cpp."""
TAPS = 4
MOST_KEPT = 16
"""Inputs of the convolution that a state slot keeps, at most."""


@dataclass(frozen=True)
class NgramRows:
    """Rows of a table that lie in parts of part_rows rows each.

    parts: int64 [n_parts], addresses of memory that stays; type: bfloat16, float16, float32 or float8_e4m3fn;
    what a row says is multiplied with scale.
    """

    parts: Array
    part_rows: int
    width: int
    type: np.dtype[Any]
    scale: float


@dataclass(frozen=True)
class NgramHash:
    """Integers that make a row's number of ids: int64 multipliers [longest], primes and offsets [heads]."""

    multipliers: Array
    primes: Array
    offsets: Array


def ngram_rows(
    program: Program, table: NgramRows, hash: NgramHash, ids: Array, previous: Array, out: Array, n_tokens: Array
) -> None:
    """out[t] = bfloat16 of the rows, one a head, that the n-grams ending in token t name.

    Heads of n-grams of 2 tokens come first, then those of 3, and so on. The head h of n tokens reads the row
    (xor over p < n of id[t - p] * multipliers[p]) mod primes[h] + offsets[h].

    ids: int32 [T]; previous: int32 [T, longest - 1], those of the tokens before, the nearest first; out:
    bfloat16 [T, heads * width]; n_tokens: int32 scalar, rows in use. Leaves out: where an n-gram begins;
    `previous` says it.
    """
    expect = partial(check, "ngram_rows")
    n_heads, longest = len(hash.primes), len(hash.multipliers)
    integers = (hash.multipliers, hash.primes, hash.offsets, table.parts)
    expect(all(i.dtype == np.int64 for i in integers), "int64 integers and addresses")
    expect(n_heads % (longest - 1) == 0, "as many heads for each length")
    expect(table.width % 16 == 0 and table.type in _TYPES, f"rows % 16 == 0, in one of {_TYPES}")
    expect(previous.shape[1] == longest - 1 and previous.dtype == ids.dtype == np.int32, "int32 ids")
    expect(out.shape[1] == n_heads * table.width and out.dtype == bfloat16, "bfloat16 out [T, heads width]")
    type = _TYPES.index(table.type)
    rows = table.parts, table.part_rows, table.width, table.width * table.type.itemsize, type, float(table.scale)
    program.call("deltic_ngram_rows", *rows, n_heads, longest, *integers[:3], ids, previous, out, n_tokens)


@dataclass(frozen=True)
class NgramWeights:
    """key_norm, query_norm, conv_norm: float32 [S H], zero-centred, of each stream; conv: float32 [4, S H],
    whose last row meets the token itself.
    """

    key_norm: Array
    query_norm: Array
    conv_norm: Array
    conv: Array


def ngram_gate(
    program: Program, kv: Array, x: Array, w: NgramWeights, eps: float, out: Array, n_tokens: Array, n_streams: int
) -> None:
    """x[t, s] += u[t, s]; out[t, s] = bfloat16(norm(u[t, s])), where u = value * sigmoid(sign(g)
    sqrt(max(|g|, 1e-6))) and g = norm(key[t, s]) . norm(x[t, s]) / sqrt(H).

    kv: float32 [T, S H + H], keys of the streams, then the value; x: float32 [T, S H]; out: bfloat16 [T, S
    H]; n_tokens: int32 scalar, rows in use.
    """
    width = x.shape[1] // n_streams
    check("ngram_gate", kv.dtype == x.dtype == np.float32 and out.dtype == bfloat16, "float32 kv, x; bfloat16 out")
    check("ngram_gate", width % 16 == 0 and kv.shape[1] == x.shape[1] + width, "kv [T, S H + H], H % 16 == 0")
    norms = w.key_norm, w.query_norm, w.conv_norm
    check("ngram_gate", all(n.shape == x.shape[1:] == out.shape[1:] for n in norms), "norms and out of x's width")
    program.call("deltic_ngram_gate", kv, x, *norms, out, n_tokens, n_streams, width, eps)


@dataclass(frozen=True)
class NgramMemory:
    """Inputs of the convolution that lie before a chunk. See `ngram_conv`."""

    columns: Array  # bfloat16 [state_slots, 3 * dilation, C], the oldest first
    window: Array  # bfloat16 [batch_slots, W, C]


def ngram_conv(program: Program, inputs: Array, x: Array, conv: Array, steps: GdnInputs, memory: NgramMemory) -> None:
    """x[t] += SiLU(sum over taps i of conv[i] * inputs[t - (3 - i) * dilation]), of each channel by itself;
    before the sequence's first token all is 0.

    inputs: bfloat16 [T, C]; x: float32 [T, C]; conv: float32 [4, C]. Where a chunk starts, which state slots
    get what it leaves, and what of it waits in the window of drafts: as of `gdn`, whose `steps` these are.
    """
    expect = partial(check, "ngram_conv")
    n_kept, n_channels = memory.columns.shape[1:]
    expect(conv.shape == (TAPS, n_channels) and conv.dtype == np.float32, f"float32 conv [4, {n_channels}]")
    expect(n_kept % (TAPS - 1) == 0 and n_kept <= MOST_KEPT, f"columns of at most {MOST_KEPT} tokens")
    expect(inputs.shape[1] == x.shape[1] == n_channels and n_channels % 16 == 0, "one width, % 16 == 0")
    expect(inputs.dtype == memory.columns.dtype == memory.window.dtype == bfloat16, "bfloat16 inputs, memory")
    expect(memory.window.shape[1] <= MAX_WINDOW and memory.window.shape[2] == n_channels, "windows [n, W, C]")
    i, m = steps, memory
    kept = m.columns, stride(m.columns), m.window, stride(m.window)
    program.call("deltic_ngram_conv", inputs, x, conv, n_channels, n_kept // (TAPS - 1), *i.chunks, *i.windows, *kept)
