"""Pictures in requests: from the parts of each API to the engine's request, over a fake engine."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
import time
import types
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

pytest.importorskip("PIL")

from PIL import Image

from deltic import LLM, SamplingParams
from deltic.batch_lines import BatchLine
from deltic.commands.chat import command
from deltic.commands.conversation import Conversation, StreamedAnswer
from deltic.commands.endpoint import Endpoint, EndpointError, picture_url
from deltic.commands.run import send, with_pictures
from deltic.engine.messages import PictureInfo, Request
from deltic.server.chat import picture_parts, pictures
from deltic.server.isolated import ForkServer
from deltic.server.urls import Hosts
from tests import fakes
from tests.decoders import DECODER
from tests.fake_engine import (
    IMAGE_PAD,
    PICTURE_TEMPLATE,
    TEMPLATE,
    FakeEngineClient,
    byte_tokenizer,
    make_app,
    n_held,
    served,
)
from tests.null.test_http import error_of
from tests.pictures import file_of, refused, rgb
from tests.waiting import until

INFO = PictureInfo(min_pixels=4096, max_pixels=409_600, max_tokens=400)
SMALL, WIDE, LARGE = (file_of(rgb(*sides), "PNG") for sides in ((64, 64), (160, 64), (640, 640)))
"""Of 4, 10 and 400 tokens."""
HOLLOW = {4: (2, 2), 10: (2, 5), 400: (20, 20)}


def seeing(**info: Any) -> FakeEngineClient:
    return FakeEngineClient(**{"pictures": INFO} | info)


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes | str, **more: Any) -> dict[str, Any]:
    url = data if isinstance(data, str) else url_of(data)
    return {"type": "image_url", "image_url": {"url": url} | more}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def post(
    engine: FakeEngineClient, path: str, body: Any, template: str = PICTURE_TEMPLATE, **config: Any
) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(engine, template, **config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await client.post(path, json=body)

    return asyncio.run(go())


def chat(engine: FakeEngineClient, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    return post(engine, "/v1/chat/completions", {"messages": list(messages)} | fields)


def prompt_of(request: Request) -> str:
    """The prompt as text, a run of marks as its length; the pictures must have their places, keys and pixels."""
    shown = byte_tokenizer(sees=True)
    ids, written, at = request.prompt_ids, "", 0
    for picture in request.pictures:
        assert ids[picture.first : picture.end] == [IMAGE_PAD] * picture.n_tokens
        assert len(picture.pixels) == 3072 * picture.n_tokens and len(picture.key) == 16
        written += shown.decode(ids[at : picture.first], False) + f"[{picture.rows}x{picture.columns}]"
        at = picture.end
    assert IMAGE_PAD not in ids[at:]
    return written + shown.decode(ids[at:], False)


SEEN = "<|vision_start|>[{}]<|vision_end|>"


def test_a_picture_comes_into_its_place() -> None:
    engine = seeing()
    answer = chat(
        engine, {"role": "system", "content": "Look."}, user(text("What is"), part(SMALL), text("this?"), part(WIDE))
    )
    assert answer.status_code == 200, answer.text
    (sent,) = engine.requests
    assert prompt_of(sent) == (
        f"<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\nWhat is{SEEN.format('2x2')}this?{SEEN.format('2x5')}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert answer.json()["usage"]["prompt_tokens"] == len(sent.prompt_ids)
    starts = [at for at, token in enumerate(sent.prompt_ids) if token == 257]
    assert sent.boundaries == starts[1:], "counted with the pictures' tokens"
    again = asyncio.run(pictures.read_picture(WIDE, INFO.min_pixels, INFO.max_pixels))
    assert (sent.pictures[1].key, sent.pictures[1].pixels) == (again.key, again.pixels)


def test_a_text_is_as_it_was() -> None:
    """Also one in parts, and one in which the marks are written."""
    seen, blind = seeing(), FakeEngineClient()
    said = "<|image_pad|><|vision_start|> is a mark"
    for engine in (seen, blind):
        template = PICTURE_TEMPLATE if engine is seen else TEMPLATE
        body = {"messages": [user(text(said), text("\n?")), {"role": "assistant", "content": "No."}, user(text("So"))]}
        assert post(engine, "/v1/chat/completions", body, template).status_code == 200
    assert seen.requests[0].prompt_ids == blind.requests[0].prompt_ids
    assert IMAGE_PAD not in seen.requests[0].prompt_ids and not seen.requests[0].pictures


def test_a_mark_in_a_text_beside_a_picture_is_text() -> None:
    engine = seeing()
    assert chat(engine, user(text("<|image_pad|>"), part(SMALL), text("<|image_pad|>"))).status_code == 200
    (sent,) = engine.requests
    assert sent.prompt_ids.count(IMAGE_PAD) == 4 and len(sent.pictures) == 1
    assert prompt_of(sent).count("<|image_pad|>") == 2


def test_where_parts_may_be_pictures() -> None:
    engine = seeing()
    call = {"id": "c1", "function": {"name": "shot", "arguments": "{}"}}
    answer = chat(
        engine,
        {"role": "system", "content": [part(SMALL)]},
        user({"type": "image_url", "image_url": url_of(SMALL)}),
        {"role": "assistant", "tool_calls": [call], "content": [part(LARGE)]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("done"), part(WIDE) | {"note": "of a library"}]},
    )
    assert answer.status_code == 200, answer.text
    assert [picture.n_tokens for picture in engine.requests[0].pictures] == [4, 4, 10], "what a model said has none"


def test_functions_beside_a_picture_are_read_once() -> None:
    """The new grammar has the last step done twice."""
    fields = {"functions": [{"name": "f"}], "function_call": "none", "response_format": {"type": "json_object"}}
    answer = chat(seeing(), user(part(SMALL)), **fields)
    assert answer.status_code == 200, answer.text


def test_streams_and_many_answers() -> None:
    engine = seeing()
    with served(make_app(engine, PICTURE_TEMPLATE)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        messages: Any = [user(part(SMALL), text("?"))]
        stream = client.chat.completions.create(model="fake", messages=messages, stream=True, n=2)
        assert {choice.index for chunk in stream for choice in chunk.choices} == {0, 1}
        assert len(engine.requests[0].pictures) == 1
        metrics = httpx.get(f"{url}/metrics").text
    assert 'deltic_pictures_total{model="fake"} 1.0' in metrics
    assert 'deltic_picture_tokens_total{model="fake"} 4.0' in metrics


@pytest.mark.parametrize(
    ("detail", "bounds", "n_tokens"),
    [
        ("low", {}, 256), ("high", {}, 400), ("auto", {}, 400), (None, {}, 400), ("high", {"max_pixels": 102_400}, 100),
        ("low", {"max_pixels": 102_400}, 100), ("low", {"min_pixels": 350_000}, 324), ("auto", {"max_pixels": None}, 400),
    ],
)  # fmt: skip
def test_sizes(detail: str | None, bounds: dict[str, int], n_tokens: int) -> None:
    engine = seeing()
    answer = chat(engine, user(part(LARGE, detail=detail)), mm_processor_kwargs=bounds)
    assert answer.status_code == 200, answer.text
    assert engine.requests[0].pictures[0].n_tokens == n_tokens


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"max_pixels": 409_601}, "mm_processor_kwargs.max_pixels: must be from 4096 to 409600"),
        ({"min_pixels": 4095}, "mm_processor_kwargs.min_pixels: must be from 4096 to 409600"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "mm_processor_kwargs.min_pixels: is more than max_pixels"),
        ({"max_pixels": "big"}, "mm_processor_kwargs.max_pixels"),
        ({"fps": 0}, "mm_processor_kwargs.fps: must be above 0, and at most 240"),
        ({"num_frames": 769}, "mm_processor_kwargs.num_frames: must be from 1 to 768"),
        ({"num_frames": 8, "fps": 2}, "mm_processor_kwargs.num_frames: excludes fps"),
        ({"size": 2}, "mm_processor_kwargs.size: unknown field"),
    ],
)
def test_bounds_that_are_refused(bounds: dict[str, Any], said: str) -> None:
    answer = chat(seeing(), user(part(SMALL)), mm_processor_kwargs=bounds)
    assert answer.status_code == 400 and error_of(answer)["message"].startswith(said)


def bad(given: Any, said: str, where: str = ".image_url") -> Any:
    return pytest.param(given, said, where, id=said[:30])


@pytest.mark.parametrize(
    ("given", "said", "where"),
    [
        bad(part("data:image/png;base64,QUJ"), "is not valid base64"),
        bad(part("data:image/png;base64,QU JD"), "is not valid base64"),
        bad(part("data:image/png;base64,QU\r\nJD\n"), "is no picture that can be read here"),
        bad(part("data:image/png;base64,QQ==QUJD"), "is not valid base64"),
        bad(part("data:image/png;base64,Ωabc"), "is not valid base64"),
        bad(part("data:image/png,abc"), "expected data:image/...;base64,..."),
        bad(part("data:image/png;base64,QUJD"), "is no picture that can be read here"),
        bad(part("data:image/png;base64," + "A" * 26_700_000), "is larger than 20 MB"),
        bad(part(""), "is no picture"),
        bad(part("file:///etc/passwd"), "expected a data: URL"),
        bad(part("FILE:/etc/passwd"), "expected a data: URL"),
        bad(part("/etc/passwd"), "expected a data: URL"),
        bad(part("gopher://127.0.0.1/"), "expected a data: URL"),
        bad(part("http://example.com/a.png"), "this server fetches no pictures (--fetch-images-from)"),
        bad({"type": "image_url"}, "expected a URL, or an object with one"),
        bad({"type": "image_url", "image_url": {"url": 5}}, "expected a URL, or an object with one"),
        bad(part(SMALL, detail="huge"), "expected one of auto, low, high, original", ".image_url.detail"),
        bad(part(SMALL, size=5), "unknown field", ".image_url.size"),
        bad(part(SMALL) | {"min_pixels": 5}, "unknown field", ".min_pixels"),
        bad({"type": "image", "image": url_of(SMALL)}, "'image' is not supported", ".type"),
        bad({"type": "input_audio", "input_audio": {}}, "'input_audio' is not supported", ".type"),
    ],
)
def test_parts_that_are_refused(given: dict[str, Any], said: str, where: str) -> None:
    engine = seeing()
    answer = post(engine, "/v1/chat/completions", {"messages": [user(part(SMALL), given)]})
    error = error_of(answer)
    path = f"messages[0].content[1]{where}"
    assert answer.status_code == 400 and not engine.requests
    assert error["param"] == path and error["message"].startswith(f"{path}: {said}"), error


def test_a_tower_that_is_not_run_says_why() -> None:
    why = "pictures are refused: config field 'vision_config.hidden_size': found 144; supported: a multiple of 32"
    answer = post(FakeEngineClient(no_pictures=why), "/v1/chat/completions", {"messages": [user(part(SMALL))]})
    assert error_of(answer)["message"].endswith(f"this server reads text only ({why})") and answer.status_code == 400


def test_a_model_that_reads_text_says_so() -> None:
    answer = post(FakeEngineClient(), "/v1/chat/completions", {"messages": [user(text("a"), part(SMALL))]}, TEMPLATE)
    error = error_of(answer)
    assert answer.status_code == 400 and error["param"] == "messages[0].content[1].type"
    assert error["message"].endswith("'image_url' is not supported: this server reads text only")
    hello = {"role": "user", "content": "hello"}
    bounds = {"max_pixels": 5000}
    answer = chat(FakeEngineClient(), hello, mm_processor_kwargs=bounds)
    assert answer.status_code == 400 and error_of(answer)["param"] == "mm_processor_kwargs"
    assert chat(FakeEngineClient(), hello, mm_processor_kwargs={}).status_code == 200
    assert chat(seeing(), hello, mm_processor_kwargs=bounds).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        PICTURE_TEMPLATE.replace("<|image_pad|>", ""),
        PICTURE_TEMPLATE.replace("'<|vis", "'<|image_pad|><|vis"),
    ],
)
def test_a_template_that_does_not_show_it(template: str) -> None:
    answer = post(seeing(), "/v1/chat/completions", {"messages": [user(part(SMALL))]}, template)
    assert answer.status_code == 400 and "messages: the chat template" in error_of(answer)["message"]


PUBLISHED = """
{%- set image_count = namespace(value=0) %}
{%- macro render_content(content, do_vision_count, is_system_content=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or 'image_url' in item or item.type == 'image' %}
                {%- if is_system_content %}{{- raise_exception('System message cannot contain images.') }}{%- endif %}
                {%- if do_vision_count %}{%- set image_count.value = image_count.value + 1 %}{%- endif %}
                {%- if add_vision_id %}{{- 'Picture ' ~ image_count.value ~ ': ' }}{%- endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- else %}{{- raise_exception('Unexpected item type in content.') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- set content = render_content(message.content, true, message.role == 'system') | trim %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""What published templates do with parts."""


def test_a_template_as_they_are_published() -> None:
    engine = seeing()
    turns = [{"role": "system", "content": "Look."}, user(part(SMALL), text("a ")), user(text("b"), part(WIDE))]
    asked = {"messages": turns, "chat_template_kwargs": {"add_vision_id": True}}
    assert post(engine, "/v1/chat/completions", asked, PUBLISHED).status_code == 200
    assert prompt_of(engine.requests[0]) == (
        f"<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\nPicture 1: {SEEN.format('2x2')}a<|im_end|>\n"
        f"<|im_start|>user\nbPicture 2: {SEEN.format('2x5')}<|im_end|>\n<|im_start|>assistant\n"
    )
    body = {"messages": [{"role": "system", "content": [part(SMALL)]}, user(text("a"))]}
    said = error_of(post(engine, "/v1/chat/completions", body, PUBLISHED))["message"]
    assert said == "messages: the chat template refuses them: System message cannot contain images."


def test_what_the_context_holds() -> None:
    engine = seeing(max_model_len=300)
    error = error_of(chat(engine, user(text("?"), part(LARGE))))
    n_text = len("<|s|user\n?<vision><|e|\n<|s|assistant\n<think>\n\n</think>\n\n") - 16
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages[0].content[1].image_url"
    most = int(error["message"].rpartition(" ")[2].rstrip("."))
    assert "has 400 tokens" in error["message"] and most % 1024 == 0 and most < 300 * 1024 - n_text
    answer = chat(engine, user(text("?"), part(LARGE)), mm_processor_kwargs={"max_pixels": most})
    assert answer.status_code == 200, answer.text
    error = error_of(chat(engine, *[user(part(LARGE, detail="low"))] * 2))
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages", "none is at fault alone"
    error = error_of(chat(seeing(), user(part(SMALL)), truncate_prompt_tokens=5))
    assert error["message"] == "truncate_prompt_tokens: is not available for a chat with pictures"


def test_how_many_and_how_large(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(chat(seeing(), user(*[part(SMALL)] * 257)))
    assert error["message"] == "messages[0].content[256].image_url: a request may have 256 pictures at most"
    monkeypatch.setattr(picture_parts, "MAX_PIXEL_BYTES", 3072 * 900)
    error = error_of(chat(seeing(max_model_len=4000), user(*[part(LARGE)] * 3)))
    assert error["code"] == "too_many_pixels" and "more than 900 tokens" in error["message"]
    assert chat(seeing(max_model_len=4000), user(*[part(LARGE)] * 2)).status_code == 200


def test_tokenize_counts_them() -> None:
    body: dict[str, Any] = {"messages": [user(part(WIDE), text("?"))], "mm_processor_kwargs": {"max_pixels": 8192}}
    engine = seeing()
    told = post(engine, "/tokenize", body).json()
    assert chat(engine, *body["messages"], mm_processor_kwargs=body["mm_processor_kwargs"]).status_code == 200
    assert told["tokens"] == engine.requests[0].prompt_ids and told["count"] == len(told["tokens"])
    error = error_of(post(engine, "/tokenize", {"prompt": "x", "mm_processor_kwargs": {}}))
    assert error["param"] == "mm_processor_kwargs"


def call_of(name: str, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def test_responses() -> None:
    engine = seeing()
    with served(make_app(engine, PICTURE_TEMPLATE)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        seen: Any = [
            {"type": "input_image", "image_url": url_of(WIDE), "detail": "auto"},
            {"type": "input_text", "text": "?"},
        ]
        shot: Any = {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": url_of(SMALL)}],
        }
        first = client.responses.create(model="fake", input=[{"role": "user", "content": seen}])
        assert prompt_of(engine.requests[0]).startswith(f"<|im_start|>user\n{SEEN.format('2x5')}?<|im_end|>")
        again: Any = [call_of("shot", "c"), shot, {"role": "user", "content": [seen[0] | {"detail": "low"}]}]
        answer = client.responses.create(model="fake", input=again, previous_response_id=first.id)
        assert answer.usage and answer.usage.input_tokens == len(engine.requests[1].prompt_ids)
        assert [picture.n_tokens for picture in engine.requests[1].pictures] == [10, 4, 10], "those of the history, too"
        count = client.responses.input_tokens.count(model="fake", input=again, previous_response_id=first.id)
        assert count.input_tokens == answer.usage.input_tokens
        kept = client.responses.input_items.list(first.id).data[0]
        assert kept.to_dict()["content"][0]["image_url"] == url_of(WIDE)


def test_responses_leave_out_old_pictures_that_do_not_fit() -> None:
    engine = seeing(max_model_len=500)
    turn = {"role": "user", "content": [{"type": "input_image", "image_url": url_of(LARGE)}]}
    last = {"role": "user", "content": [{"type": "input_image", "image_url": url_of(SMALL)}]}
    body = {"input": [turn, turn, last], "truncation": "auto"}
    assert post(engine, "/v1/responses", body).status_code == 200
    assert [picture.n_tokens for picture in engine.requests[0].pictures] == [400, 4]
    assert error_of(post(engine, "/v1/responses", body | {"truncation": "disabled"}))["param"] == "input"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}, "input[0].content[0].file_id: files are not kept"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url: expected a URL"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0].image_url: expected a data: URL"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "", "odd": 1}]}, "input[0].content[0].odd: unknown"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "", "detail": 1}]}, "input[0].content[0].detail: expected"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}, "input[0].content[0].type: 'input_file'"),
        ({"role": "developer", "content": [{"type": "input_image", "image_url": url_of(SMALL)}]}, "input[0].content[0].type: a picture is for"),
        ({"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": "x"}]},
         "input[0].output[0].image_url: expected a data: URL"),
    ],
)  # fmt: skip
def test_responses_refuse(item: dict[str, Any], said: str) -> None:
    answer = post(seeing(), "/v1/responses", {"input": [item]})
    assert answer.status_code == 400 and error_of(answer)["message"].startswith(said), answer.text


def shown(data: bytes) -> dict[str, Any]:
    """A block of Anthropic's."""
    encoded = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": encoded}}


def test_anthropic() -> None:
    engine = seeing()
    with served(make_app(engine, PICTURE_TEMPLATE)) as url:
        client = anthropic.Anthropic(base_url=url, api_key="none")
        use = {"type": "tool_use", "id": "t", "name": "shot", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [text("a"), text("b"), shown(SMALL), text("c")]}
        messages: Any = [
            {"role": "user", "content": [shown(WIDE), text("What"), text("is it?")]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, shown(SMALL), text("<system-reminder>x</system-reminder>")]},
        ]
        answer = client.messages.create(model="fake", max_tokens=20, messages=messages)
        count = client.messages.count_tokens(model="fake", messages=messages)
    assert answer.usage.input_tokens == count.input_tokens == len(engine.requests[0].prompt_ids)
    told = prompt_of(engine.requests[0])
    assert f"user\n{SEEN.format('2x5')}What\n\nis it?<|im_end|>" in told
    assert f"tool\na\n\nb{SEEN.format('2x2')}c\n\n<system-reminder>x</system-reminder><|im_end|>" in told
    assert f"<|im_start|>user\n{SEEN.format('2x2')}<|im_end|>" in told


def test_anthropic_marks_an_error_of_a_tool() -> None:
    engine = seeing()
    use = {"type": "tool_use", "id": "t", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [shown(SMALL)]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert post(engine, "/v1/messages", {"model": "fake", "max_tokens": 5, "messages": messages}).status_code == 200
    assert f"tool\nError: {SEEN.format('2x2')}<|im_end|>" in prompt_of(engine.requests[0])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"type": "base64", "data": "QUJ"}, "source: is not valid base64"),
        ({"type": "base64", "data": "QUJD"}, "source: is no picture"),
        ({"type": "base64"}, "source.data: expected a string"),
        ({"type": "url", "url": "http://example.com/"}, "source: this server fetches no pictures"),
        ({"type": "url", "url": "data:image/png;base64,QUJ"}, "source: is not valid base64"),
        ({"type": "file", "file_id": "a"}, "source.type: 'file' is not supported"),
        ({"type": "base64", "data": "", "odd": 1}, "source.odd: unknown field"),
        ("x", "source.type: expected base64 or url"),
    ],
)
def test_anthropic_refuses(source: Any, said: str) -> None:
    body = {
        "model": "fake",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
    }
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("count_tokens"):
            del body["max_tokens"]
        answer = post(seeing(), path, body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"messages[0].content[0].{said}"), error


