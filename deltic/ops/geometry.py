"""Sizes that kernels, models and the engine share, and the protocol of an allocator. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PAGE_SIZE = 64
"""Tokens in one KV page; also the grid on which the scheduler cuts a prefill, and a block of one on a GPU."""

N_CODES = 16
"""Codes of a frame of speech: one that the talker draws, and 15 of its predictor."""

TOKEN_PIXELS, TOKEN_FRAMES = 32, 2
"""A token of a picture is a square of so many pixels a side, of up to so many frames."""
TOKEN_BYTES = 3 * TOKEN_PIXELS**2
"""Bytes of a token's pixels in a frame: red, green and blue."""

DeviceArray = Any
"""Memory of a device: an array of numpy's on a CPU, a tensor of torch's on a GPU."""
Allocate = Callable[[str, tuple[int, ...], Any], DeviceArray]
"""Gives memory for a purpose (its name), with a shape and a type. It may exist or only be counted."""

MAX_HEAD_DIM = 256
MAX_GROUP = 32  # query heads that share a key head: the rows of one task
SPLIT_KEYS = 512
MAX_RECORDS = 16384
MAX_GDN_DIM = 256
MAX_WINDOW = 32  # tokens of a window of gdn: two of them are one of its blocks
MAX_VISION_DIM = 128
VISION_KEYS = 32  # of a frame of patches: what the product with values takes at a time


def up_to(n: Any, multiple: int) -> Any:
    """n, or each of an array, up to the next multiple."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class AttentionHeads:
    """Geometry: query and key/value heads and their width.

    A projection row is q | gate | k | v, without gates q | k | v.
    """

    n_q: int
    n_kv: int
    dim: int
    is_gated: bool = True

    @property
    def row(self) -> int:
        return ((2 if self.is_gated else 1) * self.n_q + 2 * self.n_kv) * self.dim

    def records_size(self, max_len: int) -> tuple[int, int]:
        """Size of the `records` of `attention`, float32: enough to give every split of a sequence of max_len
        tokens to another thread, whether it decodes or its prefill is a few rows. More than MAX_RECORDS, and
        a longest one is fewer tasks.
        """
        n_splits = -(-max_len // SPLIT_KEYS)
        return min(MAX_RECORDS, n_splits * max(self.n_q, MAX_GROUP)), self.dim + 16


@dataclass(frozen=True)
class AttentionWeights:
    """Norms and rotary tables of queries and keys. q_norm, k_norm: float32 [d], zero-centred; cos, sin:
    float32 [n_angles, rotary/2]. Rotated are the first `rotary` dims of a head, in pairs (i, i + rotary/2).
    """

    q_norm: DeviceArray
    k_norm: DeviceArray
    eps: float
    cos: DeviceArray
    sin: DeviceArray


@dataclass(frozen=True)
class LogprobEntries:
    """Log-probabilities that are wanted, and where they go. int32 but for the results."""

    n: DeviceArray  # entries in use: a scalar on a CPU, [1] on a GPU
    row: DeviceArray  # [N] of the logits
    target: DeviceArray  # [N] the id
    n_top: DeviceArray  # [N] how many likeliest ids are wanted; -1 skips the entry
    logprob: DeviceArray  # float32 [N]
    top_ids: DeviceArray  # [N, K], likeliest first
    top_logprobs: DeviceArray  # float32 [N, K]


@dataclass(frozen=True)
class Routing:
    """Experts of a token, and whether their weights add up to 1."""

    n_per_token: int
    normalise: bool


@dataclass(frozen=True)
class GdnHeads:
    """Geometry: key and value heads, their widths, and which key head a value head reads.

    Value head h reads key head h // (n_v / n_k); tiled (Qwen3.5 in GGUF): h % n_k.
    """

    n_k: int
    n_v: int
    k_dim: int
    v_dim: int
    tiled: bool = False
    sigmoid_gate: bool = False
    """True if the norm behind it is gated by sigmoid(z), not by SiLU."""

    @property
    def channels(self) -> int:
        return 2 * self.n_k * self.k_dim + self.n_v * self.v_dim


@dataclass(frozen=True)
class IndexHeads:
    """Geometry of the index over an attention layer's keys: query heads and one key head of this width,
    groups of `ratio` tokens that share a key, and tokens of whole groups that a token attends to, at most.

    A projection row is q | k.
    """

    n_q: int
    dim: int
    ratio: int
    budget: int

    @property
    def row(self) -> int:
        return (self.n_q + 1) * self.dim

    @property
    def n_groups(self) -> int:
        """Whole groups that a token attends to, at most."""
        return self.budget // self.ratio

    @property
    def page_rows(self) -> int:
        """Rows of a page's part of the index: a key of each token, then one of each group."""
        return PAGE_SIZE + PAGE_SIZE // self.ratio


@dataclass(frozen=True)
class GdnWeights:
    """conv: float32 [4, C] (tap 3 multiplies the current token); a_log, dt_bias: float32 [Hv]; norm: float32
    [dv].
    """

    conv: DeviceArray
    a_log: DeviceArray
    dt_bias: DeviceArray
    norm: DeviceArray
