"""The stage between codes and audio, in a whole engine over a fake model and a fake vocoder, by a clock of their own.

A frame's codes say whose it is and which; its samples are made of them, so what comes out shows what went in, in which order. The
client here plays from its first audio on, and notes by how much each piece is late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deltic.engine.checks import RequestError
from deltic.engine.engine import Engine
from deltic.engine.messages import AddText, Output, Request, SamplingParams, Speech
from deltic.engine.stage import FRAME_S, SpeechStage
from deltic.engine.step import Sequence, Step, StepResult
from tests.fakes import NAN, POISON, FakeRunner

FRAME_SAMPLES = 1920


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeVocoder:
    """Takes fixed_s and frame_s a frame; is_async: beside what else goes on, and it knows how long it took. A stream's position in its
    state slot is checked."""

    clock: Clock
    fixed_s: float = 0.0
    frame_s: float = 0.0
    is_async: bool = False
    fails_at: int = -1
    """The call that raises."""
    batches: list[list[int]] = field(default_factory=list)
    opened: list[tuple[int, Any]] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)

    def open(self, state_slot: int, state: Any = None) -> None:
        self.opened.append((state_slot, state))
        self.positions[state_slot] = 0

    def begin(self, chunks: list[tuple[int, Any]]) -> Any:
        assert len({state_slot for state_slot, _ in chunks}) == len(chunks) and all(len(codes) for _, codes in chunks)
        if len(self.batches) == self.fails_at:
            self.fails_at = -1
            raise RuntimeError("no memory")
        for state_slot, codes in chunks:
            at = self.positions[state_slot]
            assert codes[:, 1].tolist() == list(range(at, at + len(codes))), "frames left out, or given twice"
            assert len(set(codes[:, 0])) == 1, "frames of another"
            self.positions[state_slot] += len(codes)
        self.batches.append([len(codes) for _, codes in chunks])
        took_s = self.fixed_s + self.frame_s * sum(self.batches[-1])
        done_at = self.clock.now + took_s
        waves = [np.repeat(codes[:, 2] / np.float32(32767), FRAME_SAMPLES) for _, codes in chunks]

        def samples() -> list[Any]:
            self.clock.now = max(self.clock.now, done_at)
            return waves

        if not self.is_async:
            samples()
        return SimpleNamespace(
            is_done=lambda: self.clock.now >= done_at, samples=samples, seconds=lambda: took_s if self.is_async else None
        )  # fmt: skip


class SpeakingRunner(FakeRunner):
    """Codes are: whose, which frame, and a mixture of both."""

    voices = None

    def __init__(
        self, clock: Clock, vocoder: FakeVocoder, n_streams: int, step_s: float, row_s: float, **sizes: Any
    ) -> None:
        super().__init__(gpu=True, **sizes)
        self.clock, self.vocoder, self.n_streams = clock, vocoder, n_streams
        self.cost_s, self.row_s = step_s, row_s
        self.info.is_speech = True

    def check_speech(self, request: Request) -> Any:
        return SimpleNamespace(state="primed") if request.speech and request.speech.is_primed else None

    def check_texts(self, text_ids: Iterable[int]) -> None:
        if max(text_ids, default=0) >= 1000:
            raise RequestError("no such text")

    def step(self, step: Step) -> StepResult:
        self.clock.now += self.cost_s + self.row_s * step.n_tokens
        result = super().step(step)
        frames = [
            [
                number(c.sequence),
                t := c.start - c.sequence.n_prompt,
                mixed(number(c.sequence), t) if self.states[c.sequence.state_slot or 0] != NAN else -1,
                *[0] * 13,
            ]
            for c in step.chunks
            if c.is_decode
        ]
        result.codes = np.array(frames, np.int32).reshape(-1, 16)
        return result


def number(sequence: Sequence) -> int:
    return int(sequence.request.id) * 8 + sequence.index


def mixed(who: int, t: int) -> int:
    return (who * 7919 + t * 104729) % 32768


@dataclass
class Client:
    """What one sequence's client received."""

    audio: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    end: str | None = None
    first_at: float | None = None
    dry_at: float = 0.0
    late_s: float = 0.0

    def receive(self, output: Output, now: float) -> None:
        assert self.end is None, "something came behind the end"
        self.end = output.finish_reason
        if not output.audio:
            return
        samples = np.frombuffer(output.audio, "<i2").reshape(-1, FRAME_SAMPLES)
        assert (samples == samples[:, :1]).all()
        if self.first_at is None:
            self.first_at = self.dry_at = now
        late_s = max(0.0, now - self.dry_at)
        self.late_s = max(self.late_s, late_s)
        self.dry_at += late_s + len(samples) * FRAME_S
        self.audio += samples[:, 0].tolist()
        self.chunks.append(len(samples))