def test_anthropic_says_which_picture_is_too_large() -> None:
    messages = [{"role": "user", "content": [shown(LARGE)]}]
    answer = post(seeing(max_model_len=300), "/v1/messages", {"model": "fake", "max_tokens": 5, "messages": messages})
    assert answer.json()["error"]["message"].startswith("messages[0].content[0].source: has 400 tokens, and beside")


def test_ollama() -> None:
    engine = seeing()
    images = [base64.b64encode(WIDE).decode(), base64.b64encode(SMALL).decode()]
    told = [
        {"role": "user", "content": "Hi", "images": images},
        {"role": "assistant", "content": "?", "images": images},
    ]
    told.append({"role": "tool", "content": "shot", "images": images[:1]})
    answer = post(engine, "/api/chat", {"model": "fake", "messages": told, "stream": False})
    assert answer.status_code == 200 and answer.json()["prompt_eval_count"] == len(engine.requests[0].prompt_ids)
    wide, small = SEEN.format("2x5"), SEEN.format("2x2")
    assert f"user\n{wide}{small}Hi<|im_end|>" in prompt_of(engine.requests[0])
    assert f"tool\n{wide}shot<|im_end|>" in prompt_of(engine.requests[0])
    for prompt in ("What?", ""):
        body = {"model": "fake", "prompt": prompt, "images": images[1:], "stream": False}
        assert post(engine, "/api/generate", body).status_code == 200
        assert f"user\n{small}{prompt}<|im_end|>" in prompt_of(engine.requests[-1])
    answer = post(engine, "/api/generate", body | {"raw": True, "prompt": "x"})
    assert answer.json() == {"error": "images: has no meaning with raw: true. Leave it out."}
    answer = post(engine, "/api/chat", {"model": "fake", "messages": [{"role": "user", "images": ["QUJD", "QUJ"]}]})
    assert answer.status_code == 400 and answer.json()["error"].startswith("messages[0].images[")


