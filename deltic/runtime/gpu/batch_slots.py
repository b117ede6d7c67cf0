"""The device's table of running sequences, by batch slot, and how the host changes it.

One flat int32 table holds it all (`batch_table` lays it out). The host collects changes as (offset, value)
pairs and sends them with one copy from pinned memory; they are applied on the stream, between two steps. A
step without changes sends nothing: decodes move their own tokens and positions on (ops/gpu/sample.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltic.engine.cache.cache import pages_for
from deltic.engine.messages import MAX_BIASES
from deltic.engine.step import Chunk, Rule, Sequence
from deltic.models.qwen.ngrams import NgramShape
from deltic.models.rotary import PromptPositions
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.ops.gpu.blocks import GROUP_ROWS

Words = np.ndarray

_NEVER = 1 << 30
"""A position that no sequence reaches."""

MAX_CHANGES = 1 << 15
"""Words that one copy brings; more are several."""


ROWS = ("rows_batch_slot", "rows_ahead", "rows_token", "rows_length", "rows_redo")
"""Parts of the table that say what the rows of the next decode are. Those behind the first are there where
some may be drafts (ops/gpu/blocks.Drafts).
"""
HEAD_ROWS = ("rows_known", "rows_room")
"""The same, where there is a draft head (ops/gpu/draft.GuessRows)."""
BLOCK_ROWS = ("block_first", "block_nth", "block_length", "block_room")
"""The same of the blocks behind it, where there is a block drafter (ops/gpu/block.GuessBlocks)."""
ADAPTER_ROWS = ("group_adapter", "group_rows", "row_adapter")
"""The same, where rows may have adapters (ops/gpu/blocks.AdapterRows)."""

_OF_ROWS = *ROWS, *HEAD_ROWS, *BLOCK_ROWS, *ADAPTER_ROWS


def batch_table(
    n: int,
    max_model_len: int,
    allocate: Allocate,
    more: dict[str, int] | None = None,
    n_drafts: int = 0,
    of_head: Items[str] = (),
    has_pictures: bool = False,
    has_adapters: bool = False,
) -> tuple[Tensor, dict[str, tuple[int, int]], dict[str, Tensor]]:
    """The table of n batch slots, where each part begins and the words of its rows, and the parts by name.
    more: words of further parts, those aligned to 8 bytes first. n_drafts: rows of a decode beyond one a
    batch slot. of_head: HEAD_ROWS or BLOCK_ROWS, where there is a head or a block drafter. has_pictures:
    whether prompts may have some. has_adapters: whether rows may have adapters.
    """
    of_rows = (*(ROWS if n_drafts else ROWS[:1]), *of_head, *(ADAPTER_ROWS if has_adapters else ()))
    parts = {
        "seed": 2,
        **(more or {}),
        **dict.fromkeys(("last_token", "position", "state_slot", "done", "top_k", "n_prompt", "uses_history"), 1),
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition", "frequency", "presence"), 1),
        **dict.fromkeys(("n_bias", "n_banned", "banned_until", "n_stop", "max_position", "n_logprobs", "mask_row"), 1),
        **dict.fromkeys(("bias_ids", "bias", "banned", "stop_ids"), MAX_BIASES),
        "page_table": pages_for(max_model_len) + 1,
        "history": max_model_len + 1,
        **({"angle_shift": 1} if has_pictures else {}),
        **{name: GROUP_ROWS if name == "group_rows" else 1 for name in of_rows},
    }
    sizes = {name: width * (n + n_drafts if name in of_rows else n) for name, width in parts.items()}
    table = allocate("batch_slots", (sum(sizes.values()),), torch.int32)
    offsets, views, at = {}, {}, 0
    for name, width in parts.items():
        offsets[name] = (at, width)
        view = table[at : at + sizes[name]]
        views[name] = view if width == 1 or name.endswith("seed") else view.view(-1, width)
        at += sizes[name]
    views["seed"] = views["seed"].view(torch.int64)
    for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence", "bias"):
        views[name] = views[name].view(torch.float32)
    return table, offsets, views


class Ring:
    """Pinned host buffers of one size, used in turn: one is written again when the copy from it has ended."""

    def __init__(self, n_words: int, n: int, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self._buffers = [torch.empty(n_words, dtype=torch.int32, pin_memory=self.is_gpu) for _ in range(n)]
        self._events: list[torch.cuda.Event | None] = [None] * n
        self._next = 0

    def take(self) -> Tensor:
        """A buffer that nothing reads any more."""
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        return self._buffers[self._next]

    def used(self) -> None:
        """The copy from the buffer taken last was put on the current stream."""
        if self.is_gpu:
            event = torch.cuda.Event()
            event.record()
            self._events[self._next] = event
        self._next = (self._next + 1) % len(self._buffers)


class SideStream:
    """A stream for copies that only the next draw reads: they arrive while a forward still runs.

    Used as a context. The stream that is current outside waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._context: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        if self._stream is not None:
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._context.__exit__(None, None, None)
            torch.cuda.current_stream().wait_stream(self._stream)


