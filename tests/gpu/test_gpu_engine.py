"""The engine on a GPU, or on its kernels interpreted: against the oracle, and purity (P1 to P4, P6) over whole requests.

What is compared are the log-probabilities that a request is answered with: 32-bit floats of the drawn token and of the likeliest
ones, which change when a logit does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import pytest
import torch

from deltic.bench.gpu import n_launches
from deltic.bench.quality import Document, readings
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.events import ReplayStats
from deltic.engine.guides import Guide, Guides, Vocabulary
from deltic.engine.messages import Branch, Constraint, Output, Request, SamplingParams
from deltic.engine.step import Chunk
from tests.plain import plain
from tests.reference.layers import stochastic_bfloat16
from tests.reference.model import forward
from tests.tiny import byte_tokenizer, tiny_checkpoint
from tests.tiny_config import N_REAL_VOCAB

pytest.importorskip("triton")
from deltic.models.qwen.gpu_buffers import GpuMemory
from deltic.runtime.build import build_runner
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.prompt_logprobs import PromptScorer
from deltic.runtime.gpu.record import Recording, record_all
from deltic.runtime.gpu.text import GpuTextRunner

HAS_GPU = torch.cuda.is_available()
KINDS = ("dense", "moe", "next", "flash")
IN_BFLOAT16 = "dense, bfloat16 states"
N_TOKENS = 48 if HAS_GPU else 4
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: minutes in the interpreter, or nothing to see there")

LOGPROB_TOLERANCE = 0.12
"""The oracle rounds at the same places but for the projections, which a GPU's prefill keeps in bfloat16, and adds in another
order; an exchange of two experts of nearly equal weight, which these random routers have at a sixth of the positions, is larger."""

Entry = tuple[int, float, tuple[tuple[int, float], ...]]


@cache
def runner(kind: str, levers: tuple[str, ...] = ()) -> GpuTextRunner:
    kind, _, states = kind.partition(", ")
    config = EngineConfig(
        model=str(tiny_checkpoint(kind)), state_dtype="bfloat16" if states else "float32", max_num_seqs=128 if HAS_GPU else 4, max_model_len=1024 if HAS_GPU else 256,
        max_step_tokens=1024 if HAS_GPU else 128, n_pages=2048 if HAS_GPU else 24, n_checkpoints=8, lever=levers,
        cache_host_gb=0.2,
    )  # fmt: skip
    return build_runner(config, lambda stage, done: None, Gpu(levers))


@contextlib.contextmanager
def without_syncs() -> Iterator[None]:
    """On a GPU whatever waits for it raises, except events and the batch slots that say so."""
    if HAS_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if HAS_GPU:
            torch.cuda.set_sync_debug_mode("default")


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


def request(name: str, ids: list[int], n_tokens: int = N_TOKENS, **params: Any) -> Request:
    arguments = {"temperature": 0.0, "ignore_eos": True, "max_tokens": n_tokens, "logprobs": 10, **params}
    return Request(id=name, prompt_ids=ids, params=SamplingParams(**arguments))


def answers(engine: Engine, preempt: dict[int, str] | None = None, spoil_at: int = -1) -> dict[str, list[Entry]]:
    """Everything drawn, by request id and index. preempt: which request loses its batch slot before which step. spoil_at: the step before
    which nothing in the memory is finite any more."""
    found: dict[str, list[Entry]] = {}
    n_steps, recorded = 0, engine.stats().replays
    while engine.has_work():
        for sequence in [*engine.scheduler._decodes, *engine.scheduler._prefills]:
            if (preempt or {}).get(n_steps) == sequence.request.id:
                engine.scheduler._preempt(sequence)
        if n_steps == spoil_at:
            for memory in engine.runner.memory:  # type: ignore[attr-defined]
                _spoil(memory)
        with without_syncs():
            outputs = engine.step()
        n_steps += 1
        for output in outputs:
            _note(found, output)
    engine.check()
    replays = engine.stats().replays
    if replays is not None and recorded is not None:  # else it is of a CPU
        assert replays.n_recorded == recorded.n_recorded and replays.n_replayed > recorded.n_replayed
    return found


@needs_gpu
@pytest.mark.parametrize("waits", ["item", "cpu", "tolist", "nonzero"])
def test_the_check_sees_what_waits(waits: str) -> None:
    x = torch.ones(4, device="cuda")[:1]
    with pytest.raises(RuntimeError, match="synchroniz"), without_syncs():
        getattr(x, waits)()


def _spoil(memory: GpuMemory) -> None:
    for part in (memory.pages, memory.states, memory.columns):
        if HAS_GPU:
            torch.cuda.synchronize()
        part.fill_(torch.nan)
        if HAS_GPU:
            torch.cuda.synchronize()


def _note(found: dict[str, list[Entry]], output: Output) -> None:
    assert output.error is None, output.error
    for entry in output.logprobs or []:
        found.setdefault(f"{output.id}/{output.index}", []).append((entry.token_id, entry.logprob, tuple(entry.top)))


def alone(kind: str, ids: list[int], levers: tuple[str, ...] = (), **params: Any) -> list[Entry]:
    engine = Engine(runner(kind, levers))
    engine.add(request("a", ids, **params))
    return answers(engine)["a/0"]


@pytest.mark.parametrize(
    "kind", [*(KINDS if HAS_GPU else ("dense", "moe", "flash")), pytest.param(IN_BFLOAT16, marks=pytest.mark.long)]
)
def test_against_the_oracle(kind: str) -> None:
    """Prefill and decode, across a page's end: log-probabilities within the tolerance, tokens equal where it is clear."""
    inner = runner(kind)
    n_far = 0
    lengths = (1, 63, 70, *([200] if kind == "flash" else [])) if HAS_GPU else (75 if kind == "flash" else 62,)
    for length in lengths:
        ids = prompt(length, length)
        drawn = alone(kind, ids)
        tokens = [entry[0] for entry in drawn]
        store = stochastic_bfloat16 if kind == IN_BFLOAT16 else None
        weights, shape = plain(inner.model.weights), inner.plan.shape
        expected = forward(weights, shape, ids + tokens[:-1], precision="bfloat16", store=store)
        expected = expected[length - 1 :, :N_REAL_VOCAB].log_softmax(-1)
        for row, (token, logprob, top) in zip(expected, drawn, strict=True):
            best = row.topk(2).values
            errors = [abs(logprob - float(row[token])), *(abs(value - float(row[other])) for other, value in top[:3])]
            far = max(errors) > LOGPROB_TOLERANCE
            n_far += far
            if not far and best[0] - best[1] > 2 * LOGPROB_TOLERANCE:
                assert token == int(row.argmax())
    assert n_far <= (0 if "dense" in kind else 0.25 * 3 * N_TOKENS)