def test_what_a_model_that_sees_says_of_itself() -> None:
    show = post(seeing(), "/api/show", {"model": "fake"}).json()
    assert "vision" in show["capabilities"]
    assert "vision" not in post(FakeEngineClient(), "/api/show", {"model": "fake"}).json()["capabilities"]


def test_pictures_are_fetched_where_they_may_be() -> None:
    async def files(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            status = 200 if scope["path"] == "/a.png" else 404
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": WIDE})

    engine = seeing()
    config = {"fetch_images_from": ("127.0.0.1", "a.example")}
    with served(files) as url:
        for there, said in (
            (f"{url}/a.png", ""),
            (f"{url}/b.png", "could not be fetched (its server answered with status 404)"),
            (url.replace("127.0.0.1", "localhost"), "this server fetches from a.example, 127.0.0.1/32 only"),
            ("file:///a.png", "expected a data: URL, or one of http or https"),
        ):
            body = {"messages": [user(part(there), part(SMALL))]}
            answer = post(engine, "/v1/chat/completions", body, **config)
            if said:
                assert error_of(answer)["message"].startswith(f"messages[0].content[0].image_url: {said}")
    (sent,) = engine.requests
    assert [picture.n_tokens for picture in sent.pictures] == [10, 4]


def test_bodies_may_be_larger_where_there_may_be_pictures() -> None:
    body = {"messages": [user(text("x" * 17_000_000))]}
    assert post(FakeEngineClient(), "/v1/chat/completions", body, TEMPLATE).status_code == 413
    assert error_of(post(seeing(), "/v1/chat/completions", body))["code"] == "context_length_exceeded"
    assert post(seeing(), "/v1/chat/completions", body, max_body_mb=16.0).status_code == 413


def test_deltic_chat(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(WIDE)
    engine = seeing()
    with served(make_app(engine, PICTURE_TEMPLATE)) as url:
        conversation = Conversation(Endpoint(url), "fake")
        assert command(conversation, "/image /none.png") == "cannot read /none.png: No such file or directory"
        assert command(conversation, f"/image {tmp_path / 'a.png'}") == "the next message has 1 picture"
        assert command(conversation, f"/image {url_of(SMALL)}") == "the next message has 2 pictures"
        conversation.messages.append(conversation.message("What is it?"))

        async def go() -> StreamedAnswer:
            answer = StreamedAnswer()
            async for _ in conversation.ask(answer):
                pass
            return answer

        assert asyncio.run(go()).content == "Hello"
    assert f"user\n{SEEN.format('2x5')}{SEEN.format('2x2')}What is it?" in prompt_of(engine.requests[0])
    assert command(conversation, "/image") == "no pictures" and conversation.message("x")["content"] == "x"


def test_deltic_run(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(WIDE)
    added = [picture_url(str(tmp_path / "a.jpg"))]
    assert added[0].startswith("data:image/jpeg;base64,")
    with pytest.raises(EndpointError, match="cannot read"):
        picture_url(str(tmp_path / "b.jpg"))
    engine = seeing()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, user(text("c"), part(SMALL))]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/chat/completions", {"messages": turns[:2]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": turns[1:2]}),
    ]
    with served(make_app(engine, PICTURE_TEMPLATE)) as url:

        async def go() -> list[dict[str, Any]]:
            endpoint = Endpoint(url)
            jobs = [BatchLine(i, None, path, json.dumps(body).encode()) for i, (path, body) in enumerate(bodies)]
            return [await send(endpoint, "fake", job, pictures=added) for job in jobs]

        results = asyncio.run(go())
    assert [result["error"] is None for result in results] == [True] * 4 + [False] * 2
    assert results[5]["error"]["message"] == "line 5: --image: there is no message of a user"
    shown = with_pictures({"messages": turns}, "/v1/chat/completions", [], ["data:video/mp4;base64,QUJD"])["messages"][
        2
    ]
    assert [one["type"] for one in shown["content"]] == ["video_url", "text", "image_url"]
    with pytest.raises(ValueError, match="--video: videos are for lines of /v1/chat/completions"):
        with_pictures({"input": "a"}, "/v1/responses", [], ["data:video/mp4;base64,QUJD"])
    with pytest.raises(ValueError, match="--video: there is no message of a user"):
        with_pictures({"messages": turns[1:2]}, "/v1/chat/completions", [], ["data:video/mp4;base64,QUJD"])
    wide = SEEN.format("2x5")
    told = [prompt_of(request) for request in engine.requests]
    assert "user\na<|im_end|>" in told[0] and f"user\n{wide}c{SEEN.format('2x2')}<|im_end|>" in told[0]
    assert all(f"user\n{wide}a<|im_end|>" in one for one in told[1:])


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    byte_tokenizer(sees=True)._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(PICTURE_TEMPLATE)
    build = types.ModuleType("deltic.runtime.build")
    build.build_runner = fakes.build_runner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deltic.runtime.build", build)
    made = LLM(str(tmp_path), n_pages=24, max_num_seqs=4, max_model_len=1000)
    made.info.pictures = INFO
    return made


