"""SGLang's gateway, nginx and HAProxy before two servers: answers, streams, a conversation that stays where its
beginning is, and an update that loses no request.

Needs `pip install '.[test,routers]'`, and of nginx and HAProxy a package of the system each; without one its
tests are skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.routed.fleet import Fleet, Visitors, found_program, running
from bench.routed.soak import RoutedSoak
from bench.soak.traffic import Traffic
from deltic.commands.endpoint import DONE, Endpoint

SIZES = ["--threads", "1", "--max-num-seqs", "8", "--max-queue", "64", "--n-pages", "96", "--drain-notice-s", "3"]

pytestmark = pytest.mark.parametrize("router", ["sglang", "nginx", "haproxy"])


@pytest.fixture(autouse=True)
def is_there(router: str) -> None:
    if router == "sglang" and importlib.util.find_spec("sglang_router") is None:
        pytest.skip("sglang-router is not installed")
    if router != "sglang" and found_program(router) is None:
        pytest.skip(f"{router} is not installed")


async def events(endpoint: Endpoint, body: dict[str, Any], session: str) -> AsyncIterator[dict[str, Any]]:
    headers = f"x-session-id: {session}\r\n"
    reply = await endpoint.open("POST", "/v1/chat/completions", body | {"stream": True}, headers)
    assert reply.status == 200, await reply.read()
    async for _, payload in reply.events():
        if payload != DONE:
            yield json.loads(payload)


def test_conversations_stay_where_their_beginning_is(router: str) -> None:
    async def asked() -> None:
        async with running(Fleet.of(router, 2, SIZES)) as fleet:
            endpoint, model = Endpoint(fleet.url, fleet.api_key), await fleet.model()
            for number in range(4):
                messages: list[dict[str, str]] = []
                cached = []
                for turn in range(3):
                    messages.append({"role": "user", "content": f"{number} {turn} " + "word " * 80})
                    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
                    body |= {"stream_options": {"include_usage": True}}
                    said, usage, n_events = "", {}, 0
                    async for event in events(endpoint, body, f"session-{number}"):
                        n_events += 1
                        said += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                        usage = event.get("usage") or usage
                    assert n_events > 3, "the answer came in pieces"
                    cached.append(usage["prompt_tokens_details"]["cached_tokens"])
                    messages.append({"role": "assistant", "content": said})
                assert cached[1] >= 64 and cached[2] >= cached[1] + 64
            status, answer = await endpoint.json("POST", "/v1/chat/completions", {"model": model, "messages": 7})
            assert status == 400, answer
            endpoint.close()

    asyncio.run(asked())


def test_an_update_loses_no_request_and_a_kill_only_what_ran_there(router: str) -> None:
    async def asked() -> dict[str, Any]:
        async with running(Fleet.of(router, 2, SIZES)) as fleet:
            endpoint = Visitors(fleet.url, fleet.api_key)
            sent = Traffic(endpoint, await fleet.model(), 1024, 144)
            soak = RoutedSoak(fleet, sent, seed=0, timeout_s=60, log=print)
            work = asyncio.create_task(soak.run(minutes=0.4, n_clients=6, kill_every_s=4, roll_every_s=8))
            await work
            endpoint.close()
            return soak.report()

    report = asyncio.run(asked())
    assert not report["violations"]
    assert report["rolling_restarts"] and report["kills"] and report["requests"] > 100