@needs_gpu
def test_an_older_recording_that_is_freed_ends_no_newer_one() -> None:
    """Python's collector may find a runner that is gone at any allocation, also during a capture."""

    class Gone:
        def __init__(self, recordings: list[Recording]) -> None:
            self.itself, self.recordings = self, recordings

    x, stream = torch.zeros(8, device="cuda"), torch.cuda.Stream()

    def recorded(body: Callable[[], object]) -> list[Recording]:
        return record_all([body], stream, lambda done: None, ReplayStats())

    older = recorded(lambda: x.add_(1))

    def allocates() -> None:
        x.add_(1)
        if older:  # the first time, before the capture
            gc.collect()
            Gone([older.pop()])
        else:
            kept = [[i] for i in range(3000)]  # more objects than a collection waits for
            assert len(kept) == 3000

    was = gc.get_threshold()
    gc.set_threshold(500, 1, 1)
    try:
        recorded(allocates)
    finally:
        gc.set_threshold(*was)
    assert gc.isenabled()


@needs_gpu
def test_fitting_the_cost_of_a_step_leaves_nothing_behind() -> None:
    ids = prompt(3, 62)
    expected = alone("dense", ids)
    engine = Engine(runner("dense"), 250.0)
    engine.fit_cost()
    assert engine.scheduler.cost is not None and len(engine.scheduler.cost.curve) > 1
    engine.add(request("a", ids))
    assert answers(engine)["a/0"] == expected


@needs_gpu
@pytest.mark.parametrize("kind", [*KINDS, pytest.param(IN_BFLOAT16, marks=needs_gpu)])
def test_alone_and_among_others(kind: str) -> None:
    """P1: other sequences, of other lengths, come, prefill beside its decodes, and go."""
    ids = prompt(5, 70)
    expected = alone(kind, ids)
    engine = Engine(runner(kind))
    engine.add(request("a", ids))
    for i in range(127):
        engine.add(request(f"other {i}", prompt(100 + i, 1 + 37 * i % 140), n_tokens=2 + i % N_TOKENS))
    assert answers(engine)["a/0"] == expected