def test_python(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Request] = []
    add = llm._engine.add

    def noted(request: Request) -> None:
        added.append(request)
        add(request)

    monkeypatch.setattr(llm._engine, "add", noted)
    path = tmp_path / "a.png"
    path.write_bytes(WIDE)
    image = rgb(160, 64)
    parts: list[Any] = [{"type": "image", "image": one} for one in (image, WIDE, path, str(path), url_of(WIDE))]
    params = SamplingParams(max_tokens=2)
    (answer,) = llm.chat([user(text("a"), *parts, part(SMALL))], params)
    (sent,) = added
    assert prompt_of(sent).count("[2x5]") == 5 and answer.prompt_ids == sent.prompt_ids
    assert len({picture.key for picture in sent.pictures}) == 2, "the same pixels, whatever they came in"
    llm.chat([[user(part(LARGE))], [user(text("b"))]], params, mm_processor_kwargs={"max_pixels": 10_240})
    assert [[picture.n_tokens for picture in one.pictures] for one in added[1:]] == [[9], []]

    async def inside() -> None:
        llm.chat([user(part(SMALL))], params)

    asyncio.run(inside())
    for message, said in (
        (user({"type": "image", "image": 5}), "expected a picture of Pillow, bytes or a path, not int"),
        (user({"type": "image", "image": b"abc"}), "is no picture that can be read here"),
        (user(part("http://a.example/")), "this server fetches no pictures"),
    ):
        with pytest.raises(ValueError, match=said):
            llm.chat([message], params)
    with pytest.raises(FileNotFoundError):
        llm.chat([user({"type": "image", "image": tmp_path / "none.png"})], params)
    llm.info.pictures = None
    with pytest.raises(ValueError, match="this server reads text only"):
        llm.chat([user(part(SMALL))], params)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_pictures_of_pillow(mode: str) -> None:
    image = Image.new("I;16", (64, 64), 300) if mode == "I;16" else rgb(64, 64).convert(mode)
    image.getexif()[0x0112] = 6
    data = picture_parts.file_of(image)
    assert asyncio.run(pictures.read_picture(data, 4096, 4096)).n_tokens == 4


