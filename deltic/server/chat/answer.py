"""The JSON of an answer, made of the engine's outputs: one `Choice` a sequence, then whole bodies or stream
chunks.

A chunk is written as bytes: what all chunks of an answer share is encoded once, so that a token costs one
small JSON encoding.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from deltic.engine.messages import LOGPROBS_PACKED, Output, PromptLogprobs, TokenLogprob
from deltic.server.chat.arguments import given_text
from deltic.server.chat.calls import AnswerDelta, CallDelta
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.request import Shown
from deltic.server.limits import Usage
from deltic.server.transport import EncodedArray
from deltic.text import Detokenizer, StopMatcher, Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

_encode = msgspec.json.Encoder().encode


class Scores(msgspec.Struct):
    """Log-probabilities of some tokens of an answer: parallel lists."""

    token_ids: list[int] = []
    entries: list[TokenLogprob | None] = []
    """Log-probabilities of each token; None for the first token of a prompt, which nothing predicts."""
    offsets: list[int] = []
    """Offset of each token in the answer's text, in characters."""

    def extend(self, other: Scores) -> None:
        self.token_ids += other.token_ids
        self.entries += other.entries
        self.offsets += other.offsets

    def take(self, n: int) -> Scores:
        """Removes the first `n` tokens and returns them."""
        taken = Scores(self.token_ids[:n], self.entries[:n], self.offsets[:n])
        del self.token_ids[:n], self.entries[:n], self.offsets[:n]
        return taken


class PromptScores(msgspec.Struct):
    """Log-probabilities of a prompt that is echoed: like Scores, but unpacked as they are needed."""

    token_ids: list[int]
    entries: PromptLogprobs
    offsets: list[int]

    def parts(self) -> Iterator[Scores]:
        """LOGPROBS_PACKED tokens at a time."""
        entries = iter(self.entries)
        for start in range(0, len(self.token_ids), LOGPROBS_PACKED):
            part = slice(start, start + LOGPROBS_PACKED)
            ids = self.token_ids[part]
            yield Scores(ids, list(islice(entries, len(ids))), self.offsets[part])


class PromptProgress(msgspec.Struct):
    """Progress of a prompt, in llama.cpp's fields."""

    total: int
    """Tokens of the prompt."""
    cache: int
    """Tokens that the prefix cache had."""
    processed: int
    """Tokens that are computed or cached."""
    time_ms: int
    """Milliseconds since the request had its place."""


class Update(msgspec.Struct):
    """The text and tokens that one output added to a choice. `finish_reason` is set in its last."""

    index: int
    delta: AnswerDelta
    scores: Scores | None = None
    finish_reason: str | None = None
    stop: str | int | None = None
    """The stop string, or the id of the request's own, that ended it."""
    token_ids: list[int] = []
    """The tokens that the model drew, the end token included, if they were asked for."""
    n_tokens: int = 0
    """Tokens of the update's choice so far."""
    progress: PromptProgress | None = None
    """Tells of the prompt, in an update that adds nothing."""


