"""The vision tower's geometry: `vision_config` of config.json (GGUF: `gguf_config.vision_config`). A picture
becomes patches of 16 x 16 pixels, and merge x merge of them a token of the language model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deltic.models.fields import MAX_LAYERS, at_most, json_table, only, positive_float, positive_int, refuse_limits
from deltic.ops.geometry import TOKEN_FRAMES, TOKEN_PIXELS

if TYPE_CHECKING:
    from deltic.ops.formats import WeightFormat

CHANNELS, PATCH_SIZE, FRAMES_A_PATCH = 3, 16, TOKEN_FRAMES
BLOCK = TOKEN_PIXELS
"""Pixels of a side of a token's square: the sides of a resized picture are multiples of it."""
MERGE = BLOCK // PATCH_SIZE
PATCH_WIDTH = CHANNELS * FRAMES_A_PATCH * PATCH_SIZE**2
"""Values of a patch: (channel, frame, y, x). A picture is both frames."""

LAYER_NORM_EPS = 1e-6
"""Epsilon of every norm. No config says it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Sizes of a tower. formats: of its tensors that are stored quantised (`weights.stored_vision_shape`)."""

    depth: int
    hidden_size: int
    n_heads: int
    intermediate_size: int
    out_hidden_size: int
    """Width of the language model."""
    table_side: int = 48
    """The table of positions is a square of table_side x table_side entries."""
    rope_theta: float = 1e4
    formats: Mapping[str, WeightFormat] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> VisionShape:
        """Reads a config.json that has a vision_config.

        Raises UnsupportedModelError, which names the field, for whatever the forward would not honour.
        """
        fields = json_table(config, "vision_config")
        for name, default, supported in (
            ("in_channels", CHANNELS, (CHANNELS,)),
            ("patch_size", PATCH_SIZE, (PATCH_SIZE, [PATCH_SIZE] * 2)),
            ("temporal_patch_size", FRAMES_A_PATCH, (FRAMES_A_PATCH,)),
            ("spatial_merge_size", MERGE, (MERGE,)),
            ("hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",)),
            ("deepstack_visual_indexes", [], ([], ())),
        ):
            only({name: default, **fields}, name, (None, *supported))
        rope = json_table(fields, "rope_parameters", may_lack=True)
        only(rope, "rope_type", (None, "axial"))
        hidden, n_heads = positive_int(fields, "hidden_size"), positive_int(fields, "num_heads")
        depth, n_places = positive_int(fields, "depth"), positive_int(fields, "num_position_embeddings")
        refuse_limits(
            ("num_heads", n_heads, hidden % n_heads == 0, f"a divisor of hidden_size {hidden}"),
            at_most("depth", depth, MAX_LAYERS),
            ("num_position_embeddings", n_places, math.isqrt(n_places) ** 2 == n_places, "a square"),
        )
        return cls(
            depth=depth,
            hidden_size=hidden,
            n_heads=n_heads,
            intermediate_size=positive_int(fields, "intermediate_size"),
            out_hidden_size=positive_int(fields, "out_hidden_size"),
            table_side=math.isqrt(n_places),
            rope_theta=positive_float(rope, "rope_theta", 10_000),
        )

    @classmethod
    def published(cls, name: str, out_hidden_size: int) -> VisionShape | None:
        """The tower of a published model by its name, any case; None: it has none, or it is not known."""
        sizes = PUBLISHED_SIZES.get(re.sub(r"^qwen3\.[568]-", "", name.lower()))
        if sizes is None:
            return None
        depth, size, n_heads, inner = sizes
        return cls(
            depth=depth, hidden_size=size, n_heads=n_heads, intermediate_size=inner, out_hidden_size=out_hidden_size
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_heads

    @property
    def merged_size(self) -> int:
        """Width of the patches of a token, side by side."""
        return self.hidden_size * MERGE**2

    @property
    def inner_size(self) -> int:
        """The intermediate size as products take it: behind its end are zeros up to a multiple of 32."""
        return -(-self.intermediate_size // 32) * 32

    def n_operations(self, n_patches: int) -> int:
        """Operations of a picture, a multiply-add as two: linears and attention."""
        h, merged = self.hidden_size, self.merged_size
        a_patch = PATCH_WIDTH * h + self.depth * (4 * h * h + 2 * h * self.intermediate_size)
        a_token = merged * (merged + self.out_hidden_size)
        return 2 * (n_patches * a_patch + n_patches // MERGE**2 * a_token) + 4 * self.depth * n_patches**2 * h

    def inv_freq(self) -> list[float]:
        """Angles per row or column of patches, head_dim / 4 of them."""
        half = self.head_dim // 2
        return [self.rope_theta ** (-2.0 * i / half) for i in range(self.head_dim // 4)]


PUBLISHED_SIZES = {
    "0.8b": (12, 768, 12, 3072),
    "2b": (24, 1024, 16, 4096),
    "4b": (24, 1024, 16, 4096),
    **dict.fromkeys(("9b", "27b", "35b-a3b", "122b-a10b", "397b-a17b", "flash-next"), (27, 1152, 16, 4304)),
}
"""Depth, width, heads and inner width of the towers of Qwen3.5, 3.6 and 3.8, by the size in a model's name.
"""