def test_a_client_that_leaves_ends_the_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    n_begun = n_ended = 0

    async def slow(*_: Any) -> Any:
        nonlocal n_begun, n_ended
        n_begun += 1
        try:
            await asyncio.sleep(60)
        finally:
            n_ended += 1

    async def go(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"messages": [user(*[part(SMALL)] * 5)]}
            asked = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body))
            await until(lambda: n_begun == 2)
            asked.cancel()
            await until(lambda: n_ended == 2)
            assert n_begun == 2, "two are decoded at once"

    monkeypatch.setattr(picture_parts, "read_picture", slow)
    with served(make_app(seeing(), PICTURE_TEMPLATE)) as url:
        asyncio.run(go(url))


def test_no_more_than_two_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0
    read = pictures.read_picture

    async def noted(*given: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await read(*given)
        finally:
            running -= 1

    monkeypatch.setattr(picture_parts, "read_picture", noted)

    async def go() -> None:
        transport = httpx.ASGITransport(make_app(seeing(), PICTURE_TEMPLATE))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            body = {"messages": [user(*[part(SMALL)] * 3)]}
            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(4)))
            assert [answer.status_code for answer in answers] == [200] * 4

    asyncio.run(go())
    assert most == 2


KEYS = {"api_key": ("anna=1", "ben=2")}