class BatchSlots:
    """The table of batch slots, from the host's side.

    Each change concerns one sequence and updates everything that the device reads of it. `flush` sends the
    changes.
    """

    def __init__(
        self,
        table: Tensor,
        offsets: dict[str, tuple[int, int]],
        masks: Tensor,
        eos_token_ids: tuple[int, ...],
        n_real: int,
        n_drafts: int = 0,
        ngrams: NgramShape | None = None,
        ratio: int = 0,
    ) -> None:
        """table, offsets, n_drafts: of `batch_table`. masks: int32 [batch_slots + n_drafts, words], of the
        draws. n_real: ids that can be drawn. ngrams: which the forward reads: then it reads the history of
        all sequences, not only penalties those that they count. ratio: tokens that share a key of the index.
        """
        self.ngrams, self._ratio = ngrams, ratio
        self._table, self._offsets, self._masks = table, offsets, masks
        self._eos, self.n_real = eos_token_ids, n_real
        n_batch_slots = len(masks) - n_drafts
        self._owner: list[Sequence | None] = [None] * n_batch_slots
        self._pages: list[tuple[Sequence, int, int] | None] = [None] * n_batch_slots
        self._prompts: list[PromptPositions | None] = [None] * n_batch_slots
        self._rows: dict[str, list[int]] = {part: [] for part in _OF_ROWS if part in offsets}
        self._any = np.full(masks.shape[1], -1, np.int32)
        self._keys: list[Words] = []
        self._values: list[Words] = []
        self._words: list[int] = []
        """Changes of single words, behind `_keys` and `_values`: offset and value in turn."""
        device = self._table.device
        self._ring = Ring(3 * MAX_CHANGES, 4, device)  # an offset is 64 bits
        self._arrived = torch.empty(3 * MAX_CHANGES, dtype=torch.int32, device=device)
        self._mask_ring = Ring(self._masks.numel(), 3, device)
        self.beside = SideStream(device)
        self._mask_rows, self._banned_until = [-1] * n_batch_slots, [0] * n_batch_slots
        self._table.zero_()
        self._write("mask_row", 0, self._mask_rows, contiguous=True)
        for part in ("rows_batch_slot", *ADAPTER_ROWS):
            if part in offsets:
                self._write(part, 0, [-1] * (len(masks) * offsets[part][1]), contiguous=True)

    def refresh(self, sequence: Sequence) -> int:
        """Makes its batch slot the sequence's and updates its row of the page table. Returns it."""
        batch_slot = sequence.batch_slot
        assert batch_slot is not None
        if self._owner[batch_slot] is not sequence:
            self._take(batch_slot, sequence)
        if self._pages[batch_slot] != (sequence, sequence.pages_version, len(sequence.pages)):
            self._put_pages(batch_slot, sequence)
        return batch_slot

    def move_in(self, sequence: Sequence) -> None:
        """Prepares the batch slot of a sequence that is about to draw: the sampler leaves the token and its
        position where a decode reads them.
        """
        batch_slot, state_slot = self.refresh(sequence), sequence.state_slot
        assert state_slot is not None
        self._write("state_slot", batch_slot, state_slot)
        self._write("done", batch_slot, 0)

    def decode(
        self, sequence: Sequence, token: int, position: int, done: bool = False, drafts: Items[int] = ()
    ) -> None:
        """Has the sequence's next decode read this token, at this position, and behind it these drafts.

        It overwrites the values left by a decode that ran ahead, or by the draws of a draft. done: the next
        decode leaves the sequence out.
        """
        batch_slot, state_slot = self.refresh(sequence), sequence.state_slot
        assert state_slot is not None and sequence.start_slot is None
        words = {"last_token": token, "position": position, "state_slot": state_slot, "done": int(done)}
        for part, word in words.items():
            begin, width = self._offsets[part]
            self._words += begin + batch_slot * width, word
        if (self.ngrams is not None or _counts_history(sequence)) and token >= 0:
            # Where what was lost comes back, a decode without its mask has left another token there. And the
            # draw from a row of a draft sees those in front of it.
            self._write("history", batch_slot, [token, *drafts], position)

    def _write(self, part: str, batch_slot: int, values: object, first: int = 0, contiguous: bool = False) -> None:
        """Sets words of a batch slot's row of a part from word `first` on; contiguous: of the rows that
        follow, too.
        """
        self._gather()
        begin, width = self._offsets[part]
        words = np.asarray(values)
        if words.dtype in (np.float64, np.float32):
            words = words.astype(np.float32).view(np.int32)
        words = np.atleast_1d(words).astype(np.int32, copy=False)
        assert contiguous or first + len(words) <= width, part
        at = begin + batch_slot * width + first
        self._keys.append(np.arange(at, at + len(words), dtype=np.int64))
        self._values.append(words)

    def _gather(self) -> None:
        """Puts the single words behind the changes before them."""
        if self._words:
            words = np.array(self._words, np.int64)
            self._keys.append(words[::2])
            self._values.append(words[1::2].astype(np.int32))
            self._words.clear()

    def _take(self, batch_slot: int, sequence: Sequence) -> None:
        """Makes a batch slot the sequence's: writes its sampling parameters, and its tokens if penalties
        count them.
        """
        if self._owner[batch_slot] is sequence:
            return
        self._owner[batch_slot] = sequence
        self._put_mask_row(batch_slot, -1)
        p, n_prompt = sequence.request.params, sequence.n_prompt
        banned_until = _bans_end_until(sequence, [Rule(None, sequence.guide.bans_end)] if sequence.guide else [])
        self._banned_until[batch_slot] = banned_until
        ends = sorted({*p.stop_token_ids, *(() if p.ignore_eos else self._eos)})
        banned = [token for token in ends if token < self.n_real] if p.min_tokens or p.constraint is not None else []
        if p.constraint is not None and p.constraint.think_end_id is not None:
            ends.append(p.constraint.think_end_id)  # what comes behind it is not free: nothing runs ahead
        uses_history = _counts_history(sequence)
        for part, value in (
            ("temperature", float(p.temperature)),
            ("top_p", float(p.top_p)),
            ("min_p", float(p.min_p)),
            ("repetition", float(p.repetition_penalty)),
            ("frequency", float(p.frequency_penalty)),
            ("presence", float(p.presence_penalty)),
            ("top_k", p.top_k),
            ("n_prompt", n_prompt),
            ("uses_history", int(uses_history)),
            ("n_bias", len(p.logit_bias)),
            ("n_banned", len(banned)),
            ("banned_until", banned_until),
            ("n_stop", len(ends)),
            ("max_position", n_prompt + p.max_tokens - 2),
            ("n_logprobs", -1 if p.logprobs is None else p.logprobs),
            ("bias_ids", list(p.logit_bias)),
            ("bias", [float(v) for v in p.logit_bias.values()]),
            ("banned", banned),
            ("stop_ids", ends),
        ):
            if not isinstance(value, list) or value:
                self._write(part, batch_slot, value)
        pictures = [(picture.first, picture.rows, picture.columns) for picture in sequence.request.pictures]
        self._prompts[batch_slot] = prompt = PromptPositions(pictures) if pictures else None
        if "angle_shift" in self._offsets:
            self._write("angle_shift", batch_slot, 0 if prompt is None else prompt.shift)
        if "group_begun" in self._offsets:
            self._write("group_begun", batch_slot, _group_begun(prompt, n_prompt, self._ratio))
        seed = np.array([sequence.seed & (2**64 - 1)], np.uint64).view(np.int32)
        self._write("seed", batch_slot, seed)
        if uses_history or self.ngrams is not None:
            self._write("history", batch_slot, np.array(sequence.tokens, np.int32))

    def positions_in(self, batch_slot: int) -> PromptPositions | None:
        """Positions of the sequence in a batch slot. None: its prompt has no pictures."""
        return self._prompts[batch_slot]

    def _put_pages(self, batch_slot: int, sequence: Sequence) -> None:
        """Brings the batch slot's row of the page table up to date."""
        held, n_pages = self._pages[batch_slot], len(sequence.pages)
        same = held is not None and held[0] is sequence and held[1] == sequence.pages_version
        known = held[2] if held is not None and same else 0
        if known < n_pages:
            self._write("page_table", batch_slot, np.array(sequence.pages[known:], np.int32), known)
        self._pages[batch_slot] = (sequence, sequence.pages_version, n_pages)

    def put_guides(self, guided: Items[tuple[Sequence, Items[Rule]]]) -> None:
        """Sends the masks of these sequences, which have guides: the rules of the draws from their rows.

        The draws that used the last masks must have been read.
        """
        masks: list[Words] = []
        for sequence, rules in guided:
            batch_slot, row = sequence.batch_slot, -1
            assert batch_slot is not None
            self._take(batch_slot, sequence)
            until = _bans_end_until(sequence, rules)
            if self._banned_until[batch_slot] != until:
                self._write("banned_until", batch_slot, until)
                self._banned_until[batch_slot] = until
            if any(rule.mask is not None for rule in rules):
                row = len(masks)
                masks += [self._any if rule.mask is None else rule.mask for rule in rules]
            self._put_mask_row(batch_slot, row)
        if masks:
            buffer = self._mask_ring.take().view(self._masks.shape)[: len(masks)]
            np.stack(masks, out=buffer.numpy())
            with self.beside:
                self._masks[: len(masks)].copy_(buffer, non_blocking=True)
                self._mask_ring.used()

    def _put_mask_row(self, batch_slot: int, row: int) -> None:
        if self._mask_rows[batch_slot] != row:
            self._write("mask_row", batch_slot, row)
            self._mask_rows[batch_slot] = row

    def rows(self, chunks: Items[Chunk], n: int) -> None:
        """Says what the n rows of the next decode are: of each chunk its token, and behind it its drafts."""
        has_drafts = ROWS[1] in self._rows  # else each chunk is a row
        batch_slots = [c.sequence.batch_slot for c in chunks for _ in (range(c.length) if has_drafts else (0,))]
        parts: dict[str, list[Any]] = {"rows_batch_slot": batch_slots + [-1] * (n - len(batch_slots))}
        if has_drafts:
            rows = [(j, t, 0 if j else c.length, c.n_redo) for c in chunks for j, t in enumerate((0, *c.drafts))]
            rows += [(0, 0, 0, 0)] * (n - len(rows))
            parts |= {part: list(words) for part, words in zip(ROWS[1:], zip(*rows, strict=True), strict=True)}
        if HEAD_ROWS[0] in self._rows:
            parts |= {part: list(words) for part, words in zip(HEAD_ROWS, _of_head(chunks, n), strict=True)}
        adapters: list[int] = []
        if ADAPTER_ROWS[0] in self._rows:
            adapters = [c.sequence.adapter_slot for c in chunks for _ in range(c.length)]
        if max(adapters, default=-1) >= 0:  # else nothing reads them
            by_row = adapters + [-1] * (n - len(adapters))
            parts |= dict(zip(ADAPTER_ROWS, (*adapter_groups(adapters, n), by_row), strict=True))
        self._put_rows(parts)

    def blocks(self, rows: Items[Items[int]]) -> None:
        """Says what the rows of the blocks behind the next decode are: BLOCK_ROWS of each."""
        self._put_rows({part: list(words) for part, words in zip(BLOCK_ROWS, zip(*rows, strict=True), strict=True)})

    def _put_rows(self, parts: dict[str, list[Any]]) -> None:
        for part, words in parts.items():
            if self._rows[part][: len(words)] != words:
                self._write(part, 0, words, contiguous=True)
                self._rows[part][: len(words)] = words

    def flush(self) -> None:
        """Puts the changes on the current stream, those written last winning."""
        self._gather()
        if not self._keys:
            return
        keys, values = np.concatenate(self._keys), np.concatenate(self._values)
        self._keys.clear()
        self._values.clear()
        # A word changed twice keeps its last value, whatever order the device writes in.
        keys, last = np.unique(keys[::-1], return_index=True)
        values = values[::-1][last]
        for at in range(0, len(keys), MAX_CHANGES):
            part = slice(at, at + MAX_CHANGES)
            n = len(keys[part])
            buffer = self._ring.take()
            words = buffer.numpy()
            words[: 2 * n] = keys[part].view(np.int32)
            words[2 * n : 3 * n] = values[part]
            self._arrived[: 3 * n].copy_(buffer[: 3 * n], non_blocking=True)
            self._ring.used()
            self._table.index_copy_(0, self._arrived[: 2 * n].view(torch.int64), self._arrived[2 * n : 3 * n])


