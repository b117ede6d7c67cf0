"""Fits a model into memory: the sizes that are asked for, the defaults that follow from what is free, and
refusals that name the largest setting that would fit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.machine import free_memory_bytes, memory_bound
from deltic.models.qwen.shape import ModelShape
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.model import Model, S
from deltic.runtime.plan import (
    CACHE_SHARE,
    LARGEST_BUFFER,
    TOO_MUCH,
    Kind,
    Plan,
    as_flag,
    asked_plan,
    brought,
    page_cost,
    sized,
)


def make_plan(kind: Kind[S], model: Model[S], free_bytes: int, host_free_bytes: int | None = None) -> Plan[S]:
    """Sizes for this model in free_bytes of the device's memory.

    host_free_bytes: of the machine's memory, beside a GPU (default: what is free now).
    Raises ConfigError when the model or a setting does not fit, naming the largest value that would.
    """
    config = model.config
    asked = asked_plan(model, kind, free_bytes)
    plan = _shrunk(asked, kind, config)
    given, bare = config.expert_memory, replace(asked, n_checkpoints=0, host_bytes=0, n_pages=0)
    if given is not None or plan.spare_bytes < 0:
        why = kind.all_inside(model)
        if given is not None and why:
            raise ConfigError(f"--expert-memory {given}: {why}; leave it out")
        outside = (asked, plan) if why else _with_experts_outside(asked, kind, config)
        if given is not None or outside[1].spare_bytes >= 0 or _shrunk(bare, kind, EngineConfig()).spare_bytes < 0:
            asked, plan = outside
    if plan.spare_bytes < 0:
        told = None if given is None else _refusal_of_experts(asked, kind, config)
        raise told or _refusal(asked, plan, kind, config)
    if not kind.on_gpu and config.memory_gb is None:  # at most half of what is spare: the cache's
        lacking = plan.decoders_bytes - (free_bytes - plan.budget_bytes)
        plan = replace(plan, budget_bytes=plan.budget_bytes - max(0, min(lacking, plan.spare_bytes // 2)))
    plan = _with_checkpoints(kind.budget(plan, config), kind, config)
    if config.n_pages is None:
        n_pages = min(kind.useful_pages(plan, config), plan.left_bytes // page_cost(plan))
        plan = replace(plan, n_pages=n_pages)
    assert plan.n_pages >= pages_for(plan.max_model_len), "one sequence has fitted so far"
    free = free_memory_bytes() if host_free_bytes is None else host_free_bytes
    n_bytes = kind.host_bytes(plan, config, max(0, free - _pinned_bytes(plan)))
    if model.n_host_units is not None:
        n_bytes = model.n_host_units * plan.host_page_bytes
    return replace(plan, host_bytes=n_bytes)


def refuse_little_memory(plan: Plan[S]) -> None:
    """Raises ConfigError where the host's memory does not hold what GPUs read there."""
    needed, free = _pinned_bytes(plan), free_memory_bytes()
    if needed > free:
        sizes = plan.ngram_bytes, plan.table_bytes, plan.n_expert_slots
        parts = zip(("the table of n-grams", "the embedding", "experts"), sizes, strict=True)
        raise ConfigError(
            f"GPUs read {' and '.join(name for name, n in parts if n)} in the host's memory, {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free{memory_bound()}; take --device cpu, which reads files, or a machine with more memory"
        )


def _pinned_bytes(plan: Plan[S]) -> int:
    """Bytes of the host's memory that GPUs read by its address: the tables, and experts."""
    return plan.ngram_bytes + plan.table_bytes + (plan.outside_bytes if plan.n_expert_slots else 0)


