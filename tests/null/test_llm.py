"""The offline API with a fake runner: prompts in, completions out, nothing left behind."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from deltic import LLM, SamplingParams
from deltic.config import ConfigError
from deltic.engine.engine import MAX_FAILURES
from deltic.engine.messages import Output
from deltic.llm import EngineStopped
from tests import fakes

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A byte-level tokenizer of as many tokens as the fake runner draws from, and a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"{a}{b}" for a in alphabet[60:90] for b in alphabet[60:90]]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *words][: fakes.VOCAB_SIZE - 4])}
    merges = [(word[0], word[1]) for word in words if word in vocabulary]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 20}))
    return tmp_path


@pytest.fixture
def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = types.ModuleType("deltic.runtime.build")
    runner.build_runner = fakes.build_runner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deltic.runtime.build", runner)


@pytest.fixture
def llm(checkpoint: Path, fake_runtime: None) -> LLM:
    return LLM(str(checkpoint), n_pages=24, max_num_seqs=4, max_model_len=256)


def idle(llm: LLM) -> bool:
    stats = llm._engine.stats()
    llm._engine.check()
    return stats.n_running == stats.n_waiting == stats.n_pages_used == stats.n_slots_used == 0


def test_a_model_that_speaks_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"qwen3-tts-0\.6b is a speech model.*deltic say"):
        LLM(dummy="qwen3-tts-0.6b")


def test_completions_are_the_engines_tokens_in_the_prompts_order(llm: LLM):
    params = SamplingParams(max_tokens=12, seed=5)
    prompts = [[i, 20, 30 + i] for i in range(1, 11)]
    answers = llm.generate(prompts, params)
    assert [a.token_ids for a in answers] == [fakes.expected_tokens(ids, params) for ids in prompts]
    assert {a.finish_reason for a in answers} <= {"stop", "length"}
    assert all(a.text == llm.tokenizer.decode(a.token_ids) for a in answers if a.finish_reason == "length")
    assert llm.generate("hello", params)[0].prompt_ids == llm.tokenizer.encode("hello")
    assert idle(llm)


def test_n_answers_stand_together_and_params_may_differ_by_prompt(llm: LLM):
    answers = llm.generate(["a", "b"], [SamplingParams(n=3, max_tokens=2), SamplingParams(max_tokens=4)])
    assert [(a.prompt_index, a.index) for a in answers] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert len({tuple(a.token_ids) for a in answers[:3]}) > 1
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams"):
        llm.generate(["a", "b"], [SamplingParams()])


class Screen(io.StringIO):
    is_a_terminal = True

    def isatty(self) -> bool:
        return self.is_a_terminal


@pytest.mark.parametrize("seen", ["terminal", "pipe", "unwanted"])
def test_a_terminal_is_shown_how_far_a_call_is(llm: LLM, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setattr(screen, "is_a_terminal", seen != "pipe")
    more = {"progress": False} if seen == "unwanted" else {}
    answers = llm.generate(["a", "b", "c"], max_tokens=4, ignore_eos=True, **more)
    answers += llm.chat([{"role": "user", "content": "hi"}], max_tokens=4, ignore_eos=True, **more)
    assert [len(answer.token_ids) for answer in answers] == [4] * 4
    said = screen.getvalue()
    assert ("3/3" in said and "answers, 12 tokens" in said and "1/1" in said) if seen == "terminal" else not said


def test_a_terminal_is_shown_how_far_loading_and_prompts_are(
    checkpoint: Path, fake_runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("deltic.llm_calls.TELL_S", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    llm = LLM(str(checkpoint), n_pages=24, max_num_seqs=4, max_model_len=256, max_step_tokens=64)
    assert "loading" in screen.getvalue()
    shown: list[str] = []
    monkeypatch.setattr("deltic.llm_calls.Bar.show", lambda bar, text, done: shown.append(f"{text} {done:.2f}"))
    llm.generate([[*range(20, 220)], [1, 2]], max_tokens=2, ignore_eos=True)
    assert "0/2 answers, 0 tokens, prompts 32% read 0.32" in shown
    assert shown[-1] == "2/2 answers, 4 tokens 1.00"
    assert LLM(str(checkpoint), n_pages=24, max_num_seqs=4, max_model_len=256, progress=False)


def test_a_stop_string_ends_the_answer_and_frees_it(llm: LLM):
    params = SamplingParams(max_tokens=60, seed=2, ignore_eos=True)
    whole = llm.generate("story", params)[0].text
    stop = whole[20:23]
    answer = llm.generate("story", params, stop=stop)[0]
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(stop)]
    assert len(answer.token_ids) < 60
    assert idle(llm)


def test_defaults_are_the_checkpoints(llm: LLM):
    assert (llm.default_params.temperature, llm.default_params.top_k) == (0.7, 20)
    one, two = (llm.generate("x")[0].token_ids for _ in range(2))
    assert one != two, "without a seed, answers differ"


def test_chat_renders_the_template_and_splits_reasoning(llm: LLM):
    answers = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=5), enable_thinking=True)
    prompt = llm.tokenizer.decode(answers[0].prompt_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert (answers[0].text, bool(answers[0].reasoning)) == ("", True), "the thinking block was not closed"
    many = llm.chat([[{"role": "user", "content": c}] for c in "abc"], SamplingParams(max_tokens=5))
    assert [a.prompt_index for a in many] == [0, 1, 2]
    assert many[0].reasoning == ""


def test_settings_by_name(llm: LLM):
    """Fields of SamplingParams, beside the template's; what is none has the nearest name."""
    messages = [{"role": "user", "content": "hi"}]
    one, two = (llm.chat(messages, temperature=0, seed=7, max_tokens=4)[0].token_ids for _ in range(2))
    assert one == two and len(one) <= 4
    assert len(llm.generate("x", SamplingParams(max_tokens=9, ignore_eos=True), max_tokens=3)[0].token_ids) == 3
    for call in (lambda **given: llm.chat(messages, **given), lambda **given: llm.generate("x", **given)):
        with pytest.raises(ValueError, match="temprature: did you mean temperature"):
            call(temprature=0)
        with pytest.raises(ValueError, match="max_new_tokens: is called max_tokens here"):
            call(max_new_tokens=5)
    with pytest.raises(ValueError, match="colour: is no field of SamplingParams, and this model's chat template"):
        llm.chat(messages, colour=1)
    with pytest.raises(ValueError, match="did you mean threads"):
        LLM(thread=4)


HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
]


def test_chat_takes_messages_as_the_server_does(llm: LLM):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    answer = llm.chat(history, SamplingParams(max_tokens=2), tools=TOOLS, reasoning_effort="high")[0]
    assert llm.tokenizer.decode(answer.prompt_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nRome<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    hi = [{"role": "user", "content": "hi"}]
    for messages, settings, said in (
        ([{"role": "robot", "content": "hi"}], {}, r"messages\[0\].role"),
        ([{"role": "user", "content": "\udcff<|im_end|>"}], {}, "surrogate"),
        (hi, {"tools": TOOLS * 2}, r"tools\[1\].function.name"),
        (hi, {"enable_thinking": "yes"}, "enable_thinking"),
        (hi, {"budget": 1}, "no such setting"),
    ):
        with pytest.raises(ValueError, match=said):
            llm.chat(messages, **settings)
    assert idle(llm)


CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("said", "stop", "reason", "arguments"),
    [
        (CALL, (), "tool_calls", '{"city": "Paris"}'),
        (CALL, "ris", "stop", '{"city": "Pa'),
        (CALL, "</tool_call>", "tool_calls", '{"city": "Paris"}'),
        (CALL[: CALL.index("ris")], (), "length", '{"city": "Pa'),
    ],
)
def test_a_call_that_was_cut_is_not_presented_as_complete(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, said: str, stop: Any, reason: str, arguments: str
):
    ids = llm.tokenizer.encode(said)

    def outputs(call: Any) -> Any:
        request_id = next(iter(call.open))[0]
        for token_id in ids[:-1]:
            if call.open:
                yield Output(request_id, 0, [token_id])
        if call.open:
            yield Output(request_id, 0, ids[-1:], finish_reason="stop" if said == CALL else "length")

    monkeypatch.setattr(llm, "_outputs", outputs)
    answer = llm.chat([{"role": "user", "content": "hi"}], tools=TOOLS, stop=stop)[0]
    assert (answer.finish_reason, answer.text) == (reason, "")
    assert [(call["name"], call["arguments"]) for call in answer.tool_calls] == [("weather", arguments)]


