"""Videos in requests: from the parts of a chat to the engine's request, over a fake engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("PIL")

from PIL import Image

from deltic import LLM, SamplingParams
from deltic.commands.chat import command
from deltic.commands.conversation import Conversation, StreamedAnswer
from deltic.commands.endpoint import Endpoint
from deltic.engine.messages import Request
from deltic.server.chat import picture_parts, videos
from tests.fake_engine import PICTURE_TEMPLATE, TEMPLATE, VIDEO_PAD, FakeEngineClient, byte_tokenizer, make_app, served
from tests.null.test_http import error_of
from tests.null.test_picture_doors import INFO, PUBLISHED, SMALL, WIDE, chat, part, post, seeing, text, url_of, user
from tests.null.test_picture_doors import llm as llm
from tests.pictures import file_of
from tests.videos import frames_of, only_sound, video, whole

FRAMES = [file_of(Image.fromarray(frame), "PNG") for frame in frames_of(4, 64, 64)]
"""Of 4 tokens a pair."""


def listed(frames: list[bytes] = FRAMES, **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": [url_of(frame) for frame in frames]} | more


def filed(data: bytes | str) -> dict[str, Any]:
    url = data if isinstance(data, str) else url_of(data, "video/mp4")
    return {"type": "video_url", "video_url": {"url": url}}


def prompt_of(request: Request) -> str:
    """The prompt as text, a run of marks as its length, where there is a picture."""
    shown = byte_tokenizer(sees=True)
    written, at = "", 0
    for picture in request.pictures:
        mark = VIDEO_PAD - 2 + picture.n_frames
        assert request.prompt_ids[picture.first : picture.end] == [mark] * picture.n_tokens
        assert len(picture.pixels) == 3072 * picture.n_frames * picture.n_tokens and len(picture.key) == 16
        written += shown.decode(request.prompt_ids[at : picture.first], False) + f"[{picture.rows}x{picture.columns}]"
        at = picture.end
    return written + shown.decode(request.prompt_ids[at:], False)


def pair(seconds: str, size: str = "2x2") -> str:
    return f"<{seconds} seconds><|vision_start|>[{size}]<|vision_end|>"


def test_a_list_of_frames_comes_into_its_place() -> None:
    engine = seeing()
    answer = chat(engine, user(text("a"), listed(), text("b"), part(WIDE), listed(FRAMES[:1], fps=4)))
    assert answer.status_code == 200, answer.text
    (sent,) = engine.requests
    assert prompt_of(sent) == (
        f"<|im_start|>user\na{pair('0.2')}{pair('1.2')}b<|vision_start|>[2x5]<|vision_end|>{pair('0.0')}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert [picture.n_frames for picture in sent.pictures] == [2, 2, 1, 2]
    assert answer.json()["usage"]["prompt_tokens"] == len(sent.prompt_ids)
    starts = [at for at, token in enumerate(sent.prompt_ids) if token == 257]
    assert sent.boundaries == starts[1:], "counted with the frames' tokens"
    told = post(engine, "/tokenize", {"messages": [user(text("a"), listed())]}).json()
    assert VIDEO_PAD in told["tokens"] and told["count"] == len(told["tokens"])


def test_where_parts_may_be_videos() -> None:
    engine = seeing()
    call = {"id": "c1", "function": {"name": "shot", "arguments": "{}"}}
    answer = chat(
        engine,
        {"role": "system", "content": [listed()]},
        {"role": "assistant", "tool_calls": [call], "content": [listed()]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("done"), listed(fps=1) | {"note": "of a library"}]},
    )
    assert answer.status_code == 200, answer.text
    assert len(engine.requests[0].pictures) == 4, "what a model said has none"
    assert f"done{pair('0.5')}{pair('2.5')}" in prompt_of(engine.requests[0])


def test_a_mark_in_a_text_beside_a_video_is_text() -> None:
    engine = seeing()
    said = "<|vision_start|><|video_pad|><|vision_end|>"
    assert chat(engine, user(text(said), listed(), text("<|video_pad|>"))).status_code == 200
    assert engine.requests[0].prompt_ids.count(VIDEO_PAD) == 8


def test_a_template_as_they_are_published() -> None:
    engine = seeing()
    branch = "{%- elif 'video' in item or item.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    template = PUBLISHED.replace(
        "            {%- elif 'text' in item %}", f"            {branch}\n{{%- elif 'text' in item %}}"
    )
    assert post(engine, "/v1/chat/completions", {"messages": [user(listed(), text("x"))]}, template).status_code == 200
    assert f"user\n{pair('0.2')}{pair('1.2')}x<|im_end|>" in prompt_of(engine.requests[0])


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        PICTURE_TEMPLATE.replace("<|video_pad|>", ""),
        PICTURE_TEMPLATE.replace("<|video_pad|>", "<|image_pad|>"),
        PICTURE_TEMPLATE.replace("<|video_pad|>", "<|video_pad|><|video_pad|>"),
    ],
)
def test_a_template_that_does_not_show_it(template: str) -> None:
    answer = post(seeing(), "/v1/chat/completions", {"messages": [user(listed())]}, template)
    assert answer.status_code == 400 and "messages: the chat template" in error_of(answer)["message"]


def test_a_template_that_writes_the_mark_alone() -> None:
    engine = seeing()
    template = PICTURE_TEMPLATE.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    assert post(engine, "/v1/chat/completions", {"messages": [user(listed())]}, template).status_code == 200
    assert f"user\n{pair('0.2')}{pair('1.2')}<|im_end|>" in prompt_of(engine.requests[0])


def bad(given: Any, said: str, where: str = ".video") -> Any:
    return pytest.param(given, said, where, id=said[:30])


@pytest.mark.parametrize(
    ("given", "said", "where"),
    [
        bad({"type": "video"}, "expected URLs of its frames, or the URL of a file"),
        bad({"type": "video", "video": []}, "expected URLs of its frames"),
        bad({"type": "video", "video": [5]}, "expected URLs of its frames"),
        bad(listed(fps=0), "expected a number above 0, at most 240", ".fps"),
        bad(listed(fps=True), "expected a number above 0, at most 240", ".fps"),
        bad(listed(speed=2), "unknown field", ".speed"),
        bad({"type": "video", "video": "data:video/mp4;base64,QUJD", "fps": 2}, "is for a list of frames", ".fps"),
        bad(listed([FRAMES[0], b"abc"]), "frame 1: is no picture that can be read here"),
        bad(listed([FRAMES[0], WIDE]), "frame 1 has 160 x 64 pixels, and frame 0 64 x 64"),
        bad({"type": "video", "video": ["data:image/png;base64,QUJ"]}, "frame 0: is not valid base64"),
        bad(
            {"type": "video", "video": [url_of(SMALL), "http://a.example/"]}, "frame 1: this server fetches no pictures"
        ),
        bad({"type": "video", "video": ["/etc/passwd"]}, "frame 0: expected a data: URL"),
        bad(listed(FRAMES * 193), "has 772 frames. A video may have 768"),
        bad(listed(FRAMES * 20), "has 80 frames, too many for this model's context"),
        bad({"type": "video_url"}, "expected a URL, or an object with one", ".video_url"),
        bad({"type": "video_url", "video_url": {"url": "", "fps": 1}}, "unknown field", ".video_url.fps"),
        bad({"type": "input_video", "input_video": {}}, "'input_video' is not supported", ".type"),
    ],
)
def test_parts_that_are_refused(given: dict[str, Any], said: str, where: str) -> None:
    engine = seeing(max_model_len=500)
    answer = chat(engine, user(part(SMALL), given))
    error = error_of(answer)
    path = f"messages[0].content[1]{where}"
    assert answer.status_code == 400 and not engine.requests
    assert error["param"] == path and error["message"].startswith(f"{path}: {said}"), error


@pytest.mark.parametrize("given", [listed(), filed(b"x")])
def test_a_model_that_reads_text_says_so(given: dict[str, Any]) -> None:
    answer = post(FakeEngineClient(), "/v1/chat/completions", {"messages": [user(given)]}, TEMPLATE)
    assert answer.status_code == 400 and error_of(answer)["param"] == "messages[0].content[0].type"
    assert error_of(answer)["message"].endswith(f"'{given['type']}' is not supported: this server reads text only")


def test_other_doors_have_none() -> None:
    engine = seeing()
    given: Any = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": [listed()]}]}
    assert post(engine, "/v1/messages", given).status_code == 400
    given = {
        "input": [{"role": "user", "content": [{"type": "input_video", "video_url": "data:video/mp4;base64,QUJD"}]}]
    }
    assert post(engine, "/v1/responses", given).status_code == 400
    assert not engine.requests


def test_frames_become_smaller_where_they_do_not_fit() -> None:
    """A pair is a picture, and three quarters of the context are for all of a request."""
    large = [file_of(Image.fromarray(frame), "PNG") for frame in frames_of(4, 640, 640)]
    for context, n_videos, tokens in ((2000, 1, 400), (500, 1, 169), (500, 2, 81)):
        engine = seeing(max_model_len=context)
        answer = chat(engine, user(*[listed(large)] * n_videos))
        assert answer.status_code == 200, answer.text
        assert {picture.n_tokens for picture in engine.requests[0].pictures} == {tokens}
        assert len(engine.requests[0].pictures) == 2 * n_videos
    engine = seeing(max_model_len=2000)
    assert chat(engine, user(listed(large)), mm_processor_kwargs={"max_pixels": 16_384}).status_code == 200
    assert {picture.n_tokens for picture in engine.requests[0].pictures} == {16}


def test_what_the_context_holds() -> None:
    large = [file_of(Image.fromarray(frame), "PNG") for frame in frames_of(8, 640, 640)]
    answer = chat(seeing(max_model_len=1000), user(text("x" * 500), listed(large)))
    error = error_of(answer)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages[0].content[1].video"
    assert "has 676 tokens" in error["message"] and "Send fewer than its 4 pairs of frames" in error["message"]
    most = int(error["message"].rpartition(" ")[2].rstrip("."))
    answer = chat(
        seeing(max_model_len=1000), user(text("x" * 500), listed(large)), mm_processor_kwargs={"max_pixels": most}
    )
    assert answer.status_code == 200, answer.text


def test_all_pixels_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_parts, "MAX_PIXEL_BYTES", 3072 * 20)
    assert chat(seeing(), user(listed())).status_code == 200
    error = error_of(chat(seeing(), user(listed(), listed())))
    assert error["code"] == "too_many_pixels" and error["param"].endswith("].video")


def test_files_are_fetched_where_they_may_be() -> None:
    async def files(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": SMALL})

    engine = seeing()
    with served(files) as url:
        body = {"messages": [user({"type": "video", "video": [f"{url}/a.png", url_of(SMALL)]})]}
        answer = post(engine, "/v1/chat/completions", body, fetch_images_from=("127.0.0.1",))
    assert answer.status_code == 200 and pair("0.2") in prompt_of(engine.requests[0])


def test_without_the_library_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_parts, "needs_av", lambda: "pip install it")
    error = error_of(chat(seeing(), user(filed(b"x"))))
    assert error["message"] == "messages[0].content[0].video_url: pip install it"
    assert chat(seeing(), user(listed())).status_code == 200


@pytest.fixture
def av() -> Iterator[Any]:
    yield pytest.importorskip("av")


def test_a_file(av: Any) -> None:
    engine = seeing()
    answer = chat(engine, user(filed(whole("mp4")), text("What happens?")))
    assert answer.status_code == 200, answer.text
    times = re.findall(r"<([\d.]+) seconds>", prompt_of(engine.requests[0]))
    assert times == ["0.3", "1.4", "2.6"]
    for bounds, n in (
        ({"fps": 1}, 2),
        ({"num_frames": 12}, 6),
        ({"do_sample_frames": False}, 15),
        ({"do_sample_frames": True}, 3),
    ):
        assert chat(engine, user(filed(whole("mp4"))), mm_processor_kwargs=bounds).status_code == 200
        assert len(engine.requests[-1].pictures) == n, bounds
    answer = chat(engine, user({"type": "video", "video": url_of(whole("webm"), "video/webm")}))
    assert answer.status_code == 200 and len(engine.requests[-1].pictures) == 3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a video of a cat", "is no video that can be read here"),
        (SMALL, "is no video that can be read here"),
        ("http://a.example/", "this server fetches no videos (--fetch-images-from)"),
        ("file:///etc/passwd", "expected a data: URL"),
        ("data:video/mp4;base64,QUJ", "is not valid base64"),
        ("data:video/mp4,abc", "expected data:video/...;base64,..."),
    ],
)
def test_files_that_are_refused(av: Any, data: bytes | str, said: str) -> None:
    error = error_of(answer := chat(seeing(), user(filed(data))))
    path = "messages[0].content[0].video_url"
    assert answer.status_code == 400 and error["param"] == path and error["message"].startswith(f"{path}: {said}")


def test_hostile_files_are_each_a_bad_request(av: Any) -> None:
    """tests/null/test_videos.py has all of them."""
    for data in (only_sound(), whole("mp4")[:2000]):
        error = error_of(answer := chat(seeing(), user(filed(data))))
        assert answer.status_code == 400 and error["code"] == "invalid_video"


def test_a_client_that_waits_no_more_ends_the_process(av: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "DECODE_S", 0.0001)
    error = error_of(chat(seeing(), user(filed(whole("mp4")))))
    assert "could not be decoded within 0.0003 s" in error["message"]


def test_python(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Request] = []
    add = llm._engine.add

    def noted(request: Request) -> None:
        added.append(request)
        add(request)

    monkeypatch.setattr(llm._engine, "add", noted)
    path = tmp_path / "a.png"
    path.write_bytes(FRAMES[0])
    frames = [Image.fromarray(frames_of(4, 64, 64)[1]), FRAMES[2], path, url_of(FRAMES[3])]
    params = SamplingParams(max_tokens=2)
    llm.chat([user(text("a"), {"type": "video", "video": frames, "fps": 1})], params)
    assert f"a{pair('0.5')}{pair('2.5')}<|im_end|>" in prompt_of(added[0])
    for wrong, said in ((5, "expected a picture of Pillow, bytes or a path"), ([], "expected URLs of its frames")):
        with pytest.raises(ValueError, match=said):
            llm.chat([user({"type": "video", "video": wrong})], params)


def test_python_takes_files(av: Any, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Request] = []
    add = llm._engine.add

    def noted(request: Request) -> None:
        added.append(request)
        add(request)

    monkeypatch.setattr(llm._engine, "add", noted)
    path = tmp_path / "a.mp4"
    path.write_bytes(data := video(30))
    for given in (data, path, str(path), url_of(data, "video/mp4")):
        llm.chat(
            [user({"type": "video", "video": given})], SamplingParams(max_tokens=2), mm_processor_kwargs={"fps": 1}
        )
        assert len(added[-1].pictures) == 2
    assert len({picture.key for request in added for picture in request.pictures}) == 2


def test_videos_have_room_for_all_that_they_may_become() -> None:
    engine = seeing(pictures=msgspec.structs.replace(INFO, room_bytes=3072 * 1200))
    assert chat(engine, user(listed(), listed(), part(SMALL))).status_code == 200
    assert len(engine.requests[0].pictures) == 5


def test_deltic_chat(av: Any, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(whole("mp4"))
    engine = seeing()
    with served(make_app(engine, PICTURE_TEMPLATE)) as url:
        conversation = Conversation(Endpoint(url), "fake")
        assert command(conversation, "/video /none.mp4") == "cannot read /none.mp4: No such file or directory"
        assert command(conversation, f"/video {tmp_path / 'a.mp4'}") == "the next message has 1 video"
        conversation.messages.append(conversation.message("What happens?"))

        async def go() -> StreamedAnswer:
            answer = StreamedAnswer()
            async for _ in conversation.ask(answer):
                pass
            return answer

        assert asyncio.run(go()).content == "Hello"
    assert len(engine.requests[0].pictures) == 3 and "What happens?" in prompt_of(engine.requests[0])
    assert command(conversation, "/video") == "no videos" and conversation.message("x")["content"] == "x"
