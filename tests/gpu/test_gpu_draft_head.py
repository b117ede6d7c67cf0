"""The draft head on a GPU: its guesses against the reference, its keys and values on every way, and its own operators.

That it changes no answer is shown with all other drafts, in test_gpu_drafts.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.drafts import n_guessable
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Sequence, Step
from deltic.ops.contract import KernelError
from deltic.ops.geometry import PAGE_SIZE
from tests.cpu.test_reference import prompt
from tests.heads import KINDS, kept, loaded, run, sequence
from tests.planned import settled
from tests.reference.layers import linear, rms_norm
from tests.reference.model import draft_states, draft_trunk, hidden_states, trunk
from tests.tiny import tiny_checkpoint
from tests.tiny_config import N_REAL_VOCAB
from tests.tiny_gguf import tiny_gguf

pytest.importorskip("triton")
from deltic.ops.gpu.blocks import Drafts, Rows
from deltic.ops.gpu.draft import GuessRows, begin_guess, draft_pair, follow, go_on, guess_rows
from deltic.ops.gpu.linear import DECODED_ROWS
from deltic.ops.gpu.norm import add_norm
from deltic.runtime.build import build_runner
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner
from tests.gpu.test_gpu_drafts import MAX_DRAFTS, build, small_checkpoint


def fresh(kind: str = "dense") -> GpuTextRunner:
    """The runner, with nothing in its pages that anything may be mistaken for."""
    runner = build(kind)
    for pages in (runner.memory[0].pages, runner.memory[0].index):
        if pages is not None:
            pages.fill_(float("nan"))
    return runner


def drafted(runner: GpuTextRunner, of: Sequence, drafts: list[int], n_guesses: int = 0) -> list[int]:
    """A decode with a draft; the sequence gets what counts, as the scheduler does it. Gives the guesses."""
    chunk = Chunk(of, of.n_computed + of.n_window, 1 + len(drafts), n_redo=of.n_window, drafts=drafts)
    result = runner.step(Step([chunk], [Draw(0, of, n_guesses)], runs_ahead=False))
    of.n_computed, of.n_window = chunk.start + (not drafts), len(result.tokens[0]) if drafts else 0
    of.tokens.extend(result.tokens[0])
    return result.guesses[0]


@pytest.mark.parametrize("kind", [*KINDS, "flash"])
def test_guesses_are_those_of_the_reference(kind: str) -> None:
    """Each from the head's own state of the one before; behind a prefill, a decode and a draft."""
    weights, shape = loaded(small_checkpoint(kind))
    runner, ids, n_wanted = fresh(kind), prompt(70), MAX_DRAFTS
    run(runner, of := sequence(ids), len(ids))
    run(runner, of, 1)
    guesses = run(runner, of, 1, n_wanted)
    assert len(guesses) == n_wanted
    known, tokens = list(of.tokens[1:]), list(of.tokens[:-1])
    expected = {}
    for dtype in ("bfloat16", "float32"):
        hidden = (hidden_states if shape.n_streams == 1 else trunk)(weights, shape, tokens, dtype)
        for i in range(n_wanted):
            next_ids = [*known, *guesses[:i]]
            states = draft_states(weights, shape, hidden, next_ids, dtype)
            expected[dtype] = logits = linear(states[-1:], weights.lm_head, dtype)[0, :N_REAL_VOCAB].float()
            own = states if shape.n_streams == 1 else draft_trunk(weights, shape, hidden, next_ids, dtype)
            hidden = torch.cat([hidden, own[-1:]])
            if dtype == "bfloat16":
                assert logits.max() - logits[guesses[i]] < 0.05  # of magnitude 4; near-ties may fall either way
    found = runner.workspace.decode.logits[:N_REAL_VOCAB].cpu()
    off, rounding = ((x - expected["bfloat16"]).abs() for x in (found, expected["float32"]))
    assert off.max() < 0.1 + 3 * rounding.max() and off.median() < 0.01 + 3 * rounding.median()


