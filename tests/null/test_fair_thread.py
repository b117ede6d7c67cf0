"""The thread that prepares large requests: whose turn it is, what waits, what is left."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any

import httpx
import pytest

from deltic.server import fair_thread
from deltic.server.api import decode
from deltic.server.fair_thread import FairThread
from deltic.server.limits import INLINE_BYTES
from deltic.server.room import Room
from deltic.text import Tokenizer, pause
from tests.fake_engine import FakeEngineClient, make_app, n_held, served
from tests.waiting import until


class Busy(FairThread):
    """Stands still until `order` is asked for."""

    def __init__(self, most: int = 10**9) -> None:
        super().__init__("test", lambda: most)
        self.go, self.done, self.futures = threading.Event(), list[str](), list[Future[Any]]()
        begun = threading.Event()
        self.submit("first", 1, lambda: (begun.set(), self.go.wait(5)))
        assert begun.wait(5)

    def add(self, key: str, size: int = 10, name: str = "") -> Future[Any] | None:
        """Work that notes its name, else its key."""
        body = object()
        if not self.hold(key, body, size):
            return None
        future = self.submit(key, size, lambda: self.done.append(name or key))
        future.add_done_callback(lambda _: self.leave(key, body))
        self.futures.append(future)
        return future

    def order(self) -> str:
        self.go.set()
        while waiting := [future for future in self.futures if not future.done()]:
            futures.wait(waiting, 5)
        return "".join(self.done)


def test_a_job_keeps_the_lock_for_half_a_millisecond() -> None:
    """And no longer than somebody else has said (`Guides`)."""
    before = sys.getswitchinterval()
    try:
        for given, found in ((0.005, fair_thread.SWITCH_S), (0.0002, 0.0002)):
            sys.setswitchinterval(given)
            FairThread("test", lambda: 0).close()
            assert sys.getswitchinterval() == pytest.approx(found, abs=1e-5)
    finally:
        sys.setswitchinterval(before)


def test_one_key_is_first_come_first_served() -> None:
    thread = Busy()
    for name in "abcdefghijklm":
        thread.add("", random.randint(1, 100), name)
    assert thread.order() == "abcdefghijklm"


def test_keys_take_turns_by_size() -> None:
    thread = Busy()
    for key, size, n in (("a", 10, 6), ("b", 10, 3), ("c", 30, 2)):
        for _ in range(n):
            thread.add(key, size)
    assert thread.order() == "abc" + "ab" + "ab" + "ac" + "aa"


def test_who_comes_late_goes_next_and_gains_nothing_by_having_been_away() -> None:
    thread = Busy()
    for _ in range(5):
        thread.add("a")
    thread.submit("x", 1, lambda: (thread.add("b"), thread.add("b")))
    assert thread.order() == "a" + "bab" + "aaa"


def test_a_long_job_lets_others_pass_between_its_parts() -> None:
    thread = Busy()

    def long(name: str) -> Callable[[], None]:
        def work() -> None:
            for i in range(6):
                thread.done.append(f"{name}{i} ")
                if (name, i) == ("A", 1):
                    thread.add("b", 25, "b ")
                    thread.add("a", 5, "a ")
                    thread.futures.append(thread.submit("c", 60, long("C")))
                pause.get()(10)

        return work

    thread.futures.append(thread.submit("a", 60, long("A")))
    assert thread.order() == "A0 A1 b C0 A2 C1 A3 C2 A4 C3 A5 C4 a C5 "


def test_many_long_jobs_end_and_nobody_passes_more_than_have_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_thread, "MAX_BEGUN", 3)
    thread, n_parts = Busy(), Counter[str]()

    def long(name: str) -> Callable[[], None]:
        def work() -> None:
            for _ in range(50):
                n_parts[name] += 1
                pause.get()(1)

        return work

    thread.futures += [thread.submit(name, 50, long(name)) for name in "abcdefghij" * 3]
    assert thread.order() == "" and set(n_parts.values()) == {150}


def test_what_is_done_in_parts_has_one_turn_for_all() -> None:
    thread = Busy()
    turn = thread.turn("a", 10)

    def first() -> None:
        thread.done.append("1")
        thread.futures.append(thread.submit_in(turn, lambda: thread.done.append("2")))

    thread.futures.append(thread.submit_in(turn, first))
    for key in "bbba":
        thread.add(key)
    assert thread.order() == "12" + "bbab", "and is paid for once"


def test_what_is_cancelled_is_not_done_and_an_error_is_the_callers() -> None:
    thread = Busy()
    left, kept = thread.add("a"), thread.add("b")
    failed = thread.submit("c", 1, lambda: 1 // 0)
    assert left and kept and failed and left.cancel() and len(thread._waiting) == 2
    assert thread.order() == "b"
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_what_is_cancelled_half_done_ends_at_its_next_pause_and_leaves_nothing() -> None:
    thread = Busy()

    def work(held: Callable[[], str]) -> None:
        thread.done.append("a")
        thread.futures[0].cancel()
        pause.get()(5)
        thread.done.append("never")

    held = Busy.order.__get__(thread)
    left = weakref.ref(held)
    gc.disable()
    try:
        thread.futures.append(thread.submit("a", 10, partial(work, held)))
        thread.add("a", name="b")
        assert thread.order() == "ab"
        assert isinstance(thread.futures[0].exception(), futures.CancelledError)
        thread.futures.clear()
        del held
        assert left() is None
    finally:
        gc.enable()


def test_a_large_text_is_read_no_further_when_its_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []

    def slow(tokenizer: Tokenizer, text: str) -> list[int]:
        pieces.append(len(text))
        time.sleep(0.01)
        return [0]

    monkeypatch.setattr(Tokenizer, "_encode_piece", slow)
    body = {"prompt": "word " * 1_000_000}

    async def go(url: str) -> None:
        async with httpx.AsyncClient(timeout=20) as client:
            asked = asyncio.create_task(client.post(f"{url}/tokenize", json=body))
            while not pieces:
                await asyncio.sleep(0.005)
            asked.cancel()
            await until(lambda: app.state.server.worker._current is None)
            assert sum(pieces) < len(body["prompt"])

    app = make_app(FakeEngineClient())
    with served(app) as url:
        asyncio.run(go(url))


def test_what_a_key_has_is_bounded() -> None:
    thread = Busy(most=100)
    assert thread.add("a", 500) and not thread.add("a", 1), "a single one may be larger"
    assert thread.add("b", 60) and not thread.add("b", 60) and thread.add("b", 40)
    assert thread.order() == "ab" + "b"


def test_keys_take_turns_in_a_room_and_none_has_all_of_it() -> None:
    order: list[str] = []

    async def go() -> None:
        room = Room(lambda: 100, n_shares=2)

        async def use(name: str, key: str, size: int) -> None:
            with await room.take(key, size):
                order.append(name)
                await asyncio.sleep(0.01)

        uses = [use(f"a{i}", "anna", 30) for i in range(3)] + [use("x", "anna/batches", 30)]
        tasks = [asyncio.create_task(one) for one in (*uses, use("b", "ben", 50), use("c", "cleo", 500))]
        left = asyncio.create_task(use("left", "ben", 50))
        await asyncio.sleep(0)
        assert room._taken == {"anna": 30, "ben": 50}, "a key may have half, its batches included"
        left.cancel()
        await asyncio.gather(*tasks)
        assert not room._taken.total() and not room._waiting

    asyncio.run(go())
    assert order == ["a0", "b", "x", "c", "a1", "a2"], "in turn, those of batches, too; who left has had no part"


def test_who_needs_much_room_is_not_passed_for_ever_and_gives_back_what_is_too_much() -> None:
    order: list[str] = []

    async def go() -> None:
        room = Room(lambda: 100)
        first = await room.take("a", 60)

        async def use(name: str, size: int) -> None:
            with await room.take(name, size):
                order.append(name)

        tasks = [asyncio.create_task(use("large", 80)), asyncio.create_task(use("small", 10))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == []
        first.shrink(20)
        await asyncio.gather(*tasks)
        first.enter()
        first.leave()
        assert room._taken.total() == 20, "two use it"
        first.leave()
        assert not room._taken.total()

    asyncio.run(go())
    assert order == ["large", "small"]


def test_a_key_with_many_large_bodies_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    go_on, parse = threading.Event(), decode.parse

    def noted(body: bytes, kind: Any) -> Any:
        asked = parse(body, kind)
        if len(body) > INLINE_BYTES:
            order.append(asked.user)
            go_on.wait(5)
        return asked

    monkeypatch.setattr(decode, "parse", noted)
    app = make_app(FakeEngineClient(), max_body_mb=0.1, api_key=("anna=1", "ben=2"))

    async def go(url: str) -> list[int]:
        async with httpx.AsyncClient(timeout=10) as client:

            async def ask(key: str, user: str, n_bytes: int) -> int:
                body = {"prompt": "x", "user": user, "metadata": {"a": "x" * n_bytes}}
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
                return answer.status_code

            tasks = [asyncio.create_task(ask("1", "anna", 60_000)) for _ in range(4)]
            await until(lambda: order and n_held(app) == 3 and any(task.done() for task in tasks))
            tasks.append(asyncio.create_task(ask("2", "ben", 10_000)))
            await until(lambda: n_held(app) == 4 and len(app.state.server.worker._waiting) == 3)
            go_on.set()
            return sorted([await task for task in tasks])

    with served(app) as url:
        assert asyncio.run(go(url)) == [200, 200, 200, 200, 429]
    assert order == ["anna", "ben", "anna", "anna"], "of anna's, one was too much"
