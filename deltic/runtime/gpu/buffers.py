"""Every buffer of a step on a GPU: the same calls count it for the plan and allocate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from deltic.engine.messages import MAX_LOGPROBS
from deltic.models.dflash.gpu import GpuDrafterBuffers, drafter_buffers, matrix_sizes
from deltic.models.qwen.gpu_adapters import AdapterBuffers, adapter_buffers
from deltic.models.qwen.gpu_buffers import (
    DecodeBuffers,
    HeadBuffers,
    PrefillBuffers,
    decode_buffers,
    decode_rows,
    head_buffers,
    prefill_buffers,
)
from deltic.models.qwen.gpu_shards import Exchange
from deltic.models.qwen.shard import Cuts
from deltic.models.tts.gpu import FrameBuffers, PromptBuffers, frame_buffers, prompt_buffers
from deltic.models.vision.gpu import PIECE, VisionBuffers, vision_buffers
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.ops.gpu.all_reduce import Columns, Rank, column_blocks, columns_of, rank_of, shared_buffers
from deltic.ops.gpu.block import guess_blocks
from deltic.ops.gpu.blocks import AdapterRows, BatchState, Drafts, Windows, window_rows
from deltic.ops.gpu.draft import guess_rows
from deltic.ops.gpu.frames import FrameParameters
from deltic.ops.gpu.launch import bound_levers
from deltic.ops.gpu.sample import BatchParameters, Drawn, SampleScratch, sample_scratch
from deltic.runtime.gpu.batch_slots import ADAPTER_ROWS, BLOCK_ROWS, HEAD_ROWS, ROWS, batch_table
from deltic.runtime.plan import Plan, SpeechPlan, TextPlan

PIECE_ROWS = 4096
"""Patches of the longest piece of a picture."""
MAX_SEGMENTS = 32
"""Prompts of one prefill."""
SUM_ROWS = 2048
"""Rows of a prefill that GPUs add up at a time: what they send each other needs room."""
HOST_LOGIT_ROWS = 16
"""The same of logits, where GPUs meet in the host's memory."""

ByBatchSlot = TypeVar("ByBatchSlot", BatchState, BatchParameters)
Head = TypeVar("Head", HeadBuffers, GpuDrafterBuffers)


@dataclass(frozen=True)
class Workspace:
    """Every buffer of a step but the two memories: the part that is the same for text and speech."""

    table: Tensor
    """int32, flat: everything by batch slot, so that the host changes it with one list of (offset, value)."""
    offsets: dict[str, tuple[int, int]]
    """First word of each part of the table, and the words of one row."""
    rows_batch_slot: Tensor
    """int32 [N], of the table: the batch slot of each row of the next decode, or -1."""
    batch_slots: BatchState
    parameters: BatchParameters
    sample: SampleScratch
    out: dict[str, Drawn]
    """Results of a decode and of a prefill."""


@dataclass(frozen=True)
class GpuWorkspace(Workspace):
    """Every buffer of a step of a text model."""

    decode: DecodeBuffers
    prefill: PrefillBuffers
    guesses: Guesses[HeadBuffers] | None
    """Guesses, where there is a draft head."""
    blocks: Guesses[GpuDrafterBuffers] | None
    """The same, where there is a block drafter."""
    vision: VisionBuffers | None
    """Buffers of the vision tower, where there is one."""
    picture_rows: Tensor | None
    """bfloat16 [blocks * PAGE_SIZE, H]: what the vision tower made of pictures, in blocks."""
    shares: Shares | None
    """Buffers that GPUs share, where the model is cut."""
    adapters: list[AdapterBuffers]
    """Buffers of adapters of each shard, where there is room for any."""


@dataclass(frozen=True)
class Meeting:
    """Buffers that other GPUs write to, beside normed rows and logits. In the host's memory all have one."""

    sums: dict[str, tuple[Tensor, Tensor]]
    """Inbox and flags, of a decode and of a prefill."""
    logit_flags: dict[str, Tensor]
    """The same, and of guesses where there is a draft head."""
    staged: Tensor | None
    """float32, flat: logits on their way, in the host's memory."""


@dataclass(frozen=True)
class Shares:
    """Buffers of a model that is cut: what other GPUs write to, and this one's columns of logits."""

    meeting: Meeting | None
    """Buffers, where there are other GPUs that reach them."""
    shard_logits: Tensor
    """float32, flat: columns of one part."""
    gpu_logits: Tensor | None
    """float32, flat: of all parts that the GPU has, where these are several."""
    total: Tensor | None
    """float32, flat: sums of all GPUs, where a kernel of its own makes them."""


