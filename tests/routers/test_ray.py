"""Deltic on Ray: two replicas of the built-in model, a CPU each, behind Ray Serve, and a file of `deltic run --ray`.

Needs `pip install '.[test,routers]'`. One cluster for all tests, since a start takes longer than any of them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.5"
ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from deltic.config import ConfigError  # noqa: E402
from deltic.ray import actors, app, llm  # noqa: E402
from deltic.ray.replica import Ask  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own

SETTINGS: dict[str, Any] = {"replicas": "2", "num_cpus": 1, "max-num-seqs": 16, "drain-s": 20}
STORY = [{"role": "user", "content": "Tell me a long story about a fox."}]


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two CPUs."""
    context = ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield context.address_info["address"]
    serve.shutdown()
    ray.shutdown()


def deploy(**more: Any) -> None:
    serve.run(app.build(SETTINGS | more), name="deltic", route_prefix="/llm")


@pytest.fixture(scope="module")
def url(cluster: str) -> str:
    """Two replicas behind a prefix."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deploy()
    return f"http://127.0.0.1:{port}/llm"


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"messages": STORY, "max_tokens": 8, "temperature": 0} | fields)


def engines() -> dict[int, int]:
    """The processes of the replicas' engines, each with that of its replica."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if b"deltic.host.process" in words and b"ServeReplica" in Path(f"/proc/{parent}/cmdline").read_bytes():
                found[int(path.parent.name)] = parent
        except OSError:
            continue
    return found


def n_sequences() -> int:
    """Of both replicas, each asked a few times by requests that have nothing in common."""
    handle = serve.get_deployment_handle("Replica", "deltic").options(stream=True, method_name="ask")
    answers = [list(handle.remote(Ask("GET", "/load", key=b"%d" % i))) for i in range(8)]
    return sum(int(json.loads(body)["server_load"]) for _, body in answers)


def test_a_chat_and_other_apis(client: httpx.Client) -> None:
    answer = ask(client)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
    assert len(answer.headers.get_list("x-request-id")) == 1
    assert client.get("/v1/models").json()["data"][0]["id"] == "built-in"
    claude = client.post("/v1/messages", json={"model": "built-in", "max_tokens": 4, "messages": STORY})
    assert claude.json()["type"] == "message"
    assert client.post("/api/chat", json={"model": "built-in", "messages": STORY, "stream": False}).json()["done"]
    assert client.post("/tokenize", json={"prompt": "a b"}).json()["count"] == 2


def test_bad_requests_have_the_bodies_of_openais_errors(client: httpx.Client) -> None:
    answer = ask(client, max_tokens=-1)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
    answer = client.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/nothing").json()["error"]["code"] == "not_found"
    answer = client.get("/metrics")
    assert answer.status_code == 501 and "several" in answer.json()["error"]["message"]
    large = client.post("/v1/chat/completions", content=b" " * 65_000_000)
    assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"


def test_a_stream_comes_in_pieces(client: httpx.Client) -> None:
    asked = {"messages": STORY, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = [(time.monotonic(), piece) for piece in answer.iter_raw()]
    assert len(pieces) > 20 and pieces[-1][1].endswith(b"data: [DONE]\n\n")
    n_before_the_last_fifth = sum(at < pieces[0][0] + 0.8 * (pieces[-1][0] - pieces[0][0]) for at, _ in pieces)
    assert n_before_the_last_fifth > 10


def test_who_leaves_frees_the_sequence(client: httpx.Client) -> None:
    asked = {"messages": STORY, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        pieces = answer.iter_raw()  # held: when it is forgotten the connection closes
        assert next(pieces) and wait_for(n_sequences)
    wait_for(lambda: not n_sequences(), 10)
    with ThreadPoolExecutor(1) as pool:  # one that waits for its whole answer
        waiting = pool.submit(
            httpx.post, f"{client.base_url}v1/chat/completions", json=asked | {"stream": False}, timeout=1
        )
        assert isinstance(waiting.exception(), httpx.ReadTimeout)
    wait_for(lambda: not n_sequences(), 10)


def test_a_conversation_stays_with_its_replica(client: httpx.Client) -> None:
    for topic in ("a fox", "a hen", "a cow", "a cat"):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"I want to hear of {topic}. " * 20}]
        for turn in range(3):
            answer = ask(client, messages=messages).json()
            if turn:
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]


def test_both_replicas_work_when_there_is_much_to_do(client: httpx.Client) -> None:
    """All of one conversation, so that one replica would have them all."""
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: ask(client, max_tokens=60, ignore_eos=True), range(24)))
    assert all(answer.status_code == 200 for answer in answers)
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1, "bits of any replica"


