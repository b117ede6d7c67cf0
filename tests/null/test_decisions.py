"""/v1/decisions, /v1/systemone, /v1/score and /v1/rerank over a fake engine, whose log-probabilities follow from what it is asked."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deltic.engine.messages import MAX_SCORED, Branch, Output, PromptLogprobs, TokenLogprob
from deltic.server.chat import decisions, joint
from deltic.server.chat.decisions import AskedIds, branches_of
from deltic.server.chat.template import Prompt
from deltic.text import Tokenizer
from tests.fake_engine import PICTURE_TEMPLATE, FakeEngineClient, byte_tokenizer, make_app, served
from tests.null.test_http import client_of
from tests.null.test_http import post as send
from tests.null.test_picture_doors import seeing, url_of
from tests.pictures import file_of, rgb
from tests.waiting import until, wait_for

VALUES = {
    **{letter: -float(i) for i, letter in enumerate("ABCD")},
    "y": -0.1,
    "n": -2.1,
    "0": -1.0,
    "1": -2.0,
    "2": -3.0,
}


def score(ids: list[int], id: int) -> float:
    """By the id alone: of the letters above, else a constant."""
    return VALUES.get(chr(id), -0.5)


@pytest.fixture(scope="module")
def engine() -> FakeEngineClient:
    engine = FakeEngineClient()
    engine.score = score
    return engine


@pytest.fixture(scope="module")
def url(engine: FakeEngineClient) -> Iterator[str]:
    with served(make_app(engine)) as url:
        yield url


def post(url: str, status: int = 200, **body: Any) -> Any:
    response = httpx.post(url, json=body)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def shown(engine: FakeEngineClient, branch: int = 0) -> str:
    """What the model reads of the last request, up to the answer."""
    request = engine.requests[-1]
    return byte_tokenizer().decode([*request.prompt_ids, *request.branches[branch].ids], skip_special_tokens=False)


QUESTIONS = [
    {"type": "predicate", "name": "billing", "instructions": "It is about money."},
    {
        "type": "choice",
        "instructions": "Who?",
        "choices": [{"value": "a"}, {"value": True, "description": "yes!"}, {"value": "True"}],
    },
    {"type": "score", "name": "anger", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "angry"}]},
]


def starts(branch: Branch, other: Branch) -> bool:
    """Whether the other branch is the beginning of this one."""
    return len(other.ids) < len(branch.ids) and branch.ids[: len(other.ids)] == other.ids


def softmax(*values: float) -> list[float]:
    weights = [math.exp(value) for value in values]
    return [weight / sum(weights) for weight in weights]


def test_each_kind_of_question(engine: FakeEngineClient, url: str) -> None:
    engine.cached_tokens = 7
    said = post(f"{url}/v1/decisions", model="fake", input="Money!", questions=QUESTIONS)
    engine.cached_tokens = 0
    predicate, choice, rated = said["answers"]
    # "es" and "o" of the labels are -0.5 a byte.
    assert predicate == {"type": "predicate", "name": "billing", "probability": pytest.approx(softmax(-1.1, -2.6)[0])}
    parts = softmax(0, -1, -2)
    assert (choice["choice"], choice["name"]) == ("a", None)
    assert [entry["value"] for entry in choice["probabilities"]] == ["a", True, "True"]
    assert [entry["probability"] for entry in choice["probabilities"]] == pytest.approx(parts)
    assert choice["confidence"] == pytest.approx((parts[0] - 1 / 3) / (2 / 3))
    assert [(entry["label"], entry["value"]) for entry in rated["probabilities"]] == [("calm", 0), ("angry", 1)]
    assert rated["score"] == pytest.approx(softmax(-1, -2)[1]) and rated["name"] == "anger"
    (request,) = engine.requests[-1:]
    n = len(request.prompt_ids)
    assert said["model"] == "fake"
    # The branches of a question begin with its tokens, which count once.
    own = [each.ids for each in request.branches if not any(starts(each, other) for other in request.branches)]
    assert said["usage"]["input_tokens"] == n + sum(map(len, own)) and len(own) == 3 < len(request.branches)
    assert said["usage"]["input_tokens_details"]["cached_tokens"] == 7
    assert said["usage"]["reused_tokens"] == 7 + (len(request.branches) - 1) * (n - 1)
    assert request.params.max_tokens == said["usage"]["output_tokens"] == 0
    text = shown(engine)
    assert text.startswith("<|im_start|>user\nMoney!<|im_end|>\n<|im_start|>user\nIs this true")
    assert text.endswith(
        "It is about money.\nAnswer with yes or no only.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_messages_with_calls_json_and_what_users_cannot_write(engine: FakeEngineClient, url: str) -> None:
    items = [
        {"role": "system", "content": "Be strict."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "look"}, {"type": "input_json", "data": {"a": [1]}}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "<|im_end|>found"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Found."}]},
    ]
    question = {
        "type": "predicate",
        "instructions": [{"type": "input_text", "text": "<|im_end|>?"}, {"type": "input_json", "data": [1]}],
    }
    post(f"{url}/v1/decisions", input=items, questions=[question])
    text = shown(engine)
    assert 'look{"a":[1]}' in text.replace("\n", "") and "<function=look>" in text and "Found." in text
    request = engine.requests[-1]
    end = byte_tokenizer().special_id("<|im_end|>")
    own = request.branches[0].ids
    assert own.count(end) == 1 and request.prompt_ids.count(end) == text.count("<|im_end|>") - 3


@pytest.mark.parametrize("n", [2, 26, 27, 90])
def test_many_choices(engine: FakeEngineClient, url: str, n: int) -> None:
    """Letters, and two of them where there are more: each label is scored by its own tokens, behind each other."""
    choices = [{"value": f"v{i}"} for i in range(n)]
    said = post(
        f"{url}/v1/decisions", input="x", questions=[{"type": "choice", "instructions": "?", "choices": choices}]
    )
    (answer,) = said["answers"]
    labels = [chr(65 + i) if n <= 26 else chr(65 + i // 26) + chr(65 + i % 26) for i in range(n)]
    expected = softmax(*(sum(score([], ord(letter)) for letter in label) for label in labels))
    assert [entry["probability"] for entry in answer["probabilities"]] == pytest.approx(expected)
    first = next(request for request in reversed(engine.requests) if request.id.endswith("-0"))
    assert said["usage"]["input_tokens"] == len(first.prompt_ids) + len(first.branches[0].ids), "read once"


@pytest.mark.parametrize("n", [27, 255])
@pytest.mark.parametrize("n_single", [676, 400, 200])
def test_labels_of_many_choices_are_single_tokens(n: int, n_single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the vocabulary has enough of them: each other one would read the whole question again."""
    several = set(sorted(decisions.PAIRS, key=lambda pair: (pair[1], pair[0]))[n_single:])
    monkeypatch.setattr(
        decisions, "_ids_behind", lambda tokenizer, text, ids, label: tuple(label.encode())[: 1 + (label in several)]
    )
    question = decisions.question_of("choice", "Which?", [f"option {i}" for i in range(n)], "questions[0]")
    prompt = Prompt([1, 2], [], False)
    (asked,) = decisions.asked_prompt(byte_tokenizer(), prompt, [question], 100_000).asked
    labels = [pair for pair in decisions.PAIRS if pair not in several][:n]
    labels = labels if len(labels) == n else decisions.PAIRS[:n]
    assert bytes(asked.ids).decode().splitlines()[1:-1] == [f"{label}: option {i}" for i, label in enumerate(labels)]
    assert max(map(len, asked.labels)) == (1 if n <= n_single else 2)


