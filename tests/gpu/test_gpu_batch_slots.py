"""The table of batch slots, from the host's side: what a sequence's parameters, pages and tokens become in words."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from deltic.engine.guides import Guide
from deltic.engine.messages import Constraint, Picture, Request, SamplingParams
from deltic.engine.step import Chunk, Rule, Sequence
from deltic.runtime.gpu.batch_slots import HEAD_ROWS, ROWS, BatchSlots, batch_table

WIDTHS = {
    "seed": 2, "last_token": 1, "position": 1, "state_slot": 1, "done": 1, "top_k": 1, "n_prompt": 1, "uses_history": 1,
    "temperature": 1, "top_p": 1, "min_p": 1, "repetition": 1, "frequency": 1, "presence": 1, "n_bias": 1, "n_banned": 1,
    "banned_until": 1, "n_stop": 1, "max_position": 1, "n_logprobs": 1, "bias_ids": 8, "bias": 8, "banned": 8, "stop_ids": 8,
    "page_table": 4, "history": 16, "rows_batch_slot": 1, "mask_row": 1,
}  # fmt: skip
N_BATCH_SLOTS = 3


class Table:
    """A small table, and its rows by name."""

    def __init__(self) -> None:
        self.offsets, at = {}, 0
        for name, width in WIDTHS.items():
            self.offsets[name] = at, width
            at += width * N_BATCH_SLOTS
        self.words = torch.zeros(at, dtype=torch.int32)
        self.masks = torch.zeros(N_BATCH_SLOTS, 10, dtype=torch.int32)
        self.batch_slots = BatchSlots(self.words, self.offsets, self.masks, (2,), 300)

    def row(self, name: str, batch_slot: int, kind: torch.dtype = torch.int32) -> Any:
        self.batch_slots.flush()
        begin, width = self.offsets[name]
        row = self.words[begin + batch_slot * width :][:width].view(kind).tolist()
        return row if width > 1 else row[0]


def sequence(batch_slot: int, tokens: list[int], n_prompt: int, **params: Any) -> Sequence:
    request = Request(id="", prompt_ids=[], params=SamplingParams(**params))
    return Sequence(
        request, 0, 2**63 + 5, array("i", tokens), n_prompt, batch_slot=batch_slot, state_slot=batch_slot + 10
    )


def test_whole_numbers_are_floats() -> None:
    """As whoever writes Python gives them: temperature=1 is not the smallest float above 0."""
    table = Table()
    table.batch_slots.refresh(sequence(1, [1], 1, temperature=1, top_p=1, repetition_penalty=2, presence_penalty=1))
    assert [table.row(name, 1, torch.float32) for name in ("temperature", "top_p", "repetition", "presence")] == [
        1,
        1,
        2,
        1,
    ]
    assert table.row("seed", 1, torch.int64)[0] == 5 - 2**63


def test_bans_stops_and_history() -> None:
    table = Table()
    one = sequence(
        2, [7, 8, 9], 2, min_tokens=3, stop_token_ids=(11,), frequency_penalty=0.5, logit_bias={4: 1}, max_tokens=5
    )
    table.batch_slots.refresh(one)
    assert table.row("stop_ids", 2)[:2] == table.row("banned", 2)[:2] == [2, 11]
    assert (table.row("banned_until", 2), table.row("max_position", 2)) == (5, 5)
    assert table.row("history", 2)[:4] == [7, 8, 9, 0]
    table.batch_slots.decode(one, 42, 3)  # drawn by a decode that ran ahead
    assert table.row("history", 2)[:4] == [7, 8, 9, 42]
    assert table.row("bias", 2, torch.float32)[0] == 1
    table.batch_slots.refresh(sequence(0, [7], 1, min_tokens=1 << 40))
    assert table.row("banned_until", 0) == 1 << 30
    table.batch_slots.decode(sequence(1, [5], 1), 42, 3)
    assert table.row("history", 1) == [0] * 16 and table.row("uses_history", 2) == 1


@pytest.mark.parametrize("max_model_len", [64, 128])
def test_a_table_of_pages_has_a_row_for_each_sequence(max_model_len: int) -> None:
    """Of contexts of one page, too, whose rows are as wide as a seed."""
    table, _, views = batch_table(3, max_model_len, lambda _, size, dtype: torch.zeros(size, dtype=dtype))
    assert views["page_table"].shape == (3, max_model_len // 64 + 1) and views["seed"].shape == (3,)
    views["page_table"][1, 0] = 7
    assert table.count_nonzero() == 1


def test_a_group_of_the_index_that_begins_in_a_picture() -> None:
    """At the prompt's end, where a decode completes it: its first token's place, and its angles on the three axes."""
    words, offsets, views = batch_table(
        3, 40, lambda _, size, dtype: torch.zeros(size, dtype=dtype), {"group_begun": 4}, has_pictures=True
    )
    batch_slots = BatchSlots(words, offsets, torch.zeros(3, 10, dtype=torch.int32), (2,), 300, ratio=4)
    shown = Picture(key=b"", rows=3, columns=3, pixels=b"", first=4)
    for batch_slot, n_prompt in enumerate((14, 16, 18)):  # a group of the picture's last token; none; one of text
        one = sequence(batch_slot, list(range(n_prompt)), n_prompt)
        one.request = msgspec.structs.replace(one.request, pictures=(shown,))
        batch_slots.refresh(one)
    batch_slots.flush()
    assert views["group_begun"].tolist() == [[12, 4, 6, 6], [-1, 0, 0, 0], [-1, 10, 10, 10]]


def test_pages_are_sent_once_and_again_when_they_change() -> None:
    table, one = Table(), sequence(0, [1], 1)
    one.pages = [3, 4]
    table.batch_slots.refresh(one)
    assert table.row("page_table", 0) == [3, 4, 0, 0]
    table.batch_slots.refresh(one)
    assert not table.batch_slots._keys
    one.pages = [3, 9, 5]
    one.pages_version += 1
    table.batch_slots.refresh(one)
    assert table.row("page_table", 0) == [3, 9, 5, 0]


def test_guides_become_masks_and_bans() -> None:
    """A thought bans the ends, and its own end is one on the device; masks are packed into the first rows; another owner has none."""
    table, grammar = Table(), Constraint(grammar="x", think_end_id=40)
    first, second = (sequence(batch_slot, [1], 1, constraint=grammar) for batch_slot in range(2))
    for one in (first, second):
        one.guide = Guide(one, grammar, 300)
    table.batch_slots.put_guides([(one, [Rule(one.guide.mask, one.guide.bans_end)]) for one in (first, second)])
    assert table.row("stop_ids", 0)[:2] == [2, 40] and table.row("banned", 0)[0] == 2
    assert table.row("banned_until", 0) > 1 << 29 and [table.row("mask_row", i) for i in range(3)] == [-1] * 3
    second.guide.advance(40)
    second.guide.words = np.arange(10, dtype=np.int32)
    table.batch_slots.put_guides([(one, [Rule(one.guide.mask, one.guide.bans_end)]) for one in (first, second)])
    assert [table.row("mask_row", i) for i in range(3)] == [-1, 0, -1] and table.row("banned_until", 1) == 1
    assert table.masks[0].tolist() == list(range(10))
    table.batch_slots.refresh(sequence(1, [5], 1))
    assert table.row("mask_row", 1) == -1


def test_rows_of_drafts() -> None:
    """A row for each token, masks row by row, ends banned up to the end of a thought, and drafts where penalties look."""
    words, offsets, views = batch_table(2, 40, lambda _, size, dtype: torch.zeros(size, dtype=dtype), n_drafts=4)
    masks = torch.zeros(6, 10, dtype=torch.int32)
    batch_slots = BatchSlots(words, offsets, masks, (2,), 300, 4)
    one, two = (sequence(batch_slot, list(range(9)), 5, frequency_penalty=0.5) for batch_slot in (1, 0))
    chunks = [Chunk(one, 8, 3, n_redo=2, drafts=[70, 71]), Chunk(two, 8, 1)]
    for chunk in chunks:
        batch_slots.decode(chunk.sequence, 8, 8, drafts=chunk.drafts)
    batch_slots.rows(chunks, 6)
    mask = np.arange(10, dtype=np.int32)
    batch_slots.put_guides([(one, [Rule(None, True), Rule(None, True), Rule(mask)]), (two, [Rule(mask)])])
    batch_slots.flush()
    found = {part: views[part].tolist() for part in ROWS}
    assert found == {
        "rows_batch_slot": [1, 1, 1, 0, -1, -1],
        "rows_ahead": [0, 1, 2, 0, 0, 0],
        "rows_token": [0, 70, 71, 0, 0, 0],
        "rows_length": [3, 0, 0, 1, 0, 0],
        "rows_redo": [2, 2, 2, 0, 0, 0],
    }
    assert views["history"][1, :12].tolist() == [*range(9), 70, 71, 0]
    assert views["mask_row"].tolist() == [3, 0] and views["banned_until"].tolist() == [5, 11]
    assert masks[:2].eq(-1).all() and masks[2].tolist() == masks[3].tolist() == list(range(10))


def test_rows_of_a_draft_head() -> None:
    """The token behind, where it was drawn before, and the room of each sequence's pages, or of its answer."""
    words, offsets, views = batch_table(
        2, 40, lambda _, size, dtype: torch.zeros(size, dtype=dtype), n_drafts=4, of_head=HEAD_ROWS
    )
    batch_slots = BatchSlots(words, offsets, torch.zeros(6, 10, dtype=torch.int32), (2,), 300, 4)
    one, two = (sequence(batch_slot, list(range(9)), 5, max_tokens=n) for batch_slot, n in ((1, 100), (0, 20)))
    one.pages, two.pages = [3], [4, 5]
    batch_slots.rows([Chunk(one, 8, 3, drafts=[70, 71]), Chunk(two, 6, 1)], 6)
    batch_slots.flush()
    assert views["rows_known"].tolist() == [-1, -1, -1, 7, -1, -1]
    assert views["rows_room"].tolist() == [64, 64, 64, 22, 0, 0]


def test_the_last_change_wins() -> None:
    table, one = Table(), sequence(0, [1], 1)
    for token in (5, 6, 7):
        table.batch_slots.decode(one, token, 10)
    assert (table.row("last_token", 0), table.row("position", 0), table.row("done", 0)) == (7, 10, 0)
    table.batch_slots.decode(one, 8, 11, done=True)
    assert (table.row("last_token", 0), table.row("position", 0), table.row("done", 0)) == (8, 11, 1)
    one.state_slot = 5
    table.batch_slots.move_in(one)  # its token and position are the sampler's to leave
    assert (table.row("last_token", 0), table.row("position", 0), table.row("done", 0)) == (8, 11, 0)
    assert table.row("state_slot", 0) == 5
    table.batch_slots.rows([Chunk(sequence(batch_slot, [5], 1), 1, 1) for batch_slot in (2, 0)], 3)
    assert [table.row("rows_batch_slot", i) for i in range(3)] == [2, 0, -1]