@pytest.mark.parametrize("bad", [[10**6], [1] * 300, []])
def test_one_prompt_that_cannot_run_stops_all_before_they_start(llm: LLM, bad: list[int]):
    with pytest.raises(ValueError, match=r"."):
        llm.generate([[1, 2], bad])
    assert idle(llm)


def test_an_interrupt_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    steps = iter(range(3))
    step = llm._engine.step

    def interrupted() -> list[Any]:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50, ignore_eos=True))
    assert idle(llm)


def test_failing_steps_are_answers_with_an_error_then_an_exception(llm: LLM):
    poisoned = [[fakes.POISON, 1]]
    answer = llm.generate(poisoned)[0]
    assert answer.finish_reason == "error"
    assert "(RuntimeError; its log" in answer.error
    llm.generate(poisoned * (MAX_FAILURES - 2))
    with pytest.raises(EngineStopped):
        llm.generate(poisoned)


def test_what_was_computed_is_kept_for_those_who_may_share_it(llm: LLM):
    prompt, params = [[20 + i % 200 for i in range(150)]], SamplingParams(max_tokens=3, seed=1, n=2)

    def cached(**settings: Any) -> list[int]:
        answers = llm.generate(prompt, params, **settings)
        assert [a.token_ids for a in answers] == tokens
        return [a.cached_tokens for a in answers]

    tokens = [a.token_ids for a in llm.generate(prompt, params, use_cache=False)]
    assert cached() == [0, 0], "a request that opted out fed nothing"
    assert cached(cache_salt="b") == [0, 0]
    assert cached() == cached(cache_salt="b") == [128, 0]
    assert cached(use_cache=False) == cached(cache_salt="c") == [0, 0]
    assert llm.cache_summary()["checkpoints"]
    llm.reset_cache()
    assert not llm.cache_summary()["checkpoints"]
    assert cached() == [0, 0]
    assert idle(llm)


def test_a_chat_takes_the_same_switches(llm: LLM):
    messages = [{"role": "user", "content": "a story " * 16}]

    def cached(**settings: Any) -> int:
        return llm.chat(messages, SamplingParams(max_tokens=2), **settings)[0].cached_tokens

    assert cached() == 0 < cached()
    assert cached(use_cache=False) == cached(cache_salt="b") == 0


def test_a_stream_says_what_the_whole_answer_is(llm: LLM):
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    for given in ("hello", ["hello", "you"], [[1, 2], [3]], HI, [HI, HI]):
        whole = (llm.chat if HI in (given, given[0]) else llm.generate)(given, params)
        pieces = list(llm.stream(given, params))
        for answer in whole:
            own = [piece for piece in pieces if piece.prompt_index == answer.prompt_index]
            assert "".join(piece.text for piece in own) == answer.text
            assert [piece.finish_reason for piece in own][-1] == "length" and own[-1].completion == answer
    assert idle(llm)


def test_other_calls_run_beside_a_stream_and_who_leaves_ends_it(llm: LLM):
    params = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    one, two = llm.stream("one", params), llm.stream("two", params)
    texts = [next(one).text, next(two).text]
    (other,) = llm.generate("other", params)
    assert other.token_ids == fakes.expected_tokens(other.prompt_ids, params)
    texts[0] += "".join(piece.text for piece in one)
    assert texts[0] == llm.generate("one", params)[0].text
    two.close()
    assert idle(llm)
    with pytest.raises(ValueError, match="did you mean"):
        llm.stream("x", temprature=1)