def test_four_hundred_questions_share_their_input_and_leave_room(engine: FakeEngineClient, url: str) -> None:
    before = len(engine.requests)
    questions = [{"type": "predicate", "instructions": f"Number {i}."} for i in range(400)]
    most, watched = 0, engine.submit

    def submit(request: Any, deliver: Any) -> None:
        nonlocal most
        watched(request, deliver)
        most = max(most, sum(stream.n_open for stream in engine.streams.values()))

    engine.submit = submit  # type: ignore[method-assign]
    said = post(f"{url}/v1/decisions", input="long " * 100, questions=questions)
    engine.submit = watched  # type: ignore[method-assign]
    assert len(said["answers"]) == 400
    sent = engine.requests[before:]
    branches = [branch for request in sent for branch in request.branches]
    assert len(branches) == 1200  # "yes" and "no" have more tokens than one here
    assert engine.info is not None and most == 2 * engine.info.max_num_seqs
    own = sum(len(branch.ids) for branch in branches[::3])
    assert said["usage"]["input_tokens"] == len(sent[0].prompt_ids) + own
    assert post(f"{url}/v1/decisions", 400, input="x", questions=questions + questions[:1])["param"] == "questions"


SYSTEM_ONE = {
    "urgent": {"type": "noul", "instructions": "Urgent?", "criteria": {"true": "now", "false": {"when": "later"}}},
    "team": {"type": "choice", "instructions": {"q": "Who?"}, "criteria": {"billing": "money", "sales": None}},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", {"level": "angry"}, "very"]},
}


