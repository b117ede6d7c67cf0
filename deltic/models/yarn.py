"""YaRN (Peng et al. 2023, arXiv:2309.00071): scaled positions, and the angles of dims that rotate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deltic.models.fields import UnsupportedModelError, positive_float, positive_int, read_flag, refuse_limits

SCALING_FIELDS = (
    *("rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
)


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Parameters of YaRN."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def rotary_frequencies(n: int, theta: float, yarn: YarnScaling | None) -> list[float]:
    """Angles per position of n rotated dims, n/2 float64 values.

    Plain: theta^(-2i/n). YaRN blends that with the same divided by `factor`, along a ramp over i.
    """
    plain = [theta ** (-2.0 * i / n) for i in range(n // 2)]
    if yarn is None:
        return plain

    def dim_of(n_rotations: float) -> float:
        window = yarn.original_max_position_embeddings / (n_rotations * 2 * math.pi)
        return n * math.log(window) / (2 * math.log(theta))

    low, high = dim_of(yarn.beta_fast), dim_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    if low == high:
        high += 0.001  # the published form avoids 0/0 in this way
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(n // 2)]
    return [f * (1.0 - r) + f / yarn.factor * r for f, r in zip(plain, ramp, strict=True)]


def rope_fields(text: Mapping[str, object], *names: str) -> dict[str, object]:
    """Reads the fields of the rotation from wherever a config keeps them: in rope_scaling, in
    rope_parameters, or flat, those of these names, as older and re-saved files do. Raises
    UnsupportedModelError.
    """
    fields = {name: text[name] for name in names if text.get(name) is not None}
    for group in ("rope_scaling", "rope_parameters"):
        if (value := text.get(group)) is None:
            continue
        if not isinstance(value, Mapping):
            raise UnsupportedModelError(group, value, "an object")
        fields |= {key: said for key, said in value.items() if said is not None}
    return fields


def n_positions(made_for: int, yarn: YarnScaling | None) -> int:
    """Positions of a model that was made for so many."""
    return made_for if yarn is None else max(made_for, int(yarn.factor * yarn.original_max_position_embeddings))


def yarn_scaling(rope: Mapping[str, object], max_positions: int) -> YarnScaling | None:
    """Reads the fields of YaRN; None: positions are not scaled. Raises UnsupportedModelError."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "mrope"):
        return None
    if kind != "yarn":
        raise UnsupportedModelError("rope_type", kind, "default or yarn")
    factor, theta = positive_float(rope, "factor"), positive_float(rope, "rope_theta", 1e6)
    refuse_limits(("rope_theta", theta, theta > 1.0, "over 1 with YaRN"))

    def attention_scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    default = attention_scale(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default = attention_scale(positive_float(rope, "mscale"))
        default /= attention_scale(positive_float(rope, "mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=positive_int(rope, "original_max_position_embeddings", max_positions),
        attention_factor=positive_float(rope, "attention_factor", default),
        beta_fast=positive_float(rope, "beta_fast", 32.0),
        beta_slow=positive_float(rope, "beta_slow", 1.0),
        truncate=read_flag(rope, "truncate", True),
    )