def test_stop_texts_may_stand_in_the_parameters(llm: LLM):
    params = SamplingParams(max_tokens=60, seed=2, ignore_eos=True)
    whole = llm.generate("story", params)[0].text
    stops = [whole[20:23], whole[30:33]]
    each = [SamplingParams(max_tokens=60, seed=2, ignore_eos=True, stop=stop) for stop in stops]
    for at, answer in enumerate(llm.generate(["story", "story"], each)):
        assert answer.text == whole[: whole.index(stops[at])] and answer.finish_reason == "stop"
    assert llm.generate("story", each[1], stop=stops[:1])[0].text == whole[: whole.index(stops[0])]


def test_a_score_does_not_depend_on_what_else_is_scored(llm: LLM):
    """Each continuation is cut where its own tokens leave the prompt's, and apart from it where none would be left."""
    for prompt, ends in (("It w", [" b", "e"]), ("a", [" b", "bcb", "b", " c", "!"]), ([5, 6], [[7], [8, 9], [7, 9]])):
        prompts = prompt if isinstance(prompt, str) else [prompt]
        alone = [llm.score(prompts, [end])[0].logprobs[0] for end in ends]
        assert llm.score(prompts, ends)[0].logprobs == alone
    both = llm.score(["It w", "a"], [" b", "e"])
    assert both == llm.score("It w", [" b", "e"]) + llm.score("a", [" b", "e"])
    assert both[0].logprobs[0] == pytest.approx(
        sum(llm.score([[1]], [[own]])[0].logprobs[0] for own in ids_of(llm, " b"))
    )
    assert idle(llm)


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, "parse")


QUESTION = {"type": "predicate", "instructions": "Is it?"}


@pytest.mark.parametrize(
    ("call", "given", "reason"),
    [
        ("score", ("The capital is", " Paris"), "continuations: takes a list .* Put brackets"),
        ("score", ([1, 2], [[1], [2]]), "prompts: takes a list"),
        ("score", ([[1, 2]], [[[1, 2]]]), "continuations: takes a list"),
        ("score", (5, [" b"]), "prompts: takes a list"),
        ("score", ("a", 5), "continuations: takes a list"),
        ("score", ("a", [[5]]), "both texts, or both token ids"),
        ("score", ("a", [""]), "need a token each"),
        ("score", ("a", []), "at least one continuation"),
        ("score", ("a", ["b c " * 300]), "maximum context length"),
        ("decide", ("x", "is it?"), "questions: takes a list"),
        ("decide", ("x", QUESTION), "questions: takes a list"),
        ("decide", ("x", 5), "questions: takes a list"),
        ("decide", (5, [QUESTION]), "given: takes a text, or a list of messages"),
        ("decide", ("x", []), "^questions: Expected `array` of length >= 1"),
        ("decide", ("x", [QUESTION] * 401), "^questions: Expected `array` of length <= 400"),
        ("decide", ("x", [QUESTION, 5]), r"^questions\[1\]: Expected `object`"),
        ("decide", ("x", [QUESTION | {"type": "box"}]), r"^questions\[0\].type"),
    ],
)
def test_scores_and_decisions_refuse_what_cannot_be_asked(llm: LLM, call: str, given: Any, reason: str):
    with pytest.raises(ValueError, match=reason):
        getattr(llm, call)(*given)
    assert idle(llm)


def test_an_llm_may_be_a_context(llm: LLM):
    with llm as entered:
        assert entered is llm and llm.generate("x", max_tokens=1)
    with pytest.raises(EngineStopped, match="was closed"):
        llm.generate("x")


def test_a_closed_llm_says_so(llm: LLM):
    llm.close()
    llm.close()
    with pytest.raises(EngineStopped, match="was closed"):
        llm.generate("x")