def adapter_groups(adapters: Items[int], n: int) -> tuple[list[int], list[int]]:
    """Returns the adapter and rows of n groups (AdapterRows), where rows 0, 1, ... have these adapters, or
    -1.
    """
    rows: dict[int, list[int]] = {}
    for i, adapter in enumerate(adapters):
        rows.setdefault(adapter, []).append(i)
    rows.pop(-1, None)
    found = [(adapter, of[i : i + GROUP_ROWS]) for adapter, of in rows.items() for i in range(0, len(of), GROUP_ROWS)]
    groups = [adapter for adapter, _ in found] + [-1] * (n - len(found))
    words = [row for _, of in found for row in (*of, *[-1] * (GROUP_ROWS - len(of)))]
    return groups, words + [-1] * (n * GROUP_ROWS - len(words))


def _of_head(chunks: Items[Chunk], n: int) -> Items[Items[int]]:
    """HEAD_ROWS of n rows, those of the chunks first."""
    known, room = [-1] * n, [0] * n
    at = 0
    for chunk in chunks:
        tokens, rows = chunk.sequence.tokens, slice(at, at + chunk.length)
        if chunk.start + 1 < len(tokens):  # it was drawn before, and its state lost
            known[at] = tokens[chunk.start + 1]
        # Behind a guess one token is drawn.
        most = chunk.sequence.n_prompt + chunk.sequence.request.params.max_tokens - 3
        room[rows] = [min(len(chunk.sequence.pages) * PAGE_SIZE, most)] * chunk.length
        at += chunk.length
    return known, room


def _bans_end_until(sequence: Sequence, rules: Items[Rule]) -> int:
    """The position below which nothing may be drawn that would end the sequence, by the rules of its next
    draws: an end is banned in a thought, which is over when it was once.
    """
    n_banned, until = sum(rule.bans_end for rule in rules), sequence.n_prompt + sequence.request.params.min_tokens
    if n_banned:
        until = _NEVER if n_banned == len(rules) else max(until, len(sequence.tokens) + n_banned)
    return min(_NEVER, until)


def _group_begun(prompt: PromptPositions | None, n_prompt: int, ratio: int) -> list[int]:
    """Words of a batch slot (ops/gpu/index.index_decode): a group that begins in a picture at the prompt's
    end.
    """
    first = n_prompt // ratio * ratio
    if prompt is None or first == n_prompt:
        return [-1, 0, 0, 0]
    positions, in_picture = prompt.of(first, first + 1)
    return [first if in_picture[0] else -1, *(int(axis[0]) for axis in positions)]


def _counts_history(sequence: Sequence) -> bool:
    p = sequence.request.params
    return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
