"""The built-in model as a user has it: `deltic serve` in processes of its own, talked to over HTTP.

What is tested piece by piece elsewhere is tested whole here: clients, sockets, signals and the kernels of this machine.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deltic import LLM, SamplingParams
from deltic.ops.cpu import program as table
from deltic.ops.cpu.instruction_sets import INSTRUCTION_SETS, runnable
from tests.golden import make
from tests.served import ENGINE, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_QUEUE, N_PAGES, STORY, Served
from tests.waiting import wait_for

ENDLESS = {"prompt": "Once upon a time", "max_tokens": 1400, "ignore_eos": True}
"""Takes a second at least, and 22 pages."""

GOLDEN = make.load()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the server is ready and has all its pages and slots."""
    yield
    if "served" in request.fixturenames:
        running: Served = request.getfixturevalue("served")
        wait_for(lambda: running.http.get("/health").status_code == 200)
        wait_for(running.is_empty)


# Answers.


def said(message: Any, finish_reason: str) -> dict[str, Any]:
    """What the client got, in the form of the golden file."""
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return {"content": message.content or "", "reasoning": reasoning, "calls": calls, "finish_reason": finish_reason}


def streamed(chunks: Any) -> dict[str, Any]:
    """The same, put together from a stream, and the `usage` of its last chunk."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "finish_reason": None, "usage": None}
    calls: list[list[str]] = []
    for chunk in chunks:
        if chunk.usage is not None:
            assert chunk.choices == []
            whole["usage"] = chunk.usage
            continue
        (choice,) = chunk.choices
        assert whole["finish_reason"] is None
        whole["content"] += choice.delta.content or ""
        whole["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for delta in choice.delta.tool_calls or ():
            if delta.index == len(calls):
                calls.append([delta.function.name, ""])
            calls[delta.index][1] += delta.function.arguments or ""
        whole["finish_reason"] = choice.finish_reason
    whole["calls"] = [[name, json.loads(arguments)] for name, arguments in calls]
    return whole


@pytest.mark.parametrize("name", make.CASES)
def test_chat_is_the_golden_one_streamed_or_not(served: Served, name: str) -> None:
    case = make.CASES[name]
    messages = json.loads(json.dumps(case.messages))
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])  # on the wire it is a text
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": make.MAX_TOKENS, "extra_body": case.settings}
    if case.tools:
        fields["tools"] = case.tools
    whole = served.chat(messages, **fields)
    got = said(whole.choices[0].message, whole.choices[0].finish_reason)
    chunks = streamed(served.chat(messages, **fields, stream=True, stream_options={"include_usage": True}))
    usage = chunks.pop("usage")
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    cached = usage.prompt_tokens_details.cached_tokens  # the same prompt was answered just now
    assert cached == (whole.usage.prompt_tokens - 1) // 64 * 64
    assert chunks == got
    make.facts(case, got)
    assert got["finish_reason"] == ("tool_calls" if case.call else "stop")
    if GOLDEN["kernels"] == make.kernels(table.instruction_set()):
        golden = GOLDEN["answers"][name]
        assert got == {key: golden[key] for key in got}
        assert whole.usage.completion_tokens == len(golden["token_ids"])


@pytest.mark.parametrize("library", [name for name, _ in INSTRUCTION_SETS])
def test_every_instruction_set_gives_the_golden_tokens(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library not in runnable():
        pytest.skip(f"this CPU has no {library}")
    if not table.library_file(library).exists():
        pytest.skip(f"{library} was not compiled here")
    monkeypatch.setattr(table, "instruction_set", lambda: library)
    llm = LLM(max_model_len=1024, max_num_seqs=1, threads=2)
    assert llm.info.kernels == library
    for name, case in make.CASES.items():
        golden, got = GOLDEN["answers"][name], make.plain(make.answer(llm, case))
        make.facts(case, got)
        where = make.first_wrong(golden, got["token_ids"])
        assert where is None, f"{name}: token {where} differs, with a gap of {golden['gaps'][where]} nats"
        if make.kernels(library) == GOLDEN["kernels"]:
            assert {**got, "gaps": golden["gaps"]} == golden


@pytest.mark.parametrize(
    "quantize", [None, pytest.param("int8", marks=pytest.mark.long), pytest.param("int4", marks=pytest.mark.long)]
)
def test_bits_of_instruction_sets_are_as_documented(quantize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/serving.md: any number of threads has the same bits, another instruction set the same tokens with other bits."""
    said = "have the same tokens with `avx2` and `baseline`, and other bits"
    assert said in (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    if not {"avx2", "baseline"} <= {*table.usable_instruction_sets()}:
        pytest.skip("this machine has not both")
    found = []
    for library, n_threads in (("avx2", 2), ("avx2", 1), ("baseline", 2)):
        monkeypatch.setattr(table, "instruction_set", lambda library=library: library)
        llm = LLM(max_model_len=1024, max_num_seqs=1, threads=n_threads, quantize=quantize)
        answers = [make.answer(llm, case) for case in make.CASES.values()]
        bits = [[entry.logprob for entry in answer.logprobs or ()] for answer in answers]
        found.append(([answer.token_ids for answer in answers], bits))
        llm.close()
    first, one_thread, other = found
    assert one_thread == first
    assert other[0] == first[0] and other[1] != first[1]
    pairs = zip(chain(*first[1]), chain(*other[1]), strict=True)
    assert max(abs(a - b) for a, b in pairs) < make.CLOSE / 2


def test_llm_says_what_the_server_says(served: Served) -> None:
    llm = LLM(max_model_len=1024, max_num_seqs=2, threads=2)
    prompts = ["Once upon a time, in", "The sky is"]
    whole = served.complete(prompt=prompts, max_tokens=60, temperature=0)
    answers = llm.generate(prompts, SamplingParams(max_tokens=60, temperature=0.0))
    assert [choice["text"] for choice in whole["choices"]] == [answer.text for answer in answers]
    assert answers[0].text and whole["usage"]["completion_tokens"] == sum(len(a.token_ids) for a in answers)


# Purity.


def crowd(seed: int, n: int) -> list[dict[str, Any]]:
    """Bodies of random completions; at first and in the middle eight that are too long for the pages there are."""
    draw = random.Random(seed)
    bodies = []
    for i in range(n):
        is_long = i % (n // 2) < MAX_NUM_SEQS
        n_prompt = draw.randint(600, 800) if is_long else draw.randint(1, 90)
        bodies.append(
            {
                "prompt": [draw.randrange(1500) for _ in range(n_prompt)],
                "max_tokens": draw.randint(180, 260) if is_long else draw.randint(1, 60),
                "ignore_eos": True,
                "temperature": draw.choice((0.0, 0.8, 1.5)),
                "top_k": draw.choice((0, 5)),
                "repetition_penalty": draw.choice((1.0, 1.2)),
            }
        )
    return bodies


async def among(served: Served, bodies: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """`choices` of the answers to `bodies`, sent in the midst of `others`, as JSON text."""
    headers = {"authorization": f"Bearer {served.process.api_key}"}
    async with httpx.AsyncClient(base_url=served.process.url, headers=headers, timeout=120) as http:

        async def ask(body: dict[str, Any]) -> str:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            reply = await http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return json.dumps(reply.json()["choices"])

        half = len(others) // 2
        answers = await asyncio.gather(*map(ask, [*others[:half], *bodies, *others[half:]]))
    return answers[half : half + len(bodies)]


def test_an_answer_does_not_depend_on_the_others(served: Served) -> None:
    """Bit for bit: the log-probabilities too, over other batches, other cuts of the prompt and preemptions."""
    logprobs = {"logprobs": True, "top_logprobs": 3, "max_tokens": 150}
    long = {"prompt": [i * 37 % 1500 for i in range(300)], "max_tokens": 120, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [
        {"messages": STORY, "temperature": 0, **logprobs},
        {"messages": STORY, "temperature": 1.2, "top_p": 0.9, "seed": 7, **logprobs},
        {"messages": STORY, "n": 3, "seed": 11, "max_tokens": 60},
        {**long, "logprobs": 2, "temperature": 0},
        {**long, "logprobs": 2, "temperature": 1, "seed": 5, "presence_penalty": 0.5},
    ]
    alone = [asyncio.run(among(served, [body], []))[0] for body in bodies]
    n_preemptions = served.metric("preemptions_total")
    assert asyncio.run(among(served, bodies, crowd(seed=1, n=31))) == alone
    assert served.metric("preemptions_total") > n_preemptions, "the crowd is to be so large that pages run out"


def test_n_answers_with_a_seed_come_again(served: Served) -> None:
    def texts(seed: int) -> list[str]:
        whole = served.chat(n=3, seed=seed, temperature=1, max_tokens=40)
        return [choice.message.content for choice in whole.choices]

    first = texts(3)
    assert len(set(first)) == 3
    assert texts(3) == first != texts(4)


# What a request may ask for.


def test_tool_round_trip(served: Served) -> None:
    fields: dict[str, Any] = {"tools": [make.WEATHER], "temperature": 0}
    messages: list[Any] = [make.user("What is the weather in Oslo?")]
    choice = served.chat(messages, **fields).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "snowy, -7 degrees"}
    messages += [choice.message.model_dump(exclude_none=True), result]
    choice = served.chat(messages, **fields).choices[0]
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    assert all(word in choice.message.content for word in ("Oslo", "snowy", "-7"))
    # With tool_choice none it may not call, whatever it would like.
    refused = served.chat(messages[:1], **fields, tool_choice="none", max_tokens=30).choices[0]
    assert not refused.message.tool_calls and refused.message.content


@pytest.mark.parametrize(
    "switch",
    [{"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}],
)
def test_thinking_is_apart_from_the_answer(served: Served, switch: dict[str, Any]) -> None:
    question = [make.user("What is 8 times 7?")]
    thought = served.chat(question, temperature=0, extra_body=switch)
    message = thought.choices[0].message
    assert "56" in message.content and message.reasoning_content
    assert "think>" not in message.content + message.reasoning_content
    assert 0 < thought.usage.completion_tokens_details.reasoning_tokens < thought.usage.completion_tokens
    plain = served.chat(question, temperature=0)
    assert "56" in plain.choices[0].message.content
    assert getattr(plain.choices[0].message, "reasoning_content", None) is None
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_stop_string_across_tokens_is_not_emitted(served: Served) -> None:
    choice = served.chat(temperature=0, logprobs=True, max_tokens=60).choices[0]
    tokens, whole = [entry.token for entry in choice.logprobs.content], choice.message.content
    # From the middle of a token over all of the next into a third.
    i = next(i for i in range(20, 50) if len(tokens[i]) > 2)
    stop = tokens[i][2:] + tokens[i + 1] + tokens[i + 2][:1]
    expected = whole[: whole.index(stop)]
    assert len(expected) > 20
    got = served.chat(temperature=0, stop=["never written", stop])
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == (expected, "stop")
    chunks = streamed(served.chat(temperature=0, stop=stop, stream=True))
    assert (chunks["content"], chunks["finish_reason"]) == (expected, "stop")


def test_lengths_stop_ids_and_biases(served: Served) -> None:
    short = served.chat(temperature=0, max_completion_tokens=5)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)

    whole = served.chat(temperature=0, max_tokens=60).choices[0].message.content
    (full_stop,) = served.http.post("/tokenize", json={"prompt": "."}).json()["tokens"]
    stopped = served.chat(temperature=0, extra_body={"stop_token_ids": [full_stop]}).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (whole[: whole.index(".")], "stop")

    greeting = [make.user("Hello!")]
    assert served.chat(greeting, temperature=0).usage.completion_tokens < 40
    longer = served.chat(greeting, temperature=0, extra_body={"min_tokens": 40}, max_tokens=60)
    assert 40 <= longer.usage.completion_tokens <= 60

    dots = served.chat(max_tokens=4, logit_bias={str(full_stop): 100}).choices[0]
    assert (dots.message.content, dots.finish_reason) == ("....", "length")
    (first,) = served.chat(temperature=0, max_tokens=1, logprobs=True).choices[0].logprobs.content
    (banned,) = served.http.post("/tokenize", json={"prompt": first.token}).json()["tokens"]
    other = served.chat(temperature=0, max_tokens=5, logit_bias={str(banned): -100}).choices[0]
    assert other.message.content and not other.message.content.startswith(first.token)


def test_usage_is_told_streamed_or_not(served: Served) -> None:
    whole = served.chat(temperature=0, max_tokens=7)
    n_prompt = served.http.post("/tokenize", json={"messages": STORY}).json()["count"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (n_prompt, 7)
    assert whole.usage.total_tokens == n_prompt + 7
    assert 0 <= whole.usage.prompt_tokens_details.cached_tokens < n_prompt
    with_usage = served.chat(temperature=0, max_tokens=7, stream=True, stream_options={"include_usage": True})
    assert streamed(with_usage)["usage"].total_tokens == n_prompt + 7
    assert streamed(served.chat(temperature=0, max_tokens=7, stream=True))["usage"] is None


def test_what_cannot_be_is_refused_by_name(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as unknown:
        served.chat(extra_body={"temprature": 1})
    assert unknown.value.param == "temprature" and "temprature" in unknown.value.message
    with pytest.raises(openai.BadRequestError) as out_of_range:
        served.chat(temperature=-1)
    assert out_of_range.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        served.openai.completions.create(model=served.model, prompt=[5] * 5000)
    assert "5000" in long.value.message and str(MAX_MODEL_LEN) in long.value.message
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        served.openai.chat.completions.create(model="another", messages=STORY)  # type: ignore[arg-type]
    with pytest.raises(openai.AuthenticationError):
        served.openai.with_options(api_key="wrong").models.list()


# Load, loss and the end.


class Streams:
    """Endless completions read in the background, a thread each. `endings`: each one's last event, or its status."""

    def __init__(self, served: Served, n: int, **fields: Any) -> None:
        self.endings: list[str | int] = []
        self.started = threading.Semaphore(0)
        body = ENDLESS | {"stream": True} | fields
        self._threads = [threading.Thread(target=self._read, args=(served, body)) for _ in range(n)]
        for thread in self._threads:
            thread.start()
        for _ in range(n):
            assert self.started.acquire(timeout=20)

    def _read(self, served: Served, body: dict[str, Any]) -> None:
        headers, last = {"authorization": f"Bearer {served.process.api_key}"}, ""
        with httpx.stream(
            "POST", f"{served.process.url}/v1/completions", json=body, headers=headers, timeout=60
        ) as reply:
            for line in reply.iter_lines():
                if not last:
                    self.started.release()
                last = line or last
            self.endings.append(last if reply.status_code == 200 else reply.status_code)

    def join(self) -> list[str | int]:
        for thread in self._threads:
            thread.join(30)
        assert len(self.endings) == len(self._threads), "a stream did not end"
        return self.endings


def test_a_full_queue_says_when_to_come_again(served: Served) -> None:
    n_groups = (MAX_NUM_SEQS + MAX_QUEUE) // MAX_NUM_SEQS
    sockets = [send(served, ENDLESS | {"n": MAX_NUM_SEQS, "stream": True}) for _ in range(n_groups)]
    try:
        wait_for(lambda: served.metric("sequences_waiting") >= MAX_QUEUE)
        with pytest.raises(openai.RateLimitError) as full:
            served.chat(max_tokens=1)
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "queue_full"
        assert served.http.get("/health").status_code == 200
    finally:
        for each in sockets:
            each.close()
    wait_for(served.is_empty, 2.0)
    assert served.chat(max_tokens=1).usage.completion_tokens == 1


def send(served: Served, body: dict[str, Any]) -> socket.socket:
    """A socket on which a completion was asked for, and nothing read."""
    url = httpx.URL(served.process.url)
    data = json.dumps(body).encode()
    connection = socket.create_connection((url.host, url.port), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {served.process.api_key}\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_a_client_that_leaves_frees_its_memory(served: Served, stream: bool, reset: bool) -> None:
    aborted = functools.partial(served.metric, "sequences_finished_total", finish_reason="abort")
    n_aborted = aborted()
    connection = send(served, ENDLESS | {"n": 4, "stream": stream})
    wait_for(lambda: served.metric("sequences_running") == 4)
    if stream:
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    wait_for(served.is_empty, 1.0)
    assert aborted() == n_aborted + 4


def test_the_engine_is_killed_under_load_and_comes_back(served: Served) -> None:
    before = served.chat(temperature=0, max_tokens=30).choices[0].message.content
    n_restarts = served.metric("engine_restarts_total")
    streams = Streams(served, 8, max_tokens=3000)
    whole = send(served, ENDLESS)  # waits behind them
    os.kill(served.engine_pid(), signal.SIGKILL)
    wait_for(lambda: served.http.get("/health").status_code == 503)
    with pytest.raises(openai.InternalServerError) as down:
        served.chat(max_tokens=1)
    assert down.value.status_code == 503 and int(down.value.response.headers["retry-after"]) >= 1
    for ending in streams.join():
        assert isinstance(ending, str), ending
        assert "SIGKILL" in json.loads(ending.removeprefix("data: "))["error"]["message"]
    assert re.match(rb"HTTP/1.1 50[03] ", whole.recv(1000))
    whole.close()
    wait_for(lambda: served.http.get("/health").status_code == 200, 30)
    assert served.metric("engine_restarts_total") == n_restarts + 1
    assert served.chat(temperature=0, max_tokens=30).choices[0].message.content == before
    wait_for(served.is_empty, 1.0)
    assert served.metric("pages") == N_PAGES and served.metric("state_slots") >= MAX_NUM_SEQS


def test_sigterm_lets_streams_finish() -> None:
    leaving = Served()
    try:
        streams = Streams(leaving, 2, max_tokens=500)
        process, pid = leaving.process.process, leaving.engine_pid()
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: leaving.http.get("/health").status_code == 503)
        assert leaving.http.post("/v1/completions", json=ENDLESS).status_code == 503
        assert streams.join() == ["data: [DONE]"] * 2
        assert process.wait(10) == 0
        assert not Path(f"/proc/{pid}").exists()
        assert "Traceback" not in Path(leaving.process.log.name).read_text()
    finally:
        leaving.close()


# The command line.


def deltic(*arguments: str) -> str:
    """What a command prints. It must end with 0."""
    done = subprocess.run([sys.executable, "-m", "deltic", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_run_answers_a_file_of_requests(served: Served, tmp_path: Path) -> None:
    bodies = [{"messages": [make.user(f"What is {i} plus 5?")], "temperature": 0} for i in range(1, 5)]
    lines = [json.dumps({"custom_id": f"sum {i}", "body": body}) for i, body in enumerate(bodies)]
    lines.append(json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    deltic("run", str(source), str(target), *ENGINE)
    results = {result["line"]: result for result in map(json.loads, target.read_text().splitlines())}
    assert sorted(results) == [1, 2, 3, 4, 5]
    for i, body in enumerate(bodies):
        answer = results[i + 1]["response"]["body"]["choices"][0]["message"]["content"]
        assert str(i + 6) in answer
        assert answer == served.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert results[i + 1]["custom_id"] == f"sum {i}"
    # Complete already: nothing is asked again.
    written = target.read_bytes()
    deltic("run", str(source), str(target), *ENGINE)
    assert target.read_bytes() == written


def test_plan_and_doctor_print_their_reports() -> None:
    assert re.search(r"pages", deltic("plan", *ENGINE))
    assert table.instruction_set() in deltic("doctor")
