"""What developers reported of the models that are served here, and of other servers: tests/golden/developers.json has each with the
right answer, beside whole requests of agents' sessions. The doors are asked with the official chat templates and the real vocabulary,
as in tests/published.py."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltic.config import ServerConfig
from deltic.engine.messages import PictureInfo
from deltic.server.app import create_app
from deltic.server.chat.template import ChatTemplate
from deltic.server.service import Server
from tests import published
from tests.fake_engine import FakeEngineClient, byte_tokenizer, server_log, service_of
from tests.null import fuzz_parser

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "developers.json").read_text(encoding="utf-8"))


def cases(*doors: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in GOLDEN["cases"] if case["door"] in doors]


OF_FILES = {
    "tests/cpu/test_adapters.py": "test_terms_of_a_tower_that_add_nothing_are_left_out",
    "tests/cpu/test_reports.py": "test_a_gguf_model_beside_another_tower_is_planned_without_pictures",
    "tests/null/test_quantised_files.py": "test_an_mlx_checkpoint_is_named",
}
"""Tests of what was reported of files, by the files that have them."""


def test_every_case_is_run() -> None:
    for file, test in OF_FILES.items():
        assert f"def {test}(" in (Path(__file__).parents[2] / file).read_text(encoding="utf-8")
    doors = {case["door"] for case in GOLDEN["cases"]}
    assert doors == {"parser", "template", "chat", "messages", "responses", "speech"} and len(GOLDEN["cases"]) >= 36


@pytest.mark.parametrize("case", cases("parser"))
def test_answers(case: dict[str, Any]) -> None:
    """As a whole, character by character, and in random pieces."""
    text, want, rng = case["input"]["text"], case["want"], random.Random(0)
    for parts in ([text], list(text), *(fuzz_parser.cut(text, rng) for _ in range(20))):
        said, _ = fuzz_parser.parse(parts, False, GOLDEN["tools"], False, False)
        calls = [{"name": call.name, "arguments": call.arguments} for call in said.calls]
        assert {"reasoning": said.reasoning, "content": said.content, "calls": calls} == want, parts


# Doors.


PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}


class Doors:
    """A server of a published template and the real vocabulary, over a fake engine."""

    def __init__(self, template: str, **info: Any) -> None:
        self.tokenizer = tokenizer = published.tokenizer()
        end = tokenizer.special_id("<|im_end|>")
        said = [*tokenizer.encode("Hello"), end]
        self.engine = FakeEngineClient(
            lambda request, index: said,
            **{"vocab_size": tokenizer.n_tokens, "eos_token_ids": [end], "max_model_len": 8192} | info,
        )
        server = Server(ServerConfig())
        server.add(service_of(server, self.engine, "fake", template, tokenizer=tokenizer))
        self.app = create_app(server)

    def ask(self, door: str, body: dict[str, Any]) -> tuple[httpx.Response, str, str]:
        """The response, the prompt, and what the log says."""
        needed = {"messages": {"max_tokens": 9}}.get(door, {})

        async def go() -> httpx.Response:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(self.app), base_url="http://localhost", timeout=60
            ) as client:
                return await client.post(PATHS[door], json={"model": "fake", "stream": False} | needed | body)

        n = len(self.engine.requests)
        with server_log(None) as log:
            response = asyncio.run(go())
        prompt = (
            self.tokenizer.decode(self.engine.requests[-1].prompt_ids, False) if len(self.engine.requests) > n else ""
        )
        return response, prompt, log.getvalue()


def holds(text: str, pieces: list[str]) -> bool:
    """Whether they are in it, one behind the other."""
    at = 0
    for piece in pieces:
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


@pytest.mark.parametrize(
    "case", [p for p in cases("chat", "messages", "responses") if "picture" not in p.values[0]["input"]]
)
def test_requests(case: dict[str, Any]) -> None:
    body, want = dict(case["input"]), case["want"]
    for name in body.pop("templates", ["qwen3_8"]):
        response, prompt, log = Doors(published.template(name)).ask(case["door"], body)
        assert response.status_code == want["status"], response.text
        assert holds(prompt, want.get("prompt", [])), (name, prompt)
        assert want.get("log", "") in log


@pytest.mark.parametrize("case", cases("template"))
def test_templates(case: dict[str, Any]) -> None:
    response, prompt, _ = Doors(case["input"]["chat_template"]).ask("chat", {"messages": case["input"]["messages"]})
    assert response.status_code == 200, response.text
    assert holds(prompt, case["want"]["prompt"])


EFFORTS = {
    "chat": lambda effort: {"reasoning_effort": effort},
    "responses": lambda effort: {"reasoning": {"effort": effort}},
    "messages": lambda effort: {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}},
    "ollama": lambda effort: {"think": effort},
}


def said(door: str, *messages: tuple[str, str]) -> dict[str, Any]:
    """These messages, as a door takes them."""
    plain = [{"role": role, "content": content} for role, content in messages]
    if door == "ollama":
        plain = [message | {"role": message["role"].replace("developer", "system")} for message in plain]
    if door == "messages":
        plain = [message | {"role": message["role"].replace("developer", "system")} for message in plain]
    return {"input": plain} if door == "responses" else {"messages": plain}


@pytest.mark.parametrize("door", PATHS)
def test_efforts_are_those_of_the_template(door: str) -> None:
    doors = Doors(published.template("qwen3_8"))
    for effort, known in {
        "minimal": "low",
        "low": "low",
        "medium": "",
        "high": "xhigh",
        "xhigh": "xhigh",
        "max": "xhigh",
        "ultra": "xhigh",
    }.items():
        response, prompt, log = doors.ask(door, said(door, ("user", "x")) | EFFORTS[door](effort))
        assert response.status_code == 200, response.text
        assert ("Reasoning effort is set to" in prompt) == bool(known) and f"set to {known}" * bool(known) in prompt
        assert (f'reasoning_effort="{effort}, as ' in log) == (effort not in ("low", "medium", "xhigh"))
    response, prompt, _ = doors.ask(
        door, said(door, ("user", "x")) | ({} if door == "messages" else EFFORTS[door]("none"))
    )
    assert response.status_code == 200 and prompt.endswith("<think>\n\n</think>\n\n")
    response, _, _ = doors.ask(door, said(door, ("user", "x")) | EFFORTS[door]("much"))
    assert response.status_code == 400


@pytest.mark.parametrize("name", published.OFFICIAL)
def test_system_messages_are_the_same_on_every_door(name: str) -> None:
    doors = Doors(published.template(name))
    late = "<system-reminder>\nremember\n</system-reminder>"
    for messages, pieces in (
        ([("system", "a"), ("developer", "b"), ("user", "x")], ["system\n", "a\n\nb<|im_end|>", "user\nx<|im_end|>"]),
        ([("user", "x")], ["user\nx<|im_end|>"]),
        ([("system", "a")], ["a<|im_end|>", "user\n<|im_end|>"]),
        ([("user", "x"), ("system", "remember")], [f"user\nx\n\n{late}<|im_end|>"]),
        (
            [("system", "a"), ("user", "x"), ("assistant", "y"), ("developer", "remember"), ("user", "z")],
            [f"user\n{late}\n\nz<|im_end|>"],
        ),
        (
            [("system", "a"), ("user", "x"), ("system", "remember"), ("user", "z")],
            [f"user\nx\n\n{late}\n\nz<|im_end|>"],
        ),
        ([("assistant", "Hi!"), ("user", "x")], ["Hi!<|im_end|>", "user\nx"]),
    ):
        prompts = set()
        for door in PATHS:
            settings = {} if door == "messages" else EFFORTS[door]("none")
            response, prompt, _ = doors.ask(door, said(door, *messages) | settings)
            assert response.status_code == 200, (door, response.text)
            assert holds(prompt, pieces), (door, prompt)
            prompts.add(prompt)
        assert len(prompts) == 1, prompts


def test_a_reminder_goes_with_a_result() -> None:
    """A question of its own would have the template drop the thoughts before it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
            {"role": "system", "content": "be quick"},
        ]
    }
    _, prompt, _ = Doors(published.template("qwen3_5_think")).ask("chat", body)
    assert (
        "<think>\nHm.\n</think>" in prompt
        and "ok\n\n<system-reminder>\nbe quick\n</system-reminder>\n</tool_response>" in prompt
    )