@asynccontextmanager
async def clients(engine: FakeEngineClient, **config: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Of two keys, anna's and ben's, and the server's state."""
    app = make_app(engine, PICTURE_TEMPLATE, **KEYS | config)
    async with AsyncExitStack() as stack:
        anna, ben = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(app),
                    base_url="http://localhost",
                    timeout=60,
                    headers={"authorization": f"Bearer {key}"},
                )
            )
            for key in "12"
        ]
        yield anna, ben
    (service,) = app.state.server.models.values()
    assert not service.pixels._taken.total() and not service.pixels._waiting, "all room is given back"
    assert not service.server.pictures._decoding._taken.total() and not sum(service.server.worker._sizes.values())


ASKED = "/v1/chat/completions"


def test_one_keys_pictures_are_not_read_sooner_since_another_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    n_read, read = 0, pictures.read_picture

    async def noted(*given: Any) -> Any:
        nonlocal n_read
        n_read += 1
        return await read(*given)

    monkeypatch.setattr(picture_parts, "read_picture", noted)

    async def go() -> list[int]:
        counts, body = [], {"messages": [user(part(SMALL))]}
        async with clients(engine := seeing()) as (anna, ben):
            for client, more in ((anna, {}), (anna, {}), (ben, {}), (ben, {}), (ben, {"cache_salt": "s"})):
                assert (await client.post(ASKED, json=body | more)).status_code == 200
                counts.append(n_read)
        assert [request.namespace for request in engine.requests] == ["anna", "anna", "ben", "ben", "ben"]
        assert len({request.pictures[0].key for request in engine.requests}) == 1, "the key is the content's"
        return counts

    assert asyncio.run(go()) == [1, 1, 2, 2, 3]


