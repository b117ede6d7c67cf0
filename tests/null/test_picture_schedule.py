"""Pictures in the scheduler: who has a place in the pool, when the tower runs, and that nobody waits for ever."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

from deltic.engine.checks import RequestError
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Picture, PictureInfo, Request, SamplingParams
from deltic.engine.pictures import Pace, Pictures
from deltic.engine.scheduler import TOWER_SHARE
from deltic.engine.step import Step, StepResult
from deltic.ops.geometry import PAGE_SIZE
from tests.fakes import FakeRunner


class FakeTower:
    """An encoder whose pieces are 16 tokens, and which writes a picture's key to its blocks when it is done."""

    def __init__(self, n_blocks: int, piece_s: float = 0.0) -> None:
        self.n_blocks, self.piece_s = n_blocks, piece_s
        self.blocks: list[bytes] = [b""] * n_blocks
        self.n_pieces = 0
        self.order: list[bytes] = []

    def begin(self, picture: Picture, blocks: list[int]) -> None:
        self.picture, self.to, self.left = picture, blocks, -(-picture.n_tokens // 16)
        self.order.append(picture.key)

    def run(self, seconds: float) -> bool:
        end = time.perf_counter() + seconds
        while self.left:
            time.sleep(self.piece_s)
            self.left -= 1
            self.n_pieces += 1
            if time.perf_counter() + self.piece_s > end:
                break
        if not self.left:
            for block in self.to:
                self.blocks[block] = self.picture.key
        return not self.left


class SeeingRunner(FakeRunner):
    """Checks that every token of a picture has its rows."""

    def __init__(self, tower: FakeTower, **sizes: object) -> None:
        super().__init__(**sizes)  # type: ignore[arg-type]
        self.pictures, self.info.pictures = tower, PictureInfo(1024, 10**6, 10**3)
        self.tower = tower
        self.ran: list[tuple[int, int]] = []
        """Of each step: decodes, and tokens of prefills."""

    def step(self, step: Step) -> StepResult:
        for chunk in step.chunks:
            begin, end = chunk.start, chunk.start + chunk.length
            wanted = [p for p in chunk.sequence.request.pictures if p.first < end and p.end > begin]
            assert [p.key for p, _ in chunk.pictures] == [p.key for p in wanted]
            for picture, blocks in chunk.pictures:
                assert len(blocks) == -(-picture.n_tokens // PAGE_SIZE)
                assert {self.tower.blocks[block] for block in blocks} == {picture.key}
        n_decodes = sum(chunk.is_decode for chunk in step.chunks)
        self.ran.append((n_decodes, step.n_tokens - n_decodes))
        return super().step(step)


def picture(rows: int, columns: int, name: int) -> Picture:
    return Picture(key=name.to_bytes(16, "big"), rows=rows, columns=columns, pixels=bytes(rows * columns * 3072))


def prompt(name: str, *parts: int | Picture, max_tokens: int = 4, n: int = 1) -> Request:
    """Of tokens and pictures."""
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            ids += [20 + i % 50 for i in range(part)]
        else:
            pictures.append(
                Picture(key=part.key, rows=part.rows, columns=part.columns, pixels=part.pixels, first=len(ids))
            )
            ids += [999] * part.n_tokens
    return Request(
        id=name,
        prompt_ids=ids,
        pictures=pictures,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, n=n),
    )


def steps(engine: Engine, most: int = 5000) -> Iterator[list[Output]]:
    for _ in range(most):
        if not engine.has_work():
            return
        yield engine.step()
        engine.check()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_everything_ends_in_a_small_pool(seed: int, gpu: bool) -> None:
    """Pools that hold little more than the largest picture and a page of small ones; aborts, preemption, priorities, n > 1."""
    rng = random.Random(seed)
    tower = FakeTower(rng.choice([70, 90, 200]))
    engine = Engine(
        SeeingRunner(
            tower,
            n_pages=rng.choice([40, 80]),
            max_model_len=2400,
            max_step_tokens=rng.choice([64, 256]),
            max_num_seqs=4,
            gpu=gpu,
        )
    )
    shapes = [(1, 1), (1, 3), (2, 2), (8, 8), (5, 13), (9, 40)]
    open_ids: set[str] = set()
    ended: dict[str, str] = {}
    for i in range(40):
        parts: list[int | Picture] = []
        while not parts or (rng.random() < 0.7 and sum(p if isinstance(p, int) else p.n_tokens for p in parts) < 1500):
            parts += [
                rng.choice([1, 30, 64, 150]),
                *(picture(*rng.choice(shapes), rng.randrange(9)) for _ in range(rng.randrange(3))),
            ]
        parts = [p if isinstance(p, int) else picture(p.rows, p.columns, p.n_tokens * 10 + p.key[-1]) for p in parts]
        request = prompt(f"{i}", *parts, max_tokens=rng.choice([1, 20, 200]), n=rng.choice([1, 1, 2]))
        request.priority = rng.choice([-1, 0, 0, 1])
        engine.add(request)
        open_ids.add(request.id)
        for _ in range(rng.randrange(6)):
            for output in engine.step():
                if output.finish_reason is not None:
                    ended[output.id] = output.finish_reason
            engine.check()
        if rng.random() < 0.15:
            engine.abort(rng.choice(sorted(open_ids)))
    for outputs in steps(engine):
        for output in outputs:
            assert output.finish_reason in (None, "length"), output.error
    assert engine.pictures is not None and not engine.pictures.has_work
    assert engine.pictures.n_hits and engine.scheduler.n_preemptions + engine.pictures.n_encoded


def test_a_picture_is_known_to_its_own_namespace_alone() -> None:
    """Neither time nor a count tells one key what another has sent. A salt divides a namespace further."""
    asked = [("anna", ""), ("ben", ""), ("anna", ""), ("anna", "s"), ("ben", "s"), ("ben", "")]
    engine = Engine(SeeingRunner(FakeTower(100)))
    n_encoded = []
    for i, (namespace, salt) in enumerate(asked):
        request = prompt(str(i), i, picture(4, 4, 1))  # other texts, so that no prefix is found
        request.namespace, request.cache_salt = namespace, salt
        engine.add(request)
        [*steps(engine)]
        n_encoded.append(engine.pictures.n_encoded)  # type: ignore[union-attr]
    assert n_encoded == [1, 2, 2, 3, 4, 4]


def test_pictures_that_overlap_are_refused() -> None:
    engine = Engine(SeeingRunner(FakeTower(100)))
    for first in (0, 15, 17, 100):
        request = prompt("a", picture(4, 4, 1), picture(4, 4, 2))
        request.pictures[1] = msgspec.structs.replace(request.pictures[1], first=first)
        with pytest.raises(RequestError, match="picture 1 is not where the prompt has room for it"):
            engine.add(request)
    assert not engine.has_work()


def test_who_has_left_leaves_no_pixels() -> None:
    """Hundreds of pixels' bytes would else stay with every picture that was to be encoded."""
    tower = FakeTower(100)
    engine = Engine(SeeingRunner(tower))
    pictures = engine.pictures
    assert pictures is not None
    for name in "ab":
        engine.add(prompt(name, 5, *(picture(4, 4, i) for i in range(3))))
    engine.scheduler.plan()
    tower.run = lambda seconds: False  # type: ignore[method-assign]
    pictures.work(0)
    assert {len(entry.wanted_by) for entry in pictures._entries.values()} == {2}
    engine.abort("a")
    assert {entry.wanted_by[0].request.id for entry in pictures._entries.values()} == {"b"}
    engine.abort("b")
    (begun,) = pictures._entries.values()
    assert not begun.wanted_by and begun is pictures._current, "it may be asked for again"
    engine.add(prompt("c", 5, picture(4, 4, 7)))
    engine.scheduler.plan()
    pictures.work(0)
    assert [entry.key[-1][-1] for entry in pictures._entries.values()] == [7]


def test_tokens_come_while_a_picture_is_encoded() -> None:
    """Without a target the tower takes as long as the steps."""
    tower = FakeTower(100, piece_s=0.002)
    runner = SeeingRunner(tower, step_s=0.004)
    engine = Engine(runner)
    engine.add(prompt("talk", 10, max_tokens=400))
    engine.step()
    engine.add(prompt("see", 10, picture(30, 32, 1), 10))
    n_tokens = 0
    for outputs in steps(engine):
        n_tokens += sum(len(o.token_ids) for o in outputs if o.id == "talk")
        if any(o.id == "see" and o.token_ids for o in outputs):
            break
    assert tower.n_pieces == 60 and n_tokens > 15


def test_the_tower_and_prefills_take_turns_where_there_is_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = FakeTower(200, piece_s=0.001)
    runner = SeeingRunner(tower, max_step_tokens=64, n_pages=100)
    engine = Engine(runner, max_itl_ms=20.0)
    engine.add(prompt("talk", 10, max_tokens=300))
    engine.step()
    engine.add(prompt("see", 10, picture(30, 32, 1), 10))
    engine.add(prompt("read", 1500))
    begun = len(runner.ran)
    pieces = []
    for _ in range(14):
        before = tower.n_pieces
        engine.step()
        pieces.append(tower.n_pieces - before)
    ran = runner.ran[begun:]
    both = [bool(n) and bool(m) for n, (_, m) in zip(pieces[1:], ran[:-1], strict=True)]
    assert not any(both), "a step with a prefill has used the time up"
    assert sum(map(bool, pieces)) >= 3 and sum(m > 0 for _, m in ran) >= 3
    assert all(n_decodes == 1 for n_decodes, _ in ran)


@pytest.mark.parametrize(("tenant", "most"), [("theirs", 15), ("", 60)])
def test_beside_another_owner_s_decodes_the_tower_has_short_pieces_and_half_of_the_time(
    tenant: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nine steps' time or less, and runs on when steps have had as much."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    tower = FakeTower(200, piece_s=0.002)
    engine = Engine(SeeingRunner(tower, step_s=0.004, n_pages=100), max_itl_ms=200.0)
    engine.add(prompt("talk", 10, max_tokens=400))
    engine.step()
    engine.add(msgspec.structs.replace(prompt("see", 10, picture(30, 32, 1), 10), tenant=tenant))
    pieces = []
    while tower.n_pieces < 60:
        before = tower.n_pieces
        engine.step()
        pieces.append(tower.n_pieces - before)
    assert max(pieces) == most
    begun = [i for i, n in enumerate(pieces) if n == most]
    assert all(b - a == 8 for a, b in pairwise(begun))  # 30 ms, in steps of 4


def test_the_tower_leaves_time_for_a_step_that_ran_ahead() -> None:
    """It is waited for with the pieces, however short it looked where its tokens were read."""
    engine = Engine(SeeingRunner(FakeTower(1), n_pages=100), max_itl_ms=20.0)
    engine.add(prompt("talk", 10, max_tokens=300))
    engine.step()
    engine.step()
    scheduler = engine.scheduler
    assert scheduler.cost is not None
    scheduler.cost.curve, scheduler.cost.scale = [(0, 0.004), (64, 0.01)], 1.0
    scheduler.cost.per_decode_s = scheduler.cost.per_key_s = 0.0
    assert scheduler.tower_s(0.001) == pytest.approx(TOWER_SHARE * 0.02 - 0.001), "nothing runs ahead here"
    scheduler.info.n_lookahead = 1
    assert scheduler.tower_s(0.001) == pytest.approx(TOWER_SHARE * 0.02 - 0.004)
    assert scheduler.tower_s(0.01) == pytest.approx(TOWER_SHARE * 0.02 - 0.01)


def test_a_picture_of_a_request_that_ended_is_not_encoded_on() -> None:
    tower = FakeTower(100, piece_s=0.002)
    engine = Engine(SeeingRunner(tower))
    engine.add(prompt("first", 10, picture(30, 32, 1), 10))
    engine.step()
    engine.step()  # the tower comes behind a step, when that was told
    assert 0 < tower.n_pieces < 60
    engine.abort("first")
    engine.add(prompt("second", 10, picture(2, 2, 2), 10))
    for _ in steps(engine):
        pass
    assert tower.order == [bytes(15) + b"\1", bytes(15) + b"\2"] and tower.n_pieces < 60


def test_what_is_used_more_stays_longer() -> None:
    tower = FakeTower(64 + 3, piece_s=0.0005)
    engine = Engine(SeeingRunner(tower, prefix_cache=False))

    def see(*names: int) -> None:
        for name in names:
            engine.add(prompt(f"see {name}", 3, picture(30, 32, name)))  # 15 blocks
            for _ in steps(engine):
                pass

    see(1, 2, 1, 3, 1, 4, 1)
    assert [key[-1] for key in tower.order] == [1, 2, 3, 4]
    see(5, 6, 1)
    assert [key[-1] for key in tower.order] == [1, 2, 3, 4, 5, 6]
    pictures = engine.pictures
    assert isinstance(pictures, Pictures) and pictures.n_hits == 4


def test_a_picture_that_fails_ends_its_requests_alone() -> None:
    class Failing(FakeTower):
        def run(self, seconds: float) -> bool:
            if self.picture.rows == 3:
                raise RuntimeError("no")
            return super().run(seconds)

    engine = Engine(SeeingRunner(Failing(100)))
    for name, rows in (("bad", 3), ("good", 2)):
        engine.add(prompt(name, 10, picture(rows, 5, rows), n=2))
    engine.add(prompt("text", 20))
    ended = {
        (o.id, o.finish_reason, o.error) for outputs in steps(engine) for o in outputs if o.finish_reason is not None
    }
    said = "the engine could not encode a picture (RuntimeError; its log says more). Send the request again."
    assert ended == {("bad", "error", said), ("good", "length", None), ("text", "length", None)}


def test_the_end_of_a_stage_is_taken_for_what_it_is() -> None:
    """A short piece that was believed to be whole made the next one several times as long as it might be."""
    pace = Pace(4, unit=4, least=8, most=512)
    pace.left_s = 1.0
    pace.took("rest", 100, 0.1)
    assert pace.n_rows(2, 10_000) == 512 and pace.n_rows(2, 40) == 40
    assert pace.ran == ("rest", 40)
    pace.took(*pace.ran, 0.04)
    assert pace.seconds("rest", 512) == pytest.approx(0.512)