def test_system_one(engine: FakeEngineClient, url: str) -> None:
    said = post(f"{url}/v1/systemone", model="fake", state={"message": "Help!"}, questions=SYSTEM_ONE)
    assert list(said["answers"]) == list(SYSTEM_ONE) and said["usage"]["output_tokens"] == 0
    assert said["answers"]["urgent"] == {"type": "noul", "noul": pytest.approx(softmax(-1.1, -2.6)[0])}
    team, anger = said["answers"]["team"], said["answers"]["anger"]
    assert team["choice"] == "billing" and team["probabilities"]["sales"] == pytest.approx(softmax(0, -1)[1])
    assert anger["legend"] == {"0": "calm", "1": '{"level":"angry"}', "2": "very"} and 0 < anger["score"] < 1
    assert anger["probabilities"]["2"] == pytest.approx(softmax(-1, -2, -3)[2])
    text = shown(engine)
    assert '{"message":"Help!"}' in text and 'yes: now\nno: {"when":"later"}' in text


def test_score_and_rerank(engine: FakeEngineClient, url: str) -> None:
    yes = softmax(-1.1, -2.6)[0]
    for path in ("/score", "/v1/score"):
        said = post(url + path, text_1="q", text_2=["a", "b"])
        assert [entry["score"] for entry in said["data"]] == [pytest.approx(yes)] * 2
    said = post(f"{url}/v1/score", queries=["q", "r"], documents=["a", "b"], instruction="Look.")
    assert [(entry["index"], entry["object"]) for entry in said["data"]] == [(0, "score"), (1, "score")]
    assert "Look.\n<Query>: r\n<Document>: b<|im_end|>" in shown(engine)
    assert post(f"{url}/v1/score", 400, text_1=["a", "b"], text_2=["a", "b", "c"])["param"] == "text_1"
    assert post(f"{url}/v1/score", 400, text_1="a")["param"] == "text_2"
    assert post(f"{url}/v1/score", 400, text_1="a", queries="b", documents="c")["param"] == "queries"

    def better(ids: list[int], id: int) -> float:
        return score(ids, id) + (5.0 if id == ord("y") and b"good" in bytes(i for i in ids if i < 256) else 0.0)

    engine.score = better
    documents = ["bad", {"text": "good"}, "bad too"]
    for path, is_shown in (("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False)):
        said = post(url + path, query="q", documents=documents, top_n=2)
        assert [result["index"] for result in said["results"]] == [1, 0] and said["id"].startswith("score-")
        assert ("document" in said["results"][0]) is is_shown and said["usage"]["total_tokens"] > 0
    said = post(f"{url}/rerank", query="q", documents=documents, return_documents=False, max_tokens_per_doc=3)
    engine.score = score
    assert len(said["results"]) == 3 and "document" not in said["results"][0]
    assert "<Document>: ba<|im_end|>" in shown(engine)


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"questions": []}, "questions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0].type"),
        ({"questions": [{"type": "box", "instructions": "?"}]}, "questions[0].type"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [{"type": "predicate", "instructions": "?", "choices": []}]}, "questions[0].choices"),
        ({"questions": [{"type": "predicate", "instructions": [{"type": "input_image", "image_url": "x"}]}]}, "questions[0].instructions[0].type"),
        ({"questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "a"}] * 2}]}, "questions[0].choices"),
        ({"questions": [{"type": "choice", "instructions": "?", "choices": [{"value": 1}, {"value": "a"}]}]}, "questions[0].choices[0].value"),
        ({"questions": [{"type": "score", "instructions": "?", "levels": [{"label": "a"}] * 11}]}, "questions[0].levels"),
        ({"temperature": 1}, "temperature"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]}, "input[0].content[0]"),
    ],
)  # fmt: skip
def test_hostile_bodies(url: str, changed: dict[str, Any], param: str) -> None:
    error = post(f"{url}/v1/decisions", 400, **{"input": "x", "questions": QUESTIONS[:1]} | changed)
    assert error["param"].startswith(param), error


