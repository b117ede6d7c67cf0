"""The engine's side of one HTTP request: its prompts submitted, their outputs as pieces, everything aborted at the end.

Whatever happens (the client leaves, a stop string matches, an error is raised), leaving a Generation's `with` block
ends what still runs, so pages and slots are free within a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from deltic.engine.client import EngineClient, EngineUnavailable, QueueFull, Stream
from deltic.engine.request import Output, Request, TokenLogprob
from deltic.metrics import Metrics
from deltic.server.answer import Choice, Piece, Usage
from deltic.server.errors import ApiError

RETRY_LATER = {"retry-after": "2"}


class Generation:
    """Requests of the engine that make one answer. `choices[p * n + i]` is sequence i of prompt p."""

    def __init__(
        self, client: EngineClient, metrics: Metrics, requests: list[Request], choices: list[Choice]
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._requests = requests
        self._choices = choices
        self._streams: list[Stream] = []
        self._n_open = len(choices)
        self._unfinished = "abort"  # why sequences did not finish: their client left, or what the engine said
        self._started_s = time.monotonic()
        self._last_s: list[float | None] = [None] * len(choices)
        self._n_cached = [0] * len(requests)
        self.prompt_logprobs: list[list[TokenLogprob | None] | None] = [None] * len(requests)

    @property
    def n_choices(self) -> int:
        return len(self._choices)

    def __enter__(self) -> Generation:
        """Submits all prompts, or none. Raises ApiError: 429 when the queue is full, 503 while the engine is down."""
        try:
            for request in self._requests:
                self._streams.append(self._client.submit(request))
        except QueueFull as error:
            self._abort()
            raise queue_full(error) from None
        except EngineUnavailable as error:
            self._abort()
            raise unavailable(str(error)) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._n_open:
            self._metrics.finished[self._unfinished] += self._n_open
            self._abort()

    def _abort(self) -> None:
        for stream in self._streams:
            self._client.abort(stream.request_id)

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What came, several pieces at a time when they came together; ends when every choice has ended.

        Raises ApiError when a sequence ends for another reason than its tokens: the engine died, the server stops.
        """
        async with aclosing(self._outputs()) as batches:
            async for outputs in batches:
                now_s = time.monotonic()
                pieces = [
                    piece for p, output in outputs if (piece := self._take(p, output, now_s)) is not None
                ]
                if pieces:
                    yield pieces
                if not self._n_open:
                    return

    async def _outputs(self) -> AsyncGenerator[list[tuple[int, Output]], None]:
        """Batches of (prompt, output)."""
        if len(self._streams) == 1:
            stream = self._streams[0]
            async for output in stream:
                yield [(0, output), *((0, more) for more in stream.take_ready())]
            return
        queue: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()

        async def pump(p: int, stream: Stream) -> None:
            async for output in stream:
                queue.put_nowait((p, output))
            queue.put_nowait(None)

        pumps = [asyncio.create_task(pump(p, stream)) for p, stream in enumerate(self._streams)]
        try:
            n_pumping = len(pumps)
            while n_pumping:
                batch = [await queue.get()]
                while not queue.empty():
                    batch.append(queue.get_nowait())
                n_pumping -= batch.count(None)
                yield [entry for entry in batch if entry is not None]
        finally:
            for task in pumps:
                task.cancel()

    def _take(self, p: int, output: Output, now_s: float) -> Piece | None:
        n = self._requests[p].params.n
        choice = self._choices[p * n + output.index]
        if choice.finish_reason is not None:
            return None  # a stop string ended it; the engine has not heard of that yet
        if output.finish_reason in ("error", "abort"):
            raise self._failure(output)
        self._measure(choice, output, now_s)
        self._n_cached[p] = max(self._n_cached[p], output.cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[p] = output.prompt_logprobs
        piece = choice.push(output)
        if choice.finish_reason is not None:
            self._n_open -= 1
            if output.finish_reason is None:
                self._client.abort(output.id, output.index)
            self._metrics.finished[choice.finish_reason] += 1
            self._metrics.n_generated.observe(choice.n_tokens)
            if not self._n_open:
                self._metrics.e2e_s.observe(now_s - self._started_s)
                self._metrics.n_cached += sum(self._n_cached)
                for request in self._requests:
                    self._metrics.n_prompt.observe(len(request.prompt_ids))
        return piece

    def _measure(self, choice: Choice, output: Output, now_s: float) -> None:
        n_tokens = len(output.token_ids)
        if not n_tokens:
            return
        last_s = self._last_s[choice.index]
        if last_s is None:
            self._metrics.queued_s.observe(output.queued_s)
            self._metrics.ttft_s.observe(now_s - self._started_s)
        else:
            self._metrics.itl_s.observe((now_s - last_s) / n_tokens, n_tokens)
        self._last_s[choice.index] = now_s

    def _failure(self, output: Output) -> ApiError:
        self._unfinished = str(output.finish_reason)
        message = output.error or "the request was ended before its answer was complete"
        if output.finish_reason == "abort" or self._client.state != "ready":
            return unavailable(message)
        return ApiError(500, message, code="engine_error")

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt_tokens=sum(len(request.prompt_ids) for request in self._requests),
            completion_tokens=sum(choice.n_tokens for choice in self._choices),
            cached_tokens=sum(self._n_cached),
            reasoning_tokens=sum(choice.n_reasoning_tokens for choice in self._choices),
        )


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="engine_unavailable", headers=RETRY_LATER)


def queue_full(error: QueueFull) -> ApiError:
    headers = {"retry-after": str(error.retry_after_s)}
    return ApiError(429, str(error), code="queue_full", headers=headers)
