"""The offline API for programs with an event loop: an LLM in a thread of its own.

    from deltic import AsyncLLM
    async with AsyncLLM("Qwen/Qwen3.5-0.8B") as llm:
        answers = await asyncio.gather(*(llm.chat([{"role": "user", "content": q}]) for q in questions))

Calls that are open together run together, in the same steps. The thread alone touches the engine: it takes
commands between two steps, and hands what comes to the event loop of each call.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltic.config import BUILT_IN
from deltic.llm import LLM, EngineStopped, decided, prepare_decisions, prepare_scores
from deltic.llm_calls import AnswerPiece, Completion, ContinuationScores, OpenCall, PreparedCall, stacked
from deltic.server.api.decisions import DecisionAnswer

log = logging.getLogger("deltic.llm")


class _Awaited:
    """A call, and where what comes of it goes: pieces, then None or an exception."""

    def __init__(self, prepare: Callable[[LLM], PreparedCall]) -> None:
        self.prepare = prepare
        self.call: OpenCall | None = None
        self.coming = asyncio.Queue[AnswerPiece | BaseException | None]()
        self._loop = asyncio.get_running_loop()

    def put(self, item: AnswerPiece | BaseException | None) -> bool:
        """Hands an item to the event loop, from another thread; False if that is closed."""
        try:
            self._loop.call_soon_threadsafe(self.coming.put_nowait, item)
        except RuntimeError:
            return False
        return True


class AsyncLLM:
    """A model whose calls are awaited. It loads when it is entered, or started."""

    def __init__(self, model: str = BUILT_IN, **settings: Any) -> None:
        """The arguments are LLM's."""
        self._make = partial(LLM, model, **settings)
        self._commands = queue.SimpleQueue[Callable[[LLM], None] | None]()
        self._thread: threading.Thread | None = None
        self._open: list[_Awaited] = []
        """Calls that run; the thread's alone."""
        self._llm: LLM | None = None

    @property
    def llm(self) -> LLM:
        """The LLM, for its `info`, `tokenizer` and `default_params`; its calls are the thread's. Raises
        EngineStopped.
        """
        if self._llm is None:
            raise EngineStopped(
                "this AsyncLLM is not open. Use it within: async with AsyncLLM(...) as llm; or await llm.start()."
            )
        return self._llm

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def start(self) -> AsyncLLM:
        """Loads the model, beside the event loop, and returns this. Raises what making an LLM raises."""
        ready = Future[None]()
        ready.set_running_or_notify_cancel()  # whoever waits may leave
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="deltic", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(ready)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what runs, and lets what is on its way to the cache_dir get there. Closing twice is fine."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(thread.join)
        self._llm = None

    async def generate(self, prompts: Any, params: Any = None, **options: Any) -> list[Completion]:
        """Does what LLM.generate does; a wait that is cancelled ends the answers."""
        return await self._complete(lambda llm: llm.prepare_text(prompts, params, **options))

    async def chat(self, messages: Any, params: Any = None, **options: Any) -> list[Completion]:
        """Does what LLM.chat does; a wait that is cancelled ends the answers."""
        return await self._complete(lambda llm: llm.prepare_chat(messages, params, **options))

    async def embed(
        self, texts: Any, *, dimensions: int | None = None, prompt_name: str | None = None
    ) -> NDArray[np.float32]:
        """Does what LLM.embed does; a wait that is cancelled ends what runs."""
        return stacked(await self._complete(lambda llm: llm.prepare_embed(texts, dimensions, prompt_name)))

    async def score(self, prompts: Any, continuations: Any, **options: Any) -> list[ContinuationScores]:
        """Does what LLM.score does."""
        return (await self._scored(lambda llm: prepare_scores(llm, prompts, continuations, **options)))[-1]

    async def decide(self, given: Any, questions: Any, **options: Any) -> list[DecisionAnswer]:
        """Does what LLM.decide does."""
        (asked,), scores = await self._scored(lambda llm: prepare_decisions(llm, given, questions, **options))
        return decided(asked, scores)

    async def _scored(self, prepare: Callable[[LLM], tuple[Any, ...]]) -> tuple[list[Any], list[ContinuationScores]]:
        """Whatever `prepare` gives before its scores, and those."""
        prepared: list[Any] = []

        def call(llm: LLM) -> PreparedCall:
            *prepared[:], last = prepare(llm)
            own: PreparedCall = last
            return own

        completions = await self._complete(call)
        *before, scores = prepared
        return before, scores.taken(completions)

    async def stream(self, given: Any, params: Any = None, **options: Any) -> AsyncIterator[AnswerPiece]:
        """Yields what LLM.stream does; an iterator that is closed ends its answers."""
        awaited = self._begin(lambda llm: llm.prepare(given, params, **options))
        try:
            while (item := await awaited.coming.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._commands.put(partial(self._drop, awaited))

    async def _complete(self, prepare: Callable[[LLM], PreparedCall]) -> list[Completion]:
        awaited = self._begin(prepare)
        try:
            while (item := await awaited.coming.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
        finally:
            self._commands.put(partial(self._drop, awaited))
        assert awaited.call is not None
        return [answer.completion for answer in awaited.call.answers]

    def _begin(self, prepare: Callable[[LLM], PreparedCall]) -> _Awaited:
        """Raises EngineStopped."""
        awaited = _Awaited(prepare)
        self._commands.put(partial(self._start, awaited))
        _ = self.llm  # only now: the thread that ends answers what it finds in the queue
        return awaited

    # In the thread.

    def _serve(self, ready: Future[None]) -> None:
        try:
            llm = self._llm = self._make()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        failure = EngineStopped("this AsyncLLM was closed. Make a new one.")
        try:
            while self._obey(llm):
                if llm.has_work:
                    llm.advance()
                    self._deliver(llm)
        except EngineStopped as error:
            failure = error
        except Exception:
            log.exception("the thread of an AsyncLLM failed")
            failure = EngineStopped("the engine's thread failed, as the log says. Make a new AsyncLLM.")
        finally:
            self._llm = None
            for awaited in self._open:
                if awaited.call is not None:
                    llm.end(awaited.call)
                awaited.put(failure)
            while not self._commands.empty():  # whoever asked meanwhile
                if (command := self._commands.get()) is not None and command.func == self._start:  # type: ignore[attr-defined]
                    command.args[0].put(failure)  # type: ignore[attr-defined]
            llm.close()

    def _obey(self, llm: LLM) -> bool:
        """Takes every command that waits, and waits for one while there is no work.

        False when told to end.
        """
        while True:
            try:
                command = self._commands.get(block=not llm.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(llm)

    def _start(self, awaited: _Awaited, llm: LLM) -> None:
        try:
            awaited.call = llm.begin(awaited.prepare(llm))
        except Exception as error:
            awaited.put(error)
            return
        if awaited.call.open:
            self._open.append(awaited)
        else:
            awaited.put(None)

    def _drop(self, awaited: _Awaited, llm: LLM) -> None:
        """Ends a call whose caller has left, unless it is complete."""
        if awaited in self._open and awaited.call is not None:
            self._open.remove(awaited)
            llm.end(awaited.call)

    def _deliver(self, llm: LLM) -> None:
        """Hands out what a step brought."""
        for awaited in self._open[:]:
            call = awaited.call
            assert call is not None
            is_heard = True
            while call.outputs:
                if (piece := llm.take(call, call.outputs.popleft())) is not None:
                    is_heard = awaited.put(piece)
            if not call.open or not is_heard:
                self._open.remove(awaited)
                llm.end(call)
                awaited.put(None)