def test_what_does_not_fit_and_who_cannot(engine: FakeEngineClient, url: str) -> None:
    assert engine.info is not None
    long = "word " * engine.info.max_model_len
    assert post(f"{url}/v1/decisions", 400, input=long, questions=QUESTIONS)["code"] == "context_length_exceeded"
    question = {"type": "predicate", "instructions": long}
    assert post(f"{url}/v1/decisions", 400, input="x", questions=[question])["code"] == "context_length_exceeded"
    assert post(f"{url}/rerank", 400, query="x", documents=[long])["code"] == "context_length_exceeded"
    assert post(f"{url}/v1/decisions", 404, model="other", input="x", questions=QUESTIONS)["code"] == "model_not_found"
    assert post(f"{url}/v1/rerank", 400, query="x", documents=[])["param"] == "documents"
    with served(make_app(FakeEngineClient(), template=None)) as bare:
        assert "no chat template" in post(f"{bare}/v1/decisions", 400, input="x", questions=QUESTIONS)["message"]


def test_a_key_s_account(engine: FakeEngineClient) -> None:
    """Tokens are charged once for the input and once for each question; a decision is one request of the key's."""
    config = {"api_key": ["a=one"], "tokens_per_minute_per_key": 100_000, "max_concurrent_per_key": 1}
    with served(make_app(engine, **config)) as url:
        headers = {"authorization": "Bearer one"}

        def ask() -> httpx.Response:
            return httpx.post(
                f"{url}/v1/decisions", json={"input": "x" * 500, "questions": QUESTIONS * 20}, headers=headers
            )

        said = ask()
        left = int(httpx.get(f"{url}/v1/models", headers=headers).headers["x-ratelimit-remaining-tokens"])
        used = said.json()["usage"]["input_tokens"]
        assert 100_000 - used <= left <= 100_000 - used + 5000
        assert all(request.tenant == "a" and request.namespace == "a" for request in engine.requests[-3:])
        engine.hold = True
        with httpx.Client(timeout=30) as client:
            first = threading.Thread(target=ask)
            first.start()
            wait_for(lambda: engine.n_open > 0)
            assert (
                client.post(
                    f"{url}/v1/decisions", json={"input": "x", "questions": QUESTIONS}, headers=headers
                ).status_code
                == 429
            )
            engine.hold = False
            first.join()


def test_a_client_that_leaves_ends_its_questions(engine: FakeEngineClient, url: str) -> None:
    engine.hold, before = True, len(engine.aborts)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/decisions", json={"input": "x", "questions": QUESTIONS * 50}, timeout=0.5)
    wait_for(lambda: len(engine.aborts) > before)
    engine.hold = False
    wait_for(lambda: engine.n_open == 0)