class WayOut:
    """Base of the ways out of one sequence: counts for Generation, and an Update for each output."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.n_tokens = 0
        """Generated tokens, the one that ended it included."""
        self.n_reasoning_tokens = 0
        self.n_asked = 0
        """Tokens behind the prompt that count as read."""
        self.finish_reason: str | None = None
        self.last_s: float | None = None
        """time.monotonic() of its last tokens, for who takes them."""

    def push(self, output: Output) -> Update:
        """Takes the next output of this sequence."""
        raise NotImplementedError


class Choice(WayOut):
    """Way out of one sequence: ids to text, stop strings, then reasoning, content and tool calls (if
    `parser`).
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, shown: Shown, parser: OutputParser | None = None, offset: int = 0
    ) -> None:
        """offset: characters of the answer before the generated text (an echoed prompt)."""
        super().__init__(index)
        self._shown = shown
        self._detokenizer = Detokenizer(tokenizer, shown.skip_special_tokens) if shown.gives_text else None
        self._stops = StopMatcher(shown.stops, shown.includes_stop) if shown.stops else None
        self._parser = parser
        self._held_scores = Scores() if shown.logprobs else None  # of tokens whose text was not shown yet
        self._n_characters = offset
        self._n_shown = offset

    def push(self, output: Output) -> Update:
        """Takes the next output of this sequence.

        A stop string sets `finish_reason` although the output has none: the engine is to be told.
        """
        ids = output.token_ids
        reason: str | None = output.finish_reason
        if self._shown.is_silent:
            self.finish_reason = "length" if reason else None
            return Update(self.index, AnswerDelta(), finish_reason=self.finish_reason)
        n_tokens = len(ids)
        self.n_tokens += n_tokens
        drawn, stop_id = ids, output.stop_token_id
        is_shown = self._shown.includes_stop and stop_id in self._shown.stop_token_ids
        if stop_id is not None and ids and ids[-1] == stop_id and not is_shown:
            ids = ids[:-1]  # the stop token is not printed, special or not
        held, stops, parser, text = self._held_scores, self._stops, self._parser, ""
        if held is not None:
            text = self._push_with_offsets(ids, output, held)
        elif self._detokenizer is not None:
            text = self._detokenizer.push(ids)
        if reason is not None and self._detokenizer is not None:
            text += self._detokenizer.flush()
        matched = False
        if stops is not None:
            text = stops.push(text)
            matched = stops.matched is not None
            if not matched and reason is not None:
                text += stops.flush()
        update = Update(self.index, AnswerDelta("", text) if parser is None else self._parse(parser, text, n_tokens))
        update.n_tokens = self.n_tokens
        if self._shown.gives_ids:
            update.token_ids = drawn
        if held is not None:
            self._n_shown += len(text)
            has_all = (reason and not matched) or self._detokenizer is None
            update.scores = held.take(len(held.offsets) if has_all else self._n_shown_tokens(held))
        if matched or reason is not None:
            cut = matched or reason != "stop" or output.stop_token_id in self._shown.stop_token_ids
            self._finish(update, "stop" if matched else reason, cut)
            if matched and stops is not None:
                update.stop = stops.matched
            elif reason == "stop" and stop_id in self._shown.stop_token_ids:
                update.stop = stop_id
        return update

    def _parse(self, parser: OutputParser, text: str, n_tokens: int) -> AnswerDelta:
        was_reasoning = parser.in_reasoning
        delta = parser.push(text)
        if was_reasoning or parser.in_reasoning:
            self.n_reasoning_tokens += n_tokens
        if self._shown.hides_thought:
            delta.reasoning = ""
        return delta

    def _finish(self, update: Update, reason: str | None, cut: bool) -> None:
        """Ends the choice with `update`. cut: it is not the model's wish to end here."""
        parser = self._parser
        if parser is not None:
            update.delta.add(parser.finish(truncated=cut))
            if self._shown.hides_thought:
                update.delta.reasoning = ""
            if parser.n_calls and reason == "stop" and not parser.is_call_open:
                reason = "tool_calls"
        self.finish_reason = update.finish_reason = reason

    def _push_with_offsets(self, ids: list[int], output: Output, held: Scores) -> str:
        held.token_ids += ids
        held.entries += (output.logprobs or ())[: len(ids)]
        texts = []
        for token_id in ids:
            held.offsets.append(self._n_characters)
            texts.append(self._detokenizer.push((token_id,)) if self._detokenizer else "")
            self._n_characters += len(texts[-1])
        return "".join(texts)

    def _n_shown_tokens(self, held: Scores) -> int:
        """Held tokens that begin in the text that was shown; those at or past a stop string never do."""
        return bisect_left(held.offsets, self._n_shown)


