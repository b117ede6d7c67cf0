"""An utterance that is spoken while its text is written: the bits of the text at once, whatever comes when; and what waits, waits asleep."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from deltic.engine.messages import AddText, Output, Request
from tests.cpu.test_speech_engine import CASES, Speaking, long_request, request_of

pytestmark = pytest.mark.usefixtures("one_thread")

STREAMING = [case for case in CASES if case["is_streaming"] and not case["wide"]]


def texts_of(request: Request) -> tuple[int, ...]:
    assert request.speech is not None
    return request.speech.trailing_ids


def with_texts(request: Request, texts: tuple[int, ...], **params: Any) -> Request:
    assert request.speech is not None
    return msgspec.structs.replace(
        request,
        params=msgspec.structs.replace(request.params, **params),
        speech=msgspec.structs.replace(request.speech, trailing_ids=texts),
    )


class Writing:
    """Requests whose texts come piece by piece."""

    def __init__(self, speaking: Speaking) -> None:
        self.speaking, self.engine = speaking, speaking.engine
        self.left: dict[str, list[int]] = {}
        self.n_most: dict[str, int] = {}
        self.ended: dict[tuple[str, int], Output] = {}

    def begin(self, request: Request, n_first: int = 0) -> None:
        """With the first n_first of its texts. How long it may be is said with the last."""
        texts, id = texts_of(request), request.id
        self.left[id], self.n_most[id] = list(texts[n_first:]), request.params.max_tokens
        request = with_texts(request, texts[:n_first], max_tokens=request.params.max_tokens + 40)
        assert request.speech is not None
        self.engine.add(
            msgspec.structs.replace(
                request, speech=msgspec.structs.replace(request.speech, is_open=True)
            )
        )  # fmt: skip

    def write(self, id: str, n: int) -> None:
        ids, self.left[id] = self.left[id][:n], self.left[id][n:]
        is_last = not self.left[id]
        if is_last:
            del self.left[id]
        self.take(self.engine.add_text(AddText(id, ids, is_last, self.n_most[id] if is_last else None)))

    def take(self, outputs: list[Output]) -> None:
        audio = self.speaking.audio
        for output in outputs:
            key = output.id, output.index
            audio[key] = audio.get(key, b"") + output.audio
            if output.finish_reason is not None:
                assert key not in self.ended
                self.ended[key] = output
                self.left.pop(output.id, None)

    def rest(self) -> None:
        """Steps until there is nothing to do."""
        for _ in range(1000):
            if not self.engine.has_work():
                return
            self.take(self.engine.step())
        raise AssertionError("it does not come to rest")

    def finish(self) -> None:
        for id in list(self.left):
            if id in self.left:
                self.write(id, len(self.left[id]))
        self.rest()
        self.engine.check()
        assert not self.engine.scheduler.n_open and not self.engine.cache.n_pages_used
        stats = self.engine.stats().speech
        assert stats is not None and stats.n_streams_used == 0


def requests_of(speaking: Speaking, variant: str, n: int) -> list[Request]:
    """Drawn, with texts of 4 to 12 ids and so many frames that the text ends before them."""
    found = []
    for case in STREAMING:
        if case["variant"] == variant and len(found) < n:
            i = len(found)
            request = request_of(speaking, case, f"{variant} {i}", 0.9, seed=i, max_tokens=16)
            filled = (*texts_of(request)[:-1], *range(20 + i, 40 + i))
            texts = (*filled[: 3 + 4 * i], speaking.shape.ids.tts_eos)
            found.append(with_texts(request, texts))
    assert len(found) == n
    return found


@pytest.mark.parametrize(("variant", "quantize"), [("custom_voice", None), ("base", "int8")])
def test_any_pieces_at_any_time_are_the_same_bits(variant: str, quantize: str | None) -> None:
    speaking = Speaking(variant, quantize=quantize)
    requests = requests_of(speaking, variant, 3)
    for request in requests:
        speaking.frames(request)
    n_stalled = 0
    for seed in range(2):
        rng, writing = Random(seed), Writing(speaking)
        speaking.codes = {key: codes for key, codes in speaking.codes.items() if "alone" in key[0]}
        speaking.audio = {key: audio for key, audio in speaking.audio.items() if "alone" in key[0]}
        coming = list(requests)
        while coming or writing.left:
            if coming and rng.random() < 0.3:
                request = coming.pop()
                writing.begin(request, rng.randint(0, min(2, len(texts_of(request)) - 1)))
            elif writing.left and rng.random() < 0.5:
                writing.write(rng.choice(list(writing.left)), rng.randint(1, 3))
            for _ in range(rng.randint(0, 3)):
                writing.take(speaking.engine.step())
            n_stalled += speaking.engine.scheduler.n_stalled
        writing.finish()
        for request in requests:
            id, alone = request.id, f"{request.id} alone"
            assert speaking.codes[id, 0] == speaking.codes[alone, 0]
            assert speaking.audio[id, 0] == speaking.audio[alone, 0]
            assert writing.ended[id, 0].finish_reason in ("stop", "length")
    assert n_stalled > 10


def test_one_that_stalls_sleeps_and_is_heard_as_far_as_it_got() -> None:
    speaking = Speaking()
    slow, other = requests_of(speaking, "custom_voice", 2)
    assert slow.speech is not None
    # A first piece of 30 frames is asked for; where the text stalls it is what there is.
    slow = msgspec.structs.replace(
        slow, speech=msgspec.structs.replace(slow.speech, first_chunk_frames=30)
    )  # fmt: skip
    slow = with_texts(slow, tuple(range(10, 22)), min_tokens=16)
    speaking.frames(slow)
    writing, engine = Writing(speaking), speaking.engine
    writing.begin(slow, 3)
    writing.rest()
    assert engine.scheduler.n_stalled == 1 == engine.stats().n_running and not engine.has_work()
    assert len(speaking.codes[slow.id, 0]) == 3 and len(speaking.audio[slow.id, 0]) == 3 * 3840
    engine.check()
    n_steps = engine.n_steps
    assert speaking.engine.step() == [] and engine.n_steps == n_steps
    expected = speaking.codes[slow.id, 0][:]
    writing.begin(other, len(texts_of(other)) - 1)
    writing.write(other.id, 1)
    writing.rest()
    assert writing.ended[other.id, 0].finish_reason is not None and speaking.codes[slow.id, 0] == expected
    writing.write(slow.id, 1)
    writing.rest()
    assert len(speaking.audio[slow.id, 0]) == 4 * 3840
    writing.finish()
    assert speaking.audio[slow.id, 0] == speaking.audio[f"{slow.id} alone", 0]
    assert engine.stats().speech is not None and engine.stats().speech.n_underruns == 0


def test_who_leaves_while_it_stalls_gives_everything_back() -> None:
    speaking = Speaking(max_num_seqs=1)
    first, second = requests_of(speaking, "custom_voice", 2)
    speaking.frames(second)
    writing, engine = Writing(speaking), speaking.engine
    writing.begin(first, 2)
    writing.rest()
    assert engine.cache.n_pages_used
    engine.add(second)  # there is no place for it
    writing.rest()
    assert engine.stats().n_waiting == 1 and not engine.has_work()
    writing.take(engine.abort(first.id))
    assert writing.ended[first.id, 0].finish_reason == "abort"
    writing.finish()
    assert speaking.codes[second.id, 0] == speaking.codes[f"{second.id} alone", 0]
    assert engine.add_text(AddText(first.id, [1])) == []


@pytest.mark.parametrize("host_gb", [0.0, 0.01])
def test_preempted_while_it_stalls(host_gb: float) -> None:
    """The others take its pages; it waits until its text comes, and then goes on."""
    whole = Speaking()
    cramped = Speaking(n_pages=6, max_model_len=256, cache_host_gb=host_gb, prefix_cache=False)
    texts, requests = tuple(range(10, 25)), []
    for i in range(3):
        request = long_request(whole, 120 + i, f"{i}")
        requests.append(with_texts(request, texts, max_tokens=20, seed=i, min_tokens=20))
    expected = [whole.frames(request) for request in requests]
    writing = Writing(cramped)
    for request in requests:
        writing.begin(request, 14 if request is not requests[2] else 3)
        if request is not requests[2]:
            writing.write(request.id, 1)
    writing.rest()
    scheduler = cramped.engine.scheduler
    assert scheduler.n_preemptions > 0 and scheduler.n_stalled == 1 == scheduler.n_open
    assert not cramped.engine.cache.n_pages_used and len(cramped.codes["2", 0]) == 3
    while "2" in writing.left:
        writing.write("2", 4)
        writing.rest()
    writing.finish()
    assert [cramped.codes[request.id, 0] for request in requests] == expected


def test_choices_share_the_text_and_bad_text_ends_one_request() -> None:
    speaking = Speaking()
    request, other = requests_of(speaking, "custom_voice", 2)
    both = msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, n=2))
    speaking.run(both)
    expected = {i: speaking.codes.pop((request.id, i)) for i in range(2)}
    writing, engine = Writing(speaking), speaking.engine
    writing.begin(both, 1)
    writing.begin(other, 1)
    writing.rest()
    bad = AddText(other.id, [speaking.shape.text_vocab_size])
    (ended,) = engine.add_text(bad)
    assert ended.finish_reason == "error" and "outside the text vocabulary" in str(ended.error)
    del writing.left[other.id]
    assert engine.add_text(bad) == []
    for _ in range(2):
        writing.write(both.id, 1)
        writing.rest()
    writing.finish()
    assert {i: speaking.codes[request.id, i] for i in range(2)} == expected
    engine.add(other)
    assert engine.add_text(AddText(other.id, [1], True, 1)) == []  # not open: left alone
    speaking.run()
    assert len(speaking.codes[other.id, 0]) > 1