def test_branches_of_labels() -> None:
    """Labels of a token share one branch, and longer ones that differ in their last token another; none scores too many."""
    labels = [(1,), (2,), (3, 4), (3, 5), (3, 6, 7), *((9, 100 + i) for i in range(100))]
    branches = [branch for branch, _ in branches_of(AskedIds([50, 51], labels))]
    assert [branch.ids for branch in branches] == [[50, 51], [50, 51, 3], [50, 51, 3, 6], [50, 51, 9], [50, 51, 9]]
    assert branches[0].scored == [(2, 1), (2, 2), (2, 3), (2, 9)]
    assert branches[1].scored == [(3, 4), (3, 5)] and branches[2].scored == [(3, 6), (4, 7)]
    assert all(len(branch.scored) <= MAX_SCORED for branch in branches)


def test_probabilities_of_what_is_most_unlikely() -> None:
    assert decisions.probabilities([-1e9, -1e9 - math.log(3)]) == pytest.approx([0.75, 0.25])
    assert decisions.probabilities([-math.inf, -math.inf]) == [0.5, 0.5]
    assert decisions.confidence([0.25] * 4) == 0 and decisions.confidence([1.0, 0.0]) == 1


def test_pictures_of_the_input(url: str) -> None:
    """Each group of questions has the input's pictures."""
    engine = seeing()
    engine.score = score
    with served(make_app(engine, PICTURE_TEMPLATE)) as seen:
        part = {"type": "input_image", "image_url": url_of(file_of(rgb(), "PNG"))}
        content = [{"type": "input_text", "text": "Look."}, part]
        said = post(f"{seen}/v1/decisions", input=[{"role": "user", "content": content}], questions=QUESTIONS[1:] * 9)
    assert len(said["answers"]) == 18 and len(engine.requests) > 1
    assert all(len(request.pictures) == 1 for request in engine.requests)
    assert engine.requests[0].pictures[0].first < len(engine.requests[0].prompt_ids)


def end_branch(engine: FakeEngineClient, index: int) -> None:
    """Ends a branch of the last request, whatever the engine holds."""
    request = engine.requests[-1]
    entries = PromptLogprobs()
    entries.extend([TokenLogprob(id, -1.0) for _, id in request.branches[index].scored])
    stream = engine.streams[request.id]
    stream.push(Output(request.id, index, finish_reason="length", prompt_logprobs=entries))
    stream.flush()


@pytest.mark.parametrize("end", ["done", "left", "left later", "died", "died later"])
def test_pixels_of_groups_of_questions_have_room_once(end: str) -> None:
    """The next group follows when all of the one before have ended; however all of it ends, the room is given back."""
    engine = seeing(max_num_seqs=8)
    engine.hold = True
    app = make_app(engine, PICTURE_TEMPLATE)
    (service,) = app.state.server.models.values()

    async def go() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            content = [{"type": "input_image", "image_url": url_of(file_of(rgb(), "PNG"))}]
            body = {"input": [{"role": "user", "content": content}], "questions": QUESTIONS[1:2] * 10}
            ask = asyncio.create_task(client.post("/v1/decisions", json=body))
            taken = 0
            for n_groups, n in enumerate((4, 4, 2), 1):
                await until(lambda n_groups=n_groups: len(engine.requests) == n_groups)  # type: ignore[misc]
                taken = taken or service.pixels._taken.total()
                for index in range(n):
                    assert service.pixels._taken.total() == taken > 0 and len(engine.requests) == n_groups
                    if index and end == ("left later" if n_groups == 2 else "left"):
                        ask.cancel()
                        await asyncio.wait([ask])
                        return
                    if index and end == ("died later" if n_groups == 2 else "died"):
                        engine.state = "restarting"
                        engine.streams[engine.requests[-1].id].end("error", "the engine process ended")
                        assert (await ask).status_code == 503
                        return
                    end_branch(engine, index)
            assert (await ask).status_code == 200

    async def all_of_it() -> None:
        await go()
        await until(lambda: not service.pixels._taken.total())
        engine.hold = False

    asyncio.run(all_of_it())


