"""Device memory and the recorded step.

Built once: weights, the two memories and the step's buffers are allocated and touched, and the whole step, token ids to
drawn tokens, is recorded as one program. A step is then: fill the buffers, run the program, read the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from deltic.config import EngineConfig
from deltic.engine.cache.tiers import Bytes, Tiers
from deltic.engine.messages import EngineInfo, Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Sequence, Step, StepResult
from deltic.engine.stopwatch import stopwatch
from deltic.machine import free_memory_bytes
from deltic.models.checkpoint import locate, model_name, n_real_ids
from deltic.models.packed import PACKED, map_packed, resolve_quantize, through_cache
from deltic.models.qwen.cpu import Memory, Qwen
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import Weights, dummy_weights, load_weights
from deltic.ops.cpu.program import Program, chosen, load_library
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.cpu.plan import Arena, Plan, build_workspace, make_plan
from deltic.runtime.fingerprint import fingerprint

Progress = Callable[[str, float], None]


class Runner:
    """The model on the CPU, with its memory. Not thread-safe: one engine loop owns it."""

    def __init__(self, plan: Plan, weights: Weights, progress: Progress = lambda stage, done: None) -> None:
        shape = plan.shape
        self.plan = plan
        self.max_logit_rows = plan.max_logit_rows
        arena = Arena()
        self.memory = Memory(
            pages=arena.allocate(
                "pages",
                (plan.n_pages, shape.n_attn_layers, 2, shape.n_kv_heads, PAGE_SIZE, shape.head_dim),
                torch.bfloat16,
            ),
            states=arena.allocate(
                "states",
                (plan.n_slots, shape.n_gdn_layers, shape.gdn_n_v_heads, shape.gdn_k_dim, shape.gdn_v_dim),
                torch.float32,
            ),
            columns=arena.allocate(
                "columns", (plan.n_slots, shape.n_gdn_layers, 3, shape.conv_channels), torch.bfloat16
            ),
        )
        host = arena.allocate("host tier", (plan.n_host_units, shape.page_bytes(PAGE_SIZE)), torch.uint8)
        self.host: Bytes | None = host.numpy() if plan.n_host_units else None
        self.tiers: Tiers | None = None  # until open_tiers
        self.workspace = build_workspace(plan, arena)
        arena.touch(lambda done: progress("memory", done))
        self.model = Qwen(shape, weights, plan.max_model_len)
        self.program = Program(plan.n_threads, cpus=plan.cpus)
        activations = self.workspace.activations
        self.model.record(self.program, self.workspace.batch.inputs, self.memory, activations)
        self.workspace.sampler.record(self.program, activations.logits)
        self._warm_up()
        self.info = EngineInfo(
            model_name="",
            vocab_size=plan.n_real,
            eos_token_ids=list(shape.eos_token_ids),
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_step_tokens=plan.max_step_tokens,
            n_pages=plan.n_pages,
            n_slots=plan.n_slots,
            device="cpu",
            page_bytes=shape.page_bytes(PAGE_SIZE),
            state_bytes=shape.state_bytes,
            even_context=even_context(shape),
            operators=chosen(),
        )

    def _warm_up(self) -> None:
        """One token through everything: threads are started, code is paged in, and a kernel that cannot run here fails
        now. It leaves its mark in page 0 and slot 0 only, which whoever gets them overwrites."""
        request = Request(id="warm-up", prompt_ids=[], params=SamplingParams(temperature=0.0))
        sequence = Sequence(request, 0, 0, array("i", [0]), n_prompt=1, pages=[0], place=0, slot=0)
        self.step(Step(chunks=[Chunk(sequence, 0, 1)], draws=[Draw(0, sequence)]))

    def open_tiers(self, directory: Path | None, disk_bytes: int, fingerprint: str) -> None:
        """Starts the tiers below the pools, on disk too where there is a directory. Raises ConfigError if that cannot be
        used."""
        pages, states, columns = (
            tensor.view(torch.uint8).view(len(tensor), -1).numpy()
            for tensor in (self.memory.pages, self.memory.states, self.memory.columns)
        )
        self.tiers = Tiers(
            lambda page: [pages[page]], lambda slot: [states[slot], columns[slot]], self.host,
            self.plan.shape.state_bytes, directory, disk_bytes, fingerprint,
        )  # fmt: skip
        self.info.notices += self.tiers.notices

    def step(self, step: Step) -> StepResult:
        """Runs one forward and the draws. A chunk starts from its sequence's `start_slot`, if any, else from its `slot`, or
        at 0 from the zero state, and leaves its final state in `slot` and those of its snapshots where they say."""
        batch, sampler = self.workspace.batch, self.workspace.sampler
        first_row = batch.fill(step)
        sampler.fill(step, first_row)
        self.program.run()
        memory = self.memory
        for source, target in step.slot_copies:
            memory.states[target].copy_(memory.states[source])
            memory.columns[target].copy_(memory.columns[source])
        for source, target in step.page_copies:
            memory.pages[target].copy_(memory.pages[source])
        return sampler.read(step)

    def is_busy(self) -> bool:
        """No: a step is over when `step` returns."""
        return False

    def logits(self, n_rows: int) -> torch.Tensor:
        """float32 [n_rows, V]: the logits of the last step, in the order of its rows. For tests and benches."""
        return self.workspace.activations.logits[:n_rows]


def even_context(shape: ModelShape) -> float:
    """Tokens of context at which attention multiplies as much for a token as everything else."""
    n_heads = 1 if shape.tie_word_embeddings else 2
    weights = shape.n_active_params - n_heads * shape.vocab_size * shape.hidden_size
    state = 3.5 * shape.n_gdn_layers * shape.gdn_n_v_heads * shape.gdn_k_dim * shape.gdn_v_dim
    return (weights + state) / (2 * shape.n_attn_layers * shape.n_q_heads * shape.head_dim)


def build_runner(config: EngineConfig, progress: Progress) -> Runner:
    """Locates, plans, loads and records. Raises ValueError subclasses (bad checkpoint, plan that does not fit)."""
    lap, spent = stopwatch()
    progress("plan", 0.0)
    directory, shape = locate(config)
    config = replace(config, quantize=resolve_quantize(config, directory))
    free = free_memory_bytes()
    plan = make_plan(config, shape, n_real_ids(config, directory, shape), free)
    lap("plan")
    weights, notices = _get_weights(config, directory, plan, progress)
    # A head may be stored beside an embedding that the configuration ties to it.
    if weights.n_bytes > plan.weight_bytes:
        untied = replace(shape, tie_word_embeddings=False)
        plan = make_plan(config, untied, plan.n_real, free)
    lap("weights")
    runner = Runner(plan, weights, progress)
    lap("memory")
    runner.info.model_name = model_name(config)
    runner.info.notices = notices
    runner.info.prefix_cache = config.prefix_cache
    if config.prefix_cache and config.cache_dir is not None:
        library = Path(load_library(runner.program.instruction_set)._name)
        model = fingerprint(
            config, directory, library, lambda done, total: progress("cache", done / max(1, total))
        )
        runner.open_tiers(config.cache_dir, int(config.cache_disk_gb * 1e9), model)
    elif runner.host is not None:
        runner.open_tiers(None, 0, "")
    if runner.tiers is not None:
        # On a CPU it is the same memory as the pools: evicted pages go there only if it was asked for.
        runner.tiers.takes_evicted = config.cache_host_gb is not None
    lap("cache")
    runner.info.start_s = spent
    return runner


def _get_weights(
    config: EngineConfig, directory: Path, plan: Plan, progress: Progress
) -> tuple[Weights, list[str]]:
    """From a packed model, from the cache, or from the checkpoint (and then into the cache)."""

    def on_bytes(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: progress(stage, done / max(1, total))

    shape, n_threads, quantize = plan.shape, plan.n_threads, config.quantize

    def map_file(file: Path) -> tuple[Weights, list[str]]:
        return map_packed(file, shape, n_threads, on_bytes("weights"))

    def load() -> tuple[Weights, list[str]]:
        on_weights = on_bytes("weights")
        if config.dummy is not None:
            return dummy_weights(shape, config.seed, on_weights, quantize=quantize, n_threads=n_threads), []
        return load_weights(directory, shape, on_weights, quantize=quantize, n_threads=n_threads)

    if config.dummy is None and (directory / PACKED).exists():
        return map_file(directory / PACKED)
    return through_cache(config, directory, map_file, load, on_bytes("weights cache"))