@dataclass(frozen=True)
class Guesses(Generic[Head]):
    """Buffers of a draft head or a block drafter, and how it draws: as the model does, but without
    masks, and leaving nothing to the next decode but history.
    """

    head: Head
    parameters: BatchParameters
    none: Tensor
    """int32 [batch_slots], to be filled with -1: no mask, and no log-probabilities are wanted."""
    out: Drawn
    """The token is the latest guess; of a block drafter each row's."""


@dataclass(frozen=True)
class GpuSpeechWorkspace(Workspace):
    """Every buffer of a step of a speech model. Nobody asks for log-probabilities."""

    frames: FrameParameters
    decode: FrameBuffers
    prefill: PromptBuffers


def _of(kind: type[ByBatchSlot], views: dict[str, Tensor], **others: Tensor) -> ByBatchSlot:
    """Tensors by batch slot: parts of the table, each by the name it has there, and others."""
    return kind(**{name: views[name] for name in kind.__dataclass_fields__ if name in views}, **others)


def _shared(
    plan: Plan[Any], n_vocab: int, n_top: int, allocate: Allocate, more: dict[str, int] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of a Workspace, and the parts of its table. n_vocab: width of the logits; n_top: the most
    alternatives of a token; more: as `batch_table` takes it.
    """
    n, i32, f32 = plan.n_decode_rows, torch.int32, torch.float32
    of_head = HEAD_ROWS if not plan.speaks and plan.shape.has_draft_head else BLOCK_ROWS if plan.drafter else ()
    sizes = plan.max_num_seqs, plan.max_model_len, allocate, more, plan.n_draft_rows
    table, offsets, views = batch_table(*sizes, of_head, plan.tower is not None, plan.adapters.n > 0)
    return {
        "table": table,
        "offsets": offsets,
        "rows_batch_slot": views["rows_batch_slot"],
        "batch_slots": _of(BatchState, views),
        "parameters": _of(BatchParameters, views, masks=allocate("masks", (n, -(-plan.n_real // 32)), i32)),
        "sample": sample_scratch(n, n_vocab, allocate),
        "out": {
            kind: Drawn(
                token=allocate(f"{kind} tokens", (n,), i32),
                logprob=allocate(f"{kind} log-probabilities", (n,), f32),
                top_ids=allocate(f"{kind} top ids", (n, n_top), i32),
                top_logprobs=allocate(f"{kind} top", (n, n_top), f32),
            )
            for kind in ("decode", "prefill")
        },
    }, views


def n_patches(plan: TextPlan) -> int:
    """Patches of the largest picture, in whole pieces."""
    return plan.n_picture_pages * PIECE


def gpu_workspace(plan: TextPlan, allocate: Allocate) -> GpuWorkspace:
    """Allocates the buffers of a step; used to count them as well as to have them."""
    shape, n_blocks = plan.shape, plan.max_step_tokens // PAGE_SIZE
    drafter = plan.drafter
    codes = {format.codes for of in (shape, drafter) if of is not None for format in of.formats.values()}
    if plan.quantize is not None:
        codes.add(WEIGHT_FORMATS[plan.quantize].codes)
    more = {"group_begun": 4} if shape.index is not None and plan.tower is not None else None
    shared, views = _shared(plan, shape.vocab_size * shape.draws, MAX_LOGPROBS, allocate, more)
    drafts, windows = None, None
    if plan.n_draft_rows:
        drafts = Drafts(*(views[part] for part in ROWS[1:]))
        size = plan.max_num_seqs, plan.n_shards * shape.n_gdn_layers, window_rows(plan.n_sequence_rows)
        windows = Windows(
            allocate("window columns", (*size, shape.conv_channels), torch.bfloat16),
            allocate("window gates", (*size, 2 * shape.gdn_n_v_heads), torch.float32),
        )
    guesses = blocks = None
    if shape.has_draft_head:
        known, room = (views[part] for part in HEAD_ROWS)
        guessed = guess_rows(known, room, plan.n_sequence_rows, allocate)
        guesses = _guesses(head_buffers(shape, guessed, allocate), guessed.tokens[0], plan, shared, allocate)
    if drafter is not None:
        first, nth, length, room = (views[part] for part in BLOCK_ROWS)
        of_blocks = guess_blocks((first, nth, length, room), allocate)
        own_buffers = drafter_buffers(drafter, codes, of_blocks, plan.max_step_tokens, allocate)
        tokens = allocate("guesses", (plan.n_decode_rows,), torch.int32)
        blocks = _guesses(own_buffers, tokens, plan, shared, allocate)
    vision = picture_rows = None
    if plan.tower is not None:
        n = n_patches(plan)
        vision = vision_buffers(plan.tower, n, min(n, PIECE_ROWS), allocate)
        picture_rows = allocate("pictures", (plan.n_picture_blocks * PAGE_SIZE, shape.hidden_size), torch.bfloat16)
    rows, adapters = None, list[AdapterBuffers]()
    n_segments = min(n_blocks, MAX_SEGMENTS)
    if (adapted := plan.adapters).n:
        rows = AdapterRows(*(views[part] for part in ADAPTER_ROWS))
        most = max(plan.n_decode_rows, n_segments), plan.max_step_tokens
        sizes = adapted.n, adapted.rank, adapted.n_bytes
        adapters = adapter_buffers(shape, sizes, most, allocate, plan.n_shards)
    own = decode_rows(plan.n_decode_rows, drafts, plan.tower is not None, allocate)
    further = [] if drafter is None else matrix_sizes(drafter)
    # nothing runs ahead of draws where other machines have layers
    kept = {"n_kept": 0 if shape.model_layer_types else plan.max_num_seqs, "n_shards": plan.n_shards}
    decode = decode_buffers(shape, codes, own, plan.max_model_len, allocate, **kept)
    return GpuWorkspace(
        **shared,
        adapters=adapters,
        shares=_shares(plan, allocate) if plan.cuts else None,
        guesses=guesses,
        blocks=blocks,
        vision=vision,
        picture_rows=picture_rows,
        decode=replace(decode, windows=windows, adapters=rows),
        prefill=prefill_buffers(
            shape, codes, n_blocks, n_segments, plan.max_model_len, allocate, plan.n_shards, further
        ),
    )


def _guesses(head: Head, tokens: Tensor, plan: TextPlan, shared: dict[str, Any], allocate: Allocate) -> Guesses[Head]:
    """Allocates what guesses are drawn with, into tokens."""
    none, left = (allocate(name, (plan.max_num_seqs,), torch.int32) for name in ("no masks", "left of guesses"))
    parameters = replace(
        shared["parameters"], mask_row=none, n_logprobs=none, last_token=left, position=left, done=left
    )
    return Guesses(head, parameters, none, replace(shared["out"]["decode"], token=tokens))


def _shares(plan: TextPlan, allocate: Allocate) -> Shares:
    n, h, n_shards = plan.n_decode_rows, plan.shape.hidden_size, plan.n_shards
    n_columns, f32 = max(n, _prefill_logits(plan)) * plan.shape.head_rows, torch.float32
    part = allocate("columns of logits", (n_columns,), f32)
    if plan.n_gpus == 1:
        return Shares(None, part, gpu_logits=None, total=None)
    sums_apart = plan.shape.n_streams > 1 or not bound_levers().fused_sums
    return Shares(
        meeting=meeting(plan, allocate) if bound_levers().peer else None,
        shard_logits=part,
        gpu_logits=None if n_shards == 1 else allocate("columns of all parts", (n_shards * n_columns,), f32),
        total=allocate("sums", (max(n, plan.max_step_tokens) * h,), f32) if sums_apart else None,
    )


def _prefill_logits(plan: TextPlan) -> int:
    """Returns the most rows of a prefill of which logits are asked for."""
    return min(plan.max_step_tokens // PAGE_SIZE, MAX_SEGMENTS)


def meeting(plan: TextPlan, allocate: Allocate, *, is_in_host: bool = False) -> Meeting:
    """Allocates what GPUs write to for each other: for each of them, or once in the host's memory."""
    n, n_gpus, h, f32 = plan.n_decode_rows, plan.n_gpus, plan.shape.hidden_size, torch.float32
    n_logits = {"decode": n, "prefill": _prefill_logits(plan), "guess": n}
    columns, staged = _logit_columns(plan.cuts, n_gpus, plan.shape.has_draft_head), None
    if is_in_host:
        n_logits = {kind: min(rows, HOST_LOGIT_ROWS) for kind, rows in n_logits.items()}
        n_columns = max(n_logits[kind] * ends[-1][1] for kind, ends in columns.items())
        staged = allocate("logits on their way", (n_columns,), f32)
    # a sum of parts has more bits than one of them
    sent = torch.bfloat16 if plan.n_shards == 1 else f32
    return Meeting(
        sums={
            "decode": shared_buffers(n_gpus, n, h, allocate),
            "prefill": shared_buffers(n_gpus, min(plan.max_step_tokens, SUM_ROWS), h, allocate, "prefill sums", sent),
        },
        logit_flags={
            kind: allocate(f"flags of {kind} logits", (n_gpus, n_logits[kind] * column_blocks(ends)), torch.int32)
            for kind, ends in columns.items()
        },
        staged=staged,
    )


def _logit_columns(cuts: Sequence[Cuts], n_gpus: int, has_head: bool) -> dict[str, list[tuple[int, int]]]:
    """Returns where each GPU's columns of logits begin and end. Columns that a draft head guesses from are
    the first GPU's.
    """
    ends, n_shards = [one for cut in cuts for one in cut.head], len(cuts) // n_gpus
    own = [(ends[i][0], ends[i + n_shards - 1][1]) for i in range(0, len(ends), n_shards)]
    found = {"decode": own, "prefill": own}
    if has_head:
        n = cuts[0].shape.n_drafted
        found["guess"] = [(0, n)] + [(n, n)] * (n_gpus - 1)
    return found


def exchanges(
    workspaces: Sequence[GpuWorkspace], cuts: Sequence[Cuts], in_host: Meeting | None = None
) -> list[Exchange]:
    """Makes each GPU's exchange for a model that is cut, from the workspaces of all. Every GPU can reach
    them, or in_host.
    """
    shares = [w.shares for w in workspaces if w.shares is not None]
    buffers: dict[str, list[DecodeBuffers | PrefillBuffers]] = {
        "decode": [w.decode for w in workspaces],
        "prefill": [w.prefill for w in workspaces],
    }
    columns = _logit_columns(cuts, len(workspaces), workspaces[0].guesses is not None)
    found = []
    meetings = [m for m in ([in_host] * len(shares) if in_host else [s.meeting for s in shares]) if m is not None]
    for rank, own in enumerate(shares):
        sums, logits = dict[str, Rank](), dict[str, Columns]()
        for kind in meetings[0].sums if meetings else ():
            reached = [(*m.sums[kind], b.normed) for m, b in zip(meetings, buffers[kind], strict=True)]
            kept = [b.features for b in buffers[kind] if b.features is not None]
            sums[kind] = rank_of(rank, reached, len(cuts) // len(shares), is_in_host=in_host is not None, features=kept)
        for kind in meetings[0].logit_flags if meetings else ():
            wholes = [b.logits.view(-1) for b in buffers.get(kind, buffers["decode"])]
            flags, staged = [m.logit_flags[kind] for m in meetings], meetings[0].staged
            logits[kind] = columns_of(rank, columns[kind], wholes, flags, staged)
        found.append(Exchange(sums, logits, own.shard_logits, own.gpu_logits, own.total))
    return found


def gpu_speech_workspace(plan: SpeechPlan, allocate: Allocate) -> GpuSpeechWorkspace:
    """Allocates the buffers of a step; used to count them as well as to have them."""
    shape, n_blocks = plan.shape, plan.max_step_tokens // PAGE_SIZE
    more = {"code_seed": 2, "code_temperature": 1, "code_top_p": 1, "code_top_k": 1, "n_trailing": 1}
    shared, views = _shared(plan, shape.n_drawn, 1, allocate, {**more, "trailing": plan.max_model_len})
    frames = FrameParameters(
        temperature=views["code_temperature"].view(torch.float32),
        top_p=views["code_top_p"].view(torch.float32),
        top_k=views["code_top_k"],
        seed=views["code_seed"].view(torch.int64),
        n_prompt=views["n_prompt"],
        n_trailing=views["n_trailing"],
        trailing=views["trailing"],
    )
    return GpuSpeechWorkspace(
        **shared,
        frames=frames,
        decode=frame_buffers(shape, plan.max_num_seqs, plan.max_model_len, allocate),
        prefill=prompt_buffers(shape, n_blocks, min(n_blocks, MAX_SEGMENTS), allocate),
    )