def test_a_killed_replica_ends_its_streams_only(client: httpx.Client) -> None:
    asked = {"max_tokens": 800, "stream": True, "ignore_eos": True}
    before = engines()
    assert len(before) == 2
    ends: list[tuple[str, bytes]] = []
    n_begun = threading.Semaphore(0)

    def stream(i: int) -> None:
        """Of a conversation of its own: one more than a replica may have beyond the other, and so some on either."""
        messages = [{"role": "user", "content": f"Tell me about number {i}."}]
        with httpx.stream(
            "POST", f"{client.base_url}v1/chat/completions", json=asked | {"messages": messages}, timeout=90
        ) as answer:
            last = b""
            for piece in answer.iter_raw():
                if not last:
                    n_begun.release()
                last = piece
        ends.append((answer.headers["x-request-id"], last))

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert n_begun.acquire(timeout=60)
    engine, replica = next(iter(before.items()))
    os.kill(replica, signal.SIGKILL)
    wait_for(lambda: engine not in engines() and not Path(f"/proc/{engine}").exists(), 10)
    whole = [ask(client, messages=[{"role": "user", "content": f"{i}?"}]).status_code for i in range(8)]
    assert whole == [200] * 8, "what had not begun went to the other one"
    for thread in threads:
        thread.join()
    died = [end for _, end in ends if b'"code":"replica_died"' in end]
    assert died and len(died) < 12 and all(end.startswith(b'data: {"error"') for end in died)
    assert sum(end.endswith(b"data: [DONE]\n\n") for _, end in ends) == 12 - len(died)
    wait_for(lambda: len(engines()) == 2 and engine not in engines())
    wait_for(lambda: serve.status().applications["deltic"].status == "RUNNING")


def test_a_killed_engine_comes_back_in_its_replica(client: httpx.Client) -> None:
    engine, replica = next(iter(engines().items()))
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: replica in engines().values() and engine not in engines())
    wait_for(
        lambda: all(ask(client, messages=[{"role": "user", "content": f"{i}!"}]).status_code == 200 for i in range(6))
    )
    assert replica in engines().values()


def test_a_new_version_is_rolled_out_without_a_failed_request(client: httpx.Client) -> None:
    before = set(engines())
    failed: list[Any] = []
    n_answered = 0
    is_over = threading.Event()

    def ask_on(i: int) -> None:
        nonlocal n_answered
        while not is_over.is_set():
            try:
                with httpx.Client(base_url=client.base_url, timeout=60) as own:
                    asked = {"messages": [{"role": "user", "content": f"{i}"}], "max_tokens": 40, "stream": i % 2 == 0}
                    answer = own.post("/v1/chat/completions", json=asked)
                n_answered += 1
                if answer.status_code != 200 or (i % 2 == 0 and not answer.text.endswith("data: [DONE]\n\n")):
                    failed.append(answer.text)
            except httpx.HTTPError as error:
                failed.append(error)

    threads = [threading.Thread(target=ask_on, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        deploy(**{"max-num-seqs": 15})
        wait_for(lambda: len(engines()) == 2 and not before & set(engines()))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failed and n_answered > 10


def test_replicas_follow_the_sequences() -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 8.0)
    context = SimpleNamespace(
        aggregated_metrics={"sequences": {"a": 9.0, "b": 12.0}}, total_queued_requests=4.0, config=config
    )
    assert app.by_sequences(context) == (4, {})
    context.aggregated_metrics, context.total_queued_requests = None, None
    assert app.by_sequences(context) == (0, {})


def test_an_application_scales_by_its_queue(client: httpx.Client) -> None:
    bounds = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    delays = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "look_back_period_s": 2}
    serve.delete("deltic")
    deploy(replicas=1, autoscaling=bounds | delays)
    assert len(engines()) == 1
    with ThreadPoolExecutor(8) as pool:
        is_enough = threading.Event()

        def ask_on() -> bool:
            statuses = {ask(client, max_tokens=1000, ignore_eos=True).status_code}
            while not is_enough.is_set():
                statuses.add(ask(client, max_tokens=1000, ignore_eos=True).status_code)
            return statuses == {200}

        waiting = [pool.submit(ask_on) for _ in range(8)]
        try:
            wait_for(lambda: len(engines()) == 2, 90)
        finally:
            is_enough.set()
        assert all(one.result() for one in waiting)
    serve.delete("deltic")
    wait_for(lambda: not engines())