def test_a_key_does_not_drive_out_what_is_kept_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_parts, "MAX_KEPT_BYTES", 4000)
    kept = picture_parts.PictureReader(Hosts((), ""))._kept
    shown = [pictures.of_pixels(bytes(1000), 32, 32) for _ in range(9)]
    kept.put("ben", 0, shown[0])
    for i, one in enumerate(shown):
        kept.put("anna", i, one)
    assert kept.get("ben", 0) and [i for i in range(9) if kept.get("anna", i)] == [6, 7, 8]


def test_one_key_does_not_hold_up_the_pictures_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    go_on = asyncio.Event()

    async def slow(data: bytes, *_: Any) -> Any:
        order.append("anna" if data == WIDE else "ben")
        if data == WIDE:
            await go_on.wait()
        return pictures.of_pixels(bytes(3072 * 4), 64, 64)

    monkeypatch.setattr(picture_parts, "read_picture", slow)
    monkeypatch.setattr(picture_parts.NamespaceShares, "get", lambda *_: None)

    async def go() -> None:
        async with clients(seeing()) as (anna, ben):
            asks = [
                asyncio.create_task(anna.post("/tokenize", json={"messages": [user(part(WIDE))]})) for _ in range(4)
            ]
            await until(lambda: order)
            answer = await ben.post("/tokenize", json={"messages": [user(part(SMALL), part(SMALL))]})
            assert answer.status_code == 200 and order == ["anna", "ben", "ben"], "a decoder is left for others"
            go_on.set()
            assert {(await ask).status_code for ask in asks} == {200}

    asyncio.run(go())


def test_a_picture_that_comes_several_times_at_once_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_read = 0

    async def slow(*_: Any) -> Any:
        nonlocal n_read
        n_read += 1
        await asyncio.sleep(0.05)
        return pictures.of_pixels(bytes(3072 * 4), 64, 64)

    monkeypatch.setattr(picture_parts, "read_picture", slow)

    async def go() -> None:
        async with clients(seeing()) as (anna, _):
            body = {"messages": [user(part(SMALL))]}
            answers = await asyncio.gather(*[anna.post("/tokenize", json=body) for _ in range(4)])
            assert [answer.status_code for answer in answers] == [200] * 4 and n_read == 1

    asyncio.run(go())


@pytest.mark.parametrize("end", ["done", "left", "died"])
def test_pixels_of_requests_that_wait_are_bounded(end: str) -> None:
    """All of them, wherever they wait; a key has half, and whatever ends a request gives its part back."""
    engine = seeing(pictures=msgspec.structs.replace(INFO, room_bytes=3072 * 400 * 6))
    engine.hold = True

    async def go() -> None:
        async with clients(engine) as (anna, ben):
            body = {"messages": [user(part(LARGE))]}
            asks = [asyncio.create_task(anna.post(ASKED, json=body)) for _ in range(7)]
            await until(lambda: len(engine.requests) == 3)
            counting = asyncio.create_task(anna.post("/tokenize", json=body))
            await asyncio.sleep(0.1)
            assert len(engine.requests) == 3 and not counting.done(), "half of the room"
            ask = asyncio.create_task(ben.post(ASKED, json=body))
            await until(lambda: len(engine.requests) == 4)
            assert engine.requests[3].tenant == "ben"
            if end == "left":
                for task in asks[:3]:
                    task.cancel()
                await until(lambda: len(engine.requests) == 7)
            elif end == "died":
                engine.die_after = 0
                engine.hold = False
                await asyncio.wait(asks[:3])
                engine.die_after = None
                engine.state = "ready"
            engine.hold = False
            answers = await asyncio.gather(*asks, ask, counting, return_exceptions=True)
            good = [one.status_code for one in answers if isinstance(one, httpx.Response)]
            assert good.count(200) >= 5 if end == "left" else len(good) == 9, good
            assert end != "done" or set(good) == {200}

    asyncio.run(go())


def test_who_waits_for_room_waits_as_for_a_place() -> None:
    engine = seeing(pictures=msgspec.structs.replace(INFO, room_bytes=3072 * 400))
    engine.hold = True

    async def go() -> None:
        async with clients(engine, api_key=(), queue_timeout_s=0.5) as (client, _):
            asks = [asyncio.create_task(client.post(ASKED, json={"messages": [user(part(LARGE))]})) for _ in range(2)]
            answers = [await ask for ask in asks]
            assert {answer.status_code for answer in answers} == {503}
            assert {error_of(answer)["code"] for answer in answers} == {"queue_timeout"}
            assert len(engine.requests) == 1

    asyncio.run(go())


def test_more_than_the_room_for_pixels_is_refused() -> None:
    engine = seeing(pictures=msgspec.structs.replace(INFO, room_bytes=3072 * 1000))
    answer = chat(engine, user(part(LARGE), part(LARGE), part(LARGE)))
    error = error_of(answer)
    assert answer.status_code == 400 and error["code"] == "too_many_pixels"
    assert error["message"].endswith("have more than 1000 tokens. Send fewer or smaller ones.")