def test_many_system_messages_take_no_time() -> None:
    messages = [{"role": "user", "content": "x"}, *({"role": "system", "content": "y"} for _ in range(5_000))]
    template = ChatTemplate(
        {"default": "{{ messages[-1].content }}{{ 1 / 0 if messages[1] is defined and messages[1].role == 'system' }}"},
        byte_tokenizer(),
    )
    assert len(template.render(messages).ids) > 100_000


def test_what_a_template_takes_stays_as_it_is() -> None:
    """As transformers renders it."""
    doors = Doors(published.template(published.INSTRUCT))
    body = {
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "x"},
            {"role": "system", "content": "b"},
        ]
    }
    response, prompt, _ = doors.ask("chat", body)
    assert response.status_code == 200
    assert (
        prompt
        == "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>system\nb<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", published.TRAINING)
def test_templates_for_training_are_served(name: str) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    plain = ChatTemplate({"default": published.template(name.removesuffix("_training"))}, byte_tokenizer())
    marked = ChatTemplate({"default": published.template(name)}, byte_tokenizer())
    decode = byte_tokenizer().decode
    assert decode(marked.render(messages).ids, False).startswith(
        decode(plain.render(messages[:1], add_generation_prompt=False).ids, False)[:20]
    )


def test_the_vocabulary_is_the_published_one() -> None:
    encode = published.tokenizer().encode
    assert encode("Hello, how are you?") == [9419, 11, 1204, 513, 488, 30]
    assert encode("user\nassistant") == [846, 198, 74455] and encode("<|im_end|>", "parse") == [248046]
    assert published.tokenizer().n_tokens == 248_077