def test_bad_arguments_are_refused_at_once() -> None:
    for given, said in (
        ({}, "how large is a replica"),
        ({"num_cpus": "many"}, "num_cpus"),
        ({"num_cpus": 1, "replicas": 0}, "replicas"),
        ({"num_cpus": 1, "replicsa": 2}, "replicsa is not a setting of Deltic"),
        ({"num_cpus": 1, "max-num-seqs": "x"}, "max-num-seqs = 'x': expected"),
        ({"num_cpus": 1, "threads": 2}, "num_cpus=1 with threads = 2"),
        ({"num_cpus": 1, "replicas": 2, "autoscaling": {"max_replicas": 3}}, "give one of both"),
        ({"num_cpus": 1, "autoscaling": {"max_replicas": 0}}, "autoscaling"),
    ):
        with pytest.raises(ConfigError, match=said):
            app.build(given)


# ---- ray.serve.llm -------------------------------------------------------------------------------------------------


def llm_config(**more: Any) -> Any:
    """An LLMConfig, which Ray makes where vLLM is installed only."""
    loading = SimpleNamespace(model_id="chat", model_source="built-in", tokenizer_source=None)
    given = {
        "model_loading_config": loading,
        "engine_kwargs": {"max-num-seqs": 2},
        "deployment_config": {"num_replicas": 2},
        "accelerator_config": SimpleNamespace(kind="cpu"),
        "accelerator_type": None,
        "runtime_env": None,
    }
    return SimpleNamespace(**given | more)


