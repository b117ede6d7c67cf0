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


def on_tensors(operator: Callable[..., None]) -> Callable[..., None]:
    """The operator over tensors."""

    @wraps(operator)
    def call(*arguments: Any, **more: Any) -> None:
        operator(*map(array_of, arguments), **array_of(more))

    return call
