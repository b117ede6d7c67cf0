"""The memory plan: what is allocated before the first request, and what that lets run.

Weights, workspace (activations, batch and sampler buffers), state slots, pages and the host tier of the prefix cache are
all there is. A setting that cannot fit is refused with the largest that would; after ready nothing grows with load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from deltic.config import ConfigError, EngineConfig, pinned_cpus
from deltic.engine.cache.cache import pages_for
from deltic.machine import free_memory_bytes, memory_bound, n_usable_cpus
from deltic.models.qwen.cpu import Activations, allocate_activations, check_kernels
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import weight_bytes
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.cpu.batch import Batch
from deltic.runtime.cpu.sampler import Sampler

DEFAULT_MODEL_LEN = 32768
DEFAULT_SEQS = 32
DEFAULT_STEP_TOKENS = 512
DEFAULT_POOL_BYTES = 2 << 30
"""Pages and slots take this much, and the host tier comes on top, when no --memory-gb is given and it is free."""
CACHE_SHARE = 4
"""One part in so many of what the pools hold beside running sequences is for checkpoints, and of the memory for the host
tier, unless told otherwise."""
MAX_CHECKPOINTS = 256
"""Most by default."""
FREE_SHARE = 0.8
SHORT_MODEL_LEN = 4096


class Arena:
    """Hands out zeroed CPU tensors and counts them. Memory is taken from the system when `touch` is called."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        """Bytes by the name of what they are for."""
        self._tensors: list[torch.Tensor] = []

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes.values())

    def allocate(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Raises MemoryError when there is not even address space for it."""
        n_bytes = math.prod(size) * torch.empty(0, dtype=dtype).element_size()
        raw = np.zeros(max(8, n_bytes), np.uint8)  # calloc: untouched pages cost nothing yet
        tensor = torch.from_numpy(raw)[:n_bytes].view(dtype).view(size)
        self.sizes[name] = n_bytes
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
    quantize: str | None
    weight_bytes: int
    n_real: int
    max_model_len: int
    max_num_seqs: int
    n_checkpoints: int
    """State slots beside those of the sequences that run."""
    max_step_tokens: int
    n_pages: int
    host_bytes: int
    """Host memory for pages and states that leave the pools: whole pages."""
    n_threads: int
    workspace: dict[str, int]
    """Bytes of each buffer of a step."""
    budget_bytes: int
    cpus: tuple[int, ...] = ()
    """The CPU of each thread; none: wherever the system puts them."""
    n_columns: int = 3
    """Convolution inputs that a state slot holds: the window; on a GPU a ring with one more."""

    @property
    def workspace_bytes(self) -> int:
        return sum(self.workspace.values())

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
    def n_slots(self) -> int:
        return self.max_num_seqs + self.n_checkpoints

    @property
    def state_bytes(self) -> int:
        """Of one state slot."""
        return self.shape.recurrent_state_bytes + self.shape.conv_state_bytes // 3 * self.n_columns

    @property
    def slots_bytes(self) -> int:
        return self.n_slots * self.state_bytes

    @property
    def n_host_units(self) -> int:
        return self.host_bytes // self.shape.page_bytes(PAGE_SIZE)

    @property
    def total_bytes(self) -> int:
        return (
            self.weight_bytes + self.workspace_bytes + self.slots_bytes + self.pages_bytes + self.host_bytes
        )


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
    check_kernels(shape)
    free = free_memory_bytes() if free_bytes is None else free_bytes
    length = config.max_model_len or min(shape.max_position_embeddings, DEFAULT_MODEL_LEN)
    if config.n_pages is not None and config.max_model_len is None:
        length = min(length, config.n_pages * PAGE_SIZE)
    if length > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {length}: the model was made for {shape.max_position_embeddings} positions; "
            f"give at most {shape.max_position_embeddings}"
        )
    most = int(config.memory_gb * 1e9) if config.memory_gb is not None else int(free * FREE_SHARE)
    if most > free:
        raise ConfigError(
            f"--memory-gb {config.memory_gb}: only {free / 1e9:.1f} GB are free{memory_bound()}; give at most that"
        )
    plan = _sized(
        Plan(
            shape=shape,
            quantize=config.quantize,
            weight_bytes=weight_bytes(shape, config.quantize),
            n_real=n_real,
            max_model_len=length,
            max_num_seqs=config.max_num_seqs or DEFAULT_SEQS,
            n_checkpoints=(config.n_checkpoints or 0) if config.prefix_cache else 0,
            max_step_tokens=config.max_step_tokens or DEFAULT_STEP_TOKENS,
            n_pages=0,
            host_bytes=_whole_pages(shape, (config.cache_host_gb or 0.0) * 1e9),
            n_threads=config.threads or n_usable_cpus(),
            workspace={},
            budget_bytes=most,
        )
    )
    if config.pin_threads:
        plan = replace(plan, cpus=pinned_cpus(plan.n_threads))
    bare = _shrunk(replace(plan, n_checkpoints=0, host_bytes=0), config)
    plan = _shrunk(plan, config)
    if _spare(plan, config) < 0 <= _spare(bare, config):
        raise _cache_refusal(plan, config, _spare(bare, config))
    plan = _with_checkpoints(_with_host(plan, config), config)
    n_fit = max(0, _left(plan)) // shape.page_bytes(PAGE_SIZE)
    useful = max(plan.max_num_seqs, DEFAULT_SEQS if config.prefix_cache else 1) * pages_for(
        plan.max_model_len
    )
    if config.prefix_cache and config.memory_gb is not None:  # whoever gives memory, gives it to the cache
        useful = n_fit
    plan = replace(plan, n_pages=config.n_pages or min(useful, n_fit))
    _refuse(plan, config, n_fit)
    return plan


