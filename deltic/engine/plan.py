"""The memory plan: what is allocated before the first request, and what that lets run.

Weights, workspace (activations, batch and sampler buffers), state slots and pages are all there is. A setting that
cannot fit is refused with the largest that would; after ready nothing grows with load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from deltic.config import ConfigError, EngineConfig, free_memory_bytes, n_usable_cpus
from deltic.engine.batch import Batch
from deltic.engine.cache import pages_for
from deltic.engine.request import PAGE_SIZE
from deltic.engine.sampler import Sampler
from deltic.machine import multiply_peak, read_bandwidth
from deltic.models.checkpoint import locate, model_name, n_real_ids
from deltic.models.qwen import Activations, allocate_activations
from deltic.models.shapes import ModelShape

DEFAULT_MODEL_LEN = 32768
DEFAULT_SEQS = 32
DEFAULT_POOL_BYTES = 2 << 30
"""Pages and slots take this much when no --memory-gb is given and it is free."""
FREE_SHARE = 0.8


class Arena:
    """Hands out zeroed CPU tensors and counts them. Memory is taken from the system when `touch` is called."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._tensors: list[torch.Tensor] = []

    def allocate(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        item = torch.empty(0, dtype=dtype).element_size()
        raw = np.zeros(max(1, math.prod(size)) * item, np.uint8)  # calloc: untouched pages cost nothing yet
        tensor = torch.from_numpy(raw).view(dtype)[: math.prod(size)].view(size)
        self.n_bytes += tensor.nbytes
        self._tensors.append(tensor)
        return tensor

    def touch(self, progress: Callable[[float], None] | None = None) -> None:
        """Writes every byte once, so that the system has given all of it before the first request."""
        done = 0
        for tensor in self._tensors:
            tensor.zero_()
            done += tensor.nbytes
            if progress:
                progress(done / max(1, self.n_bytes))


@dataclass(frozen=True)
class Plan:
    """Sizes of everything, in bytes and in counts."""

    shape: ModelShape
    n_real: int
    max_model_len: int
    max_num_seqs: int
    max_step_tokens: int
    n_pages: int
    n_threads: int
    workspace_bytes: int
    budget_bytes: int

    @property
    def n_batch_tokens(self) -> int:
        """Longest batch: decodes may fill the budget and a prefill still gets one page's worth."""
        return max(self.max_step_tokens, self.max_num_seqs + PAGE_SIZE)

    @property
    def max_logit_rows(self) -> int:
        return self.max_num_seqs + PAGE_SIZE

    @property
    def pages_bytes(self) -> int:
        return self.n_pages * self.shape.page_bytes(PAGE_SIZE)

    @property
    def slots_bytes(self) -> int:
        return self.max_num_seqs * self.shape.state_bytes

    @property
    def total_bytes(self) -> int:
        return self.shape.weight_bytes + self.workspace_bytes + self.slots_bytes + self.pages_bytes


@dataclass(frozen=True)
class Workspace:
    """Every buffer of a step but the two memories."""

    batch: Batch
    sampler: Sampler
    activations: Activations


def build_workspace(plan: Plan, arena: Arena) -> Workspace:
    """Allocates the step's buffers in `arena`; used to count them as well as to have them."""
    return Workspace(
        Batch(
            plan.n_batch_tokens, plan.max_num_seqs, pages_for(plan.max_model_len), plan.max_logit_rows, arena.allocate
        ),
        Sampler(
            plan.max_num_seqs, plan.max_model_len, plan.max_logit_rows, plan.shape.vocab_size, plan.n_real,
            plan.shape.eos_token_ids, plan.n_threads, arena.allocate,
        ),
        allocate_activations(plan.shape, plan.n_batch_tokens, plan.max_logit_rows, arena.allocate),
    )  # fmt: skip


def make_plan(config: EngineConfig, shape: ModelShape, n_real: int, free_bytes: int | None = None) -> Plan:
    """Sizes for this model on this machine.

    free_bytes: memory that may be taken (default: what the machine has free now). Raises ConfigError when the model or a
    setting does not fit, naming the largest value that would.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    length = config.max_model_len or min(shape.max_position_embeddings, DEFAULT_MODEL_LEN)
    if length > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {length}: the model was made for {shape.max_position_embeddings} positions; "
            f"give at most {shape.max_position_embeddings}"
        )
    n_threads = config.threads or n_usable_cpus()
    plan = Plan(
        shape, n_real, length, config.max_num_seqs or DEFAULT_SEQS, config.max_step_tokens, 0, n_threads, 0, 0
    )
    plan = _with_workspace(plan)
    most = int(config.memory_gb * 1e9) if config.memory_gb is not None else int(free * FREE_SHARE)
    if most > free:
        raise ConfigError(
            f"--memory-gb {config.memory_gb}: only {free / 1e9:.1f} GB are free; give at most that"
        )
    if config.max_num_seqs is None:  # fewer sequences rather than none
        while plan.max_num_seqs > 1 and _left(plan, most) < _one_sequence(plan):
            plan = _with_workspace(replace(plan, max_num_seqs=plan.max_num_seqs // 2))
    budget = most
    if config.memory_gb is None and config.n_pages is None:
        budget = min(
            most,
            shape.weight_bytes
            + plan.workspace_bytes
            + max(DEFAULT_POOL_BYTES, plan.slots_bytes + _one_sequence(plan)),
        )
    if config.max_model_len is None and 0 < _left(plan, budget) < _one_sequence(plan):
        n_fit = _left(plan, budget) // shape.page_bytes(PAGE_SIZE)
        plan = _with_workspace(replace(plan, max_model_len=max(1, n_fit) * PAGE_SIZE))
    useful = plan.max_num_seqs * pages_for(plan.max_model_len)
    n_fit = max(0, _left(plan, budget)) // shape.page_bytes(PAGE_SIZE)
    plan = replace(plan, n_pages=config.n_pages or min(useful, n_fit), budget_bytes=budget)
    _refuse(plan, config, n_fit)
    return plan


def _with_workspace(plan: Plan) -> Plan:
    arena = Arena()
    build_workspace(plan, arena)
    tables = 2 * plan.max_model_len * (plan.shape.rotary_dim // 2) * 4  # cos and sin
    return replace(plan, workspace_bytes=arena.n_bytes + tables)


def _left(plan: Plan, budget: int) -> int:
    """Bytes for pages once everything else is placed."""
    return budget - plan.shape.weight_bytes - plan.workspace_bytes - plan.slots_bytes


def _one_sequence(plan: Plan) -> int:
    """Bytes of the pages of one sequence of full length: the least that is of use."""
    return pages_for(plan.max_model_len) * plan.shape.page_bytes(PAGE_SIZE)


def _refuse(plan: Plan, config: EngineConfig, n_fit: int) -> None:
    """Raises ConfigError if the plan does not hold, saying what would."""
    shape, budget = plan.shape, plan.budget_bytes
    have = f"{budget / 1e9:.1f} GB"
    if shape.weight_bytes + plan.workspace_bytes + shape.state_bytes + shape.page_bytes(PAGE_SIZE) > budget:
        raise ConfigError(
            f"the model does not fit: weights {shape.weight_bytes / 1e9:.1f} GB and workspace "
            f"{plan.workspace_bytes / 1e9:.2f} GB, and {have} may be used; take a smaller model or raise --memory-gb"
        )
    n_seq_pages = pages_for(plan.max_model_len)
    if plan.n_pages > n_fit:
        raise ConfigError(f"--n-pages {plan.n_pages} does not fit into {have}; at most {n_fit} do")
    if plan.n_pages < n_seq_pages:
        n_seqs = (_left(plan, budget) + plan.slots_bytes - _one_sequence(plan)) // max(1, shape.state_bytes)
        if config.max_num_seqs is not None and n_seqs >= 1 and config.n_pages is None:
            raise ConfigError(
                f"--max-num-seqs {plan.max_num_seqs} does not fit into {have}; at most {n_seqs} do"
            )
        raise ConfigError(
            f"--max-model-len {plan.max_model_len} needs {n_seq_pages} pages and there are {plan.n_pages}; "
            f"give at most --max-model-len {max(1, plan.n_pages) * PAGE_SIZE}"
        )


def plan_report(config: EngineConfig) -> str:
    """What `deltic plan` prints: the memory plan, what fits in it, and the speed that the roofs allow.

    Raises ConfigError or another ValueError when the model cannot be served with these settings.
    """
    directory, shape = locate(config)
    plan = make_plan(config, shape, n_real_ids(directory, shape.vocab_size))
    out = StringIO()
    console = Console(file=out, width=100)
    sparse = f", {shape.n_active_params / 1e9:.2f} B active" if shape.is_moe else ""
    console.print(
        f"{model_name(config)}: {shape.n_params / 1e9:.2f} B parameters{sparse}, {shape.n_gdn_layers} DeltaNet + "
        f"{shape.n_attn_layers} attention layers"
    )
    console.print(_memory_table(plan))
    console.print(_fit_table(plan))
    console.print(_speed_table(plan, read_bandwidth(plan.n_threads), multiply_peak(plan.n_threads)))
    return out.getvalue()


def _memory_table(plan: Plan) -> Table:
    shape = plan.shape
    table = Table("memory", "GB", "what", title="Allocated before ready", title_justify="left")
    rows = (
        ("weights", shape.weight_bytes, "bfloat16 matrices, float32 norms and gates"),
        (
            "workspace",
            plan.workspace_bytes,
            f"a step of up to {plan.n_batch_tokens} tokens, {plan.n_threads} threads",
        ),
        ("state slots", plan.slots_bytes, f"{plan.max_num_seqs} of {shape.state_bytes / 1e6:.2f} MB"),
        (
            "pages",
            plan.pages_bytes,
            f"{plan.n_pages} of {PAGE_SIZE} tokens, {shape.page_bytes(PAGE_SIZE) / 1e3:.0f} kB each",
        ),
        ("total", plan.total_bytes, f"of {plan.budget_bytes / 1e9:.2f} GB that may be used"),
    )
    for name, n_bytes, what in rows:
        table.add_row(name, f"{n_bytes / 1e9:.3f}", what)
    return table


def _fit_table(plan: Plan) -> Table:
    title = f"Sequences of a length that run at once (longest: {plan.max_model_len} tokens)"
    table = Table("tokens", "sequences", "limited by", title=title, title_justify="left")
    lengths = [n for n in (1024, 4096, 16384, 65536, 262144) if n < plan.max_model_len] + [plan.max_model_len]
    for length in lengths:
        by_pages = plan.n_pages // pages_for(length)
        by_slots = by_pages >= plan.max_num_seqs
        table.add_row(f"{length}", f"{min(by_pages, plan.max_num_seqs)}", "slots" if by_slots else "pages")
    return table


def decode_bytes(shape: ModelShape, n_seqs: int, context: int) -> float:
    """Bytes that one decode step of n_seqs sequences must move: weights once (of a mixture the experts that uniform
    routing touches), each state read and written, each context's keys and values read."""
    weights = shape.weight_bytes
    if not shape.tie_word_embeddings:
        weights -= 2 * shape.vocab_size * shape.hidden_size  # the embedding is a lookup
    if shape.is_moe:
        idle = (1 - shape.n_experts_per_tok / shape.n_experts) ** n_seqs
        experts = shape.n_layers * shape.n_experts * 3 * shape.hidden_size * shape.moe_intermediate_size * 2
        weights -= int(idle * experts)
    return weights + n_seqs * (2 * shape.state_bytes + context * shape.kv_bytes_per_token)


def _speed_table(plan: Plan, bandwidth: float, peak: float) -> Table:
    """Roofs, not forecasts: the larger of bytes over bandwidth and operations over the multiply rate."""
    shape, context = plan.shape, min(1024, plan.max_model_len)
    head = 2 * shape.vocab_size * shape.hidden_size
    body = 2 * shape.n_active_params - head * (1 if shape.tie_word_embeddings else 2)
    title = f"Roofline at {bandwidth / 1e9:.1f} GB/s and {peak / 1e9:.0f} GFLOP/s (measured now)"
    table = Table("step", "tokens/s at most", "bound by", title=title, title_justify="left")
    for n_seqs in (n for n in (1, 4, 16, 64) if n <= plan.max_num_seqs):
        memory_s = decode_bytes(shape, n_seqs, context) / bandwidth
        compute_s = n_seqs * (body + head) / peak
        bound = "memory" if memory_s >= compute_s else "arithmetic"
        table.add_row(
            f"decode, {n_seqs} at {context} tokens", f"{n_seqs / max(memory_s, compute_s):.1f}", bound
        )
    table.add_row("prefill", f"{peak / body:.0f}", "arithmetic")
    return table
