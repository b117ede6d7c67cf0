"""The GPU sampler against reference/sample.py: greedy exactly, drawn tokens but for rounding at a border, and every row's purity.

Rounding: the reference sums float64 probabilities of a float32 softmax, the kernels 2**-38 steps of float32 weights (or float32
sums of a tile). The running sums agree to about 1e-6 of the whole, so of draws with u uniform one in 1e5 or so may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltic.engine.messages import SamplingParams
from deltic.ops.geometry import LogprobEntries
from deltic.ops.gpu.blocks import Drafts, Rows
from deltic.ops.gpu.sample import BatchParameters, Drawn, Draws, SampleScratch, prompt_logprobs, sample, sample_scratch
from tests.reference.sample import candidates, processed_logits, token_logprobs
from tests.reference.sample import sample as reference_sample

N_IDS, MAX_LEN, N_MOST = 8, 40, 6


@dataclass
class Sequence:
    """One batch slot's parameters, and what the reference needs."""

    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 1
    prompt: list[int] = field(default_factory=lambda: [1, 2])
    output: list[int] = field(default_factory=list)
    banned: list[int] = field(default_factory=list)
    stop: list[int] = field(default_factory=list)
    banned_until: int = 1 << 20
    max_position: int = 1 << 20
    allowed: Tensor | None = None
    """bool [V]: what its mask lets through."""

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def expected(self, logits: Tensor, n_real: int) -> int:
        banned = self.banned if self.position < self.banned_until else []
        return reference_sample(
            logits.cpu(), self.params, self.seed, self.position, self.prompt, self.output, banned, n_real, self.allowed
        )  # fmt: skip