@needs_gpu
@pytest.mark.parametrize("kind", [*KINDS, IN_BFLOAT16])
def test_any_cut_of_the_prompt(kind: str) -> None:
    """P2: chunks of 64 tokens and of all of them."""
    ids = prompt(6, 700)
    expected = alone(kind, ids, n_tokens=3)
    engine = Engine(runner(kind))
    engine.scheduler.max_step_tokens = 64
    engine.add(request("a", ids, n_tokens=3))
    assert answers(engine)["a/0"] == expected


def hit_and_cold(inner: GpuTextRunner, alone: Callable[..., list[Entry]]) -> None:
    """P3: behind a prefix that an earlier request left, and with an answer in the history that was decoded before. alone: a prompt's
    answer in an engine of its own.
    """
    ids = prompt(7, 300)
    engine = Engine(inner)
    engine.add(request("a", ids))
    first = answers(engine)["a/0"]
    longer = ids + [entry[0] for entry in first] + prompt(8, 70)
    engine.add(request("b", longer, n_tokens=3))
    warm = answers(engine)["b/0"]
    assert engine.cache.stats.n_hits == 1
    assert warm == alone(longer, n_tokens=3)


@needs_gpu
@pytest.mark.parametrize("kind", [*KINDS, pytest.param(IN_BFLOAT16, marks=needs_gpu)])
def test_hit_and_cold(kind: str) -> None:
    hit_and_cold(runner(kind), partial(alone, kind))


def preempted(inner: GpuTextRunner, alone: Callable[..., list[Entry]]) -> None:
    """P4: it loses its batch slot while it decodes, with and without host memory for its state."""
    ids = prompt(9, 70)
    expected = alone(ids)
    for keeps in (True, False):
        engine = Engine(inner)
        if not keeps:
            engine.cache._park = lambda sequence: None  # type: ignore[method-assign]
        engine.add(request("a", ids))
        assert answers(engine, preempt={3: "a"})["a/0"] == expected


@needs_gpu
@pytest.mark.parametrize("kind", [*KINDS, IN_BFLOAT16])
def test_preempted(kind: str) -> None:
    preempted(runner(kind), partial(alone, kind))


@needs_gpu
def test_preempted_with_penalties_among_others() -> None:
    """P4, where a batch slot is somebody else's meanwhile: penalties count every token once, the one drawn ahead included."""
    ids = prompt(17, 70)
    params = {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "temperature": 1.0, "seed": 3}
    expected = alone("dense", ids, **params)
    engine = Engine(runner("dense"))
    engine.add(request("a", ids, **params))
    for i in range(40):
        engine.add(request(f"other {i}", prompt(300 + i, 30 + i), n_tokens=3 + i % 20, frequency_penalty=0.5))
    assert answers(engine, preempt={4: "a", 9: "a"})["a/0"] == expected


@needs_gpu
def test_several_of_one_prompt_and_seeds() -> None:
    """n > 1 forks pages and states; a seeded draw is the same alone and beside its siblings (P6)."""
    ids = prompt(10, 70)
    expected = alone("dense", ids, temperature=1.0, seed=7)
    engine = Engine(runner("dense"))
    engine.add(request("a", ids, temperature=1.0, seed=7, n=3))
    found = answers(engine)
    assert found["a/0"] == expected
    assert len({tuple(e[0] for e in found[f"a/{i}"]) for i in range(3)}) > 1


@needs_gpu
def test_stop_tokens_end_on_the_device() -> None:
    """A sequence that draws its stop token ends there, and those beside it do not notice."""
    ids, other = prompt(11, 30), prompt(12, 64)
    drawn, expected = alone("dense", ids), alone("dense", other)
    stop = drawn[1][0]
    engine = Engine(runner("dense"))
    engine.add(request("a", ids, stop_token_ids=(stop,)))
    engine.add(request("b", other))
    found = answers(engine)
    assert found["a/0"] == drawn[: [entry[0] for entry in drawn].index(stop) + 1]
    assert found["b/0"] == expected


GRAMMAR = llguidance.LLMatcher.grammar_from_lark("start: /[ab]([0-9][ab])*!/")
LETTERS = {byte_tokenizer().token_to_id(letter): letter for letter in "ab0123456789!"}


def guided_request(name: str, ids: list[int], n_tokens: int = N_TOKENS, **params: Any) -> Request:
    """One that thinks for two tokens, and then follows GRAMMAR."""
    end = N_REAL_VOCAB - 1
    constraint = Constraint(grammar=GRAMMAR, think_end_id=end, think_budget=2, close_ids=(end,))
    return request(name, ids, n_tokens, constraint=constraint, temperature=1.0, **params)