class Play:
    """An engine, and clients that listen."""

    def __init__(
        self, n_streams: int = 16, step_s: float = 0.02, row_s: float = 0.0, fixed_s: float = 0.01,
        frame_s: float = 0.02, is_async: bool = False, **sizes: Any,
    ) -> None:  # fmt: skip
        self.clock = Clock()
        self.vocoder = FakeVocoder(self.clock, fixed_s, frame_s, is_async)
        self.runner = SpeakingRunner(self.clock, self.vocoder, n_streams, step_s, row_s, **sizes)
        self.engine = Engine(self.runner)
        self.engine.stage = SpeechStage(self.vocoder, n_streams, self.clock)
        self.clients: dict[tuple[str, int], Client] = {}
        self.n_asked: dict[str, int] = {}

    def ask(self, name: int, n_frames: int = 20, prompt: list[int] | None = None, n: int = 1, **speech: Any) -> None:
        """n_frames + 1 tokens are drawn: the last of them is never decoded."""
        params = SamplingParams(max_tokens=n_frames + 1, min_tokens=n_frames + 1, seed=name, n=n)
        self.n_asked[str(name)] = n_frames
        prompt = prompt or [20 + name] * 5
        self.engine.add(Request(id=str(name), prompt_ids=prompt, params=params, speech=Speech(**speech)))
        for index in range(n):
            self.clients[str(name), index] = Client()

    def hear(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.clients[output.id, output.index].receive(output, self.clock.now)

    def turn(self) -> None:
        self.clock.now += 1e-4
        self.hear(self.engine.step())

    def run_to_rest(self) -> None:
        while self.engine.has_work():
            self.turn()
            assert self.clock.now < 1000, "it never ends"

    def run(self) -> None:
        self.run_to_rest()
        self.check_idle()

    def check_idle(self) -> None:
        self.engine.check()
        stats = self.engine.stats().speech
        assert stats is not None and stats.n_streams_used == 0

    def check_whole(self, name: int, index: int = 0) -> None:
        client = self.clients[str(name), index]
        expected = [mixed(name * 8 + index, t) for t in range(self.n_asked[str(name)])]
        assert client.end == "length" and client.audio == expected

    def check_part(self, name: int, index: int = 0) -> None:
        audio = self.clients[str(name), index].audio
        assert audio == [mixed(name * 8 + index, t) for t in range(len(audio))]


@pytest.mark.parametrize("is_async", [False, True])
def test_every_stream_is_whole_and_ends_once_behind_its_audio(is_async: bool) -> None:
    play = Play(is_async=is_async)
    for name in range(6):
        play.ask(name, 10 + 7 * name, is_streamed=name % 3 > 0, n=1 + name // 5)
    play.run()
    for name in range(6):
        play.check_whole(name)
    play.check_whole(5, 1)
    assert play.engine.stats().speech.n_frames == sum(10 + 7 * n for n in range(6)) + 45  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("n_streams", "step_s", "fixed_s", "frame_s"),
    [
        (1, 0.045, 0.006, 0.025),  # of 80 ms: 76
        (2, 0.020, 0.005, 0.025),  # 75 with both in one batch
        (8, 0.012, 0.004, 0.0075),  # 76
        (16, 0.008, 0.0005, 0.0005),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("gap_s", [0.0, 0.4])
def test_no_stream_runs_dry_where_there_is_time(
    n_streams: int, step_s: float, fixed_s: float, frame_s: float, is_async: bool, gap_s: float
) -> None:
    play = Play(
        n_streams=n_streams, max_num_seqs=n_streams, step_s=step_s, fixed_s=fixed_s, frame_s=frame_s, is_async=is_async
    )  # fmt: skip
    begin = play.clock.now
    for name in range(n_streams):
        while play.clock.now < begin + name * gap_s:
            play.turn() if play.engine.has_work() else play.ask(name, 60)
        if (str(name), 0) not in play.clients:
            play.ask(name, 60)
    play.run()
    late_s = max(client.late_s for client in play.clients.values())
    assert late_s <= 0.1, "as the measure of speech servers has it, a stream is continuous up to 0.1 s"
    if is_async or n_streams > 8:
        assert late_s == 0.0
    assert play.engine.stats().speech.n_underruns == 0  # type: ignore[union-attr]


def test_no_stream_runs_dry_where_another_model_takes_turns() -> None:
    play = Play(n_streams=1, step_s=0.01, fixed_s=0.003, frame_s=0.005)  # of 80 ms: 78, with the other's turn
    other = Engine(FakeRunner())
    other.turn_s = 0.06
    play.engine.share([other])
    play.ask(0, 60)
    while play.engine.has_work():
        play.clock.now += other.turn_s
        play.turn()
    play.check_whole(0)
    assert play.clients["0", 0].late_s == 0.0


def test_where_there_is_no_time_all_streams_are_late_alike() -> None:
    play = Play(n_streams=4, step_s=0.03, fixed_s=0.01, frame_s=0.04)
    for name in range(4):
        play.ask(name, 50)
    play.run()
    clients = play.clients.values()
    assert min(c.late_s for c in clients) > 0.0
    ends = [c.dry_at for c in clients]
    assert max(ends) - min(ends) < 0.5
    assert play.engine.stats().speech.n_underruns > 0  # type: ignore[union-attr]
    spent_s = play.clock.now - 100
    assert spent_s < 51 * 0.03 + 200 * 0.04 + 70 * 0.01, "four streams share a batch"


def test_a_stream_that_cannot_be_kept_up_with_comes_in_batches() -> None:
    play = Play(n_streams=1, step_s=0.06, fixed_s=0.03, frame_s=0.02)
    play.ask(0, 60)
    play.run()
    play.check_whole(0)
    chunks = play.clients["0", 0].chunks
    assert sum(n >= 4 for n in chunks) >= 8
    assert play.clock.now - 100 < 61 * 0.06 + 60 * 0.02 + 30 * 0.03, "one by one it would be 60 times"


def test_a_new_stream_is_heard_while_others_are_far_ahead() -> None:
    play = Play(n_streams=4, step_s=0.01, fixed_s=0.01, frame_s=0.005)
    for name in range(3):
        play.ask(name, 200)
    while min(c.dry_at for c in play.clients.values()) < play.clock.now + 0.9:
        play.turn()
    play.ask(3, 50)
    asked_at = play.clock.now
    while play.clients["3", 0].first_at is None:
        play.turn()
    assert play.clock.now - asked_at < 0.08
    play.run()
    assert max(c.late_s for c in play.clients.values()) == 0.0


@pytest.mark.parametrize("n", [1, 3, 12])
def test_beside_the_steps_a_first_chunk_comes_alone_and_at_once(n: int) -> None:
    """The device has its next step already, so its end need not be waited for, nor audio of those that are far ahead."""
    play = Play(step_s=0.01, fixed_s=0.002, frame_s=0.0006, is_async=True)
    for name in range(n):
        play.ask(name, 200)
    while min(c.dry_at for c in play.clients.values()) < play.clock.now + 0.9:
        play.turn()
    asked_at = play.clock.now
    play.ask(99, 50)
    while play.clients["99", 0].first_at is None:
        play.turn()
    assert play.clock.now - asked_at < 2 * 0.01 + 0.002 + 2 * 0.0006 + 0.001, "two steps, two frames"
    play.run()
    assert max(c.late_s for c in play.clients.values()) == 0.0


def test_a_vocoder_beside_the_steps_is_not_thought_as_slow_as_they_are() -> None:
    play = Play(step_s=0.03, fixed_s=0.002, frame_s=0.001, is_async=True)
    play.ask(0, 30)
    play.run()
    assert play.engine.stage.frame_s <= 0.003  # type: ignore[union-attr]


def test_whole_answers_stand_back_but_not_for_ever() -> None:
    play = Play(n_streams=4, step_s=0.02, fixed_s=0.005, frame_s=0.02)
    play.ask(0, 400)
    play.ask(1, 30, is_streamed=False)
    play.run()
    play.check_whole(0)
    play.check_whole(1)
    assert play.clients["0", 0].late_s == 0.0
    whole = play.clients["1", 0]
    assert whole.chunks[0] >= 8, "in large pieces"
    assert play.clients["1", 0].first_at and play.clients["1", 0].dry_at < play.clients["0", 0].dry_at


def test_chunks_begin_small_and_a_request_may_say_how_small() -> None:
    play = Play(n_streams=4, step_s=0.01, fixed_s=0.01, frame_s=0.002)
    play.ask(0, 100)
    play.run()
    assert play.clients["0", 0].chunks[0] == 1 and max(play.clients["0", 0].chunks) >= 4
    play.ask(1, 100, first_chunk_frames=12)
    play.run()
    assert play.clients["1", 0].chunks[0] == 12
    play.ask(2, 5, first_chunk_frames=12)
    play.run()
    assert play.clients["2", 0].chunks == [5]


def test_streams_wait_for_a_slot() -> None:
    play = Play(n_streams=2, step_s=0.001)
    for name in range(8):
        play.ask(name, 12)
    play.run()
    for name in range(8):
        play.check_whole(name)
    assert {state_slot for state_slot, _ in play.vocoder.opened} == {0, 1}


def test_who_lacks_a_slot_does_not_wait_for_others_to_be_played() -> None:
    play = Play(n_streams=2, max_num_seqs=2, step_s=0.005, fixed_s=0.001, frame_s=0.001)
    for name, n_frames in enumerate((1000, 100, 50)):
        play.ask(name, n_frames)
    while play.clients["2", 0].first_at is None:
        play.turn()
    assert play.clock.now - 100 < 1.5, "the second has 8 s of audio"
    play.run()
    assert max(client.late_s for client in play.clients.values()) == 0.0


@pytest.mark.parametrize("is_async", [False, True])
def test_nobody_is_kept_to_the_pace_of_playback(is_async: bool) -> None:
    play = Play(step_s=0.01, fixed_s=0.002, frame_s=0.0005, is_async=is_async)
    for name, n_frames in enumerate((400, 60, 60)):
        play.ask(name, n_frames)
    while play.clients["1", 0].end is None or play.clients["2", 0].end is None:
        play.turn()
    assert play.clock.now - 100 < 1.0, "codes take 0.6 s, audio plays for 4.8 s"
    play.run()


def test_a_primed_stream_starts_from_its_voice() -> None:
    play = Play()
    play.ask(0, 3, is_primed=True)
    play.ask(1, 3)
    play.run()
    assert sorted(str(state) for _, state in play.vocoder.opened) == ["None", "primed"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_cancels_failures_and_lost_pages(seed: int, is_async: bool) -> None:
    """Sequences are preempted and computed again, streams are cancelled, a step and the vocoder fail: whoever is left is whole, and
    everything comes back."""
    random = Random(seed)
    play = Play(n_streams=5, step_s=0.01, frame_s=0.005, is_async=is_async, max_num_seqs=4, n_pages=5)
    play.vocoder.fails_at = random.randrange(5, 30)
    ended_by_us: set[str] = set()
    for name in range(14):
        prompt = [POISON] * 3 if name == 9 else None
        play.ask(name, random.randrange(1, 110), prompt, is_streamed=random.random() < 0.7)
        for _ in range(random.randrange(12)):
            if play.engine.has_work():
                play.turn()
        if random.random() < 0.3:
            victim = str(random.randrange(name + 1))
            play.hear(play.engine.abort(victim))
            ended_by_us.add(victim)
            assert not play.engine.stage.has_request(victim)  # type: ignore[union-attr]
    play.run()
    ends = {name: play.clients[str(name), 0].end for name in range(14)}
    assert all(ends.values()) and "length" in ends.values() and "error" in ends.values()
    for name, end in ends.items():
        play.check_whole(name) if end == "length" else play.check_part(name)
        assert end in ("length", "error") or str(name) in ended_by_us
    assert play.engine.scheduler.n_preemptions > 0 or seed != 0


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_not_finite_is_not_heard(is_async: bool) -> None:
    play = Play(is_async=is_async)
    for name in range(3):
        play.ask(name, 50)
    while not all(play.clients[str(name), 0].audio for name in range(3)):
        play.turn()
    for sequence in play.engine.scheduler._decodes[:2]:
        play.runner.states[sequence.state_slot or 0] = NAN
    play.run()
    for name in range(3):
        assert play.clients[str(name), 0].end == "length"
        play.check_whole(name)
    assert play.engine.stats().n_recomputed == 2


def test_a_step_that_fails_ends_streams_that_have_spoken() -> None:
    play = Play()
    play.ask(0, 50)
    play.ask(1, 50)
    while not play.clients["0", 0].audio:
        play.turn()
    play.runner.vocoder.batches.clear()
    was, play.runner.step = play.runner.step, _raise  # type: ignore[method-assign]
    play.turn()
    while play.clients["0", 0].end is None:
        play.turn()
    play.runner.step = was  # type: ignore[method-assign]
    play.run()
    assert {c.end for c in play.clients.values()} == {"error"}
    play.ask(2, 5)
    play.run()
    play.check_whole(2)


def _raise(step: Step) -> StepResult:
    raise RuntimeError("broken")


def test_an_id_is_in_use_until_its_audio_is_out() -> None:
    play = Play(step_s=0.001, frame_s=0.5)
    play.ask(0, 30, is_streamed=False)
    while play.engine.scheduler.n_open:
        play.turn()
    with pytest.raises(RequestError, match="in use"):
        play.engine.add(Request(id="0", prompt_ids=[1], params=SamplingParams(), speech=Speech()))
    play.hear(play.engine.abort("0"))
    assert play.clients["0", 0].end == "abort"
    play.check_idle()
    assert not play.engine.has_work()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_where_texts_stall_all_is_heard_that_was_drawn(is_async: bool, seed: int) -> None:
    rng, play = Random(seed), Play(is_async=is_async, max_num_seqs=8 if seed else 3)
    left: dict[int, int] = {}
    for name in range(7):
        n_first = rng.randint(0, 3)
        left[name] = 20 - n_first
        play.ask(
            name, 20, is_open=True, trailing_ids=(1,) * n_first, is_streamed=rng.random() < 0.7,
            first_chunk_frames=rng.choice((0, 6)),
        )  # fmt: skip
    n_rests = 0
    while left:
        for _ in range(rng.randint(0, 6)):
            play.turn()
        if play.engine.scheduler.n_stalled == play.engine.scheduler.n_open:
            play.run_to_rest()
            n_rests += 1
            for name, n in left.items():
                assert len(play.clients[str(name), 0].audio) == 20 - n
        name = rng.choice(list(left))
        n = min(left[name], rng.randint(1, 5))
        left[name] -= n
        assert play.engine.add_text(AddText(str(name), [1] * n, not left[name])) == []
        if not left[name]:
            del left[name]
    play.run()
    for name in range(7):
        play.check_whole(name)
    assert n_rests or not seed


def test_late_text_is_no_underrun() -> None:
    play = Play()
    play.ask(0, 8, is_open=True, trailing_ids=(1,) * 4)
    play.run_to_rest()
    play.clock.now += 5.0
    play.engine.add_text(AddText("0", [1] * 4, True))
    play.run()
    play.check_whole(0)
    stats = play.engine.stats().speech
    assert stats is not None and stats.n_underruns == 0


def test_who_stalls_makes_way_for_who_runs() -> None:
    """However much older it is: else a listener would wait in the middle of a word for what another has not written."""
    play = Play(n_pages=3)
    play.ask(0, 100, prompt=[20] * 60, is_open=True, trailing_ids=(1,) * 20)
    play.run_to_rest()
    play.ask(1, 70, prompt=[30] * 60)
    play.run_to_rest()
    play.check_whole(1)
    assert play.engine.scheduler.n_stalled == 1 and play.engine.scheduler.n_preemptions == 1
    play.engine.add_text(AddText("0", [1] * 80, True))
    play.run()
    play.check_whole(0)


def test_text_that_is_none_ends_its_request() -> None:
    play = Play()
    play.ask(0, 8, is_open=True, trailing_ids=(1,) * 4)
    play.ask(1, 8)
    play.turn()
    play.hear(play.engine.add_text(AddText("0", [1000])))
    assert play.clients["0", 0].end == "error"
    assert play.engine.add_text(AddText("2", [1])) == []
    play.run()
    play.check_whole(1)


def test_where_no_step_can_run_nothing_is_kept_back() -> None:
    """As when a preempted sequence waits behind others whose texts stall: its first chunk gets no larger."""
    play = Play()
    play.ask(0, 20, first_chunk_frames=6)
    assert play.engine.stage is not None
    while play.engine.n_steps < 4:
        play.turn()
    assert not play.clients["0", 0].audio
    play.hear(play.engine.stage.vocode(0))
    assert len(play.clients["0", 0].audio) == 3 and not play.engine.stage.has_work()
    play.run()
    play.check_whole(0)