class Asked:
    """As Ray's types of requests are used."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump_json(self, **how: Any) -> str:
        assert how == {"exclude_unset": True, "exclude": {"request_id"}}
        return json.dumps(self._fields)


class Answered(SimpleNamespace):
    @classmethod
    def model_validate_json(cls, text: bytes) -> Answered:
        return cls(**json.loads(text))


def test_the_class_of_ray_serve_llm_has_what_is_asked_of_it() -> None:
    from ray.llm._internal.serve.core.protocol import LLMServerProtocol

    for name, method in inspect.getmembers(LLMServerProtocol, inspect.isfunction):
        if name.startswith("__") or name == "_no_init_or_replace_init":
            continue
        ours = getattr(llm.DelticLLMServer, name)
        assert inspect.iscoroutinefunction(ours) or inspect.isasyncgenfunction(ours), name
        theirs = [one for one in inspect.signature(method).parameters if one != "kwargs"]
        assert set(theirs) <= set(inspect.signature(ours).parameters), name


def test_deployment_options() -> None:
    options = llm.DelticLLMServer.get_deployment_options(llm_config())
    assert options["num_replicas"] == 2 and options["ray_actor_options"] == {"num_gpus": 0, "num_cpus": 1}
    on_gpu = llm_config(accelerator_config=SimpleNamespace(kind="gpu"), engine_kwargs={"tensor_parallel": 2})
    assert llm.DelticLLMServer.get_deployment_options(on_gpu)["ray_actor_options"]["num_gpus"] == 2
    scaled = llm_config(deployment_config={"autoscaling_config": {"max_replicas": 3}})
    policy = llm.DelticLLMServer.get_deployment_options(scaled)["autoscaling_config"]["policy"]
    assert policy == {"policy_function": "deltic.ray.app:by_sequences"}
    for bad, said in (
        ({"lora_config": object()}, "lora"),
        ({"placement_group_config": {}}, "one actor"),
        ({"engine_kwargs": {"max_model_length": 8}}, "did you mean max-model-len"),
        ({"accelerator_config": SimpleNamespace(kind="tpu")}, "CPUs and GPUs"),
        ({"deployment_config": {"placement_group_bundles": []}}, "one actor"),
    ):
        with pytest.raises(ConfigError, match=said):
            llm.DelticLLMServer.get_deployment_options(llm_config(**bad))


def test_the_class_of_ray_serve_llm_answers(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ChatCompletionResponse", "CompletionResponse", "TokenizeResponse", "DetokenizeResponse")
    types = SimpleNamespace(**dict.fromkeys(names, Answered), ErrorResponse=SimpleNamespace, ErrorInfo=SimpleNamespace)
    monkeypatch.setitem(sys.modules, llm.TYPES, types)
    resources = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0})
    monkeypatch.setattr(llm, "get_runtime_context", lambda: resources)

    async def drive() -> None:
        server = llm.DelticLLMServer.__new__(llm.DelticLLMServer)
        await server.__init__(llm_config())  # type: ignore[misc]
        try:
            await server.check_health()
            [whole] = [item async for item in server.chat(Asked(model="chat", messages=STORY, max_tokens=4))]
            assert isinstance(whole, Answered) and whole.model == "chat"
            about = SimpleNamespace(headers={"Host": "here", "Content-Length": "3", "X-Session-Id": "1"})
            stream = [i async for i in server.chat(Asked(messages=STORY, max_tokens=9, stream=True), about)]
            assert len(stream) > 1 and all(isinstance(i, str) and i.startswith("data: ") for i in stream)
            assert stream[-1].endswith("data: [DONE]\n\n")
            [bad] = [item async for item in server.completions(Asked(prompt="a", best_of=3, max_tokens=-1))]
            assert bad.error.code == 400 and bad.error.type == "invalid_request_error"
            [none] = [item async for item in server.embeddings(Asked(input="a"))]
            assert none.error.code == 404 and "embeddings" in none.error.message
            [none] = [item async for item in server.transcriptions(None)]
            assert none.error.code == 404
            [ids] = [item async for item in server.tokenize(Asked(prompt="a b"))]
            [text] = [item async for item in server.detokenize(Asked(tokens=ids.tokens))]
            assert text.prompt == "a b"
            await server.reset_prefix_cache()
            assert not await server.is_sleeping() and not await server.is_paused()
            assert (await server.llm_config()).accelerator_type is None
            with pytest.raises(NotImplementedError, match="does not sleep"):
                await server.sleep(level=1)
        finally:
            await server.hosted.stop()
        with pytest.raises(RuntimeError):
            await server.hosted._clients[0].ready()

    asyncio.run(drive())


# ---- deltic run --ray ----------------------------------------------------------------------------------------------


def write_lines(path: Path, n: int) -> None:
    with path.open("w") as lines:
        for i in range(n):
            messages = [{"role": "user", "content": f"Tell me of {i}."}]
            body = {"messages": messages, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
            lines.write(json.dumps({"custom_id": f"line {i}", "body": body}) + "\n")


def start_run(cluster: str, source: Path, target: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "deltic", "run", str(source), str(target), "--ray", cluster, "--threads", "1"]
    # A shell starts what is in its background with Ctrl-C ignored, and tests may be.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([*words, "--in-flight", "8"], stderr=subprocess.PIPE, text=True, preexec_fn=heed)


def run_engines() -> dict[int, int]:
    """The engines of `deltic run --ray`, and their actors."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                b"deltic.host.process" in path.read_bytes()
                and b"ray::Hosted" in Path(f"/proc/{parent}/cmdline").read_bytes()
            ):
                found[int(path.parent.name)] = parent
        except OSError:
            continue
    return found


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_file_is_spread_and_resumed(cluster: str, tmp_path: Path) -> None:
    """Interrupted once; then an actor is killed: its lines are answered by the other, and all come to the same."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, 120)
    first = start_run(cluster, source, target)
    wait_for(lambda: n_lines(target) >= 5)
    first.send_signal(signal.SIGINT)
    assert first.wait(30) == 130
    wait_for(lambda: not run_engines(), 20)
    assert n_lines(target) < 120
    second = start_run(cluster, source, target)
    n_before = n_lines(target)
    wait_for(lambda: n_lines(target) > n_before + 2)
    wait_for(lambda: len(run_engines()) == 2 or n_lines(target) == 120)
    os.kill(next(iter(run_engines().values())), signal.SIGKILL)
    _, said = second.communicate(timeout=120)
    assert second.returncode == 0 and "resuming: " in said, said
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(result["line"] for result in results) == [*range(1, 121)]
    assert all(result["error"] is None for result in results)
    wait_for(lambda: not run_engines(), 20)


def test_how_large_actors_are() -> None:
    from deltic.config import EngineConfig

    nodes = [{"CPU": 8.0, "memory": 1e9}, {"CPU": 4.0}, {"memory": 1.0}]
    assert actors.sizes(EngineConfig(), nodes) == ({"num_cpus": 4, "num_gpus": 0}, 3)
    assert actors.sizes(EngineConfig(threads=2), nodes) == ({"num_cpus": 2, "num_gpus": 0}, 6)
    nodes[0]["GPU"] = 8.0
    assert actors.sizes(EngineConfig(tensor_parallel=2), nodes) == ({"num_gpus": 2, "num_cpus": 1}, 4)
    assert actors.sizes(EngineConfig(device="cpu"), nodes)[1] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ray", "--url", "http://127.0.0.1:1"], "Give one of both"),
        (["--replicas", "2"], "--replicas: how many servers --ray starts"),
        (["--ray", "--replicas", "0"], "at least 1"),
    ],
)
def test_bad_flags_of_a_run(words: list[str], said: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 1)
    command = [sys.executable, "-m", "deltic", "run", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and said in ended.stderr, ended.stderr
