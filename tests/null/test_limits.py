"""Keys by name and what each may take, the clock of a request, and what logs and metrics tell of both."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis.strategies as st
import openai
import pytest
from hypothesis import given, settings

from deltic import logs
from deltic.config import ConfigError, ServerConfig
from deltic.engine.cache.cache import Cache
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.scheduler import Scheduler
from deltic.engine.step import mixed_seed
from deltic.engine.turns import NamespaceShares
from deltic.server.limits import Account, Accounts
from deltic.server.metrics import MAX_KEYS, REST, Exposition, KeyNumbers
from tests.fake_engine import FakeEngineClient, make_app, served, server_log
from tests.fakes import FakeRunner, expected_tokens
from tests.null.test_scheduler import Bench

HELLO: Any = [{"role": "user", "content": "hello"}]
DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/messages", {"model": "fake", "messages": HELLO, "max_tokens": 100}),
    ("/v1/responses", {"input": "hello"}),
]


def client_of(engine: FakeEngineClient, key: str = "", **config: Any) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(make_app(engine, **config))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10, headers=headers)


async def reached(engine: FakeEngineClient, n: int, tasks: list[asyncio.Task[httpx.Response]]) -> None:
    """Waits until the engine has n requests."""
    async with asyncio.timeout(5):
        while len(engine.requests) < n:
            assert not any(task.done() for task in tasks), [task.result().text for task in tasks if task.done()]
            await asyncio.sleep(0.002)


# Keys.


def names(*keys: str) -> list[str]:
    return [numbers.name for numbers in Accounts(ServerConfig(api_key=keys)).numbers()]


def test_a_key_may_have_a_name() -> None:
    assert names("plain", "alice=secret", "other", "alice=second") == ["key-1", "alice", "key-3"]
    accounts = Accounts(ServerConfig(api_key=("plain", "alice=c2VjcmV0Cg==")))
    found = accounts.find(b"c2VjcmV0Cg==")
    assert found and found.name == "alice"
    assert accounts.find(b"alice=c2VjcmV0Cg==") is None and accounts.find(b"") is None


@pytest.mark.parametrize("key", ["c2VjcmV0Cg==", "a b=secret", "=secret", "name="])
def test_a_key_that_might_be_meant_otherwise_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key number 2 has a '='") as raised:
        names("fine", key)
    assert "secret" not in str(raised.value) and "c2V" not in str(raised.value)


def test_no_namespace_has_the_name_of_a_key_without_one(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[key-1]\nkey = "other"\n')
    for config in (ServerConfig(api_key=("plain", "key-2=x")), ServerConfig(api_key=("plain",), api_key_file=path)):
        with pytest.raises(ConfigError, match=r"'key-[12]': keys without a name are called so"):
            Accounts(config)


def test_one_key_cannot_be_two_names() -> None:
    with pytest.raises(ConfigError, match="'bob' is also the key of another name") as raised:
        names("alice=secret", "bob=secret")
    assert "secret" not in str(raised.value)


def test_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        '[alice]\nkey = "a"\nmax_concurrent = 3\n[bob]\nkey = "b"\nmax_concurrent = 0\ntokens_per_minute = 9\n'
    )
    config = ServerConfig(
        api_key=("carol=c",), api_key_file=path, max_concurrent_per_key=5, tokens_per_minute_per_key=60
    )
    told = {}
    for key in (b"a", b"b", b"c"):
        account = Accounts(config).find(key)
        assert account
        told[account.name] = {name.decode(): value.decode() for name, value in account.headers()}
    limits = {name: (h.get("x-ratelimit-limit-requests"), h["x-ratelimit-limit-tokens"]) for name, h in told.items()}
    assert limits == {"alice": ("3", "60"), "bob": (None, "9"), "carol": ("5", "60")}


def test_a_name_in_the_file_and_on_the_command_line_has_the_files_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "new\\n"\nmax_concurrent = 3\n')
    accounts = Accounts(ServerConfig(api_key=("alice=old",), api_key_file=path))
    account = accounts.find(b"old")
    assert account is not None and account is accounts.find(b"new")
    assert dict(account.headers())[b"x-ratelimit-limit-requests"] == b"3"


def test_keys_are_read_again(tmp_path: Path) -> None:
    """What a name has used stays; what cannot be meant changes nothing."""
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "a"\ntokens_per_minute = 100\n[bob]\nkey = "b"\n')
    accounts = Accounts(ServerConfig(api_key_file=path, api_key=("plain",)))
    numbers, alice = accounts.numbers(), accounts.find(b"a")
    assert alice is not None and not alice.is_admin
    alice.enter()
    alice.take(90)
    path.write_text(
        '[alice]\nkey = "new"\ntokens_per_minute = 100\nmax_concurrent = 1\nadmin = true\n[carol]\nkey = "c"\n'
    )
    accounts.read()
    assert accounts.find(b"new") is alice and alice.is_admin
    assert accounts.find(b"a") is accounts.find(b"b") is None and accounts.find(b"c") and accounts.find(b"plain")
    assert numbers is accounts.numbers() and [each.name for each in numbers] == ["alice", "carol", "key-1"]
    told = dict(alice.headers())
    assert told[b"x-ratelimit-remaining-requests"] == b"0" and 10 <= int(told[b"x-ratelimit-remaining-tokens"]) < 20
    path.write_text("[alice")
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        accounts.read()
    assert accounts.find(b"new") is alice


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no keys"),
        ("[alice", "keys.toml"),
        ("alice = 3", "alice"),
        ('[alice]\nkey = ""', "'alice': needs a name"),
        ('["a b"]\nkey = "x"', "'a b': needs a name"),
        ('[alice]\nkey = "x"\nmax_tokens = 1', "unknown field `max_tokens`"),
        ('[alice]\nkey = "x"\nmax_concurrent = -1', "max_concurrent"),
        ("[alice]\nmax_concurrent = 1", "key"),
        (b"\xff", "keys.toml"),
        (None, "cannot be read"),
    ],
)
def test_a_key_file_that_cannot_be_meant(tmp_path: Path, text: str | bytes | None, complaint: str) -> None:
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=complaint):
        Accounts(ServerConfig(api_key_file=path))


def test_limits_of_keys_need_keys() -> None:
    with pytest.raises(ConfigError, match="need --api-key"):
        Accounts(ServerConfig(max_concurrent_per_key=1))


# Namespaces: what a key may see.

SHARED = [("GET", "/metrics"), ("GET", "/cache"), ("POST", "/cache/reset"), ("GET", "/live"), ("GET", "/load")]


def seen(engine: FakeEngineClient, key: str, **config: Any) -> set[int]:
    """The statuses of what tells of all keys, for one of them."""

    async def go() -> set[int]:
        async with client_of(engine, key, **config) as client:
            answers = [await client.request(method, path) for method, path in SHARED]
        for answer in answers:
            if answer.status_code == 403:
                error = answer.json()["error"]
                assert error["code"] == "not_an_admin" and "admin = true" in error["message"]
        return {answer.status_code for answer in answers}

    return asyncio.run(go())


def test_what_all_keys_share_is_for_administrators(engine: FakeEngineClient, tmp_path: Path) -> None:
    keys = {"api_key": ("alice=a", "bob=b", "operator")}
    assert seen(engine, "a", **keys) == seen(engine, "b", **keys) == {403}
    assert engine.cache["checkpoints"], "nobody has emptied it"
    assert seen(engine, "operator", **keys) == {200}
    assert seen(engine, "a", api_key=("alice=a", "alice=older")) == {200}, "there is nobody else"
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "a"\nadmin = true\n[bob]\nkey = "b"\n[carol]\nkey = "c"\nadmin = false\n')
    told = [seen(engine, key, api_key_file=path) for key in "abc"]
    assert told == [{200}, {403}, {403}]
    path.write_text('[alice]\nkey = "a"\nadmin = false\n')
    assert seen(engine, "a", api_key_file=path) == {403}


@pytest.mark.parametrize(("path", "body"), DOORS)
@pytest.mark.parametrize("share", [False, True])
def test_a_named_key_is_a_namespace(engine: FakeEngineClient, path: str, body: dict[str, Any], share: bool) -> None:
    keys = ("alice=a", "bob=b", "alice=a2", "operator", "other")

    async def go() -> list[str]:
        for key in ("a", "b", "a2", "operator", "other"):
            async with client_of(engine, key, api_key=keys, share_cache=share) as client:
                assert (await client.post(path, json=body)).status_code == 200
        return [request.namespace for request in engine.requests]

    assert asyncio.run(go()) == ([""] * 5 if share else ["alice", "bob", "alice", "", ""])


def test_namespaces_find_nothing_of_each_other() -> None:
    bench, cached = Bench(FakeRunner()), {}
    asked = [("alice", ""), ("bob", ""), ("", ""), ("", "alice"), ("", "alice\n"), ("alice", "\n"), ("alice", "")]
    for i, (namespace, salt) in enumerate(asked):
        params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
        request = Request(id=str(i), prompt_ids=[7] * 300, params=params, namespace=namespace, cache_salt=salt)
        bench.scheduler.add(request)
        bench.run()
        cached[i] = bench.outputs[str(i), 0][0].cached_tokens
    assert cached == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 256}


# Limits.


@pytest.mark.parametrize(("path", "body"), DOORS)
@pytest.mark.parametrize("stream", [False, True])
def test_requests_at_once(engine: FakeEngineClient, path: str, body: dict[str, Any], stream: bool) -> None:
    engine.hold = True
    keys = {"api_key": ("alice=a", "bob=b", "operator"), "max_concurrent_per_key": 2}

    async def go() -> None:
        async with client_of(engine, "a", **keys) as client:  # type: ignore[arg-type]
            asked = body | {"stream": stream}
            tasks = [asyncio.create_task(client.post(path, json=asked)) for _ in range(2)]
            await reached(engine, 2, tasks)
            assert [request.tenant for request in engine.requests] == ["alice"] * 2
            refused = await client.post(path, json=asked)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert "'alice' has 2 requests open" in refused.json()["error"]["message"]
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            other = {"authorization": "Bearer b"}
            third = asyncio.create_task(client.post(path, json=asked, headers=other))
            assert (await client.get("/v1/models")).status_code == 200, "only what generates counts"
            await reached(engine, 3, [third])
            engine.hold = False
            answers = [await task for task in (*tasks, third)]
            assert [answer.status_code for answer in answers] == [200] * 3
            assert (await client.post(path, json=body)).status_code == 200, "its places are free again"
            assert (await client.post(path, content=b"{")).status_code == 400
            assert (await client.post(path, content=b"{")).status_code == 400
            assert (await client.post(path, json=body)).status_code == 200, "errors leave no place taken"
            text = (await client.get("/metrics", headers={"authorization": "Bearer operator"})).text
        for line in (
            'deltic_key_rate_limited_total{key="alice",limit="requests"} 1.0',
            'deltic_key_requests_open{key="alice"} 0.0',
            'deltic_key_responses_total{code="429",key="alice"} 1.0',
            'deltic_key_tokens_total{key="bob",kind="generated"} 6.0',
        ):
            assert line in text, line

    asyncio.run(go())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/chat/completions/render", {"messages": HELLO}),
        ("/v1/completions/render", {"prompt": "hello"}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": HELLO}),
        ("/v1/responses/input_tokens", {"input": "hello"}),
    ],
)
def test_what_makes_prompts_counts_as_a_request_and_takes_no_tokens(
    engine: FakeEngineClient, path: str, body: dict[str, Any]
) -> None:
    engine.hold = True
    keys: Any = {"api_key": ("alice=a", "bob=b"), "max_concurrent_per_key": 1, "tokens_per_minute_per_key": 5}

    async def go() -> None:
        async with client_of(engine, "a", **keys) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x" * 50}))
            await reached(engine, 1, [asked])
            refused = await client.post(path, json=body)
            assert refused.status_code == 429 and "has 1 request open" in refused.text
            engine.hold = False
            assert (await asked).status_code == 200
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 429, "no tokens left"
            assert (await client.post(path, json=body)).status_code == 200

    asyncio.run(go())


def test_tokens_a_minute_are_a_bucket_with_debt(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    account = Account("alice", 0, 600)
    account.enter()
    account.take(600 + 50)  # more than there was
    with pytest.raises(Exception, match=r"used up its 600 tokens a minute\. Try again in 6 s"):
        account.enter()
    now_s[0] += 4.9
    with pytest.raises(Exception, match="Try again in 1 s"):
        account.enter()
    now_s[0] += 0.2
    account.enter()
    now_s[0] += 1000
    assert dict(account.headers()) == {
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"600",
        b"x-ratelimit-reset-tokens": b"0.0s",
    }


@pytest.mark.parametrize(("path", "body"), DOORS)
def test_tokens_a_minute_hold_on_every_door(engine: FakeEngineClient, path: str, body: dict[str, Any]) -> None:
    async def go() -> None:
        async with client_of(engine, "a", api_key=("alice=a",), tokens_per_minute_per_key=60) as client:
            answers = [await client.post(path, json=body) for _ in range(12)]
            n_taken = sum(len(r.prompt_ids) + 6 for r in engine.requests)
            statuses = [answer.status_code for answer in answers]
            assert statuses == sorted(statuses) and set(statuses) == {200, 429}
            assert n_taken >= 60 > n_taken - len(engine.requests[-1].prompt_ids) - 6
            last = answers[-1]
            assert abs(int(last.headers["retry-after"]) - (n_taken + 1 - 60)) <= 1
            assert last.headers["x-ratelimit-remaining-tokens"] == "0"

    asyncio.run(go())


def test_the_openai_client_waits_as_long_as_it_is_told(engine: FakeEngineClient) -> None:
    engine.answer = lambda request, index: [97] * 900
    with served(make_app(engine, api_key=("alice=a",), tokens_per_minute_per_key=600)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="a", max_retries=1)
        client.completions.create(model="fake", prompt="x" * 301, max_tokens=300)
        with pytest.raises(openai.RateLimitError, match="600 tokens a minute"):
            client.with_options(max_retries=0).completions.create(model="fake", prompt="x", max_tokens=1)
        before_s = time.monotonic()
        client.completions.create(model="fake", prompt="x", max_tokens=1)
        assert 0.9 < time.monotonic() - before_s < 5


@pytest.mark.parametrize(("path", "body"), DOORS)
@pytest.mark.parametrize("tokens_first", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(
    engine: FakeEngineClient, path: str, body: dict[str, Any], tokens_first: int, stream: bool
) -> None:
    engine.token_s = 0.01
    engine.answer = lambda request, index: [97] * 1000
    engine.hold = tokens_first == 0

    async def go() -> httpx.Response:
        async with client_of(engine, request_timeout_s=0.15) as client:
            limit = {} if "input" in body or "max_tokens" in body else {"max_tokens": 900}
            return await client.post(path, json=body | limit | {"stream": stream})

    response = asyncio.run(go())
    assert engine.n_open == 0 and engine.aborts, "its memory is free"
    assert "the longest that this server lets one take" in response.text
    if not (stream and tokens_first):
        # A door may have begun its stream before the first token.
        assert response.status_code == 504 or stream
    else:
        assert response.status_code == 200
    if response.status_code == 504:
        assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("path", "body"), DOORS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_is_ended(
    engine: FakeEngineClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine.hold = True

    async def go(**config: Any) -> httpx.Response:
        async with client_of(engine, **config) as client:
            return await client.post(path, json=body | {"stream": stream})

    response = asyncio.run(go(queue_timeout_s=0.1))
    assert engine.n_open == 0 and "no place for the request within 0.1 s" in response.text
    assert response.status_code in (503, 529) or (stream and path == "/v1/responses")
    if response.status_code != 200:
        assert response.headers["retry-after"] == "1"
    engine.hold, engine.token_s, engine.batch = False, 0.2, 100
    assert asyncio.run(go(queue_timeout_s=0.1)).status_code == 200, "it had its place"
    engine.hold, engine.token_s = True, 0.0
    both = asyncio.run(go(queue_timeout_s=10.0, request_timeout_s=0.1))
    assert "the longest that this server lets one take" in both.text, "what comes first"


# Turns.


def served_order(
    requests: list[tuple[str, int]], n_places: int = 1, priorities: dict[int, int] | None = None
) -> list[str]:
    """The tenants of requests (tenant, n) in the order in which they got their place. priorities: of those that have another than 0."""
    runner = FakeRunner(max_num_seqs=n_places)
    scheduler = Scheduler(Cache(runner.info), runner.info, n_places + 64)
    for i, (tenant, n) in enumerate(requests):
        params = SamplingParams(max_tokens=2, n=n, seed=1, ignore_eos=True)
        priority = (priorities or {}).get(i, 0)
        scheduler.add(Request(id=str(i), prompt_ids=[50 + i] * 5, params=params, tenant=tenant, priority=priority))
    order: list[str] = []
    while step := scheduler.plan():
        for output in scheduler.commit(step, runner.step(step)):
            if output.id not in order:
                order.append(output.id)
    return [requests[int(i)][0] + i for i in order]


def test_owners_take_turns() -> None:
    asked = [("a", 1)] * 4 + [("b", 1)] * 2 + [("c", 1)]
    assert served_order(asked) == ["a0", "b4", "c6", "a1", "b5", "a2", "a3"]


def asked_by(tenant: str, i: int, n_prompt: int = 5, max_tokens: int = 200, priority: int = 0, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n, seed=1, ignore_eos=True)
    prompt = [20 + (i * 31 + 7 * j) % 900 for j in range(n_prompt)]
    return Request(id=f"{tenant}{i}", prompt_ids=prompt, params=params, tenant=tenant, priority=priority)


def steps_until_done(bench: Bench, id: str) -> int:
    """How many steps a request takes from now on."""
    n = 0
    while (id, 0) not in bench.outputs or bench.reason(id) is None:
        bench.step()
        n += 1
    return n


def test_the_namespace_with_the_most_loses_what_it_used_least_recently() -> None:
    shares: NamespaceShares[str] = NamespaceShares(6, len)
    for namespace, item in (("b", "b"), ("a", "a"), ("a", "aa"), ("a", "A")):
        shares.put(namespace, item, item)
    assert shares.get("a", "a") == "a" and shares.get("b", "a") is None, "each has its own"
    shares.put("a", "a", "another")
    assert shares.get("a", "a") == "a", "what is there stays"
    shares.put("b", "bb", "bb")
    assert shares.get("a", "aa") is None and len(shares) == 4, "that of b, though older, stays, and what a used last"
    shares.put("b", "long", "1234567")
    assert shares.get("b", "long") is None and [shares.get("a", "A"), shares.get("a", "a")] == ["A", "a"]


@pytest.mark.parametrize("n", [1, 2])
def test_who_has_no_place_does_not_wait_until_long_answers_end(n: int) -> None:
    bench = Bench(FakeRunner(max_num_seqs=4, n_pages=80))
    requests = [asked_by("a", i) for i in range(9)]
    for request in requests:
        bench.scheduler.add(request)
    bench.step()
    requests += [asked_by("b", 9, max_tokens=3, n=n), asked_by("b", 10, max_tokens=3)]
    for request in requests[-2:]:
        bench.scheduler.add(request)
    assert steps_until_done(bench, "b9") == 3 and bench.scheduler.n_preemptions == n
    assert steps_until_done(bench, "b10") == 3, "it has the next turn"
    bench.run()
    for request in requests:
        assert bench.tokens(request.id) == expected_tokens(list(request.prompt_ids), request.params)


def test_pages_of_whoever_has_the_most_are_given_up_too() -> None:
    bench = Bench(FakeRunner(max_num_seqs=8, n_pages=16))
    for i in range(4):
        bench.scheduler.add(asked_by("a", i, n_prompt=200, max_tokens=50))
    for _ in range(3):
        bench.step()
    bench.scheduler.add(asked_by("b", 4, n_prompt=150, max_tokens=3))
    assert steps_until_done(bench, "b4") < 10 and bench.scheduler.n_preemptions == 1
    bench.run()


def test_nobody_gives_way_to_whom_it_would_leave_with_less() -> None:
    bench = Bench(FakeRunner(max_num_seqs=2, n_pages=80))
    for i, tenant in enumerate("abc"):
        bench.scheduler.add(asked_by(tenant, i, max_tokens=20))
    bench.run()
    assert bench.scheduler.n_preemptions == 0


@pytest.mark.parametrize(
    ("before", "others", "n", "most"),
    [
        ([8], {"b": (1, 20)}, 8, 120),  # who comes again and again has turns, too: without these, never
        ([8, 8], {"b": (2, 20)}, 1, 120),  # never, as its own waited for all places at once
        ([], {"b": (1, 20), "c": (1, 33)}, 8, 90),  # always one of two was new (697 steps)
        ([], {"b": (8, 900)}, 8, 200),  # a request larger than it may take from others waited for their ends (937)
    ],
)
def test_a_request_of_all_places_is_not_passed_for_ever(
    before: list[int], others: dict[str, tuple[int, int]], n: int, most: int
) -> None:
    """Beside others who have so many requests of so many tokens open at any time."""
    bench = Bench(FakeRunner(max_num_seqs=8, n_pages=400))
    for i, n_before in enumerate(before):
        bench.scheduler.add(asked_by("a", i, max_tokens=30, n=n_before))
    last, n_asked = asked_by("a", 9, max_tokens=20, n=n), 0
    for n_steps in range(most):
        for tenant, (n_open, max_tokens) in others.items():
            for _ in range(n_open - sum(s.request.tenant == tenant for s in bench.scheduler.sequences())):
                n_asked += 1
                bench.scheduler.add(asked_by(tenant, n_asked, max_tokens=max_tokens))
        bench.step()
        if n_steps == 1:
            bench.scheduler.add(last)
        if (last.id, 0) in bench.outputs:
            assert not bench.scheduler.abort(last.id, if_waiting=True), "it has begun, if not with all"
    for i in range(n):
        assert (last.id, i) in bench.outputs and bench.reason(last.id, i) == "length"
        seed = mixed_seed(1, i)
        assert bench.tokens(last.id, i) == expected_tokens(list(last.prompt_ids), last.params, seed)


def test_who_has_no_place_does_not_wait_for_a_long_prompt_of_many_sequences() -> None:
    """One that waits for it gives up its place, and finds the prompt in the cache."""
    bench = Bench(FakeRunner(max_num_seqs=4, max_step_tokens=64))
    long = asked_by("a", 0, n_prompt=2000, max_tokens=5, n=4)
    bench.scheduler.add(long)
    bench.step()
    bench.scheduler.add(asked_by("b", 1, max_tokens=3))
    assert steps_until_done(bench, "b1") <= 5 and bench.scheduler.n_preemptions == 1
    bench.run()
    assert bench.scheduler.n_prompt_tokens < 2200
    for i in range(4):
        assert bench.tokens("a0", i) == expected_tokens(list(long.prompt_ids), long.params, mixed_seed(1, i))


def test_batches_give_way_and_none_gives_way_to_them() -> None:
    bench = Bench(FakeRunner(max_num_seqs=2, n_pages=80))
    for i, tenant in enumerate(("a/batches", "b/batches")):
        bench.scheduler.add(asked_by(tenant, i, priority=2**31 - 1))
    bench.step()
    bench.scheduler.add(asked_by("c", 2, max_tokens=3))
    assert steps_until_done(bench, "c2") == 3 and bench.scheduler.n_preemptions == 1
    bench.run()
    for i in range(2):
        bench.scheduler.add(asked_by("c", i))
    bench.step()
    bench.scheduler.add(asked_by("d/batches", 2, priority=2**31 - 1))
    bench.run()
    assert bench.scheduler.n_preemptions == 1


def test_prompts_of_several_owners_are_computed_in_turns() -> None:
    """Where a step has no room for all: a tenant's long prompts do not go before another's short one."""
    bench = Bench(FakeRunner(max_num_seqs=8, n_pages=200, max_step_tokens=64))
    for i in range(4):
        bench.scheduler.add(asked_by("a", i, n_prompt=640, max_tokens=1))
    for _ in range(5):
        bench.step()
    bench.scheduler.add(asked_by("b", 4, n_prompt=130, max_tokens=1))
    assert steps_until_done(bench, "b4") <= 6, "every second step is its own"
    bench.run()


def test_one_owner_is_served_in_the_order_of_arrival() -> None:
    for tenant in ("", "a"):
        assert served_order([(tenant, 1)] * 6) == [f"{tenant}{i}" for i in range(6)]


def test_a_request_of_n_counts_n() -> None:
    asked = [("a", 3), ("a", 1), ("b", 1), ("b", 1), ("b", 1), ("b", 1)]
    assert served_order(asked, n_places=3)[:4] == ["a0", "b2", "b3", "b4"]


def test_what_waits_with_a_lower_priority_costs_its_owner_no_turn() -> None:
    asked = [("a", 1)] * 4 + [("b", 1)] * 3
    order = served_order(asked, priorities={0: 1, 1: 1, 2: 1})
    assert order == ["a3", "b4", "b5", "b6", "a0", "a1", "a2"]


def test_no_priority_goes_before_another_owner() -> None:
    order = served_order([("a", 1)] * 60 + [("b", 1)], priorities=dict.fromkeys(range(60), -(2**31)))
    assert order[:3] == ["a0", "b60", "a1"]
    order = served_order([("a", 1)] * 60 + [("b", 1)], priorities={i: -i for i in range(60)})
    assert order[:3] == ["a59", "b60", "a58"], "each takes the turn of the one before"


def test_what_is_urgent_goes_before_its_owners_others() -> None:
    asked = [("a", 1)] * 3 + [("b", 1)] * 3 + [("a", 1)]
    assert served_order(asked, priorities={6: -1}) == ["b3", "a6", "a0", "b4", "a1", "b5", "a2"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("aab"), st.integers(1, 2), st.integers(-3, 2)), max_size=16))
def test_of_one_owner_the_priority_decides_and_then_the_arrival(asked: list[tuple[str, int, int]]) -> None:
    priorities = {i: priority for i, (_, _, priority) in enumerate(asked)}
    order = served_order([(tenant, n) for tenant, n, _ in asked], n_places=2, priorities=priorities)
    for tenant in "ab":
        own = [int(id[1:]) for id in order if id[0] == tenant]
        assert own == sorted(own, key=lambda i: (priorities[i], i))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(1, 300), st.integers(1, 90)), max_size=12)
)
def test_everybody_is_served_with_the_same_tokens_when_memory_is_short(asked: list[tuple[str, int, int, int]]) -> None:
    bench = Bench(FakeRunner(max_num_seqs=3, n_pages=12))
    prompts = {}
    for i, (tenant, n, n_prompt, max_tokens) in enumerate(asked):
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=1, ignore_eos=True)
        prompts[str(i)] = [20 + (i * 31 + 7 * j) % 900 for j in range(n_prompt)], params
        bench.scheduler.add(Request(id=str(i), prompt_ids=prompts[str(i)][0], params=params, tenant=tenant))
        if i % 3 == 0:
            bench.step()
    bench.run()
    for id, (prompt, params) in prompts.items():
        assert bench.tokens(id) == expected_tokens(prompt, params)


# Logs.


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    with server_log(logs.JsonFormatter()) as written:
        yield written


@pytest.mark.parametrize(("path", "body"), DOORS)
def test_a_line_of_json_for_each_request(
    engine: FakeEngineClient, lines: io.StringIO, path: str, body: dict[str, Any]
) -> None:
    async def go() -> None:
        async with client_of(engine, "topsecret", api_key=("alice=topsecret",)) as client:
            await client.post(path, json=body, headers={"x-request-id": "mine"})

    asyncio.run(go())
    (line,) = lines.getvalue().splitlines()
    assert "topsecret" not in line and "hello" not in line
    told = json.loads(line)
    assert {name: told[name] for name in ("level", "method", "route", "status", "key", "request_id")} == {
        "level": "info", "method": "POST", "route": path, "status": 200, "key": "alice", "request_id": "mine",
    }  # fmt: skip
    assert told["generated_tokens"] == 6 and told["prompt_tokens"] == len(engine.requests[0].prompt_ids)
    assert 0 <= told["first_token_seconds"] <= told["seconds"] < 5
    assert engine.requests[0].id.startswith(told["answer_id"])


def test_prompts_are_logged_only_if_that_is_asked_for(engine: FakeEngineClient, lines: io.StringIO) -> None:
    async def go() -> None:
        async with client_of(engine, log_prompts=True) as client:
            await client.post("/v1/completions", json={"prompt": "a\x1b[2K\x9b7m\n\u2028b"})

    asyncio.run(go())
    (line,) = lines.getvalue().splitlines()
    assert line.isascii() and line.isprintable()
    assert json.loads(json.loads(line)["body"])["prompt"] == "a\x1b[2K\x9b7m\n\u2028b"


def test_an_exception_is_a_field(lines: io.StringIO) -> None:
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        logging.getLogger("deltic.server").exception("broken")
    told = json.loads(lines.getvalue())
    assert told["message"] == "broken" and "ZeroDivisionError" in told["exception"]


# Metrics.


def test_the_number_of_labels_is_bounded() -> None:
    keys = [KeyNumbers(f"k{i}", n_prompt_tokens=1) for i in range(MAX_KEYS + 7)]
    text = Exposition(keys).text().decode()
    assert text.count('kind="prompt"') == MAX_KEYS + 1
    assert f'deltic_key_tokens_total{{key="{REST}",kind="prompt"}} 7.0' in text


def test_what_runs_here(engine: FakeEngineClient) -> None:
    async def go() -> str:
        async with client_of(engine) as client:
            await client.post("/v1/completions", json={"prompt": "x"})
            return (await client.get("/metrics")).text

    text = asyncio.run(go())
    assert 'deltic_build_info{device="none",kernels="none",model="fake",version="' in text
    assert "process_resident_memory_bytes" in text and 'deltic_pages_used_ratio{model="fake"} 0.0' in text
    assert (
        'deltic_prefill_time_seconds_count{model="fake"} 1.0' in text
        and 'deltic_decode_time_seconds_count{model="fake"} 1.0' in text
    )
    assert "deltic_key" not in text
