"""The memory plan on a GPU: every byte of the device that serving takes, counted before it is taken.

Weights, activations of the largest decode and the largest prefill, tables, state slots and pages are all there is; recorded
steps keep their buffers in them. A setting that cannot fit is refused with the largest that would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.engine.messages import MAX_BIASES, MAX_LOGPROBS
from deltic.machine import free_memory_bytes
from deltic.models.fields import UnsupportedModelError
from deltic.models.qwen.gpu import (
    RING,
    DecodeBuffers,
    PlaceState,
    PrefillBuffers,
    decode_buffers,
    prefill_buffers,
)
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import weight_bytes
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.sample import PlaceParameters, SampleScratch, sample_scratch
from deltic.runtime.cpu.plan import CACHE_SHARE, DEFAULT_MODEL_LEN, Plan

DEFAULT_SEQS = 128
MAX_SEQS = 256
DEFAULT_STEP_TOKENS = 8192
MAX_SEGMENTS = 32
"""Prompts of one prefill."""
MAX_CHECKPOINTS = 1024
RESERVE_BYTES = 1 << 30
"""For the driver, compiled kernels, the recorded steps themselves, and the library's workspace."""
FREE_SHARE = 0.95


@dataclass(frozen=True)
class GpuWorkspace:
    """Every buffer of a step but the two memories."""

    table: Tensor
    """int32, flat: everything by place, so that the host changes it with one list of (offset, value)."""
    offsets: dict[str, tuple[int, int]]
    """Where the rows of each part of the table begin, and the words of one row."""
    places: PlaceState
    parameters: PlaceParameters
    decode: DecodeBuffers
    prefill: PrefillBuffers
    sample: SampleScratch
    out: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]
    """Of a decode and of a prefill: tokens int32 [P], log-probabilities float32 [P], ids and log-probabilities of the likeliest
    [P, MAX_LOGPROBS]."""


def place_table(
    n: int, max_model_len: int, allocate: Allocate, more: dict[str, int] | None = None
) -> tuple[Tensor, dict[str, tuple[int, int]], dict[str, Tensor]]:
    """The table of n places, where each part begins and the words of its rows, and the parts by name. more: words of further parts,
    those aligned to 8 bytes first."""
    parts = {
        "seed": 2, **(more or {}),
        **dict.fromkeys(("last_token", "position", "slot", "done", "top_k", "n_prompt", "uses_history"), 1),
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition", "frequency", "presence"), 1),
        **dict.fromkeys(("n_bias", "n_banned", "banned_until", "n_stop", "max_position", "n_logprobs", "mask_row"), 1),
        **dict.fromkeys(("bias_ids", "bias", "banned", "stop_ids"), MAX_BIASES),
        "page_table": pages_for(max_model_len) + 1, "history": max_model_len + 1, "rows_place": 1,
    }  # fmt: skip
    n_words = sum(width * n for width in parts.values())
    table = allocate("places", (n_words,), torch.int32)
    offsets, views, at = {}, {}, 0
    for name, width in parts.items():
        offsets[name] = (at, width)
        view = table[at : at + width * n]
        views[name] = view.view(n, width) if width > 2 else view
        at += width * n
    views["seed"] = views["seed"].view(torch.int64)
    for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence", "bias"):
        views[name] = views[name].view(torch.float32)
    return table, offsets, views