def run(
    *requests: Request, preempt: dict[int, str] | None = None, keeps: bool = True, spoil_at: int = -1
) -> dict[str, list[Entry]]:
    """Their answers, all at once. keeps: there is host memory for a preempted one's state."""
    file = Path(tiny_checkpoint("dense")) / "tokenizer.json"
    engine = Engine(runner("dense"), vocabulary=Vocabulary(file.read_text))
    if not keeps:
        engine.cache._park = lambda sequence: None  # type: ignore[method-assign]
    for r in requests:
        engine.add(r)
    found = answers(engine, preempt, spoil_at)
    assert (engine.stats().n_recomputed > 0) == (spoil_at >= 0)
    undrawn = engine.runner._undrawn  # type: ignore[attr-defined]
    for ended in [*engine.runner._ahead]:  # type: ignore[attr-defined]
        assert ended.finish_reason is not None
        engine.runner._drop(ended)  # type: ignore[attr-defined]
    assert undrawn.n_free == engine.info.max_num_seqs
    engine.close(0)
    return found


def follows(entries: list[Entry]) -> bool:
    """Whether the forced end of the thought and what the grammar admits are there."""
    tokens = [entry[0] for entry in entries]
    text = "".join(LETTERS[token] for token in tokens[3:])
    return tokens[2] == N_REAL_VOCAB - 1 and re.fullmatch(r"[ab]([0-9][ab])*([0-9]|!)?", text) is not None


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the forwards that are started from now on."""
    n_rows: list[int] = []
    forward = GpuTextRunner._forward

    def counting(self: GpuTextRunner, chunks: list[Chunk]) -> int:
        n_rows.append(len(chunks))
        return forward(self, chunks)

    monkeypatch.setattr(GpuTextRunner, "_forward", counting)
    return n_rows


@needs_gpu
def test_constrained_beside_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thoughts that run ahead, their forced ends, grammars: nobody's bits follow from the others, and all decode in one forward."""
    n = 8 if HAS_GPU else 1
    guided = [guided_request(f"g{i}", prompt(40 + i, 5 + i), seed=i) for i in range(n)]
    free = [request(f"f{i}", prompt(60 + i, 9 + i), temperature=1.0, seed=i) for i in range(n)]
    expected = {k: v for r in guided + free for k, v in run(r).items()}
    rows = count_forwards(monkeypatch)
    monkeypatch.setattr("deltic.engine.guides.LONGEST_WAIT_S", 1.0)  # nobody sits out a step
    monkeypatch.setattr("deltic.engine.guides.SLOW_S", 1.0)
    monkeypatch.setattr(Guides, "collect", lambda self, decodes, step_s: _collect(self, decodes, 1e9))
    assert run(*guided, *free) == expected
    assert all(follows(expected[f"g{i}/0"]) for i in range(n))
    assert len(rows) <= N_TOKENS + 6 and sum(rows) >= 2 * n * (N_TOKENS - 1) * 0.6


@needs_gpu
def test_words_that_may_and_may_not_come() -> None:
    """Their masks follow from the token that was drawn last, so only the forward runs ahead of it."""
    allowed = sum(1 << id for id in range(5, 12)).to_bytes(2, "little")
    few = Constraint(allowed=allowed, bad_ids=((5,), (6, 7), (8, 9, 10)))
    one = request("one", prompt(70, 9), constraint=few, temperature=1.0, seed=1)
    two = request("two", prompt(71, 40), constraint=few, temperature=1.0, seed=2, n=2 if HAS_GPU else 1)
    expected = run(one) | run(two)
    assert run(one, two, preempt={4: "one"}) == expected
    for entries in expected.values():
        tokens = bytes(entry[0] for entry in entries)
        assert len(tokens) == N_TOKENS and set(tokens) <= set(range(6, 12))
        assert bytes((6, 7)) not in tokens and bytes((8, 9, 10)) not in tokens


_collect = Guides.collect