def test_bodies_whose_pictures_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, n_waiting = asyncio.Event(), 0

    async def slow(*_: Any) -> Any:
        nonlocal n_waiting
        n_waiting += 1
        await go_on.wait()
        return pictures.of_pixels(bytes(3072 * 4), 64, 64)

    monkeypatch.setattr(picture_parts, "read_picture", slow)

    async def go() -> None:
        async with clients(seeing(), max_body_mb=0.1) as (anna, ben):
            body = {"messages": [user(part(SMALL)), user(text("x" * 40_000))]}
            asks = [asyncio.create_task(anna.post("/tokenize", json=body)) for _ in range(3)]
            app = anna._transport.app
            await until(lambda: n_waiting and n_held(app) == 3)
            full = await anna.post("/tokenize", json=body)
            assert (full.status_code, error_of(full)["code"]) == (429, "too_many_large_requests")
            other = asyncio.create_task(ben.post("/tokenize", json=body))
            await until(lambda: n_held(app) == 4)
            go_on.set()
            assert [(await ask).status_code for ask in (*asks, other)] == [200] * 4

    asyncio.run(go())


def test_memory_that_ran_out_is_not_the_pictures_fault(forks: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(pictures, "PROGRAM", (DECODER, killed))
    answer = chat(seeing(), user(part(SMALL)))
    assert (answer.status_code, error_of(answer)["code"]) == (503, "out_of_memory") and answer.headers["retry-after"]
    assert error_of(answer)["message"].startswith("memory ran out while a file of the request was decoded")


def test_a_small_file_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to a thread and back waits for whoever has Python's lock, 0.1 s beside large bodies."""
    sent: list[object] = []
    to_thread = asyncio.to_thread

    async def noted(work: Any, *given: Any) -> Any:
        sent.append(work)
        return await to_thread(work, *given)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    assert chat(seeing(), user(part(SMALL))).status_code == 200 and not sent
    monkeypatch.setattr(picture_parts, "FEW_BYTES", 10)
    assert chat(seeing(), user(part(SMALL))).status_code == 200
    assert sent == [picture_parts._decoded, picture_parts._digest]


def test_no_client_names_what_a_picture_is_kept_under() -> None:
    """Another picture under the same name, as vLLM's `uuid` has it, is another picture."""
    engine = seeing()
    for data in (SMALL, WIDE):
        named = part(data) | {"uuid": "1"}
        answer = post(engine, ASKED, {"messages": [user(named)]}, strict_fields="off")
        assert answer.status_code in (200, 400)
        assert chat(engine, user(part(data))).status_code == 200
    assert len({request.pictures[0].key for request in engine.requests}) == 2


def test_a_file_that_comes_again_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    n_read, read = 0, pictures.read_picture

    async def noted(*given: Any) -> Any:
        nonlocal n_read
        n_read += 1
        return await read(*given)

    monkeypatch.setattr(picture_parts, "read_picture", noted)

    async def go() -> None:
        reader = picture_parts.PictureReader(Hosts((), ""))

        async def asked(*files: bytes, **bounds: int) -> list[Any]:
            """The pictures, one request for each, and how many were decoded for that."""
            before, found = n_read, []
            for data in files:
                sent = picture_parts.Sent("a", "", data=data)
                found += (await reader.read([sent], INFO, picture_parts.PictureBounds(**bounds))).values()
            return [*found, n_read - before]

        *first, n = await asked(SMALL, WIDE, SMALL)
        assert n == 2 and first[0] is first[2]
        assert (await asked(SMALL, WIDE))[2] == 0 and (await asked(LARGE, max_pixels=102_400))[1] == 1
        one, other, n = await asked(LARGE, LARGE)
        assert n == 1 and one is other and one.n_tokens == 400, "other bounds, another picture"
        assert (await asked(SMALL + b" "))[1] == 1, "another file"
        reader._kept._room = 3072 * 414
        assert (await asked(LARGE, SMALL, WIDE))[3] == 0
        assert (await asked(file_of(rgb(64, 64, seed=1), "PNG")))[1] == 1, "100 tokens went, as did others"
        assert (await asked(WIDE))[1] == 0 and (await asked(LARGE, max_pixels=102_400))[1] == 1
        assert reader._kept._used.total() == sum(len(one.pixels) for one in reader._kept._items.values()) <= 3072 * 414

    asyncio.run(go())


HOSTILE = int(os.environ.get("HOSTILE_PICTURES", "8"))
"""How many of the files are sent."""


def test_hostile_files_are_each_a_bad_request() -> None:
    """One after the other, beside a client that only talks. tests/null/test_pictures.py has all of them."""
    engine = seeing()
    files = [*refused()]
    chosen = [files[i * len(files) // HOSTILE % len(files)] for i in range(HOSTILE)]
    waits: list[float] = []
    is_over = threading.Event()

    def talk() -> None:
        with httpx.Client(timeout=30) as client:
            while not is_over.wait(0.05):
                begun_s = time.monotonic()
                answer = client.post(f"{url}/v1/chat/completions", json={"messages": [user(text("hello"))]})
                assert answer.status_code == 200
                waits.append(time.monotonic() - begun_s)

    def send(data: bytes) -> httpx.Response:
        return httpx.post(f"{url}/v1/chat/completions", json={"messages": [user(part(data))]}, timeout=30)

    with served(make_app(engine, PICTURE_TEMPLATE)) as url, ThreadPoolExecutor(1) as thread:
        talking = thread.submit(talk)
        try:
            for name, data, said in chosen:
                begun_s = time.monotonic()
                error = error_of(answer := send(data))
                assert answer.status_code == 400 and error["param"] == "messages[0].content[0].image_url", name
                assert said in error["message"] and time.monotonic() - begun_s < 10, (name, error)
            assert send(SMALL).status_code == 200
        finally:
            is_over.set()
        talking.result()
    assert len(engine.requests) == 1 + len(waits) and waits and sorted(waits)[len(waits) // 2] < 1