def gpu_workspace(plan: Plan, levers: Levers, allocate: Allocate) -> GpuWorkspace:
    """Allocates the buffers of a step; used to count them as well as to have them."""
    n, i32, f32 = plan.max_num_seqs, torch.int32, torch.float32
    shape, n_blocks = plan.shape, plan.max_step_tokens // PAGE_SIZE
    table, offsets, views = place_table(n, plan.max_model_len, allocate)
    state = {name: views[name] for name in ("last_token", "position", "done")}
    decode = decode_buffers(shape, levers, n, plan.max_model_len, allocate)
    return GpuWorkspace(
        table=table,
        offsets=offsets,
        places=PlaceState(slot=views["slot"], page_table=views["page_table"], **state),
        parameters=PlaceParameters(
            **{k: v for k, v in views.items() if k not in ("slot", "page_table", "rows_place")},
            masks=allocate("masks", (n, -(-plan.n_real // 32)), i32),
        ),
        decode=replace(decode, rows_place=views["rows_place"]),
        prefill=prefill_buffers(shape, n_blocks, min(n_blocks, MAX_SEGMENTS), allocate),
        sample=sample_scratch(n, shape.vocab_size, allocate),
        out={
            kind: (
                allocate(f"{kind} tokens", (n,), i32), allocate(f"{kind} log-probabilities", (n,), f32),
                allocate(f"{kind} top ids", (n, MAX_LOGPROBS), i32), allocate(f"{kind} top", (n, MAX_LOGPROBS), f32),
            )
            for kind in ("decode", "prefill")
        },
    )  # fmt: skip


def check_gpu_kernels(shape: ModelShape) -> None:
    """Raises UnsupportedModelError for a geometry that the GPU's kernels cannot run."""
    group = shape.n_q_heads // max(1, shape.n_kv_heads)
    limits = (
        ("hidden_size", shape.hidden_size, shape.hidden_size % 64 == 0, "a multiple of 64"),
        ("head_dim", shape.head_dim, shape.head_dim in (32, 64, 128, 256), "32, 64, 128 or 256"),
        ("num_attention_heads / num_key_value_heads", group, group <= 16, "at most 16"),
        ("linear_key_head_dim", shape.gdn_k_dim, shape.gdn_k_dim in (16, 32, 64, 128), "16, 32, 64 or 128"),
        ("linear_value_head_dim", shape.gdn_v_dim, shape.gdn_v_dim in (16, 32, 64, 128), "16, 32, 64 or 128"),
        ("partial_rotary_factor * head_dim", shape.rotary_dim, shape.rotary_dim % 16 == 0, "a multiple of 16"),
        ("intermediate_size", shape.intermediate_size, shape.intermediate_size % 32 == 0, "a multiple of 32"),
        ("moe_intermediate_size", shape.moe_intermediate_size, shape.moe_intermediate_size % 32 == 0, "a multiple of 32"),
        ("shared_expert_intermediate_size", shape.shared_intermediate_size, shape.shared_intermediate_size % 32 == 0, "a multiple of 32"),
        ("vocab_size", shape.vocab_size, shape.vocab_size < 1 << 20, "less than 1048576"),
    )  # fmt: skip
    for field, found, holds, supported in limits:
        if not holds:
            raise UnsupportedModelError(field, found, supported)


def make_gpu_plan(
    config: EngineConfig,
    shape: ModelShape,
    n_real: int,
    free_bytes: int,
    levers: Levers,
    host_free_bytes: int | None = None,
) -> Plan:
    """Sizes for this model in free_bytes of device memory.

    Raises ConfigError when the model or a setting does not fit, naming the largest value that would.
    """
    check_gpu_kernels(shape)
    length = config.max_model_len or min(shape.max_position_embeddings, DEFAULT_MODEL_LEN)
    if length > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {length}: the model was made for {shape.max_position_embeddings} positions; "
            f"give at most {shape.max_position_embeddings}"
        )
    if config.quantize:
        raise ConfigError(f"--quantize {config.quantize} is for the CPU; leave it out, or give --device cpu")
    step_tokens = config.max_step_tokens or DEFAULT_STEP_TOKENS
    if step_tokens % PAGE_SIZE:
        raise ConfigError(f"--max-step-tokens {step_tokens}: on a GPU it must be a multiple of {PAGE_SIZE}")
    if (config.max_num_seqs or 1) > MAX_SEQS:
        raise ConfigError(f"--max-num-seqs {config.max_num_seqs}: a GPU step has at most {MAX_SEQS} rows")
    most = (
        int(config.memory_gb * 1e9)
        if config.memory_gb is not None
        else int(free_bytes * FREE_SHARE) - RESERVE_BYTES
    )
    if most > free_bytes - RESERVE_BYTES // 2:
        raise ConfigError(
            f"--memory-gb {config.memory_gb}: only {free_bytes / 1e9:.1f} GB of the device are free, and it needs "
            f"{RESERVE_BYTES / 2e9:.1f} GB beside; give at most {(free_bytes - RESERVE_BYTES // 2) / 1e9:.1f}"
        )
    plan = Plan(
        shape=shape, quantize=None, weight_bytes=weight_bytes(shape, None, "rows"), n_real=n_real, max_model_len=length,
        max_num_seqs=config.max_num_seqs or DEFAULT_SEQS, n_checkpoints=config.n_checkpoints or 0,
        max_step_tokens=step_tokens, n_pages=0, host_bytes=0, n_threads=1, workspace={}, budget_bytes=most, n_columns=RING,
    )  # fmt: skip
    page = shape.page_bytes(PAGE_SIZE)
    if not config.prefix_cache:
        plan = replace(plan, n_checkpoints=0)
    while True:
        plan = replace(plan, workspace=_count(plan, levers))
        left = plan.budget_bytes - plan.total_bytes
        if left >= pages_for(plan.max_model_len) * page:
            break
        if config.max_num_seqs is None and plan.max_num_seqs > 8:
            plan = replace(plan, max_num_seqs=plan.max_num_seqs // 2)
        elif config.max_step_tokens is None and plan.max_step_tokens > 1024:
            plan = replace(plan, max_step_tokens=plan.max_step_tokens // 2)
        elif config.max_model_len is None and plan.max_model_len > 4096:
            plan = replace(plan, max_model_len=plan.max_model_len // 2)
        else:
            raise _refusal(plan, left, page)
    if config.n_checkpoints is None and config.prefix_cache:
        spare = left - (config.n_pages or pages_for(plan.max_model_len)) * page
        plan = replace(
            plan, n_checkpoints=max(0, min(MAX_CHECKPOINTS, spare // CACHE_SHARE // plan.state_bytes))
        )
    n_fit = (plan.budget_bytes - plan.total_bytes) // page
    if (config.n_pages or 0) > n_fit:
        raise ConfigError(
            f"--n-pages {config.n_pages} do not fit into {most / 1e9:.1f} GB of device memory; at most {n_fit} do"
        )
    n_least = pages_for(plan.max_model_len)
    if (config.n_pages or n_fit) < n_least:
        raise ConfigError(f"--n-pages {config.n_pages} cannot hold one sequence; give at least {n_least}")
    return replace(
        plan, n_pages=config.n_pages or n_fit, host_bytes=_host_bytes(config, plan, page, host_free_bytes)
    )


def _count(plan: Plan, levers: Levers) -> dict[str, int]:
    """Bytes of each buffer of a step."""
    sizes: dict[str, int] = {}

    def allocate(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(size, dtype=dtype, device="meta")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
        return tensor

    gpu_workspace(plan, levers, allocate)
    sizes["rotary tables"] = 2 * plan.max_model_len * (plan.shape.rotary_dim // 2) * 4
    return sizes


def _host_bytes(config: EngineConfig, plan: Plan, page: int, host_free_bytes: int | None) -> int:
    """Host memory for what leaves the pools: what is asked for, else one sequence of full length, whole pages."""
    free = free_memory_bytes() if host_free_bytes is None else host_free_bytes
    one = pages_for(plan.max_model_len) * page + math.ceil(plan.state_bytes / page) * page
    wanted = one if config.cache_host_gb is None else int(config.cache_host_gb * 1e9)
    if wanted > free // 2:
        if config.cache_host_gb is not None:
            raise ConfigError(
                f"--cache-host-gb {config.cache_host_gb}: at most half of the {free / 1e9:.1f} GB that are free"
            )
        wanted = 0
    return wanted // page * page


def _refusal(plan: Plan, left: int, page: int) -> ConfigError:
    """What does not fit, and what would."""
    have, one = (
        f"{max(0, plan.budget_bytes) / 1e9:.1f} GB of device memory",
        pages_for(plan.max_model_len) * page,
    )
    least = plan.weight_bytes + plan.state_bytes + page
    if least > plan.budget_bytes:
        return ConfigError(
            f"the model does not fit: weights {plan.weight_bytes / 1e9:.1f} GB, and there are {have}; give --device cpu"
        )
    live = plan.max_num_seqs * plan.state_bytes
    n_seqs = (left + live - one) // plan.state_bytes
    if 1 <= n_seqs < plan.max_num_seqs:
        return ConfigError(
            f"--max-num-seqs {plan.max_num_seqs} does not fit into {have}; at most {n_seqs} do"
        )
    if left + plan.n_checkpoints * plan.state_bytes >= one:
        n = (left + plan.n_checkpoints * plan.state_bytes - one) // plan.state_bytes
        return ConfigError(f"--n-checkpoints {plan.n_checkpoints} does not fit into {have}; at most {n} do")
    n_tokens = max(0, left) // page * PAGE_SIZE
    return ConfigError(
        f"--max-model-len {plan.max_model_len} does not fit into {have} beside {plan.weight_bytes / 1e9:.1f} GB of weights and "
        f"{plan.workspace_bytes / 1e9:.1f} GB for a step; give at most {n_tokens}, or less --max-step-tokens"
    )