def _with_experts_outside(asked: Plan[S], kind: Kind[S], config: EngineConfig) -> tuple[Plan[S], Plan[S]]:
    """The plan with experts outside before and after defaults are reduced: with as many inside as asked for.
    Else with up to half of the memory for them and of what the rest leaves: so that sequences are as long as
    they can be, and a prompt and an answer bring least.
    """
    if config.expert_memory is not None:
        asked = sized(kind.hold_experts(asked, int(config.expert_memory * 1e9)), kind)
        return asked, _shrunk(asked, kind, config)
    plans = list[tuple[Plan[S], Plan[S]]]()
    for i in range(9):
        n_bytes = asked.budget_bytes * i // 16
        asked = sized(kind.hold_experts(asked, n_bytes), kind)
        plan = _shrunk(asked, kind, config)
        if plan.spare_bytes < 0 and plans:
            break
        part = plan.spare_bytes // CACHE_SHARE  # one at least is left to pages and states
        held = (sized(kind.hold_experts(plan, n_bytes + i * part), kind) for i in range(CACHE_SHARE - 1, 0, -1))
        plan = next((more for more in held if more.spare_bytes >= part > 0), plan)
        plans.append((asked, plan))
    return max(plans, key=lambda at: (at[1].max_model_len, -_brought_by(at[1])))