@pytest.mark.parametrize("case", cases("speech"))
def test_speech(case: dict[str, Any]) -> None:
    """A built-in voice that says a word for minutes is ended, and the client told."""
    from tests.fake_speech import FakeSpeechClient
    from tests.null.test_speech_http import say

    engine = FakeSpeechClient("custom_voice")
    engine.n_frames = 5000
    answer = say(engine, case["input"])
    assert answer.status_code == 500 and "speech_did_not_end" in answer.text
    assert engine.requests[0].params.max_tokens == case["want"]["frames"]


# Pictures.


def picture(width: int, height: int, orientation: int | None = None) -> bytes:
    Image = pytest.importorskip("PIL.Image")
    made, written = Image.new("RGB", (width, height), (200, 30, 30)), io.BytesIO()
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    made.save(written, "PNG", exif=exif)
    return written.getvalue()


@pytest.mark.parametrize("case", [p for p in cases("chat") if "picture" in p.values[0]["input"]])
def test_pictures(case: dict[str, Any]) -> None:
    asked, want = case["input"], case["want"]
    data = picture(*asked["picture"], asked.get("orientation"))
    encoded = (base64.encodebytes if "line" in asked else base64.b64encode)(data).decode()
    assert ("\n" in encoded) == ("line" in asked)
    doors = Doors(
        published.template("qwen3_8"), pictures=PictureInfo(min_pixels=4096, max_pixels=409_600, max_tokens=400)
    )
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    response, _, _ = doors.ask("chat", {"messages": [{"role": "user", "content": [part]}]})
    assert response.status_code == want["status"], response.text
    assert want.get("said", "") in response.text
    if "grid" in want:
        (shown,) = doors.engine.requests[0].pictures
        assert [shown.rows, shown.columns] == want["grid"]