@needs_gpu
def test_late_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence whose mask takes longer than steps do sits them out; what it had computed ahead is drawn from when the mask is there."""
    slow, quick = (guided_request("slow", prompt(50, 70), seed=1), guided_request("quick", prompt(51, 6), seed=2))
    free = request("free", prompt(52, 64), n_tokens=3 * N_TOKENS)
    expected = run(slow) | run(quick) | run(free)
    do = Guides._do

    def dawdle(self: Guides, guides: list[Guide], tokens: list[int], words: Any = None) -> None:
        if any(guide.sequence.request.id == "slow" for guide in guides):
            time.sleep(0.004 if HAS_GPU else 0.5)
        do(self, guides, tokens, words)

    monkeypatch.setattr(Guides, "_do", dawdle)
    assert run(slow, quick, free) == expected


@needs_gpu
@pytest.mark.parametrize("keeps", (True, False))
def test_preempted_in_its_grammar(keeps: bool) -> None:
    """P4: with logits computed ahead from which nothing was drawn, and its batch slot and state slot somebody else's meanwhile."""
    guided = guided_request("a", prompt(53, 70), seed=3, frequency_penalty=0.5)
    other = guided_request("b", prompt(54, 40), seed=4)
    late = request("c", prompt(55, 66))
    expected = run(guided) | run(other) | run(late)
    preempt = {4: "a", 6: "b", 9: "a"} if HAS_GPU else {4: "a"}
    assert run(guided, other, late, preempt=preempt, keeps=keeps) == expected


@pytest.mark.long
@pytest.mark.parametrize("at", [2, pytest.param(1, marks=needs_gpu), pytest.param(6, marks=needs_gpu)])
def test_memory_that_is_not_finite(at: int) -> None:
    """Whoever runs when all of it is spoilt is computed once more, what ran ahead is dropped, and no bit is another."""
    n = 2 if HAS_GPU else 1
    asked = [request("a", prompt(56, 70 if HAS_GPU else 20), frequency_penalty=0.5, n=n, seed=5, temperature=1.0)]
    if HAS_GPU:
        asked += [guided_request("b", prompt(57, 30), seed=4), request("c", prompt(58, 500))]
    expected: dict[str, list[Entry]] = {}
    for one in asked:
        expected |= run(one)
    assert run(*asked, spoil_at=at) == expected


@needs_gpu
def test_constrained_and_preempted() -> None:
    """P4: before the step that finds the end of the thought drawn ahead; and where forced tokens, which penalties count, come back."""
    ids = prompt(9, 5)

    def answer(step: int | None, keeps: bool, **params: Any) -> list[Entry]:
        engine = Engine(runner("dense"))
        if not keeps:
            engine.cache._park = lambda sequence: None  # type: ignore[method-assign]
        engine.add(request("a", ids, n_tokens=8, **params))
        return answers(engine, {} if step is None else {step: "a"})["a/0"]

    end = alone("dense", ids, n_tokens=3)[2][0]
    own = {"constraint": Constraint(think_end_id=end, begin_ids=(7, 8))}
    assert answer(2, True, **own) == answer(None, True, **own)
    end = N_REAL_VOCAB - 1
    forced = Constraint(think_end_id=end, think_budget=1, close_ids=(end, 9), begin_ids=(7, 8))
    params = {"constraint": forced, "frequency_penalty": 2.0, "temperature": 1.0, "seed": 3}
    expected = answer(None, False, **params)
    assert answer(6, False, **params) == expected
    history = runner("dense").workspace.parameters.history[:, : len(ids) + 8].tolist()
    assert ids + [entry[0] for entry in expected] in history, "what penalties count"


@needs_gpu
@pytest.mark.parametrize("lever", ("run_ahead=off", "silu_epilogue=off", "pdl=off", "graphs=off"))
def test_levers_that_say_exact_are(lever: str) -> None:
    """Every lever that says it leaves the bits as they are does so."""
    ids = prompt(13, 67)
    assert alone("dense", ids, (lever,)) == alone("dense", ids)


@needs_gpu
def test_prompt_logprobs() -> None:
    """They come from the same prefill, and are the oracle's within the tolerance."""
    inner, ids = runner("dense"), prompt(14, 70)
    engine = Engine(inner)
    engine.add(request("a", ids, n_tokens=1, prompt_logprobs=2))
    outputs = [output for _ in range(20) if engine.has_work() for output in engine.step()]
    entries = list(outputs[0].prompt_logprobs or ())
    assert entries[0] is None and len(entries) == len(ids)
    expected = forward(plain(inner.model.weights), inner.plan.shape, ids, precision="bfloat16")[
        :, :N_REAL_VOCAB
    ].log_softmax(-1)
    for i, entry in enumerate(entries[1:]):
        assert entry is not None and entry.token_id == ids[i + 1]
        assert abs(entry.logprob - float(expected[i, ids[i + 1]])) < LOGPROB_TOLERANCE
    read = list(readings(inner, [Document(ids, [False] * 60 + [True] * 10)]))  # as `deltic bench quality` does
    assert sum(n for *_, n in read) == len(ids)
    found = [float(row[target]) for targets, log_q, _ in read for row, target in zip(log_q, targets, strict=True)]
    assert found == pytest.approx([entry.logprob for entry in entries[60:] if entry is not None], abs=1e-4)