def _brought_by(plan: Plan[Any]) -> float:
    """Bytes of experts that a prompt of 8,192 tokens and an answer of 256 bring."""
    return -(-8192 // plan.max_step_tokens) * brought(plan, plan.max_step_tokens) + 256 * brought(plan, 1)


def _shrunk(plan: Plan[S], kind: Kind[S], config: EngineConfig) -> Plan[S]:
    """Reduces defaults that do not fit, in the kind's order, but first moves a table to the host."""
    if plan.left_bytes < plan.sequence_bytes and not plan.table_bytes:
        n_bytes = kind.table_bytes(plan)
        plan = replace(plan, weight_bytes=plan.weight_bytes - n_bytes, table_bytes=n_bytes)
    while plan.left_bytes < plan.sequence_bytes:
        for field, least in kind.shrink:
            value = getattr(plan, field)
            if getattr(config, field) is None and value > least:
                plan = sized(plan, kind, **{field: max(least, value // 2)})
                break
        else:
            break
    return plan


def _with_checkpoints(plan: Plan[S], kind: Kind[S], config: EngineConfig) -> Plan[S]:
    """Decides the number of checkpoint state slots where it is not given."""
    if config.n_checkpoints is not None or not config.prefix_cache or not kind.max_checkpoints:
        return plan
    share = plan.spare_bytes // CACHE_SHARE
    if config.n_pages is not None and not kind.on_gpu:
        # No more beside them than a plan of that size would have; a GPU's memory is for nobody else.
        share = min(share, plan.pages_bytes // (CACHE_SHARE - 1))
    n_checkpoints = max(0, min(kind.max_checkpoints, share // plan.state_bytes))
    if n_checkpoints < 1 <= plan.spare_bytes // plan.state_bytes:
        n_checkpoints = 1  # without any there are no hits
    return replace(plan, n_checkpoints=n_checkpoints)


# What does not fit, and what would.


def _refusal_of_experts(asked: Plan[S], kind: Kind[S], config: EngineConfig) -> ConfigError | None:
    """Refuses --expert-memory if less of it would fit."""
    for tenths in range(int(10 * (config.expert_memory or 0.0)), -1, -1):
        if _shrunk(sized(kind.hold_experts(asked, tenths * 10**8), kind), kind, config).spare_bytes >= 0:
            have = f"{asked.budget_bytes / 1e9:.1f} GB of device memory beside the rest; give at most {tenths / 10:g}"
            return ConfigError(f"--expert-memory {config.expert_memory:g} does not fit into {have}")
    return None


def _refusal(asked: Plan[S], plan: Plan[S], kind: Kind[S], config: EngineConfig) -> ConfigError:
    """asked: the plan before the defaults were shrunk. plan: the smallest one, which is still too large."""
    bare = _shrunk(replace(asked, n_checkpoints=0, host_bytes=0), kind, config)
    if bare.spare_bytes >= 0:  # so the cache's settings are too large, and need not shorten what runs
        plan = replace(bare, n_checkpoints=asked.n_checkpoints, host_bytes=asked.host_bytes)
    have = f"{max(0, plan.budget_bytes) / 1e9:.1f} GB{' of device memory' if kind.on_gpu else ''}"
    too_large: list[tuple[str, str, int]] = []
    for field, least, unit in (
        ("n_checkpoints", 0, 1),
        ("host_bytes", 0, 10**7),
        ("n_pages", pages_for(plan.max_model_len), 1),
        ("max_num_seqs", 1, 1),
        ("max_model_len", PAGE_SIZE, PAGE_SIZE),
        ("max_step_tokens", PAGE_SIZE, PAGE_SIZE),
        ("max_picture_tokens", PAGE_SIZE, PAGE_SIZE),
    ):
        value = getattr(plan, field)
        if value <= least:
            continue
        name = as_flag(field, value, config)
        most = _largest(plan, kind, field, least, unit)
        if most is not None:
            return ConfigError(
                f"{name} does not fit into {have} beside {(plan.weight_bytes + plan.vocoder_bytes) / 1e9:.1f} GB of weights; "
                f"give at most {most / 1e9 if field == 'host_bytes' else most}"
            )
        too_large.append((name, field, least))
    names = []
    for name, field, least in too_large:  # none of them alone
        names.append(name)
        plan = sized(plan, kind, **{field: least})
        if plan.spare_bytes >= 0:
            return ConfigError(f"{' and '.join(names)} do not fit into {have} together; give less of each")
    return _does_not_fit(bare, kind, have)


def _largest(plan: Plan[S], kind: Kind[S], field: str, least: int, unit: int) -> int | None:
    """The largest value of a field, of least, least + unit, ..., with which the plan fits; None: not even the
    least does.

    The search starts from below, so that no workspace much larger than a fitting one is measured.
    """

    def fits(n: int) -> bool:
        return sized(plan, kind, **{field: least + n * unit}).spare_bytes >= 0

    if not fits(0):
        return None
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return least + low * unit


def _does_not_fit(plan: Plan[S], kind: Kind[S], have: str) -> ConfigError:
    """Makes the error for a model that no lower setting would make fit. plan: without what is kept for
    the prefix cache.
    """
    sizes = f"weights {plan.weight_bytes / 1e9:.1f} GB"
    beside = {"vision tower": plan.tower_bytes, "draft model": plan.drafter_bytes, "vocoder": plan.vocoder_bytes}
    for name, n_bytes in beside.items():
        sizes += f", {name} {n_bytes / 1e9:.1f} GB" if n_bytes else ""
    needed = plan.total_bytes - plan.pages_bytes + plan.sequence_bytes
    if plan.workspace_bytes >= TOO_MUCH:
        sizes += f" alone, with buffers of more than {LARGEST_BUFFER / 1e9:.0f} GB each"
        needed -= plan.workspace_bytes
    else:
        sizes += f" and workspace {plan.workspace_bytes / 1e9:.2f} GB"
    n_gb = math.ceil((needed + kind.reserve_bytes) / kind.free_share / 1e9)
    smaller = {None: "--quantize int8, ", "int8": "--quantize int4, "}.get(plan.quantize, "")
    first, where = ("--device cpu, ", "GPU") if kind.on_gpu else (smaller, "machine")
    if isinstance(plan.shape, ModelShape) and plan.shape.formats:
        first = "a quantisation of fewer bits, "
    if isinstance(plan.shape, ModelShape) and plan.shape.is_moe and not kind.on_gpu and not plan.outside_bytes:
        first = f"--weights-cache DIR or `deltic pack`, which leave experts on the disk, {first}"
    return ConfigError(
        f"the model does not fit: {sizes}, and {have} may be used{'' if kind.on_gpu else memory_bound()}; take {first}a smaller "
        f"model, or a {where} with at least {n_gb} GB free"
    )
