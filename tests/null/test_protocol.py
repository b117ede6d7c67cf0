"""The wire: every field is honoured or refused with a 400 that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltic.config import ConfigError, ModelConfig, ServerConfig
from deltic.engine.messages import EngineInfo, SamplingParams
from deltic.models.fields import CheckpointError
from deltic.server.api import completions, decode, models, protocol
from deltic.server.chat.arguments import given_arguments
from deltic.server.chat.messages import template_messages
from deltic.server.chat.request import NO_DEFAULTS, Chat, Completion, answer_length, checked_params
from deltic.server.errors import ApiError
from deltic.text import SamplingDefaults, TokenizerError

INFO = EngineInfo(
    model_name="m", vocab_size=300, eos_token_ids=[2], max_model_len=100, max_num_seqs=8, max_step_tokens=64, n_pages=9,
    n_slots=8, device="none",
)  # fmt: skip
CONFIG = ServerConfig()
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> SamplingParams:
    """What becomes of a chat with a prompt of 10 tokens."""
    body = json.dumps({"messages": HELLO} | fields).encode()
    asked = protocol.chat_of(decode.parse(body, protocol.ChatRequest))
    template_messages(asked.messages)
    return params(asked)


def completion(**fields: Any) -> SamplingParams:
    return params(completion_of(**fields))


def completion_of(defaults: SamplingDefaults = NO_DEFAULTS, **fields: Any) -> Completion:
    body = json.dumps({"prompt": "hello"} | fields).encode()
    return completions.completion_of(decode.parse(body, completions.CompletionRequest), INFO, defaults)


def params(asked: Chat | Completion) -> SamplingParams:
    return checked_params(asked, answer_length(asked, 10, INFO, None), INFO, CONFIG)


def refused(make: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"].keys() == {"message", "type", "param", "code"}
    return caught.value


def test_every_sampling_field_arrives() -> None:
    given = dict(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, presence_penalty=0.2, frequency_penalty=-0.3,
        repetition_penalty=1.1, logit_bias={5: 1.5}, seed=-(2**63), min_tokens=2, stop_token_ids=(3, 4), ignore_eos=True,
        n=3, prompt_logprobs=2,
    )  # fmt: skip
    expected = SamplingParams(**given, logprobs=4)
    given["stop_token_ids"] = [3, 4]
    assert chat(**given, logprobs=True, top_logprobs=4) == expected
    assert completion(**given, logprobs=4) == expected


def test_defaults() -> None:
    assert chat() == SamplingParams(max_tokens=90)
    assert completion() == SamplingParams(max_tokens=16)
    assert completion(max_tokens=5000).max_tokens == 90
    assert chat(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert chat(temperature=1e-9).temperature == 0.0
    assert (chat(top_p=0).top_p, chat(top_p=0).top_k) == (1.0, 1)
    assert chat(top_k=-1).top_k == 0
    assert completion(max_tokens=0).max_tokens == 1
    assert completion(echo=True, logprobs=3).prompt_logprobs == 3
    every = dict.fromkeys(protocol.ChatRequest.__struct_fields__) | {"messages": HELLO}
    assert chat(**every) == SamplingParams(max_tokens=90)


def test_defaults_of_the_operator(tmp_path: Path) -> None:
    def load(**about: Any) -> SamplingDefaults:
        return SamplingDefaults.load(tmp_path, ModelConfig(**about))

    shipped = tmp_path / "generation_config.json"
    shipped.write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 9}')
    other = tmp_path / "other.json"
    other.write_text('{"top_p": 0.5, "transformers_version": "5"}')
    assert load() == SamplingDefaults(temperature=0.6, top_k=20)
    assert load(generation_config="none") == load(generation_config="vllm") == NO_DEFAULTS
    assert load(generation_config=str(other)) == SamplingDefaults(top_p=0.5)
    assert load(generation_config=str(tmp_path)) == load()
    said = {"temperature": 0, "max_new_tokens": 7}
    defaults = load(override_generation_config=said)
    assert defaults == SamplingDefaults(temperature=0.0, top_k=20, max_new_tokens=7)
    with pytest.raises(ConfigError, match="--generation-config absent: there is no file absent"):
        load(generation_config="absent")
    for wrong, complaint in (
        ({"temperatur": 1}, "'temperatur' is none of temperature, top_p"),
        ({"temperature": -1}, r"Expected `float` >= 0.0 - at `\$.temperature`"),
        ({"top_k": "many"}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ):
        with pytest.raises(ConfigError, match=f"--override-generation-config: .*{complaint}"):
            load(override_generation_config=wrong)
    shipped.write_text('{"temperature": "hot"}')
    assert load(override_generation_config=said).max_new_tokens == 7, "what is overridden need not be right"


def test_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == NO_DEFAULTS
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1], "min_p": null}')
    defaults = SamplingDefaults.load(tmp_path)
    drawn = params(completion_of(defaults, top_k=3))
    assert (drawn.temperature, drawn.top_p, drawn.top_k) == (0.6, 0.95, 3)
    path.write_text('{"do_sample": false, "temperature": 0.6}')
    assert SamplingDefaults.load(tmp_path).temperature == 0.0
    path.write_text('{"top_k": "many"}')
    with pytest.raises(TokenizerError, match="top_k"):
        SamplingDefaults.load(tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="broken JSON"):
        SamplingDefaults.load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**70}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 91}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"cache_prompt": "no"}, "cache_prompt"),
        ({"store": 3}, "store"),
        ({"service_tier": "cheap"}, "service_tier"),
        ({"best_of": 5}, "best_of"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"mirostat": 1}, "mirostat"),
        ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, "repeat_penalty"),
        ({"detokenize": False}, "detokenize"),
        ({"detokenize": False, "return_token_ids": True, "stop": "x"}, "detokenize"),
        ({"request_id": "a b"}, "request_id"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
def test_both_apis_refuse(fields: dict[str, Any], param: str) -> None:
    for make in (chat, completion):
        error = refused(make, **fields)
        assert error.param == param, error.message
        assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "", "x": 1}]}, "messages[0].x"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '"\\udcff"'}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "x": 1}]}, "tools[0].x"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [{"function": {"name": "f"}}, {"function": {"name": "f"}}]}, "tools[1].function.name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a b", "arguments": ""}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "thinking.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"verbosity": "most"}, "verbosity"),
        ({"echo": True}, "echo"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"functions": [3]}, "functions[0]"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_chat_refuses(fields: dict[str, Any], param: str) -> None:
    error = refused(chat, **fields)
    assert error.param == param, error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [[1], [2**80]]}, "prompt[1]"),
        ({"suffix": "end", "prompt": [1]}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 0}, "best_of"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_completions_refuse(fields: dict[str, Any], param: str) -> None:
    error = refused(completion, **fields)
    assert error.param == param, error.message


def test_harmless_values_are_accepted() -> None:
    chat(
        store=False, user="u", metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True,
        response_format={"type": "text"}, modalities=["text"], functions=[], prompt_cache_key="k", tool_choice="auto",
        tools=[], stream=True, stream_options={"include_usage": True, "include_obfuscation": False},
    )  # fmt: skip
    completion(suffix="", best_of=1)
    for field, values in decode.NEUTRAL.items():
        for value in values:
            if field != "echo":  # a field of completions
                completion(**{field: value})
            chat(**{field: value})
    for strict in (None, False):
        chat(tools=[{"type": "function", "function": {"name": "f", "strict": strict}}])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"a"', b'{"prompt": NaN}', b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff"}', b'{"prompt": "\\udcff"}', b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "a"} x',
        b'{"metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    ],
)  # fmt: skip
def test_bodies_that_are_not_a_request(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode.parse(body, completions.CompletionRequest)
    assert caught.value.status == 400


def test_prompts_of_every_form() -> None:
    def of(prompt: Any) -> list[Any]:
        return completion_of(prompt=prompt).prompts

    assert of("a") == ["a"] and of(["a", "b"]) == ["a", "b"]
    assert of([1, 2]) == [[1, 2]] and of([[1], [2, 3]]) == [[1], [2, 3]]


def test_a_prompt_that_is_too_long_is_told_the_limit_and_its_length() -> None:
    asked = completion_of(prompt="x")
    for n_prompt in (100, 5000):
        with pytest.raises(
            ApiError, match=rf"maximum context length is 100 tokens. However, your prompt has {n_prompt} tokens"
        ) as caught:
            answer_length(asked, n_prompt, INFO, None)
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert answer_length(asked, 99, INFO, None) == 1
    with pytest.raises(ApiError, match="empty"):
        answer_length(asked, 0, INFO, None)


def test_messages_for_the_template() -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
            {
                "role": "assistant", "content": None, "reasoning": "r", "refusal": None, "annotations": [],
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "t"},
        ]
    }  # fmt: skip
    request = decode.parse(json.dumps(body).encode(), protocol.ChatRequest)
    assert template_messages(request.messages) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab", "name": "n"},
        {
            "role": "assistant", "content": "", "reasoning_content": "r",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [protocol.ChatRequest, models.TokenizeRequest])
def test_thinking_switches(kind: Any) -> None:
    def of(**fields: Any) -> dict[str, Any]:
        body = json.dumps({"messages": HELLO} | fields).encode()
        convert = protocol.chat_of if kind is protocol.ChatRequest else models.tokenized_chat
        return convert(decode.parse(body, kind)).settings

    for fields in (
        {"chat_template_kwargs": {"enable_thinking": 1}},
        {"reasoning_effort": "none", "enable_thinking": True},
    ):
        assert refused(of, **fields).param in ("chat_template_kwargs.enable_thinking", "reasoning_effort")

    assert of() == {}
    assert of(reasoning_effort="none") == {"enable_thinking": False, "reasoning_effort": "none"}
    assert of(reasoning_effort="high") == {"enable_thinking": True, "reasoning_effort": "high"}
    assert of(enable_thinking=True) == {"enable_thinking": True}
    assert of(chat_template_kwargs={"enable_thinking": False, "x": 1}) == {"enable_thinking": False, "x": 1}
    assert of(preserve_thinking=True) == of(chat_template_kwargs={"preserve_thinking": True})
    error = refused(of, preserve_thinking=True, chat_template_kwargs={"preserve_thinking": False})
    assert error.param == "preserve_thinking" and "chat_template_kwargs.preserve_thinking" in error.message


def test_a_null_field_that_is_not_known_asks_for_nothing() -> None:
    """Client libraries write their structs with every field they have."""
    call = {"id": "1", "type": "function", "async": None, "function": {"name": "f", "arguments": "{}", "x": None}}
    said = {"role": "assistant", "content": "a", "parsed": None, "tool_calls": [call, call]}
    request = decode.parse(
        json.dumps({"messages": [*HELLO, said, said], "foo": None, "bar": None}).encode(), protocol.ChatRequest
    )
    assert len(request.messages) == 3
    assert refused(chat, messages=[HELLO[0] | {"foo": 1}]).param == "messages[0].foo"


@pytest.mark.parametrize(
    "text, read",
    [
        ("", {}),
        ('{"a": "b', {"a": "b"}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a":', {}),
        ('{"a": 1} x', None),
        ("[1", None),
    ],
)
def test_arguments_that_were_cut_short_come_back_as_far_as_they_go(text: str, read: dict[str, Any] | None) -> None:
    assert given_arguments(text) == read