def batch_slots_of(sequences: list[Sequence], device: str) -> BatchParameters:
    p, i32 = len(sequences), torch.int32
    h = torch.full((p, MAX_LEN), -7, dtype=i32)
    bias_ids, banned, stop = (torch.full((p, N_IDS), 3, dtype=i32) for _ in range(3))  # rows behind n count for nothing
    bias = torch.full((p, N_IDS), torch.nan)
    for i, s in enumerate(sequences):
        h[i, : s.position] = torch.tensor(s.prompt + s.output, dtype=i32)
        for j, (id, value) in enumerate(s.params.logit_bias.items()):
            bias_ids[i, j], bias[i, j] = id, value
        banned[i, : len(s.banned)] = torch.tensor(s.banned, dtype=i32)
        stop[i, : len(s.stop)] = torch.tensor(s.stop, dtype=i32)

    def column(value: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([value(s) for s in sequences], dtype=dtype)

    def uses(s: Sequence) -> bool:
        q = s.params
        return q.repetition_penalty != 1 or q.frequency_penalty != 0 or q.presence_penalty != 0

    masked = [s for s in sequences if s.allowed is not None]
    n_words = max([len(s.allowed) // 32 + 1 for s in masked], default=1 << 13)
    masks = torch.full((p, n_words), -1, dtype=i32)
    for row, s in enumerate(masked):
        bits = np.packbits(s.allowed.numpy(), bitorder="little")
        masks[row].view(torch.uint8)[: len(bits)] = torch.from_numpy(bits)

    made = BatchParameters(
        temperature=column(lambda s: s.params.temperature), top_p=column(lambda s: s.params.top_p),
        min_p=column(lambda s: s.params.min_p), repetition=column(lambda s: s.params.repetition_penalty),
        frequency=column(lambda s: s.params.frequency_penalty), presence=column(lambda s: s.params.presence_penalty),
        top_k=column(lambda s: s.params.top_k, i32), seed=column(lambda s: s.seed, torch.int64),
        n_prompt=column(lambda s: len(s.prompt), i32), history=h, uses_history=column(uses, i32),
        bias_ids=bias_ids, bias=bias, n_bias=column(lambda s: len(s.params.logit_bias), i32),
        banned=banned, n_banned=column(lambda s: len(s.banned), i32), banned_until=column(lambda s: s.banned_until, i32),
        stop_ids=stop, n_stop=column(lambda s: len(s.stop), i32), max_position=column(lambda s: s.max_position, i32),
        n_logprobs=column(lambda s: -1 if s.params.logprobs is None else s.params.logprobs, i32),
        last_token=torch.full((p,), -9, dtype=i32), position=torch.full((p,), -9, dtype=i32),
        done=torch.full((p,), -9, dtype=i32), masks=masks,
        mask_row=column(lambda s: -1 if s.allowed is None else masked.index(s), i32),
    )  # fmt: skip
    return BatchParameters(**{f.name: getattr(made, f.name).to(device) for f in fields(made)})


def poisoned(n_draws: int, n_vocab: int, device: str, tile: int, cap: int) -> SampleScratch:
    def allocate(_: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.float32:
            return torch.full(size, torch.nan, device=device)
        return torch.full(size, 987654321, dtype=dtype, device=device)

    return sample_scratch(n_draws, n_vocab, allocate, tile, cap)


def draw(
    logits: Tensor, sequences: list[Sequence], n_real: int, tile: int = 64, cap: int = 32, rows: list[int] | None = None,
    batch_slots: BatchParameters | None = None, chosen: list[int] | None = None, together: int | None = None,
) -> tuple[list[int], tuple[Tensor, ...], BatchParameters]:  # fmt: skip
    """chosen: the place of each draw (-1: none); rows: its row of the logits; together: draws for which there is scratch."""
    device = str(logits.device)
    batch_slots = batch_slots or batch_slots_of(sequences, device)
    chosen = list(range(len(sequences))) if chosen is None else chosen
    rows = list(range(len(chosen))) if rows is None else rows
    d = len(chosen)

    def i32(x: list[int]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    out = (
        i32([-5] * d), torch.full((d,), torch.nan, device=device), torch.full((d, N_MOST), -5, dtype=torch.int32, device=device),
        torch.full((d, N_MOST), torch.nan, device=device),
    )  # fmt: skip
    draws = Draws(i32(rows), i32(chosen), i32([sequences[c].position if c >= 0 else 0 for c in chosen]))
    scratch = poisoned(together or d, logits.shape[1], device, tile, cap)
    sample(logits, n_real, draws, batch_slots, scratch, Drawn(*out))
    return out[0].tolist(), out, batch_slots


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0} | given))


def test_greedy_equals_the_reference(device: str) -> None:
    """Ties (also of 0 and -0, and across tiles), padding ids above the rest, biases, penalties, bans."""
    g = torch.Generator().manual_seed(0)
    n_vocab, n_real = 300, 290
    logits = torch.randn(8, n_vocab, generator=g) * 3
    logits[:, n_real:] = 99
    logits[0, [77, 200, 201]] = 20.0
    logits[1, :n_real] = -1.0
    logits[1, [130, 250]] = torch.tensor([-0.0, 0.0])
    logits[2, [5, 100, 289]] = 15.0
    logits[3, [5, 100, 289]] = torch.tensor([15.0, 14.0, 13.0])
    logits[4, [5, 100]] = torch.tensor([12.0, 11.0])
    logits[5, [9, 64]] = torch.tensor([-0.01, -0.02])
    logits[5, :9] = logits[5, 10:64] = logits[5, 65:n_real] = -9
    sequences = [
        Sequence(params()),
        Sequence(params()),
        Sequence(params(), banned=[5]),
        Sequence(params(logit_bias={5: -4.0, 288: 30.0, 63: 1.0, 64: 1.0})),
        Sequence(
            params(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25),
            prompt=[5, 5, 7],
            output=[100, 8, 100],
        ),
        Sequence(params(repetition_penalty=3.0), prompt=[9, 63], output=[]),
        Sequence(params(frequency_penalty=2.0, logit_bias={100: 9.0}), output=[100] * 30, banned=[3]),
        Sequence(params(), banned=[5], banned_until=2),
    ]
    tokens, _, _ = draw(logits.to(device), sequences, n_real)
    assert tokens == [s.expected(logits[i], n_real) for i, s in enumerate(sequences)]
    assert tokens[:3] == [77, 130, 100] and tokens[3] == 288 and tokens[5] == 64


def test_what_cannot_be_drawn(device: str) -> None:
    """-1 where a real logit is not finite, or everything is banned; nothing where there is no batch slot."""
    n_vocab, n_real = 130, 128
    logits = torch.randn(5, n_vocab)
    logits[0, 100], logits[1, 3], logits[2, 127] = torch.nan, torch.inf, -torch.inf
    logits[3, 0] = -9.0  # is a stop token
    logits[3, n_real:] = torch.nan
    sequences = [Sequence(params(temperature=t, logprobs=2), stop=[0]) for t in (0.0, 1.0, 0.0, 0.0)]
    tokens, out, batch_slots = draw(logits.to(device), sequences, n_real, chosen=[0, 1, 2, 3, -1])
    assert tokens[:3] == [-1] * 3 and tokens[3] == int(logits[3, :n_real].argmax()) and tokens[4] == -5
    assert batch_slots.done.tolist() == [1, 1, 1, 0] and torch.isnan(out[1][:3]).all()
    few = torch.randn(2, 4)
    sequences = [Sequence(params(temperature=t), banned=[0, 1, 2, 3], prompt=[1]) for t in (0.0, 1.0)]
    assert draw(few.to(device), sequences, 4)[0] == [-1, -1]


def test_advance(device: str) -> None:
    n_vocab = 70
    logits = torch.full((4, n_vocab), -1.0)
    logits[:, 66] = 5.0
    sequences = [
        Sequence(params()),
        Sequence(params(), stop=[4, 66], prompt=[1, 2, 3]),
        Sequence(params(), max_position=4, output=[9, 9, 9]),
        Sequence(params(), max_position=4, output=[9, 9]),
    ]
    _, _, batch_slots = draw(logits.to(device), sequences, n_vocab)
    assert batch_slots.last_token.tolist() == [66] * 4
    assert batch_slots.position.tolist() == [2, 3, 5, 4]
    assert batch_slots.done.tolist() == [0, 1, 1, 0]
    for i, s in enumerate(sequences):
        assert batch_slots.history[i, : s.position + 2].tolist() == [*s.prompt, *s.output, 66, -7]


FILTERS = (
    {}, {"temperature": 0.3}, {"temperature": 5.0}, {"temperature": 1e-6}, {"top_k": 1}, {"top_k": 3}, {"top_k": 50},
    {"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.9999}, {"min_p": 0.2}, {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8}, {"top_k": 20, "min_p": 0.05}, {"min_p": 0.01, "top_p": 0.9},
    {"top_k": 200, "top_p": 0.9, "min_p": 0.001, "temperature": 0.7},
    {"top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5}, {"top_k": 5, "logit_bias": {9: 6.0, 70: -2.0}},
)  # fmt: skip


@pytest.mark.parametrize("cap", [64, 512])
def test_draws_equal_the_reference(device: str, cap: int) -> None:
    """Every filter, short lists in registers and long ones through memory; peaked and flat rows, and rows full of ties."""
    g = torch.Generator().manual_seed(cap)
    n_vocab, n_real = 200, 197
    kinds = ("peaked", "flat", "ties") if device == "cuda" else ("peaked",) if cap > n_vocab else ("flat", "ties")
    differ, total = [], 0
    for kind in kinds:
        rows, sequences = [], []
        for filters in FILTERS[:: 1 if device == "cuda" or kind != "ties" else 3]:
            for j in range(2 if device == "cuda" else 1):
                x = torch.randn(n_vocab, generator=g) * (4 if kind == "peaked" else 0.5)
                rows.append(x.round() if kind == "ties" else x)
                s = params(**({"temperature": 1.0} | filters))
                banned = [int(rows[-1][:n_real].argmax())] if len(rows) % 3 == 0 else []
                allowed = None
                if len(rows) % 2:
                    allowed = torch.rand(n_vocab, generator=g) < (0.03, 0.5, 0.97)[len(rows) % 3]
                    allowed[100] = True
                seed = int(torch.randint(0, 2**62, (), generator=g))
                sequences.append(
                    Sequence(s, seed, prompt=[3, 9, 70], output=[9] * (j + 1), banned=banned, allowed=allowed)
                )
        logits = torch.stack(rows)
        tokens, _, _ = draw(logits.to(device), sequences, n_real, cap=cap)
        for i, s in enumerate(sequences):
            total += 1
            if tokens[i] != s.expected(logits[i], n_real):
                differ.append((kind, s.params, tokens[i], s.expected(logits[i], n_real)))
                row = processed_logits(logits[i], s.params, s.prompt, s.output, s.banned, n_real, s.allowed)
                ids, _ = candidates(row, s.params)
                assert tokens[i] in ids.tolist()
    assert len(differ) <= 1, differ


def test_masks(device: str) -> None:
    """Greedy and drawn; words of all ones, of none and mixed; one id, and none; above biases; rows without a mask beside them."""
    g = torch.Generator().manual_seed(9)
    n_vocab, n_real = 300, 290
    logits = torch.randn(7, n_vocab, generator=g)
    logits[:, n_real:] = 99
    only, none, some = torch.zeros(3, n_vocab, dtype=torch.bool)
    only[255] = True
    some[64:96] = some[150] = some[287:] = True
    sequences = [
        Sequence(params(logit_bias={3: 50.0}), allowed=only),
        Sequence(params(temperature=2.0, top_k=3), allowed=some),
        Sequence(params(logit_bias={150: 50.0, 149: 90.0}, repetition_penalty=1.2), allowed=some),
        Sequence(params(temperature=1.0), allowed=none),
        Sequence(params(temperature=1.0, logprobs=2), allowed=only),
        Sequence(params(temperature=1.0)),
        Sequence(params(temperature=1.0, top_p=0.9), allowed=some, banned=[64, 65]),
    ]
    tokens, out, _ = draw(logits.to(device), sequences, n_real)
    expected = [-1 if i == 3 else s.expected(logits[i], n_real) for i, s in enumerate(sequences)]
    assert tokens == expected and tokens[0] == tokens[4] == 255 and tokens[2] == 150
    assert float(out[1][4]) == pytest.approx(float(token_logprobs(logits[4], n_real)[255]), abs=1e-5)


def test_smallest_temperature_is_greedy(device: str) -> None:
    """The reference's quotient overflows there; the CPU's kernel and this one subtract first."""
    logits = torch.randn(3, 130)
    sequences = [Sequence(params(temperature=1e-38, **k)) for k in ({}, {"top_p": 0.9}, {"top_k": 7})]
    assert draw(logits.to(device), sequences, 130)[0] == logits.argmax(1).tolist()


def test_every_u_of_a_row(device: str) -> None:
    """Many seeds on one row: the drawn ids follow the reference one by one, so the generator is the same."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 200, generator=g)
    n = 24
    sequences = [
        Sequence(params(temperature=1.0), seed=(-1) ** i * (i * 0x123456789ABCDEF % 2**63), prompt=[0] * (i + 1))
        for i in range(n)
    ]
    tokens, _, _ = draw(logits.to(device), sequences, 200, rows=[0] * n)
    expected = [s.expected(logits[0], 200) for s in sequences]
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) == 0
    assert len(set(tokens)) > 8


def test_rows_are_pure(device: str) -> None:
    """A row alone, among others, in another order, and through the decode's entry: the same bits (P6)."""
    g = torch.Generator().manual_seed(5)
    n_vocab = n_real = 300
    kinds = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.2, "top_k": 40, "frequency_penalty": 0.3}, {}]  # fmt: skip
    sequences = [Sequence(params(logprobs=4, **k), seed=i, output=[i]) for i, k in enumerate(kinds)]
    logits = torch.randn(4, n_vocab, generator=g).to(device)
    tokens, out, _ = draw(logits, sequences, n_real)
    for i in range(4):
        alone, one, _ = draw(logits[i : i + 1], sequences, n_real, chosen=[i])
        assert alone == tokens[i : i + 1]
        assert torch.equal(one[1], out[1][i : i + 1]) and torch.equal(one[2], out[2][i : i + 1])
        assert torch.equal(one[3].nan_to_num(), out[3][i : i + 1].nan_to_num())
    for together in (None, 3, 1):  # draws that take turns in the scratch
        back, _, _ = draw(logits, sequences, n_real, chosen=[3, -1, 1, 0], rows=[3, 0, 1, 0], together=together)
        assert back == [tokens[3], -5, tokens[1], tokens[0]]
    batch_slots = batch_slots_of(sequences, device)
    i32 = {"dtype": torch.int32, "device": device}
    shuffled = torch.stack([logits[2], logits[0] * 0, logits[1], logits[0]])
    lines = Rows(*(torch.tensor(x, **i32) for x in ([2, 3, 1, 0], [7, -1, 8, 9], [2, 2, 2, 2])))
    for together in (6, 3, 1):
        batch_slots.position.fill_(-9)
        out_token = torch.full((4,), -5, **i32)
        scratch = poisoned(together, n_vocab, device, 64, 32)
        sample(shuffled, n_real, lines, batch_slots, scratch, Drawn(out_token, *out[1:]))
        assert out_token.tolist() == [tokens[2], -5, tokens[1], tokens[0]]
        assert batch_slots.position.tolist() == [3, 3, 3, -9]


def test_rows_of_a_draft_draw_as_if_it_had_been_drawn(device: str) -> None:
    """Of one batch slot: each with its position's noise and mask, and penalties that see the tokens in front."""
    g = torch.Generator().manual_seed(6)
    n_vocab = n_real = 300
    shared = params(temperature=1.0, frequency_penalty=2.0, repetition_penalty=1.5, logprobs=3, min_tokens=3)
    allowed = [torch.rand(n_real, generator=g) < 0.3 for _ in range(3)]
    sequences = [
        Sequence(shared, 3, output=[5, 9, 7][: 1 + j], banned=[20, 21], banned_until=4, allowed=allowed[j])
        for j in range(3)
    ]
    logits = torch.randn(3, n_vocab, generator=g).to(device)
    logits[:, [5, 7, 9, 20]] += 6
    expected, out, _ = draw(logits, sequences, n_real)
    batch_slots = batch_slots_of(sequences, device)
    batch_slots.mask_row[2] = 0  # the first of three
    i32 = {"dtype": torch.int32, "device": device}
    batch_slot, state_slot, position, ahead = (
        torch.tensor(x, **i32) for x in ([2, 2, 2], [1, 1, 1], [2, 3, 4], [0, 1, 2])
    )
    rows = Rows(batch_slot, state_slot, position, drafts=Drafts(ahead, ahead, ahead, ahead))
    found = Drawn(torch.full((3,), -5, **i32), *(torch.zeros_like(part) for part in out[1:]))
    sample(logits, n_real, rows, batch_slots, poisoned(3, n_vocab, device, 64, 32), found)
    assert found.token.tolist() == expected and torch.equal(found.logprob, out[1])
    assert torch.equal(found.top_ids[:, :3], out[2][:, :3])


@pytest.mark.parametrize("n_top", [0, 1, 5])
def test_logprobs(device: str, n_top: int) -> None:
    """Under the raw softmax, whatever the draw was; ties by id. Sums of exp by tile: 1e-5 covers their rounding."""
    n_vocab, n_real = 200, 195
    logits = (torch.randn(3, n_vocab) * 2).round() / 2
    logits[:, n_real:] = 50
    sequences = [
        Sequence(params(logprobs=n_top, logit_bias={4: 20.0})),
        Sequence(params(logprobs=n_top)),
        Sequence(params()),
    ]
    tokens, out, _ = draw(logits.to(device), sequences, n_real)
    for i in range(2):
        expected = token_logprobs(logits[i], n_real)
        assert float(out[1][i]) == pytest.approx(float(expected[tokens[i]]), abs=1e-5)
        values, ids = expected.sort(descending=True, stable=True)
        assert out[2][i].tolist() == ids[:n_top].tolist() + [-5] * (N_MOST - n_top)
        assert torch.allclose(out[3][i, :n_top].cpu(), values[:n_top], atol=1e-5)
        assert torch.isnan(out[3][i, n_top:]).all()
    assert torch.isnan(out[1][2])

    i32 = {"dtype": torch.int32, "device": device}
    logprob, ids = torch.full((4,), torch.nan, device=device), torch.full((4, N_MOST), -5, **i32)
    tops = torch.full((4, N_MOST), torch.nan, device=device)
    entries = LogprobEntries(
        torch.tensor([3], **i32), torch.tensor([2, 0, 1, 0], **i32), torch.tensor([7, 190, 1, 1], **i32),
        torch.tensor([n_top, n_top, -1, n_top], **i32), logprob, ids, tops,
    )  # fmt: skip
    prompt_logprobs(logits.to(device), n_real, entries, tile=64)
    for i, (row, target) in enumerate(((2, 7), (0, 190))):
        expected = token_logprobs(logits[row], n_real)
        assert float(logprob[i]) == pytest.approx(float(expected[target]), abs=1e-5)
        assert ids[i, :n_top].tolist() == expected.sort(descending=True, stable=True)[1][:n_top].tolist()
    assert torch.isnan(logprob[2:]).all() and (ids[2:] == -5).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_real_sizes_equal_the_reference() -> None:
    """248,320 ids: short lists, long ones (flat rows) and plain draws; alone and in a batch of 64."""
    n_vocab, n_real = 248320, 248077
    g = torch.Generator().manual_seed(1)
    rows, sequences = [], []
    for filters in FILTERS:
        for scale in (0.5, 2.0, 5.0):
            rows.append(torch.randn(n_vocab, generator=g) * scale)
            sequences.append(
                Sequence(params(**({"temperature": 1.0, "logprobs": 5} | filters)), seed=len(rows), output=[9])
            )
    logits = torch.stack(rows)
    tokens, out, _ = draw(logits.cuda(), sequences, n_real, tile=2048, cap=2048)
    expected = [s.expected(logits[i], n_real) for i, s in enumerate(sequences)]
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= 1
    for i in range(0, len(rows), 5):
        alone, one, _ = draw(logits[i : i + 1].cuda(), sequences, n_real, tile=2048, cap=2048, chosen=[i])
        assert alone == tokens[i : i + 1] and torch.equal(one[3][0, :5], out[3][i, :5])
        assert one[2][0, :5].tolist() == logits[i, :n_real].topk(5).indices.tolist()
    batch_slots = batch_slots_of(sequences, "cuda")
    again, _, _ = draw(logits.cuda(), sequences, n_real, tile=2048, cap=2048, batch_slots=replace(batch_slots))
    assert again == tokens
