"""Device memory and the recorded step.

Built once: weights, the two memories and the step's buffers are allocated and touched, and the whole step, token ids to
drawn tokens, is recorded as one program. A step is then: fill the buffers, run the program, read the tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from deltic.config import BUILT_IN, EngineConfig
from deltic.engine.plan import Arena, Plan, build_workspace, make_plan
from deltic.engine.request import PAGE_SIZE, EngineInfo, Step, StepResult
from deltic.models.qwen import Memory, Qwen
from deltic.models.shapes import CheckpointError, ModelShape, published_shape, resolve_model
from deltic.models.weights import Weights, dummy_weights, load_weights
from deltic.ops.table import Program, chosen

DEMO = Path(__file__).parent.parent / "demo"

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
                (plan.max_num_seqs, shape.n_gdn_layers, shape.gdn_n_v_heads, shape.gdn_k_dim, shape.gdn_v_dim),
                torch.float32,
            ),
            columns=arena.allocate(
                "columns", (plan.max_num_seqs, shape.n_gdn_layers, 3, shape.conv_channels), torch.bfloat16
            ),
        )
        self.workspace = build_workspace(plan, arena)
        arena.touch(lambda done: progress("memory", done))
        self.model = Qwen(shape, weights, plan.max_model_len)
        self.program = Program(plan.n_threads)
        activations = self.workspace.activations
        self.model.record(self.program, self.workspace.batch.inputs, self.memory, activations)
        self.workspace.sampler.record(self.program, activations.logits)
        self.info = EngineInfo(
            model_name="",
            vocab_size=plan.n_real,
            eos_token_ids=list(shape.eos_token_ids),
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_step_tokens=plan.max_step_tokens,
            n_pages=plan.n_pages,
            n_slots=plan.max_num_seqs,
            device="cpu",
            operators=chosen(),
        )

    def step(self, step: Step) -> StepResult:
        """Runs one forward and the draws. A chunk that starts at 0 starts from the zero state."""
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

    def logits(self, n_rows: int) -> torch.Tensor:
        """float32 [n_rows, V]: the logits of the last step, in the order of its rows. For tests and benches."""
        return self.workspace.activations.logits[:n_rows]


class _AddedToken(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def n_real_ids(directory: Path, vocab_size: int) -> int:
    """Ids that mean something: rows of the embedding past the tokenizer's last id are padding and are never drawn."""
    try:
        file = msgspec.json.decode((directory / "tokenizer.json").read_bytes(), type=_TokenizerFile)
    except OSError:
        return vocab_size
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{directory / 'tokenizer.json'}: not a tokenizer file ({error})") from None
    highest = max([*file.model.vocab.values(), *(token.id for token in file.added_tokens)], default=vocab_size - 1)
    return min(vocab_size, highest + 1)


def locate(config: EngineConfig) -> tuple[str, Path, ModelShape]:
    """Name, directory of the text files (tokenizer, template) and shape of the configured model.

    Raises CheckpointError, UnsupportedModelError, or ConfigError for an unknown dummy shape.
    """
    if config.dummy is not None:
        return f"dummy-{config.dummy.lower()}", DEMO, published_shape(config.dummy)
    if config.model == BUILT_IN:
        return "deltic-demo", DEMO, ModelShape.from_directory(DEMO)
    directory = resolve_model(config.model)
    return Path(config.model).name or config.model, directory, ModelShape.from_directory(directory)


def build_runner(config: EngineConfig, progress: Progress) -> Runner:
    """Locates, plans, loads and records. Raises ValueError subclasses (bad checkpoint, plan that does not fit)."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's own pool must not spin beside ours
    clock = time.perf_counter()
    spent: dict[str, float] = {}

    def lap(stage: str) -> None:
        nonlocal clock
        spent[stage] = round(time.perf_counter() - clock, 3)
        clock = time.perf_counter()

    progress("plan", 0.0)
    name, directory, shape = locate(config)
    plan = make_plan(config, shape, n_real_ids(directory, shape.vocab_size))
    lap("plan")
    notices: list[str] = []

    def on_bytes(done: int, total: int) -> None:
        progress("weights", done / max(1, total))

    if config.dummy is not None:
        weights = dummy_weights(shape, config.seed, on_bytes)
    else:
        weights, notices = load_weights(directory, shape, on_bytes)
    lap("weights")
    runner = Runner(plan, weights, progress)
    lap("memory")
    runner.info.model_name = name
    runner.info.notices = notices
    runner.info.start_s = spent
    return runner