class Message:
    """A choice's updates put together: what a client of the stream would have at the end."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[CallDelta] = []
        self.scores: Scores | None = None
        """Log-probabilities that are not in `logprobs` yet."""
        self.logprobs: dict[str, EncodedArray] = {}
        """Log-probabilities in the answer's form, encoded as they come: objects would take ten times the
        memory.
        """
        self.finish_reason: str | None = None
        self.stop: str | int | None = None
        self.token_ids: list[int] = []
        self.prompt_logprobs: Iterator[dict[str, object] | None] | None = None

    def add(self, update: Update) -> None:
        self.reasoning.append(update.delta.reasoning)
        self.content.append(update.delta.content)
        for delta in update.delta.calls:
            if delta.index == len(self.calls):
                self.calls.append(delta)
            else:
                self.calls[delta.index].arguments += delta.arguments
        if update.scores is not None:
            self.scores = self.scores or Scores()
            self.scores.extend(update.scores)
        self.token_ids += update.token_ids
        self.finish_reason = update.finish_reason or self.finish_reason
        self.stop = update.stop if self.stop is None else self.stop

    def stopped(self) -> dict[str, str | int]:
        """vLLM's field, where there is something to say."""
        return {} if self.stop is None else {"stop_reason": self.stop}


class Extras(msgspec.Struct, frozen=True):
    """Fields of an answer beside its content."""

    usage: bool = False
    """Chunks have `usage: null`, and a last one has the counts."""
    running_usage: bool = False
    """Every chunk has the counts so far."""
    timings: bool = False
    """The counts so far are given as `timings`, llama.cpp's form, in bodies and chunks."""
    padding: bool = False
    """Chunks have random characters, so that their lengths tell little."""
    prompts: list[list[int]] | None = None
    """The ids of each prompt, where answers have theirs."""
    names_ids: bool = False
    """A token of log-probabilities is called `token_id:N`."""
    tier: bool = False
    """A `service_tier`, the only one."""
    older_calls: bool = False
    """The call is a `function_call`."""
    custom: frozenset[str] = frozenset()
    """Tools whose calls are `custom`: of a text."""
    fingerprint: str = ""
    """Hash of what decides an answer's bits, beside the request."""


NO_EXTRAS = Extras()


def padding(n_bytes: int) -> bytes:
    """Random characters, up to 63, that make the length of a chunk of so many bytes a multiple of 64."""
    return secrets.token_hex(32)[: -n_bytes % 64].encode()