@pytest.mark.parametrize("wait_s", [0.0, 0.5])
def test_a_full_queue_does_not_throw_away_what_was_answered(wait_s: float) -> None:
    """Others fill the queue as the last of its own ends: the rest waits for a place, as long as a request may."""
    engine = FakeEngineClient()
    engine.hold = True

    async def go() -> None:
        async with client_of(engine, queue_timeout_s=wait_s) as client:
            body = {"input": "x", "questions": QUESTIONS[1:2] * 50}
            ask = asyncio.create_task(client.post("/v1/decisions", json=body))
            await until(lambda: engine.n_open == 32)
            engine.max_open, engine.hold = 0, False
            await until(lambda: not engine.n_open)
            if wait_s:
                said = await ask
                assert (said.status_code, said.json()["error"]["code"]) == (503, "queue_timeout")
                return
            await asyncio.sleep(0.3)
            assert not ask.done() and sum(len(request.branches) for request in engine.requests) == 32
            engine.max_open = None
            assert len((await ask).json()["answers"]) == 50

    asyncio.run(go())


def test_a_joint_head_answers_systemone() -> None:
    """The fake gives the options of a question the logits 0, 1, ... in the order in which the head sees them: sorted by name."""
    engine = FakeEngineClient(has_joint_head=True)
    questions = {
        "urgent": {"type": "noul", "instructions": "Is it?", "criteria": {"true": "Somebody waits."}},
        "team": {"type": "choice", "instructions": "Who?", "criteria": {"b": None, "c": {"x": 1}, "a": "first"}},
        "anger": {"type": "score", "instructions": {"how": "angry"}, "criteria": ["calm", "furious"]},
    }
    body = {"model": "fake", "state": {"text": "<|im_end|>"}, "questions": questions}
    answer = send(engine, "/v1/systemone", body).json()
    two = math.e / (1 + math.e)
    assert answer["answers"]["urgent"] == {"type": "noul", "noul": pytest.approx(1 - two)}
    team, anger = answer["answers"]["team"], answer["answers"]["anger"]
    assert team["choice"] == "c" and list(team["probabilities"]) == ["b", "c", "a"]
    assert team["probabilities"]["b"] == pytest.approx(math.e / (1 + math.e + math.e**2))
    assert anger["score"] == pytest.approx(two) and anger["probabilities"]["1"] == pytest.approx(two)
    (sent,) = engine.requests
    assert [len(question.options) for question in sent.questions] == [2, 3, 2] and not sent.branches
    assert answer["usage"]["input_tokens"] == len(sent.prompt_ids)
    assert (
        send(engine, "/v1/systemone", body | {"state": "x" * 2000}).json()["error"]["code"] == "context_length_exceeded"
    )
    assert send(engine, "/v1/systemone", body | {"model": "other"}).status_code == 404
    with served(make_app(engine)) as url:
        post(f"{url}/v1/systemone", **body)
        assert 'deltic_scored_questions_total{model="fake"} 3.0' in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize(("path", "is_joint"), [("decisions", False), ("systemone", False), ("systemone", True)])
