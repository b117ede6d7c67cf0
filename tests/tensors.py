"""Between torch, which the oracles speak, and the arrays that the CPU's operators take. Memory is shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltic.ops.arrays import bfloat16
from deltic.ops.geometry import GdnHeads, GdnWeights


def array_of(value: Any) -> Any:
    """Tensors as arrays, in dataclasses, tuples, lists and dictionaries, too; anything else as it is."""
    if isinstance(value, Tensor):
        if value.dtype == torch.bfloat16:
            return value.view(torch.int16).numpy().view(bfloat16)
        return value.numpy()
    if isinstance(value, tuple | list):
        return type(value)(map(array_of, value))
    if isinstance(value, dict):
        return {key: array_of(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: array_of(part) for name, part in parts.items() if part is not None}
        if any(changed[name] is not parts[name] for name in changed):
            return dataclasses.replace(value, **changed)
    return value


def tensor_of(array: Any) -> Tensor:
    """An array as a tensor; one that may not be written, as a copy."""
    if not array.flags.writeable:
        array = np.array(array)
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class TiledOrder:
    """A DeltaNet layer with its value heads in tiled order: its geometry, and for each index of tensors in that order, where the
    element is in the grouped one. row: of a projection q|k|v|z|b|a; channel: of the convolution; head; out: of all heads' outputs.
    """

    def __init__(self, heads: GdnHeads) -> None:
        keys, dv = 2 * heads.n_k * heads.k_dim, heads.v_dim
        self.heads = dataclasses.replace(heads, tiled=True)
        self.head, self.out = self._order(1), self._order(dv)
        self.channel, self.row = self._order(dv, n_kept=keys), self._order(dv, dv, 1, 1, n_kept=keys)

    def _order(self, *widths: int, n_kept: int = 0) -> Tensor:
        """n_kept elements, and then for each width the value heads."""
        head = torch.arange(self.heads.n_v).view(self.heads.n_k, -1).T.reshape(-1, 1)
        parts = [torch.arange(n_kept)]
        for i, width in enumerate(widths):
            begin = n_kept + sum(widths[:i]) * self.heads.n_v
            parts.append((begin + head * width + torch.arange(width)).flatten())
        return torch.cat(parts)

    def weights(self, grouped: GdnWeights) -> GdnWeights:
        conv = grouped.conv[:, self.channel].contiguous()
        return GdnWeights(conv, grouped.a_log[self.head], grouped.dt_bias[self.head], grouped.norm)


def on_tensors(operator: Callable[..., None]) -> Callable[..., None]:
    """The operator over tensors."""

    @wraps(operator)
    def call(*arguments: Any, **more: Any) -> None:
        operator(*map(array_of, arguments), **array_of(more))

    return call
