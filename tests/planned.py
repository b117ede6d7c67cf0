"""A plan of a shape without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from deltic.config import EngineConfig, without_foreign
from deltic.runtime.build import plan_of, settle
from deltic.runtime.fit import make_plan
from deltic.runtime.model import SpeechModel, TextModel
from deltic.runtime.plan import Kind, Plan, TextKind


def planned(
    config: EngineConfig,
    shape: Any,
    kind: Kind[Any],
    n_real: int,
    free: int,
    host_free: int | None = None,
    **parts: Any,
) -> Plan[Any]:
    """The plan of a model of this shape in `free` bytes. parts: further fields of the Model."""
    kind.check(shape)
    model: Any = SpeechModel
    settled = without_foreign(config, kind.device, "text" if isinstance(kind, TextKind) else "speech")
    if isinstance(kind, TextKind):
        model, settled = TextModel, replace(settled, max_drafts=kind.max_drafts(settled, shape))
    return make_plan(
        kind, model(config=settled, directory=Path(), shape=shape, n_real=n_real, **parts), free, host_free
    )


def settled(config: EngineConfig, device: Any, free: int) -> tuple[TextModel | SpeechModel, Plan[Any]]:
    """What is run on a device, and its plan in `free` bytes."""
    model = settle(config, device)
    return model, plan_of(model, device, free)