def _whole_pages(shape: ModelShape, n_bytes: float) -> int:
    """Bytes of as many pages as n_bytes hold."""
    a_page = shape.page_bytes(PAGE_SIZE)
    return int(n_bytes) // a_page * a_page


def _with_host(plan: Plan, config: EngineConfig) -> Plan:
    """Decides the budget, and the host tier where it is not given: what one sequence of full length takes, if there is
    memory for it."""
    default = 0
    if config.cache_host_gb is None:
        a_page = plan.shape.page_bytes(PAGE_SIZE)
        default = _one_sequence(plan) + -(-plan.shape.state_bytes // a_page) * a_page
    if config.memory_gb is not None or config.n_pages is not None:
        if default > _spare(plan, config) // CACHE_SHARE:
            default = 0
        return replace(plan, host_bytes=plan.host_bytes + default)
    # Modest unless told otherwise: what running takes, and something for the cache where that is more than the default.
    running = plan.slots_bytes + _one_sequence(plan)
    pools = max(DEFAULT_POOL_BYTES, running + running // 2 if config.prefix_cache else running)
    modest = plan.weight_bytes + plan.workspace_bytes + plan.host_bytes + pools
    if modest + default > plan.budget_bytes:
        default = 0
    budget = min(plan.budget_bytes, modest + default)
    return replace(plan, budget_bytes=budget, host_bytes=plan.host_bytes + default)


def _with_checkpoints(plan: Plan, config: EngineConfig) -> Plan:
    """Decides the number of checkpoint slots where it is not given."""
    if config.n_checkpoints is not None or not config.prefix_cache:
        return plan
    spare = _spare(plan, config)
    share = spare // CACHE_SHARE
    if config.n_pages is not None:  # no more beside them than a plan of that size would have
        share = min(share, config.n_pages * plan.shape.page_bytes(PAGE_SIZE) // (CACHE_SHARE - 1))
    n_checkpoints = min(MAX_CHECKPOINTS, share // plan.shape.state_bytes)
    if n_checkpoints < 1 <= spare // plan.shape.state_bytes:
        n_checkpoints = 1  # without any there are no hits
    return replace(plan, n_checkpoints=max(0, n_checkpoints))


def _spare(plan: Plan, config: EngineConfig) -> int:
    """Bytes that are left once there are the pages that there must be: those that were asked for, else one sequence's.
    Negative when there are not even those."""
    asked = (config.n_pages or 0) * plan.shape.page_bytes(PAGE_SIZE)
    return _left(plan) - (asked or _one_sequence(plan))


def _sized(plan: Plan, **changes: int) -> Plan:
    """The plan with changes and the workspace they need. Raises ConfigError."""
    plan, arena = replace(plan, **changes), Arena()  # type: ignore[arg-type]
    try:
        build_workspace(plan, arena)
    except MemoryError:
        if plan.weight_bytes > plan.budget_bytes:
            raise ConfigError(
                f"the model does not fit: weights alone take {plan.weight_bytes / 1e9:.1f} GB, and {plan.budget_bytes / 1e9:.1f} GB "
                f"may be used{memory_bound()}; take a smaller model"
            ) from None
        raise ConfigError(
            f"--max-step-tokens {plan.max_step_tokens} with --max-num-seqs {plan.max_num_seqs} needs more workspace "
            "than this machine has memory; give less"
        ) from None
    tables = 2 * plan.max_model_len * (plan.shape.rotary_dim // 2) * 4
    return replace(plan, workspace={**arena.sizes, "rotary tables": tables})


def _shrunk(plan: Plan, config: EngineConfig) -> Plan:
    """Where the defaults do not fit: sequences of no less than SHORT_MODEL_LEN, then fewer, then shorter still."""
    while _left(plan) < _one_sequence(plan):
        if config.max_model_len is None and plan.max_model_len > SHORT_MODEL_LEN:
            plan = _sized(plan, max_model_len=max(SHORT_MODEL_LEN, plan.max_model_len // 2))
        elif config.max_num_seqs is None and plan.max_num_seqs > 1:
            plan = _sized(plan, max_num_seqs=plan.max_num_seqs // 2)
        elif config.max_model_len is None and plan.max_model_len > PAGE_SIZE:
            plan = _sized(plan, max_model_len=plan.max_model_len // 2)
        else:
            break
    return plan


def _left(plan: Plan) -> int:
    """Bytes for pages once everything else is placed."""
    return plan.budget_bytes - (plan.total_bytes - plan.pages_bytes)


def _one_sequence(plan: Plan) -> int:
    """Bytes of the pages of one sequence of full length: the least that is of use."""
    return pages_for(plan.max_model_len) * plan.shape.page_bytes(PAGE_SIZE)


def _cache_refusal(plan: Plan, config: EngineConfig, room: int) -> ConfigError:
    """For a plan that would fit without its checkpoints and its host tier, for which there are `room` bytes."""
    shape, have = plan.shape, f"{plan.budget_bytes / 1e9:.1f} GB"
    if plan.n_checkpoints and room >= plan.host_bytes:
        return ConfigError(
            f"--n-checkpoints {plan.n_checkpoints} of {shape.state_bytes / 1e6:.1f} MB each do not fit into {have}; "
            f"at most {(room - plan.host_bytes) // shape.state_bytes} do"
        )
    most = max(0, room - plan.n_checkpoints * shape.state_bytes) // 10**7 / 100
    return ConfigError(
        f"--cache-host-gb {config.cache_host_gb} does not fit into {have} beside what has to be there; give at most {most}"
    )


def _refuse(plan: Plan, config: EngineConfig, n_fit: int) -> None:
    """Raises ConfigError if the plan does not hold, saying what would."""
    shape, budget = plan.shape, plan.budget_bytes
    have = f"{budget / 1e9:.1f} GB"
    least = plan.weight_bytes + shape.state_bytes + shape.page_bytes(PAGE_SIZE)
    if least + plan.workspace_bytes > budget:
        base = _sized(plan, max_step_tokens=1).workspace_bytes
        a_token = (plan.workspace_bytes - base) / plan.max_step_tokens
        needed = plan.weight_bytes + plan.slots_bytes + _one_sequence(plan) + base
        n_tokens = int((budget - needed) / max(1.0, a_token)) // PAGE_SIZE * PAGE_SIZE
        if plan.max_step_tokens > n_tokens >= PAGE_SIZE:
            raise ConfigError(
                f"--max-step-tokens {plan.max_step_tokens} needs a workspace of {plan.workspace_bytes / 1e9:.1f} GB beside "
                f"{plan.weight_bytes / 1e9:.1f} GB of weights, and {have} may be used; give at most {n_tokens}"
            )
        raise ConfigError(
            f"the model does not fit: weights {plan.weight_bytes / 1e9:.1f} GB and workspace "
            f"{plan.workspace_bytes / 1e9:.2f} GB, and {have} may be used{memory_bound()}; take a smaller model, or a machine with at least "
            f"{math.ceil((least + plan.workspace_bytes) / FREE_SHARE / 1e9)} GB free"
        )
    n_seq_pages = pages_for(plan.max_model_len)
    if plan.n_pages > n_fit:
        raise ConfigError(f"--n-pages {plan.n_pages} does not fit into {have}; at most {n_fit} do")
    if plan.n_pages < n_seq_pages:
        live_bytes = plan.max_num_seqs * shape.state_bytes
        n_seqs = (_left(plan) + live_bytes - _one_sequence(plan)) // max(1, shape.state_bytes)
        if config.max_num_seqs is not None and n_seqs >= 1 and config.n_pages is None:
            raise ConfigError(
                f"--max-num-seqs {plan.max_num_seqs} does not fit into {have}; at most {n_seqs} do"
            )
        if config.n_pages is not None:
            raise ConfigError(
                f"--n-pages {plan.n_pages} cannot hold one sequence; give at least {n_seq_pages}"
            )
        alone = _left(plan) + live_bytes - shape.state_bytes
        raise ConfigError(
            f"--max-model-len {plan.max_model_len} does not fit into {have}, not even with --max-num-seqs 1; "
            f"give at most {alone // shape.page_bytes(PAGE_SIZE) * PAGE_SIZE}"
        )
