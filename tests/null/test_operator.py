"""What an operator sets for requests that do not say: the template's settings, how tokens are drawn, how long answers are."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from deltic.__main__ import parser
from deltic.config import ConfigError, EngineConfig, ModelConfig, ServerConfig
from deltic.engine.messages import Request, SamplingParams
from deltic.server.app import create_app
from deltic.server.serve import Served, _service
from deltic.server.service import Server, Service
from tests.fake_engine import FakeEngineClient, served
from tests.fake_speech import FakeSpeechClient
from tests.null.test_http import HELLO


def service(server: Server, engine: FakeEngineClient, **about: Any) -> Service:
    """The built-in model's files over a fake engine."""
    engine.config = EngineConfig()  # type: ignore[attr-defined]
    return _service(server, Served(("a",), ModelConfig(**about), engine))  # type: ignore[arg-type]


def asked(about: dict[str, Any], path: str, *bodies: dict[str, Any], **config: Any) -> list[Request]:
    """The engine's requests of these bodies."""
    engine = FakeEngineClient()
    server = Server(ServerConfig(**config))
    server.add(service(server, engine, **about))
    with served(create_app(server)) as url:
        for body in bodies:
            reply = httpx.post(url + path, json=body, timeout=20)
            assert reply.status_code == 200, reply.text
    return engine.requests


def test_a_templates_settings_hold_where_a_request_does_not_say() -> None:
    chat = {"messages": HELLO}
    on, off = ({"enable_thinking": value} for value in (True, False))
    said = [chat | on, chat | off, chat | {"chat_template_kwargs": on}, chat | {"reasoning_effort": "none"}]
    plain = [request.prompt_ids for request in asked({}, "/v1/chat/completions", *said)]
    assert plain[0] == plain[2] != plain[1] == plain[3]
    for default, expected in ((on, plain[0]), (off, plain[1])):
        requests = asked({"default_chat_template_kwargs": default}, "/v1/chat/completions", chat, *said)
        assert [request.prompt_ids for request in requests] == [expected, *plain]
        (request,) = asked({"default_chat_template_kwargs": default}, "/v1/responses", {"input": "Hi"})
        (same,) = asked({}, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]} | default)
        assert request.prompt_ids == same.prompt_ids


def test_thinking_by_default_reaches_the_door_that_does_not_think_by_itself() -> None:
    message = {"model": "a", "messages": HELLO, "max_tokens": 5}
    thinks = {"thinking": {"type": "adaptive"}}
    said = [message | thinks, message | {"thinking": {"type": "disabled"}}]
    by_itself, on, off = (r.prompt_ids for r in asked({}, "/v1/messages", message, *said))
    assert by_itself == off != on
    for default, expected in ((True, on), (False, off)):
        about = {"default_chat_template_kwargs": {"enable_thinking": default}}
        told = [request.prompt_ids for request in asked(about, "/v1/messages", message, *said)]
        assert told == [expected, on, off]


def test_how_tokens_are_drawn_where_a_request_does_not_say() -> None:
    override = {
        "temperature": 0.3,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "max_new_tokens": 3,
    }
    about = {"generation_config": "none", "override_generation_config": override}
    own = {"temperature": 0.9, "max_tokens": 5, "top_k": 2}
    for path, body, length in (
        ("/v1/chat/completions", {"messages": HELLO}, 3),
        ("/v1/completions", {"prompt": "x"}, 3),
    ):
        first, second = asked(about, path, body, body | own, default_max_tokens=9)
        params: SamplingParams = first.params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.5, 7, 0.1)
        assert (params.repetition_penalty, params.max_tokens) == (1.2, length)
        assert (second.params.temperature, second.params.max_tokens, second.params.top_k) == (0.9, 5, 2)
        (third,) = asked({"generation_config": "none"}, path, body, default_max_tokens=9)
        assert (third.params.temperature, third.params.max_tokens) == (1.0, 9)


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        ({"default_chat_template_kwargs": {"thinking": True}}, "thinking: this model's chat template has no such setting"),
        ({"default_chat_template_kwargs": {"enable_thinking": "no"}}, "enable_thinking: expected true or false"),
        ({"default_chat_template_kwargs": {"messages": []}}, "messages: this model's chat template has no such setting"),
        ({"generation_config": "/no/such"}, "--generation-config /no/such: there is no file"),
        ({"override_generation_config": {"seed": 1}}, "'seed' is none of temperature"),
    ],
)  # fmt: skip
def test_a_default_that_cannot_hold_is_refused_at_the_start(about: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        service(Server(ServerConfig()), FakeEngineClient(), **about)


@pytest.mark.parametrize("about", [{"default_chat_template_kwargs": {"a": 1}}, {"generation_config": "none"}])
def test_a_model_that_speaks_has_none_of_these(about: dict[str, Any]) -> None:
    client = FakeSpeechClient()
    client.config = EngineConfig(dummy="qwen3-tts-0.6b")
    flag = "--" + next(iter(about)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} is for models that write, and 'a' speaks"):
        _service(Server(ServerConfig()), Served(("a",), ModelConfig(**about), client))  # type: ignore[arg-type]


def test_a_flag_that_takes_json_refuses_what_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    given = parser().parse_args(["serve", "--override-generation-config", '{"top_k": 2}'])
    assert given.override_generation_config == {"top_k": 2}
    for wrong in ("{", "[1]", "5"):
        with pytest.raises(SystemExit):
            parser().parse_args(["serve", "--override-generation-config", wrong])
        assert "invalid JSON object value" in capsys.readouterr().err
