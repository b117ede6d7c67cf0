"""Attention of rows that see each other, and of rows with a window: right over several splits, and the same bits among others."""

from __future__ import annotations

import pytest
import torch

from deltic.ops.cpu.attention import AttentionInputs, attn_prepare, block_attention
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import SPLIT_KEYS, AttentionHeads, AttentionWeights
from deltic.ops.kv_formats import KvPages
from tests.cpu.test_attention import BF16, F32, I32, Sequences, i32
from tests.reference import dflash as reference
from tests.reference.layers import rms_norm, rope, rounded
from tests.tensors import on_tensors

block_attention, attn_prepare = map(on_tensors, (block_attention, attn_prepare))

HEADS = AttentionHeads(4, 2, 128, is_gated=False)
N_BLOCK = 13
LENGTHS = (2 * SPLIT_KEYS + 70, 70, 3 * SPLIT_KEYS)


class Blocks(Sequences):
    def see(self, which: list[int], sees: tuple[bool, int], n_records: int = 0) -> list[torch.Tensor]:
        """The output rows of the last N_BLOCK tokens of some sequences."""
        h = self.heads
        whole, last = torch.cat([self.proj[s] for s in which]), torch.cat([self.proj[s][-N_BLOCK:] for s in which])
        for rows, n_each in ((whole, [self.lengths[s] for s in which]), (last, [N_BLOCK] * len(which))):
            starts = [self.lengths[s] - n for s, n in zip(which, n_each, strict=True)]
            counts = torch.tensor(n_each)
            inputs = AttentionInputs(
                n_tokens=i32(len(rows)), page_table=self.table, n_seqs=i32(len(which)), batch_slot=i32(*which),
                positions=torch.cat([torch.arange(a, a + n) for a, n in zip(starts, n_each, strict=True)]).to(I32),
                token_batch_slot=torch.repeat_interleave(i32(*which), counts).to(I32),
                seq_start=torch.cat([torch.zeros(1), counts.cumsum(0)]).to(I32), seq_context=i32(*starts),
            )  # fmt: skip
            q = torch.full((len(rows), h.n_q * h.dim), float("nan"), dtype=BF16)
            program, weights = (
                Program(2, library=self.kernels),
                AttentionWeights(self.q_norm, self.k_norm, 1e-6, self.cos, self.sin),
            )
            attn_prepare(program, rows, h, weights, inputs, KvPages(self.pages), q)
            program.run()
        program, out = Program(2, library=self.kernels), torch.full_like(q, float("nan"))
        records = torch.full((n_records, h.dim + 16), float("nan"), dtype=F32)
        block_attention(program, q, h, inputs, self.pages, sees, (rows, records), out)
        program.run()
        return list(out.view(torch.int16).split(N_BLOCK))

    def seen(self, s: int, sees: tuple[bool, int]) -> torch.Tensor:
        h, n = self.heads, self.lengths[s]
        q, k, v = self.proj[s].split([h.n_q * h.dim] + [h.n_kv * h.dim] * 2, -1)
        q, k = (
            rounded(rope(rms_norm(x.unflatten(-1, (-1, h.dim)), w, 1e-6), torch.arange(n), self.inv_freq), "bfloat16")
            for x, w in ((q, self.q_norm), (k, self.k_norm))
        )
        keys = reference.Keys(k, rounded(v, "bfloat16").unflatten(-1, (-1, h.dim)))
        return reference.attend(q[-N_BLOCK:], keys, n - N_BLOCK, *sees).flatten(1)


SEES = [(False, 0), (True, 0), (True, 40), (False, 40), (False, 5), (False, SPLIT_KEYS + 9), (True, 1)]


@pytest.mark.parametrize("sees", SEES)
def test_blocks_against_the_oracle(sees: tuple[bool, int]) -> None:
    """The longest context divided among threads, too; a block alone has the bits that it has among others."""
    from deltic.ops.cpu.program import instruction_set

    blocks = Blocks(instruction_set(), HEADS, LENGTHS)
    together = blocks.see([0, 1, 2], sees)
    for s, out in enumerate(together):
        torch.testing.assert_close(out.view(BF16).float(), blocks.seen(s, sees), rtol=2**-7, atol=2e-3)
        assert torch.equal(out, blocks.see([s], sees, n_records=4096)[0])