@pytest.mark.long
def test_branches_behind_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scores have the bits of a prompt of their own, in company, behind what the cache has, and alone."""
    inner, ids = runner("dense"), prompt(15, 70)
    start = PromptScorer._start

    def placed(scorer: PromptScorer, logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, k: int) -> Any:
        assert not (rows.data_ptr() | targets.data_ptr()) % 16, "another pointer is another kernel"
        return start(scorer, logits, rows, targets, k)

    monkeypatch.setattr(PromptScorer, "_start", placed)
    branches = [Branch([], [(0, 7), (0, 9)]), Branch(own := prompt(16, 20), [(3, own[3]), (20, 1), (20, 2)])]

    def scores(engine: Engine, *requests: Request) -> list[list[tuple[int, float]]]:
        for each in requests:
            engine.add(each)
        outputs = [output for _ in range(30) if engine.has_work() for output in engine.step()]
        said = {
            (o.id, o.index): [(e.token_id, e.logprob) for e in o.prompt_logprobs if e]
            for o in outputs
            if o.prompt_logprobs
        }
        engine.check()
        return [entries for _, entries in sorted(said.items())]

    nothing = {"n_tokens": 0, "logprobs": None}
    asked = msgspec.structs.replace(request("a", ids, **nothing, n=2), branches=branches)
    engine = Engine(inner)
    together = scores(engine, request("chat", prompt(17, 90), 3), asked)
    assert scores(engine, asked) == together == scores(Engine(inner), asked)
    for whole, entry in (([*ids, 9], together[0][1]), ([*ids, *own, 1], together[1][1])):
        assert scores(Engine(inner), request("b", whole, **nothing, prompt_logprobs=0))[0][-1] == entry


@needs_gpu
def test_real_widths() -> None:
    """P1 and P2 where the vendor's library multiplies too: decodes of 1, 31, 32 and 64 rows, chunks of 64 rows and of thousands."""
    config = EngineConfig(dummy="qwen3.5-0.8b", max_num_seqs=64, max_model_len=8192, memory_gb=20.0, prefix_cache=False)
    inner = build_runner(config, lambda stage, done: None, Gpu())

    def run(ids: list[int], n_others: int = 0, step_tokens: int = 8192, n_tokens: int = 12) -> list[Entry]:
        engine = Engine(inner)
        engine.scheduler.max_step_tokens = step_tokens
        engine.add(request("a", ids, n_tokens))
        for i in range(n_others):
            engine.add(request(f"other {i}", prompt(200 + i, 20 + i), n_tokens=14))
        return answers(engine)["a/0"]

    ids = prompt(15, 100)
    expected = run(ids)
    for n_others in (30, 31, 63):
        assert run(ids, n_others) == expected
    ids = prompt(16, 6000)
    expected = run(ids, n_tokens=2)
    for step_tokens in (64, 1024):
        assert run(ids, step_tokens=step_tokens, n_tokens=2) == expected


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_launches_of_a_decode(kind: str) -> None:
    """At most 8 kernels a layer (with experts 9 beyond 4 rows, where routing is one of its own), and a few around them: counted in
    the graph that was captured."""
    inner = runner(kind)
    n_layers = inner.plan.shape.n_layers
    for n in (1, 128):
        n_most = 9 if kind != "dense" and n > 4 else 8
        # three more in the place of each norm; the index, the n-gram embedding and what begins the streams
        more = 6 * n_layers + 3 + 4 * inner.plan.shape.n_attn_layers + 5 if kind == "flash" else 0
        assert n_launches(inner, n) <= n_most * n_layers + 8 + more
        graphs = inner.recordings.decode(n, 1).graph, inner.recordings.of("draw", n).graph
        assert sum(n_nodes(graph) for graph in graphs if graph) <= n_launches(inner, n) + 2


def n_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph, as the CUDA runtime counts them."""
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    n = ctypes.c_size_t(0)
    assert runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(n)) == 0
    return n.value