def decode_all(runner: GpuTextRunner, of: Sequence, n: int) -> None:
    """One token a step, with guesses and without."""
    while len(of.tokens) <= n:
        run(runner, of, 1, len(of.tokens) % 3)


def index_of(runner: GpuTextRunner, of: Sequence, n: int) -> Tensor:
    """Bits of the head's keys in the index for the first n tokens, and of their groups, if it has one."""
    index = runner.memory[0].index
    if index is None:
        return torch.empty(0)
    rows = index[of.pages, -1].view(torch.int16).cpu()
    return torch.cat([rows[:, :PAGE_SIZE].flatten(0, 1)[:n], rows[:, PAGE_SIZE:].flatten(0, 1)[: n // 4]])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dense", pytest.param("flash", marks=pytest.mark.long)])
def test_its_keys_and_values_are_the_same_on_every_way(kind: str) -> None:
    """In one chunk and in several, with guesses, without, behind drafts, beside others, from a prefix and computed again: bit for bit.

    So what guesses and rejected rows have left in the pages is written over."""
    ids, n = prompt(90), 104
    run(runner := fresh(kind), of := sequence(ids), len(ids))
    decode_all(runner, of, n)
    truth, tokens, keys = kept(runner, of, n), list(of.tokens), index_of(runner, of, n)
    values = torch.from_numpy(truth.astype(np.int32) << 16).view(torch.float32)
    assert values.isfinite().all() and len(set(truth[0, 0, :, 0].tolist())) > 80

    run(runner := fresh(kind), chunks := sequence(ids), 64, draws=False)
    run(runner, chunks, len(ids) - 64)
    for i, step in enumerate((3, 2, 4, 1, 3, 0)):  # tokens of a draft; every other one is wrong from some batch slot on
        at = len(chunks.tokens)
        draft = tokens[at : at + step]
        if i % 2 and draft:
            draft[-1] = (draft[-1] + 1) % 256
        guesses = drafted(runner, chunks, draft, n_guesses=i % 3)
        assert len(guesses) == i % 3
    assert list(chunks.tokens[: n + 1]) == tokens and len(chunks.tokens) > n + 1
    np.testing.assert_array_equal(kept(runner, chunks, n), truth)
    assert torch.equal(index_of(runner, chunks, n), keys)

    again = sequence(tokens[:n], batch_slot=1, n_prompt=len(ids))  # its memory was lost: nothing is drawn
    again.pages[0] = chunks.pages[0]  # but for a page that the tree had
    runner.memory[0].states[1], runner.memory[0].columns[1] = 0, 0
    run(runner, again, 64, draws=False)
    run(runner, again, len(ids) - 64, draws=False)
    beside = sequence(prompt(40, seed=2), batch_slot=2)
    run(runner, beside, 40)
    while again.n_computed < n - 1:
        step = Step([Chunk(s, s.n_computed, 1) for s in (again, beside)], [Draw(1, beside, 2)], runs_ahead=False)
        for s, drawn in zip((beside,), runner.step(step).tokens, strict=True):
            s.tokens.extend(drawn)
        again.n_computed += 1
        beside.n_computed += 1
    np.testing.assert_array_equal(kept(runner, again, n - 1), truth[:, :, : n - 1])
    assert torch.equal(index_of(runner, again, n - 1), torch.cat([keys[: n - 1], keys[n : n + (n - 1) // 4]]))


def test_guesses_end_where_pages_end() -> None:
    of = sequence(prompt(PAGE_SIZE - 3))
    of.pages = of.pages[:1]
    runner = fresh()
    run(runner, of, PAGE_SIZE - 3)
    before = runner.memory[0].pages[1:].clone()
    assert [len(run(runner, of, 1, 4)) for _ in range(3)] == [3, 2, 1]  # the next token has no page yet
    torch.testing.assert_close(runner.memory[0].pages[1:-1], before[:-1], equal_nan=True, rtol=0, atol=0)
    assert n_guessable(of, 1) == 1


def test_guesses_end_where_the_answer_ends() -> None:
    """One token is drawn behind them: no row draws from more history than there can be."""
    runner, n = fresh(), 9
    of = sequence(prompt(n), max_tokens=5, frequency_penalty=1e-6)
    run(runner, of, n)
    assert runner.draft_head is not None
    rows, found = runner.draft_head._rows, []
    for _ in range(3):
        found.append(len(run(runner, of, 1, 3)))
        batch_slot, position = (int(words[0]) for words in (rows.draws.batch_slot, rows.draws.position))
        assert batch_slot < 0 or position < n + 4
    assert found == [2, 1, 0]


def test_what_draws_a_token_draws_a_guess() -> None:
    """Penalties, biases and the seed; and guesses leave nothing to the next draw."""
    runner = fresh()
    biased = {"logit_bias": {7: 50.0}, "frequency_penalty": 2.0}
    run(runner, of := sequence(prompt(9), **biased), 9)
    assert run(runner, of, 1, 3) == [7, 7, 7]
    penalised = {"logit_bias": {7: 100.0, 8: 90.0}, "frequency_penalty": 20.0}
    run(runner, of := sequence(prompt(9), batch_slot=1, **penalised), 9)
    guesses = run(runner, of, 1, 4)
    assert of.tokens[-2:].tolist() == [7, 8] and guesses == [7, 8, 7, 8]
    for _ in range(3):
        run(runner, of, 1)
    assert of.tokens[-3:].tolist() == [7, 8, 7]
    seeds = set()
    for batch_slot in range(3):
        run(runner, of := sequence(prompt(9), batch_slot=batch_slot, temperature=5.0), 9)
        seeds.add(tuple(run(runner, of, 1, 4)))
    assert len(seeds) == 3


@pytest.mark.parametrize("kind", ["dense", "flash"])
def test_a_prompts_log_probabilities_are_those_without_a_head(kind: str) -> None:
    """Which has used the buffers of the forward by then."""
    found = []
    for max_drafts in (0, MAX_DRAFTS):
        of = sequence(prompt(20), prompt_logprobs=2)
        chunk = Chunk(of, 0, 20, prompt_logprobs=True)
        found.append(build(kind, max_drafts).step(Step([chunk], [Draw(0, of)], runs_ahead=False)))
    assert found[0].prompt_logprobs == found[1].prompt_logprobs and len(found[0].prompt_logprobs[0]) == 19
    assert found[0].tokens == found[1].tokens


@pytest.mark.long
@pytest.mark.parametrize(
    "stored", [pytest.param("int4", marks=pytest.mark.long), "fp8", pytest.param("Q8_0", marks=pytest.mark.long)]
)
def test_quantised_heads(stored: str) -> None:
    """Rounded at load, and as a file has them: every product finds its kernel."""
    if stored == "Q8_0":
        path, quantize = tiny_gguf("moe", stored, has_mtp=True), None
    else:
        path, quantize = tiny_checkpoint("moe", has_mtp=True, experts="split"), stored
    config = EngineConfig(
        model=str(path), max_drafts=2, max_num_seqs=2, max_model_len=256, max_step_tokens=64, n_pages=9,
        n_checkpoints=0, quantize=quantize, device="cuda",
    )  # fmt: skip
    runner = build_runner(config, lambda stage, done: None, Gpu())
    assert isinstance(runner, GpuTextRunner) and runner.info.has_draft_head
    head = runner.model.weights.draft_head
    assert head is not None and head.fc.whole.format.name == stored
    run(runner, of := sequence(prompt(9)), 9)
    assert len(run(runner, of, 1, 2)) == 2
    logits = runner.workspace.decode.logits[:N_REAL_VOCAB]
    assert logits.isfinite().all() and logits.std() > 0.1


@pytest.mark.parametrize("n_blocks", [1, 2, 4, 8])
def test_short_prefills_have_room_for_decoded_weights_of_a_head_over_streams(n_blocks: int) -> None:
    """Its first product has a row for each of four streams: from two blocks on so many that weights are decoded once."""
    config = EngineConfig(
        model=str(small_checkpoint("flash")), max_drafts=2, max_step_tokens=n_blocks * PAGE_SIZE, quantize="int8", device="cuda"
    )  # fmt: skip
    for max_drafts, n_rows in ((2, 4 * PAGE_SIZE), (0, PAGE_SIZE)):
        _, plan = settled(replace(config, max_drafts=max_drafts), Gpu(), 2 << 30)
        assert ("decoded weights" in plan.workspace) == (n_blocks * n_rows > DECODED_ROWS)


@pytest.mark.parametrize("kind", ["dense", "flash", pytest.param("next", marks=pytest.mark.long)])
def test_its_own_guesses_change_no_answer(kind: str) -> None:
    """With the depth that the engine chooses."""
    answers = []
    for max_drafts in (0, MAX_DRAFTS):
        engine = Engine(build(kind, max_drafts))
        assert engine.info.has_draft_head == bool(max_drafts)
        for i in range(2):
            params = SamplingParams(max_tokens=10, temperature=0.0, logit_bias={7: 6.0}, logprobs=1, ignore_eos=True)
            engine.add(Request(id=str(i), prompt_ids=prompt(30 + i, seed=i), params=params))
        found: dict[str, tuple[list[int], list[object]]] = {"0": ([], []), "1": ([], [])}
        while engine.has_work():
            for output in engine.step():
                found[output.id][0].extend(output.token_ids)
                found[output.id][1].extend(output.logprobs or [])
            engine.check()
        answers.append(found)
    assert answers[0] == answers[1]
    assert engine.stats().n_drafted > 0


# Its operators.


def table(n: int, device: str) -> tuple[Rows, GuessRows]:
    parts = [torch.zeros(n, dtype=torch.int32, device=device) for _ in range(9)]
    g = guess_rows(*parts[7:], 4, lambda _, size, dtype: torch.full(size, 99, dtype=dtype, device=device))
    return Rows(*parts[:3], drafts=Drafts(*parts[3:7])), g


def test_what_counts_is_found(device: str) -> None:
    """As Chunk.accepted finds it: nothing right, some, all, and no token; beside rows without a draft or a draw, and none at all."""
    none = Sequence(Request(id="", prompt_ids=[], params=SamplingParams()), 0, 0, [], 0)  # type: ignore[arg-type]
    cases = [([5, 6, 7], [1, 2, 3, 4]), ([5, 6, 7], [5, 6, 3, 4]), ([5, 6], [5, 6, 9]), ([], [8]), ([], [-1])]
    cases += [([5, 6], [5, -1, 3]), ([4], [4, 4])]
    n = sum(len(drawn) for _, drawn in cases) + 2
    rows, g = table(n, device)
    drawn, expected_last, expected_kept, at = torch.zeros(n, dtype=torch.int32), [-1] * n, [-1] * n, 0
    for i, (drafts, out) in enumerate(cases):
        for j, (token, draft) in enumerate(zip(out, [0, *drafts], strict=True)):
            drawn[at + j] = token
            for tensor, value in zip(
                (rows.batch_slot, rows.state_slot, rows.position), (i, 10 + i, 20 * i + j), strict=True
            ):
                tensor[at + j] = value
            rows.drafts.ahead[at + j], rows.drafts.token[at + j] = j, draft  # type: ignore[union-attr]
            g.room[at + j] = 20 * i + len(out) + 1
        count = len(Chunk(none, 0, len(out), drafts=drafts).accepted(out)) if out[0] >= 0 else 0
        expected_kept[at : at + count] = [10 + i] * count
        if count:
            expected_last[at + count - 1] = 10 + i
        at += len(out)
    g.known.fill_(-1)
    rows.state_slot[at:] = -1
    rows.state_slot[at], rows.batch_slot[at], g.known[at], drawn[at] = 30, 6, 3, 4  # it was drawn before
    expected_kept[at] = expected_last[at] = 30
    begin_guess(rows, drawn.to(device), g)
    assert g.kept.tolist() == expected_kept and g.last.tolist() == expected_last
    assert g.token.tolist() == [*drawn.tolist()[:at], 3, 0] and g.tokens[1].tolist() == drawn.tolist()
    batch_slots = [batch_slot if last >= 0 and i != at else -1 for i, (batch_slot, last) in enumerate(zip(rows.batch_slot.tolist(), expected_last, strict=True))]  # fmt: skip
    assert g.draws.batch_slot.tolist() == batch_slots
    assert g.draws.position.tolist() == (rows.position + 2).tolist()
    for i, last in enumerate(expected_last):
        g.tokens[0, i] = 50 + i if last >= 0 else 0
    g.tokens[0, 3] = -1
    go_on(rows, g)
    assert g.tokens[2].tolist() == g.tokens[0].tolist() == g.token.tolist()
    goes_on = [last >= 0 and i not in (3, at) and int(rows.position[i]) + 1 < int(g.room[i]) for i, last in enumerate(expected_last)]  # fmt: skip
    assert (
        [last >= 0 for last in g.last.tolist()]
        == goes_on
        == [batch_slot >= 0 for batch_slot in g.draws.batch_slot.tolist()]
    )
    assert g.position.tolist() == (rows.position + 1).tolist()
    go_on(rows, g)
    assert g.tokens[3].tolist() == g.tokens[0].tolist() and (g.draws.position == rows.position + 4).all()


def test_ids_behind_a_prompt(device: str) -> None:
    next_ids = torch.arange(128, dtype=torch.int32, device=device)
    next_ids[63], next_ids[100] = -1, -3
    token = torch.empty_like(next_ids)
    follow(next_ids, torch.tensor([500, 501, 502], dtype=torch.int32, device=device), token)
    expected = next_ids.clone()
    expected[63], expected[100] = 500, 502
    assert torch.equal(token, expected)
    with pytest.raises(KernelError, match="a multiple of 64"):
        follow(next_ids[:60], token, token)


@pytest.mark.parametrize(
    ("n", "width", "n_streams"), [(1, 64, 1), (5, 1024, 1), (3, 1600, 1), (3, 64, 4), (2, 1600, 2)]
)
def test_pairs(n: int, width: int, n_streams: int, device: str) -> None:
    """The reference; of one stream the bits of the norm of a layer."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    s, whole = n_streams, n_streams * width
    x, hidden, w_x, w_hidden = random(n, width), random(n, whole), random(width) / 9, random(whole) / 9
    out = torch.full((n * s, 2 * width), float("nan"), dtype=torch.bfloat16, device=device)
    embedded = x.clone().to(device)
    residual = embedded if s == 1 else torch.ones(n * s, width, device=device)
    norms = w_x.to(device), w_hidden.to(device)
    draft_pair(embedded, hidden.to(device), *norms, 1e-6, out, residual)
    assert (residual == 0).all()
    again, hidden = torch.empty_like(out), hidden.bfloat16()
    draft_pair(x.to(device), hidden.to(device), *norms, 1e-6, again)
    assert torch.equal(again, out)
    parts = rms_norm(x, w_x, 1e-6).repeat_interleave(s, 0), rms_norm(hidden.float(), w_hidden, 1e-6).view(n * s, width)
    torch.testing.assert_close(out.float().cpu(), torch.cat(parts, -1), rtol=0.01, atol=1e-3)
    if s > 1:
        return
    for half, w in ((x.to(device), w_x), (hidden.float().to(device), w_hidden)):
        one = torch.empty((n, width), dtype=torch.bfloat16, device=device)
        add_norm(half, None, w.to(device), 1e-6, one)
        assert torch.equal(one, out[:, :width] if w is w_x else out[:, width:])