class AnswerJson:
    """JSON of one HTTP request's answer, whole or in chunks."""

    KIND = CHUNK_KIND = ""
    """The field `object` of a whole answer, and of a chunk."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, extras: Extras = NO_EXTRAS) -> None:
        self.id = request_id
        self.model = model
        self._tokenizer = tokenizer
        self.extras = extras
        self._head = {"id": request_id, "object": self.KIND, "created": int(time.time()), "model": model}
        if extras.fingerprint:
            self._head["system_fingerprint"] = extras.fingerprint
        if extras.tier:
            self._head["service_tier"] = "default"
        chunk = self._head | {"object": self.CHUNK_KIND}
        self._start = b"data: " + _encode(chunk)[:-1] + b',"choices":['
        self._tail = b',"usage":null' if extras.usage else b""

    def note(self, usage: Usage) -> None:
        """Sets what the chunks from now on tell of the counts, if they do."""
        tail = {"usage": usage.plain()} if self.extras.running_usage else {}
        tail |= {"timings": usage.timings()} if self.extras.timings else {}
        if tail:
            self._tail = b"," + _encode(tail)[1:-1]
            if self.extras.usage and not self.extras.running_usage:
                self._tail += b',"usage":null'

    def body(self, messages: list[Message], usage: Usage, extra: dict[str, object] | None = None) -> dict[str, object]:
        """The whole answer, for a LargeResponse: iterators are arrays. extra: further fields of it."""
        choices = [self._choice(index, message) for index, message in enumerate(messages)]
        timings = {"timings": usage.timings()} if self.extras.timings else {}
        return {**self._head, "choices": choices, "usage": usage.plain(), **timings, **(extra or {})}

    def keep(self, message: Message) -> None:
        """Encodes the log-probabilities that came."""
        scores, message.scores = message.scores, None
        if scores is None:
            return
        for name, values in self._lists(scores).items():
            into = message.logprobs.setdefault(name, EncodedArray())
            if written := _encode(list(values))[1:-1]:
                into.append(written)

    def _lists(self, scores: Scores | PromptScores) -> dict[str, Iterable[object]]:
        """The arrays that tell of tokens."""
        raise NotImplementedError

    def _scored(self, scores: Scores | None) -> bytes:
        """The log-probabilities of a chunk."""
        if scores is None:
            return b"null"
        return _encode({name: list(values) for name, values in self._lists(scores).items()})

    def _chunk(self, choice: bytes, more: bytes = b"") -> bytes:
        """The chunk of one choice. more: further fields of it, each behind a comma."""
        chunk = b"%s%s]%s%s" % (self._start, choice, more, self._tail)
        if self.extras.padding:
            chunk += b',"obfuscation":"%s"' % padding(len(chunk))
        return chunk + b"}\n\n"

    def _choice(self, index: int, message: Message) -> dict[str, object]:
        raise NotImplementedError

    def _progress_chunk(self, choice: bytes, progress: PromptProgress) -> bytes:
        return self._chunk(choice, b',"prompt_progress":' + _encode(progress))

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._start + b'],"usage":' + _encode(usage.plain()) + b"}\n\n"

    def _text_of(self, token_id: int) -> tuple[str, bytes]:
        data = self._tokenizer.token_bytes(token_id)
        if self.extras.names_ids:
            return f"token_id:{token_id}", data
        return data.decode("utf-8", "replace"), data


class ChatAnswer(AnswerJson):
    KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, extras: Extras = NO_EXTRAS) -> None:
        super().__init__(request_id, model, tokenizer, extras)
        self._open: dict[int, CallDelta] = {}
        """Custom calls that go on, by choice."""

    def role_chunk(self, index: int) -> bytes:
        """The first chunk of a choice."""
        prompts = self.extras.prompts
        more = b"" if prompts is None else b',"prompt_token_ids":' + _encode(prompts[0])
        return self._delta(index, b'{"role":"assistant","content":""}', more=more)

    def chunks(self, update: Update) -> bytes:
        """The chunks for an update: one for what it adds, if anything; one that ends the choice, at its
        end."""
        if update.progress is not None:
            # Without the role, which would be said twice: programs put deltas together.
            return self._progress_chunk(b'{"index":%d,"delta":{},"finish_reason":null}' % update.index, update.progress)
        written = b""
        delta, scores = update.delta, update.scores
        calls = self._call_deltas(update) if self.extras.custom else list(map(_plain_call_delta, delta.calls))
        if delta.content or delta.reasoning or calls or (scores and scores.token_ids) or update.token_ids:
            plain: dict[str, object] = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
            if delta.content or not (delta.reasoning or calls):
                plain["content"] = delta.content
            ids = b',"token_ids":' + _encode(update.token_ids) if update.token_ids else b""
            written = self._delta(update.index, _encode(plain | self._calls(calls)), self._scored(scores), ids=ids)
        if update.finish_reason is not None:
            stop = b"" if update.stop is None else b',"stop_reason":' + _encode(update.stop)
            written += self._delta(update.index, b"{}", reason=_encode(self._reason(update.finish_reason)), ids=stop)
        return written

    def _call_deltas(self, update: Update) -> list[dict[str, object]]:
        """Tells the calls of an update: of a custom one, which comes as JSON, all its text at its end."""
        deltas: list[dict[str, object]] = []
        for call in update.delta.calls:
            if call.id is None and update.index in self._open:
                self._open[update.index].arguments += call.arguments
                continue
            deltas += self._text(update.index)
            if call.name in self.extras.custom:
                self._open[update.index] = msgspec.structs.replace(call)
                call = msgspec.structs.replace(call, arguments="")
            deltas.append(_plain_call_delta(call, self.extras.custom))
        return deltas if update.finish_reason is None else deltas + self._text(update.index)

    def _text(self, index: int) -> list[dict[str, object]]:
        """Ends the custom call of a choice, if there is one, and tells its text."""
        call = self._open.pop(index, None)
        return [] if call is None else [{"index": call.index, "custom": {"input": given_text(call.arguments)}}]

    def _calls(self, calls: list[dict[str, object]]) -> dict[str, object]:
        """Returns the field of a message or a delta for its calls: the older one if that was asked for."""
        if not calls:
            return {}
        return {"function_call": calls[0]["function"]} if self.extras.older_calls else {"tool_calls": calls}

    def _reason(self, reason: str | None) -> str | None:
        return "function_call" if self.extras.older_calls and reason == "tool_calls" else reason

    def _delta(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes = b"null",
        reason: bytes = b"null",
        ids: bytes = b"",
        more: bytes = b"",
    ) -> bytes:
        choice = b'{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":%s%s}' % (index, delta, logprobs, reason, ids)
        return self._chunk(choice, more)

    def body(self, messages: list[Message], usage: Usage, extra: dict[str, object] | None = None) -> dict[str, object]:
        if self.extras.prompts is not None:
            extra = (extra or {}) | {"prompt_token_ids": self.extras.prompts[0]}
        return super().body(messages, usage, extra)

    def _choice(self, index: int, message: Message) -> dict[str, object]:
        content, reasoning = "".join(message.content), "".join(message.reasoning)
        calls = self._calls([_plain_call(call, self.extras.custom) for call in message.calls])
        thought = {"reasoning_content": reasoning} if reasoning else {}
        plain: dict[str, object] = {"role": "assistant", "content": content or (None if calls else "")}
        return {
            "index": index,
            "message": plain | (thought | calls if self.extras.older_calls else calls | thought),
            "logprobs": message.logprobs or None,
            "finish_reason": self._reason(message.finish_reason),
            **message.stopped(),
            **({} if self.extras.prompts is None else {"token_ids": message.token_ids}),
        }

    def _lists(self, scores: Scores | PromptScores) -> dict[str, Iterable[object]]:
        """`{"content": [{token, logprob, bytes, top_logprobs}]}`."""
        return {"content": self._entries(scores)}

    def encoded(self, scores: Scores) -> list[msgspec.Raw]:
        """The log-probabilities of each token as JSON.

        Those of a long answer are kept so: objects would take ten times as much.
        """
        return [msgspec.Raw(_encode(entry)) for entry in self._entries(scores)]

    def _entries(self, scores: Scores | PromptScores) -> Iterator[dict[str, object]]:
        for entry in scores.entries:
            assert entry is not None  # a chat shows no prompt tokens
            plain = self._plain_token(entry.token_id, entry.logprob)
            plain["top_logprobs"] = [self._plain_token(token_id, logprob) for token_id, logprob in entry.top]
            yield plain

    def _plain_token(self, token_id: int, logprob: float) -> dict[str, object]:
        text, data = self._text_of(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


class CompletionAnswer(AnswerJson):
    KIND = CHUNK_KIND = "text_completion"

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer, extras: Extras = NO_EXTRAS, n_top: int = 0, n: int = 1
    ) -> None:
        """n_top: alternatives to show for each token (a prompt's entries may have more). n: choices of each
        prompt.
        """
        super().__init__(request_id, model, tokenizer, extras)
        self._n_top = n_top
        self._n = n
        self._begun: set[int] = set()

    def chunks(self, update: Update) -> bytes:
        """The chunk for an update, if it says anything."""
        if update.progress is not None:
            choice = b'{"index":%d,"text":"","logprobs":null,"finish_reason":null}' % update.index
            return self._progress_chunk(choice, update.progress)
        if (
            not update.delta.content
            and update.finish_reason is None
            and not (update.scores and update.scores.token_ids)
            and not update.token_ids
        ):
            return b""
        ids: dict[str, object] = {} if update.stop is None else {"stop_reason": update.stop}
        if self.extras.prompts is not None:
            ids["token_ids"] = update.token_ids
            if update.index not in self._begun:
                self._begun.add(update.index)
                ids["prompt_token_ids"] = self.extras.prompts[update.index // self._n]
        choice = b'{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s%s}' % (
            update.index,
            _encode(update.delta.content),
            self._scored(update.scores),
            b"null" if update.finish_reason is None else _encode(update.finish_reason),
            b"," + _encode(ids)[1:-1] if ids else b"",
        )
        return self._chunk(choice)

    def put_prompt(self, message: Message, text: str, scores: PromptScores | None) -> None:
        """Puts a prompt before what `message` says. The log-probabilities are encoded as they are sent."""
        message.content.insert(0, text)
        if scores is not None:
            for name, values in self._lists(scores).items():
                message.logprobs.setdefault(name, EncodedArray()).insert(0, map(_encode, values))

    def prompt_chunks(self, index: int, text: str, scores: PromptScores | None) -> Iterator[bytes]:
        """The chunks of the prompt of a choice."""
        if scores is None:
            yield self.chunks(Update(index, AnswerDelta(content=text)))
            return
        starts = [*scores.offsets[::LOGPROBS_PACKED], len(text)]
        for i, part in enumerate(scores.parts()):
            yield self.chunks(Update(index, AnswerDelta(content=text[starts[i] : starts[i + 1]]), part))

    def _choice(self, index: int, message: Message) -> dict[str, object]:
        plain: dict[str, object] = {
            "index": index,
            "text": "".join(message.content),
            "logprobs": message.logprobs or None,
            "finish_reason": message.finish_reason,
        } | message.stopped()
        if message.prompt_logprobs is not None:
            plain["prompt_logprobs"] = message.prompt_logprobs
        if (prompts := self.extras.prompts) is not None:
            plain |= {"token_ids": message.token_ids, "prompt_token_ids": prompts[index // self._n]}
        return plain

    def _lists(self, scores: Scores | PromptScores) -> dict[str, Iterable[object]]:
        """Four parallel lists; the drawn token is always among its alternatives."""
        entries = scores.entries
        return {
            "text_offset": scores.offsets,
            "token_logprobs": (None if entry is None else finite(entry.logprob) for entry in entries),
            "tokens": map(self._token, scores.token_ids),
            "top_logprobs": map(self._top, entries),
        }

    def _top(self, entry: TokenLogprob | None) -> dict[str, float] | None:
        if entry is None:
            return None
        top = {self._token(token_id): finite(logprob) for token_id, logprob in entry.top[: self._n_top]}
        return {self._token(entry.token_id): finite(entry.logprob)} | top

    def _token(self, token_id: int) -> str:
        """A token's text; OpenAI's `bytes:\\xe2` notation for one that is only a part of a character."""
        if self.extras.names_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _plain_call_delta(call: CallDelta, custom: frozenset[str] = frozenset()) -> dict[str, object]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index} | _plain_call(call, custom)


def _plain_call(call: CallDelta, custom: frozenset[str]) -> dict[str, object]:
    """custom: as of Extras."""
    if call.name in custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": given_text(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def prompt_logprobs(entries: PromptLogprobs, tokenizer: Tokenizer) -> Iterator[dict[str, object] | None]:
    """vLLM's form: for each prompt token None (the first) or id -> {logprob, rank, decoded_token}.

    A prompt token that is not among the most likely has rank null: it was not computed.
    """
    for entry in entries:
        if entry is None:
            yield None
            continue
        ranked: list[tuple[int, float, int | None]] = [(i, p, rank + 1) for rank, (i, p) in enumerate(entry.top)]
        if entry.token_id not in {token_id for token_id, _ in entry.top}:
            ranked.append((entry.token_id, entry.logprob, None))
        yield {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
            }
            for token_id, logprob, rank in ranked
        }


def offsets(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Offset of each token of a prompt in its text, in characters."""
    detokenizer, at, starts = Detokenizer(tokenizer, skip_special_tokens=False), 0, []
    for token_id in ids:
        starts.append(at)
        at += len(detokenizer.push((token_id,)))
    return starts
