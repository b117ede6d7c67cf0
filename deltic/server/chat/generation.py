"""The engine's side of one HTTP request: its prompts submitted, their outputs as updates, everything aborted
at the end.

Whatever happens (the client leaves, a stop string matches, an error is raised), the end of `run` ends what
still runs, so pages and slots are free within a step. No task wakes up for a token: the event loop calls from
the engine's client through to the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from deltic.engine.messages import Output, PromptLogprobs, Request
from deltic.host.client import EngineClient, EngineUnavailable, QueueFull
from deltic.server.adapters import ServedAdapter
from deltic.server.chat.answer import PromptProgress, Update, WayOut
from deltic.server.chat.calls import AnswerDelta
from deltic.server.errors import RETRY_LATER, ApiError, waited_too_long
from deltic.server.limits import BATCH_PRIORITY, Ticket, Usage
from deltic.server.metrics import Metrics

RETRY_S = 0.1
"""Seconds after which a full queue is tried again."""


class Generation:
    """Requests of the engine that make one answer. Its choices are those of the first prompt's sequences,
    then of the next one's.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        requests: list[Request],
        choices: Sequence[WayOut],
        ticket: Ticket,
        adapter: ServedAdapter | None = None,
        at_once: int | None = None,
    ) -> None:
        """ticket: of the HTTP request that is answered; it learns what the answer took. adapter: the one that
        is applied. at_once: sequences that may be open at once, at least those of one request; the others
        follow when some have ended. None: all.
        """
        self._client = client
        self._ticket = ticket
        self._adapter = adapter
        self._metrics = metrics
        self._requests = requests
        self._choices = choices
        self._submitted: list[Request] = []
        self._n_open = len(choices)
        self._first = list(accumulate((request.params.n for request in requests), initial=0))
        self._at_once = at_once
        self._n_running = 0  # sequences that are submitted and have not ended
        self._unfinished = "abort"  # why sequences did not finish: their client left, or what the engine said
        self._started_s = self._last_s = time.monotonic()
        self._queued_s = 0.0
        self._first_s: float | None = None
        self._n_seeing = 0  # sequences in the engine, which has their pixels until they end
        self._is_late = False  # it has waited as long as it may, and is ended unless it has its place
        self._n_cached = [0] * len(requests)
        self._n_drafted = self._n_accepted = 0
        self.prompt_logprobs: list[PromptLogprobs | None] = [None] * len(requests)

    @property
    def n_choices(self) -> int:
        return len(self._choices)

    async def run(self, take: Callable[[list[Update]], object]) -> None:
        """Hands to `take` what comes, several updates at a time when they came together, until every choice
        has ended.

        Raises what `take` does, and ApiError: 429 when the queue is full (all prompts are submitted, or
        none), 503 while the engine is down, or when a sequence ends for another reason than its tokens: the
        engine died, the server stops, it waited too long for a place; 504 when the ticket's time is over; 404
        when its adapter was unloaded meanwhile.
        """
        self._consume = take
        loop = asyncio.get_running_loop()
        ended = self._ended = loop.create_future()
        wait_s = self._ticket.queue_timeout_s
        timer = loop.call_later(wait_s, self._end_if_waiting) if wait_s else None
        try:
            with refusals():
                if self._ticket.is_batch and self._client.n_open:  # half of the queue is for others
                    n = min(len(self._choices), self._at_once or math.inf)
                    self._client.check_room(int(n), spare=self._client.max_queue // 2)
                self._submit()
                self._ticket.take(self._n_prompt)
                if self._adapter is not None:
                    self._adapter.numbers.enter()
                async with asyncio.timeout(self._ticket.left_s()):
                    await ended
        except TimeoutError:
            self._unfinished = "timeout"
            raise timed_out(time.monotonic() - self._ticket.started_s) from None
        finally:
            if timer:
                timer.cancel()
            ended.cancel()  # later outputs are discarded
            self._end()

    def _submit(self) -> None:
        """Submits what may be open now. Raises as `EngineClient.submit`, unless the queue is full and some of
        it was submitted before: then the rest follows. Raises ApiError (503) if that waited too long.
        """
        while len(self._submitted) < len(self._requests):
            p = len(self._submitted)
            request = self._requests[p]
            if self._n_running + request.params.n > (self._at_once or math.inf):
                return
            if self._n_seeing and request.pictures:
                return  # the room for pixels has them once
            request.tenant = self._ticket.turns
            request.namespace = self._ticket.namespace
            if self._client.config.trace is not None:
                request.labels = self._ticket.labels
            if self._adapter is not None:
                request.adapter, request.adapter_name = self._adapter.current_key(), self._adapter.name
            if self._ticket.is_batch:
                request.priority = BATCH_PRIORITY
            try:
                self._client.submit(request, partial(self._deliver, p))
            except QueueFull:
                if not (self._at_once and self._submitted):
                    raise
                if not self._n_running:  # none of its own will end and make room
                    wait_s = self._ticket.queue_timeout_s
                    if wait_s and time.monotonic() - self._last_s > wait_s:
                        self._unfinished = "queue_timeout"
                        raise waited_too_long(wait_s) from None
                    asyncio.get_running_loop().call_later(RETRY_S, self._go_on)
                return
            self._submitted.append(request)
            self._n_running += request.params.n
            if request.pictures and self._ticket.held is not None:
                self._n_seeing = request.params.n
                self._ticket.held.enter()  # until the last of them has ended
            self._metrics.n_pictures += len(request.pictures)
            self._metrics.n_picture_tokens += sum(picture.n_tokens for picture in request.pictures)
            request.pictures.clear()  # they are the engine's now, and large

    def _go_on(self) -> None:
        """Submits more, unless all is over. An error is `run`'s."""
        if not self._ended.done():
            try:
                self._submit()
            except Exception as error:
                self._ended.set_exception(error)

    @property
    def _n_prompt(self) -> int:
        """Tokens of the prompts, each of which counts once, and of what is asked behind them."""
        lengths = {id(request.prompt_ids): len(request.prompt_ids) for request in self._requests}
        return sum(lengths.values()) + sum(choice.n_asked for choice in self._choices)

    def _end_if_waiting(self) -> None:
        """Ends the answer if its first prompt waits: of several the first has its place first."""
        self._is_late = True
        self._client.abort(self._requests[0].id, if_waiting=True)

    def _end(self) -> None:
        is_begun = len(self._submitted) == len(self._requests) or (self._at_once and self._submitted)
        if is_begun:
            self._ticket.usage = self.usage()
            if self._adapter is not None:
                self._adapter.numbers.leave(self._first_s is not None)
        if not self._n_open:
            return
        if is_begun:
            self._metrics.finished[self._unfinished] += self._n_open
        for request in self._submitted:
            self._client.abort(request.id)

    def _deliver(self, p: int, outputs: list[Output]) -> None:
        """Takes outputs of prompt `p`.

        An error is not the event loop's, but `run`'s, which waits for `_ended`.
        """
        ended = self._ended
        if self._n_seeing:
            self._n_seeing -= sum(output.finish_reason is not None for output in outputs)
            if not self._n_seeing and self._ticket.held is not None:
                self._ticket.held.leave()
        if ended.done():
            return
        now_s = time.monotonic()
        updates: list[Update] = []
        try:
            try:
                for output in outputs:
                    if (update := self._take(p, output, now_s)) is not None:
                        updates.append(update)
            finally:
                if updates:  # what came before an error is still the client's
                    self._consume(updates)
        except Exception as error:
            ended.set_exception(error)
            return
        if not self._n_open:
            ended.set_result(None)
        elif len(self._submitted) < len(self._requests):
            self._go_on()

    def _take(self, p: int, output: Output, now_s: float) -> Update | None:
        choice = self._choices[self._first[p] + output.index]
        if choice.finish_reason is not None:
            return None  # a stop string ended it; the engine has not heard of that yet
        if output.finish_reason in ("error", "abort"):
            raise self._failure(output)
        if output.n_read is not None:
            return self._progress(p, output, output.n_read, now_s)
        self._last_s = now_s
        if self._first_s is None:
            self._first_s, self._queued_s = now_s, output.queued_s
            if self._adapter is not None:
                self._adapter.numbers.begin()
        n_tokens = len(output.token_ids)
        if n_tokens:
            last_s = choice.last_s
            if last_s is None:
                self._metrics.queued_s.observe(output.queued_s)
                self._metrics.ttft_s.observe(now_s - self._started_s)
                self._metrics.prefill_s.observe(max(0.0, now_s - self._started_s - output.queued_s))
                self._ticket.first_s = self._ticket.first_s or now_s
            else:
                self._metrics.itl_s.observe((now_s - last_s) / n_tokens, n_tokens)
            choice.last_s = now_s
            self._ticket.take(n_tokens)
        self._n_drafted += output.n_drafted
        self._n_accepted += output.n_accepted
        is_first = not output.index or not self._requests[p].branches
        if output.cached_tokens and is_first:
            self._n_cached[p] = max(self._n_cached[p], output.cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[p] = output.prompt_logprobs
        update = choice.push(output)
        if choice.finish_reason is not None:
            self._note_finished(choice, output, now_s)
        return update

    def _progress(self, p: int, output: Output, n_read: int, now_s: float) -> Update:
        """n_read: tokens of prompt `p` that are computed or cached."""
        time_ms = round((now_s - self._started_s - output.queued_s) * 1e3)
        total = len(self._requests[p].prompt_ids)
        progress = PromptProgress(total, output.cached_tokens, n_read, max(0, time_ms))
        return Update(self._first[p] + output.index, AnswerDelta(), progress=progress)

    def _note_finished(self, choice: WayOut, output: Output, now_s: float) -> None:
        """output: the one that `choice` finished with."""
        assert choice.finish_reason
        self._n_open -= 1
        self._n_running -= 1
        if output.finish_reason is None:
            self._client.abort(output.id, output.index)
        self._metrics.finished[choice.finish_reason] += 1
        self._metrics.n_generated.observe(choice.n_tokens)
        if not self._n_open:
            self._metrics.e2e_s.observe(now_s - self._started_s)
            self._metrics.decode_s.observe(now_s - (self._ticket.first_s or now_s))
            for request in self._requests:
                self._metrics.n_prompt.observe(len(request.prompt_ids))

    def _failure(self, output: Output) -> ApiError:
        if self._is_late and output.finish_reason == "abort" and output.error is None:
            self._unfinished = "queue_timeout"
            return waited_too_long(self._ticket.queue_timeout_s)
        self._unfinished = str(output.finish_reason)
        message = output.error or "the request was ended before its answer was complete"
        if output.finish_reason == "abort" or self._client.state != "ready":
            return unavailable(message)
        return ApiError(500, message, code="engine_error")

    def usage(self) -> Usage:
        """Counts so far."""
        # Of requests with one prompt the first finds what others have left.
        n_cached = {id(r.prompt_ids): n for r, n in reversed(list(zip(self._requests, self._n_cached, strict=True)))}
        return Usage(
            prompt_tokens=self._n_prompt,
            completion_tokens=sum(choice.n_tokens for choice in self._choices),
            cached_tokens=sum(n_cached.values()),
            reasoning_tokens=sum(choice.n_reasoning_tokens for choice in self._choices),
            timing=self._timing(),
            n_drafted=self._n_drafted,
            n_accepted=self._n_accepted,
        )

    def _timing(self) -> dict[str, float]:
        """Milliseconds until the first sequence had its place, then until the first token, then until the
        last.
        """
        first_s = self._first_s or self._last_s
        queued_s = min(self._queued_s, first_s - self._started_s)
        parts = {
            "queue_ms": queued_s,
            "prefill_ms": first_s - self._started_s - queued_s,
            "decode_ms": self._last_s - first_s,
            "total_ms": self._last_s - self._started_s,
        }
        return {name: round(seconds * 1e3, 1) for name, seconds in parts.items()}


def timed_out(seconds: float) -> ApiError:
    # Sent again, it would take as long again.
    message = f"the request was ended after {seconds:.0f} s, the longest that this server lets one take. Ask for a shorter answer."
    return ApiError(504, message, code="request_timeout", headers={"x-should-retry": "false"})


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="engine_unavailable", headers=RETRY_LATER)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raises ApiError for what an engine's client refuses: 503 while there is no engine, 429 for a full
    queue.
    """
    try:
        yield
    except QueueFull as error:
        raise queue_full(error) from None
    except EngineUnavailable as error:
        raise unavailable(str(error)) from None


def queue_full(error: QueueFull) -> ApiError:
    return ApiError(429, str(error), code="queue_full", headers={"retry-after": str(error.retry_after_s)})