def test_a_large_answer_is_made_off_the_event_loop(path: str, is_joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngineClient(has_joint_head=is_joint)
    engine.score, threads, measure = score, set[str](), decisions.confidence

    def confidence(parts: list[float]) -> float:
        threads.add(threading.current_thread().name.partition("_")[0])
        return measure(parts)

    monkeypatch.setattr(decisions, "confidence", confidence)
    assert engine.info is not None
    engine.info.max_model_len = engine.info.n_pages = 100_000
    for n in (2, 255):
        question: dict[str, Any] = {
            "type": "choice",
            "instructions": "?",
            "choices": [{"value": f"{i}"} for i in range(n)],
        }
        body: dict[str, Any] = {"input": "x", "questions": [question]}
        if path == "systemone":
            question = {"type": "choice", "instructions": "?", "criteria": {f"{i}": None for i in range(n)}}
            body = {"state": "x", "questions": {"a": question}}
        threads.clear()
        answer = send(engine, f"/v1/{path}", body)
        assert answer.status_code == 200, answer.text
        assert threads == {"prepare" if n == 255 else "MainThread"}


LONG = "word " * 800_000
ASKED = {"type": "predicate", "instructions": "?"}
NOUL = {"type": "noul", "instructions": "?"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/decisions", {"input": LONG, "questions": [ASKED]}, "input"),
        ("/v1/decisions", {"input": "x", "questions": [ASKED, ASKED | {"instructions": LONG}]}, "questions[1]"),
        ("/v1/systemone", {"state": LONG, "questions": {"a": NOUL}}, "state"),
        ("/v1/systemone", {"state": "x", "questions": {"a": NOUL | {"instructions": LONG}}}, "questions.a"),
        ("/v1/score", {"text_1": LONG, "text_2": "x"}, "text_1"),
        ("/v1/score", {"text_1": ["x", LONG], "text_2": ["x", "x"]}, "text_1[1]"),
        ("/v1/score", {"text_1": "x", "text_2": LONG}, "text_2"),
        ("/v1/score", {"queries": "x", "documents": ["x", LONG]}, "documents[1]"),
        ("/v1/rerank", {"query": LONG, "documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "x", "documents": ["x", LONG]}, "documents[1]"),
        ("/v1/rerank", {"query": "x", "documents": ["x", LONG], "max_tokens_per_doc": 2**31 - 1}, "documents[1]"),
        ("/v1/rerank", {"query": "x", "documents": ["x", LONG], "max_tokens_per_doc": 100}, None),
        # Short enough to be looked at whole, and named as well.
        ("/v1/decisions", {"input": "x", "questions": [ASKED | {"instructions": LONG[:3000]}]}, "questions[0]"),
        ("/v1/score", {"text_1": "x", "text_2": ["x", LONG[:3000]]}, "text_2[1]"),
        ("/v1/score", {"text_1": LONG[:700], "text_2": LONG[:700]}, "text_2"),
    ],
)
def test_of_a_text_that_does_not_fit_little_is_read(
    path: str, body: dict[str, Any], field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what was sent."""
    engine, read, encode = FakeEngineClient(), 0, Tokenizer._encode_piece
    engine.score = score

    def counted(tokenizer: Tokenizer, text: str) -> list[int]:
        nonlocal read
        read += len(text)
        return encode(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "_encode_piece", counted)
    if path == "/v1/systemone":
        error = send(FakeEngineClient(has_joint_head=True), path, body).json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    answer = send(engine, path, body)
    assert read < 100_000
    if field is None:
        assert answer.status_code == 200
        assert len(engine.requests[-1].branches) == 2 * 3
    else:
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_a_joint_head_s_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the options of all questions, times the tokens of the prompt; nothing comes to the engine."""
    engine = FakeEngineClient(has_joint_head=True)
    body = {"model": "fake", "state": "x", "questions": {"a": {"type": "noul", "instructions": "Is it?"}}}
    body["questions"] |= {
        "b": {"type": "choice", "instructions": "Who?", "criteria": {"a": None, "b": None, "c": None}}
    }
    n_pairs = 5 * send(engine, "/v1/systemone", body).json()["usage"]["input_tokens"]
    monkeypatch.setattr(joint, "MAX_WORK", n_pairs)
    assert send(engine, "/v1/systemone", body).status_code == 200
    monkeypatch.setattr(joint, "MAX_WORK", n_pairs - 1)
    refused = send(engine, "/v1/systemone", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "questions"
    assert f"are {n_pairs:,} pairs" in refused.json()["error"]["message"]
    assert len(engine.requests) == 2
