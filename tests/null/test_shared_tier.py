"""Several servers on one directory: what one has computed is found by the others, and one of them evicts for all.

The runner compares every page and state with the tokens it stands for, so a wrong hit is an error in the step that uses it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deltic.engine.cache import cache, disk, saves, tiers
from deltic.engine.cache.directory import ABANDONED_S, ALIVE_S, HEADER_BYTES, Directory
from deltic.engine.cache.tree import DISK
from deltic.engine.engine import Engine
from deltic.engine.events import CacheLocated
from deltic.engine.messages import LocateCache, Request, SamplingParams
from deltic.ops.geometry import PAGE_SIZE
from tests.conversations import some_ids
from tests.fakes import expected_tokens
from tests.null.test_prefix_crash import PAGE_BYTES, ROOT, STATE_BYTES, SolidRunner, Traffic

PAYLOAD = {".page": PAGE_BYTES, ".state": STATE_BYTES}


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers know of each other within moments."""
    monkeypatch.setattr(disk, "BEAT_S", 0.02)
    monkeypatch.setattr(saves, "SURVEY_S", 0.05)
    monkeypatch.setattr(saves, "IDLE_SURVEY_S", 0.05)


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Engines on one directory, in the order of their start; they are checked and closed at the end."""
    engines: list[Engine] = []

    def start_one(**sizes: Any) -> Engine:
        engines.append(Engine(SolidRunner(tmp_path, **sizes)))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.check()
        assert engine.runner.tiers is not None and engine.runner.tiers.n_damaged == 0
        engine.close(5.0)


def until(condition: Callable[[], Any], *engines: Engine, seconds: float = 10.0) -> None:
    """Engines that have nothing to do look around until something is so."""
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s
        for engine in engines:
            engine.cache.store.poll()
        time.sleep(0.002)


def settle(*engines: Engine) -> None:
    """Until everything is saved that was to be."""
    stores = [engine.cache.store for engine in engines]
    until(lambda: all(store.is_idle for store in stores), *engines)


def meet(*engines: Engine) -> None:
    """Until all know that they are not alone."""
    until(lambda: all(engine.cache.store.tiers.may_have_foreign for engine in engines), *engines)


def ask(engine: Engine, prompt: list[int], max_tokens: int = 1, **options: Any) -> int:
    """The tokens of a prompt that were found; the answer is right."""
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    ask.n = getattr(ask, "n", 0) + 1  # type: ignore[attr-defined]
    engine.add(Request(id=str(ask.n), prompt_ids=prompt, params=params, **options))  # type: ignore[attr-defined]
    n_cached, answer = 0, []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            n_cached += output.cached_tokens
            answer += output.token_ids
    assert answer == expected_tokens(prompt, params)
    return n_cached


def payload(directory: Path) -> int:
    return sum(PAYLOAD.get(path.suffix, 0) for path in directory.rglob("*"))


def evicts(engine: Engine) -> bool:
    return bool(engine.cache_summary()["tiers"]["disk"]["evicts"])


# What is found.


@pytest.mark.parametrize("n", [64, 65, 128, 129, 400, 640])
def test_what_one_computed_is_a_hit_on_another(start: Start, n: int) -> None:
    rng = Random(n)
    first, second = start(), start()
    meet(first, second)
    prompt = some_ids(rng, n)
    assert ask(first, prompt) == 0
    settle(first)
    n_known = (n - 1) // PAGE_SIZE * PAGE_SIZE
    assert ask(second, prompt) == n_known, "at most 64 tokens are computed again"
    assert second.cache.store.shared.n_found == n_known // PAGE_SIZE
    longer = [*prompt, *some_ids(rng, 100)]
    assert ask(second, longer) >= n_known
    settle(second)
    assert ask(first, longer) == (len(longer) - 1) // PAGE_SIZE * PAGE_SIZE, "and back again"


def test_the_prompt_is_there_while_the_answer_is_still_written(start: Start) -> None:
    first, second = start(), start()
    meet(first, second)
    prompt = some_ids(Random(1), 400)
    params = SamplingParams(max_tokens=90, seed=1, ignore_eos=True)
    first.add(Request(id="long", prompt_ids=prompt, params=params))
    n_steps = 0
    while first.has_work():
        first.step()
        time.sleep(0.002)
        n_steps += 1
        if n_steps == 60:
            assert ask(second, prompt) == 384


def test_nothing_is_found_under_another_salt_or_namespace(start: Start) -> None:
    first, second = start(), start()
    meet(first, second)
    prompt = some_ids(Random(2), 300)
    ask(first, prompt, cache_salt="a", namespace="p")
    settle(first)
    assert ask(second, prompt) == ask(second, prompt, cache_salt="a") == ask(second, prompt, namespace="p") == 0
    assert ask(second, prompt, cache_salt="a", namespace="p") == 256


@pytest.mark.parametrize("seed", range(3))
def test_hits_are_those_of_one_server(start: Start, tmp_path: Path, seed: int) -> None:
    """The same prompts in the same order, each to any of three servers: as many tokens are found as by one alone."""
    rng = Random(seed)
    families = [some_ids(rng, 64 * rng.randrange(1, 5) + rng.randrange(64)) for _ in range(3)]
    prompts = [[*rng.choice(families), *some_ids(rng, rng.choice([10, 100, 200]))] for _ in range(25)]
    prompts += rng.sample(prompts, 10)
    engines = [start(n_pages=200, n_checkpoints=80) for _ in range(3)]
    alone = Engine(SolidRunner(tmp_path / "alone", n_pages=200, n_checkpoints=80))
    meet(*engines)
    found = []
    for prompt in prompts:
        expected = ask(alone, prompt)
        settle(alone)
        engine = rng.choice(engines)
        found.append((ask(engine, prompt), expected))
        settle(engine)
    assert [n for n, _ in found] == [n for _, n in found] and any(n for n, _ in found)
    alone.close(5.0)


def test_a_server_alone_looks_for_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers.Tiers, "search", lambda *_: pytest.fail("it looks for what nobody can have written"))
    monkeypatch.setattr(tiers.Tiers, "survey", lambda *_: pytest.fail("it looks for what nobody can have written"))
    engine = start()
    for i in range(5):
        ask(engine, some_ids(Random(i), 300))
    settle(engine)
    time.sleep(0.1)
    engine.cache.store.poll()
    assert evicts(engine) and engine.cache_summary()["tiers"]["disk"]["servers"] == 1


def test_the_last_one_knows_what_the_others_left(start: Start) -> None:
    first, second = start(), start()
    meet(first, second)
    prompt = some_ids(Random(3), 300)
    ask(second, prompt)
    second.close(5.0)
    until(lambda: not first.cache.store.tiers.may_have_foreign, first)
    until(lambda: not first.cache.store.shared._news, first)
    assert ask(first, prompt) == 256


def test_a_miss_costs_one_look(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(), start()
    meet(first, second)
    looked: list[str] = []
    stat = os.stat

    def noted(path: Any, *rest: Any, **more: Any) -> os.stat_result:
        if str(path).endswith((".page", ".state")):
            looked.append(str(path))
        return stat(path, *rest, **more)

    monkeypatch.setattr(os, "stat", noted)
    n = []
    monkeypatch.setattr(tiers.Tiers, "_save", lambda *_: None)
    ask(second, some_ids(Random(4), 640))
    n.append(len(looked))
    assert n == [1]


def test_a_disk_that_hangs_holds_up_nobody_for_long(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "MAX_SEARCH_S", 0.2)
    monkeypatch.setattr(cache, "MAX_SEARCH_S", 0.2)
    first, second = start(), start()
    meet(first, second)
    gate = [True]

    def hang(*_: Any) -> None:
        while gate[0]:
            time.sleep(0.01)

    monkeypatch.setattr(disk.Disk, "search", hang)
    began = time.monotonic()
    assert ask(second, some_ids(Random(5), 300)) == 0
    took = time.monotonic() - began
    assert 0.15 < took < 10
    began = time.monotonic()
    for i in range(5):  # the next ones do not even ask
        assert ask(second, some_ids(Random(6 + i), 300)) == 0
    assert time.monotonic() - began < 10
    gate[0] = False


# What may be sent.


def located(engine: Engine, prompt: list[int], *others: Engine, **options: Any) -> CacheLocated:
    command = LocateCache(Request(id="export", prompt_ids=prompt, params=SamplingParams(), **options))
    if (answer := engine.locate_cache(command)) is not None:
        return answer
    assert engine.exports is not None
    answers: list[CacheLocated] = []
    until(lambda: answers.extend(engine.exports.poll()) or answers, engine, *others)  # type: ignore[union-attr]
    assert len(answers) == 1 and not engine.exports.is_waiting
    engine.check()
    return answers[0]


def test_the_files_of_a_prompt(start: Start) -> None:
    rng = Random(20)
    engine, other = start(), start()
    meet(engine, other)
    prompt = some_ids(rng, 400)
    assert located(engine, prompt) == CacheLocated("export")
    ask(engine, prompt)
    found = located(engine, [*prompt, *some_ids(rng, 50)])
    assert found.n_tokens == 384 and len(found.files) == 7
    assert [path.rsplit(".", 2)[1:] for path in found.files] == [[str(64 * i), "page"] for i in range(1, 7)] + [
        ["384", "state"]
    ]
    assert all(map(os.path.exists, found.files))
    assert located(engine, prompt, cache_salt="another").n_tokens == 0
    assert located(other, prompt).files == found.files, "a server that shares the disk has them, too"
    assert located(engine, prompt[:64]).n_tokens == 0 and located(engine, []).n_tokens == 0
    refused = located(engine, [2**40])
    assert refused.is_refused and "vocabulary" in str(refused.error)


def test_a_checkpoint_that_is_not_worth_a_place_is_written_when_it_is_asked_for(start: Start) -> None:
    engine, rng = start(), Random(21)
    prompt = some_ids(rng, 200)
    ask(engine, prompt)
    engine.cache.store.saves.queue.clear()
    ask(engine, [*prompt, *some_ids(rng, 300)])
    settle(engine)
    assert located(engine, prompt).n_tokens == 192


def test_a_disk_that_takes_nothing_is_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(disk_bytes=500)
    prompt = some_ids(Random(22), 300)
    ask(engine, prompt)
    assert "no room" in str(located(engine, prompt).error)
    monkeypatch.setattr(saves, "MAX_EXPORT_S", 0.1)
    hanging = start()
    monkeypatch.setattr(disk.Disk, "can_save", False)
    ask(hanging, prompt)
    assert "within 0.1 s" in str(located(hanging, prompt).error)
    monkeypatch.undo()
    hanging.cache.store.saves.queue.clear()
    without = Engine(SolidRunner(None))
    assert "--cache-dir" in str(located(without, prompt).error)


def test_an_end_that_waits_for_a_look_does_not_spin(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, n_polls = start(), [0]
    store = engine.cache.store
    monkeypatch.setattr(saves.Shared, "must_look", lambda *_: True)
    poll = store.poll
    store.poll = lambda: (poll(), n_polls.__setitem__(0, n_polls[0] + 1))[0]  # type: ignore[method-assign]
    ask(engine, some_ids(Random(23), 300))
    n_polls[0] = 0
    engine.close(0.3)
    assert store.saves.queue and 0 < n_polls[0] < 50
    store.saves.queue.clear()  # or the fixture, which closes it again, waits in vain


# Who deletes.


def test_one_evicts_for_all_and_the_budget_is_kept(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_bytes, rng = 100_000, Random(7)
    engines = [start(n_pages=20, disk_bytes=disk_bytes) for _ in range(3)]
    meet(*engines)
    assert list(map(evicts, engines)) == [True, False, False]
    deleted: list[Any] = []
    delete = tiers.Tiers.delete
    monkeypatch.setattr(tiers.Tiers, "delete", lambda self, *what: (deleted.append(self), delete(self, *what))[1])
    most = 0
    for i in range(60):
        for engine in engines:
            ask(engine, some_ids(rng, 300))
            settle(engine)
            most = max(most, payload(tmp_path))
        if i % 5 == 0:
            until(lambda: payload(tmp_path) <= disk_bytes, *engines)
    assert most <= disk_bytes * 1.25
    assert {id(one) for one in deleted} == {id(engines[0].runner.tiers)}, "the others never delete for room"
    until(lambda: engines[0].cache_summary()["tiers"]["disk"]["bytes_used"] == payload(tmp_path), *engines)
    for engine in engines:
        settle(engine)
        of = engine.runner.tiers
        assert of is not None
        until(lambda of=of: of.is_idle)
        assert {("state", key) for key in of.disk._used_at} <= set(of.disk._files)


def test_what_was_found_and_then_evicted_is_computed(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    meet(first, second)
    prompt = some_ids(Random(8), 300)
    ask(first, prompt)
    settle(first)
    ask(second, prompt)
    saved = first.cache.store.saves
    saved.disk_bytes = 0
    saved.make_room(0)
    saved.disk_bytes = 10**9
    until(lambda: payload(tmp_path) == 0, first)
    for node in list(second.cache.store.tree.nodes.values()):  # as if it had lost its memory
        assert node.page[DISK]
    third = start()
    meet(third)
    assert ask(third, prompt) == 0
    until(lambda: not any(n.page[DISK] for n in second.cache.store.tree.nodes.values()), second)
    assert ask(second, prompt) == 256, "in its own memory it is"


def test_a_reset_empties_the_directory_for_all(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    meet(first, second)
    prompts = [some_ids(Random(i), 300) for i in range(6)]
    for prompt in prompts:
        ask(first, prompt)
    settle(first)
    second.reset_cache()
    assert payload(tmp_path) == 0
    assert ask(second, prompts[0]) == 0
    first.check()
    until(lambda: first.cache_summary()["tiers"]["disk"]["pages"] <= 4, first, second)
    assert ask(first, prompts[1]) == 256, "its own memory is its own"


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT, errno.EMFILE])
def test_a_file_that_cannot_be_opened_once_costs_nobody_anything(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    writer, rng = start(), Random(30)
    base = some_ids(rng, 320)
    prompts = [[*base, *some_ids(rng, 200)] for _ in range(3)]
    for prompt in prompts:
        ask(writer, prompt)
    settle(writer)
    writer.close(5.0)
    engine, n_bytes = start(), payload(tmp_path)
    open_file, failed = os.open, []

    def fail_once(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".page") and not failed:
            failed.append(path)
            raise OSError(code, os.strerror(code), path)
        return open_file(path, *rest, **more)

    monkeypatch.setattr(os, "open", fail_once)
    ask(engine, prompts[0])
    settle(engine)
    time.sleep(0.2)
    until(lambda: not engine.cache.store.shared._news, engine)
    assert failed and payload(tmp_path) == n_bytes
    assert [ask(engine, prompt) for prompt in prompts[1:]] == [512, 512]


HOLDER = """
import sys, time
from tests.null.test_shared_tier import *
disk.BEAT_S = 0.02
engine = Engine(SolidRunner(Path(sys.argv[1])))
ask(engine, some_ids(Random(9), 300))
settle(engine)
print(evicts(engine), flush=True)
while True:
    engine.cache.store.poll()
    time.sleep(0.005)
"""


def test_the_lease_moves_when_its_holder_is_killed(start: Start, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"True\n"
        engine = start()
        meet(engine)
        time.sleep(0.1)
        assert not evicts(engine)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    until(lambda: evicts(engine), engine)
    assert ask(engine, some_ids(Random(9), 300)) == 256
    assert child.stdout is not None
    child.stdout.close()


def test_who_takes_over_looks_at_once_and_writes_nothing_before(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "IDLE_SURVEY_S", 1e9)
    first, second = start(), start()
    meet(first, second)
    until(lambda: second.cache.store.shared._survey_at > 1e8, first, second)
    for i in range(4):
        ask(first, some_ids(Random(40 + i), 300))
    settle(first)
    until(lambda: second.runner.tiers.disk.is_idle, first, second)  # type: ignore[union-attr]
    survey = tiers.Tiers._survey_all
    gate: list[Any] = []
    monkeypatch.setattr(tiers.Tiers, "_survey_all", lambda *given: gate.append(given))
    first.close(5.0)
    until(lambda: second.runner.tiers.disk.directory.may_delete, second)
    n_bytes = payload(tmp_path)
    ask(second, some_ids(Random(50), 300))
    time.sleep(0.1)
    second.cache.store.poll()
    assert len(gate) == 1 and payload(tmp_path) == n_bytes
    survey(*gate.pop())
    settle(second)
    until(lambda: second.cache_summary()["tiers"]["disk"]["bytes_used"] == payload(tmp_path) > n_bytes, second)


def test_news_that_wait_outlast_the_next_survey(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(), start()
    meet(first, second)
    for i in range(4):
        ask(second, some_ids(Random(60 + i), 300))
        settle(second)
    until(lambda: first.cache_summary()["tiers"]["disk"]["bytes_used"] == payload(tmp_path), first, second)
    monkeypatch.setattr(saves, "MAX_NEWS", 1)
    first.cache.store.shared._survey_at = float("inf")
    second.reset_cache()
    first_tiers = first.runner.tiers
    assert first_tiers is not None
    for _ in range(2):
        first_tiers.survey()
        until(lambda: first_tiers.disk.surveyed)
        first.cache.store.poll()
    until(lambda: not first.cache.store.shared._news, first)
    assert not any(node.page[DISK] for node in first.cache.store.tree.nodes.values())
    assert first.cache_summary()["tiers"]["disk"]["bytes_used"] == 0


def test_a_reset_takes_nothing_that_a_survey_has_found_meanwhile(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start()
    meet(first, second)
    store, first_tiers = first.cache.store, first.runner.tiers
    assert first_tiers is not None
    store.shared._survey_at = float("inf")
    for i in range(4):
        ask(second, some_ids(Random(70 + i), 300))
    settle(second)
    until(lambda: first_tiers.disk.is_idle, first)
    first_tiers.survey()
    until(lambda: first_tiers.disk.surveyed)
    monkeypatch.setattr(saves, "MAX_NEWS", 1)
    counts = iter([1, 0])
    monkeypatch.setattr(type(store), "n_moving", property(lambda _: next(counts)))
    store.reset()
    monkeypatch.undo()
    assert not store.shared._news and payload(tmp_path) == 0


def test_who_does_not_look_around_gives_the_lease_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(), start()
    meet(first, second)
    monkeypatch.setattr(disk, "UNFOLLOWED_S", 0.1)
    until(lambda: evicts(second), second)  # nobody steps the first
    assert not evicts(first)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_each_evicts_its_own(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    disk_bytes, rng = 60_000, Random(10)
    engines = [start(n_pages=20, disk_bytes=disk_bytes) for _ in range(2)]
    for engine in engines:
        (notice,) = engine.runner.tiers.notices if engine.runner.tiers else []
        assert "no locks" in notice
    meet(*engines)
    for _ in range(40):
        for engine in engines:
            ask(engine, some_ids(rng, 300))
            settle(engine)
    until(lambda: all(engine.runner.tiers.disk.is_idle for engine in engines), *engines)  # type: ignore[union-attr]
    assert payload(tmp_path) <= 1.3 * disk_bytes
    shares = [engine.cache_summary()["tiers"]["disk"]["bytes_used"] for engine in engines]
    assert min(shares) >= disk_bytes // 10, "each has some"
    prompt = some_ids(rng, 300)
    ask(engines[0], prompt)
    settle(engines[0])
    assert ask(engines[1], prompt) == 256


def test_files_that_others_write_are_not_written_again(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    meet(first, second)
    prompt = some_ids(Random(11), 400)
    ask(first, prompt)
    settle(first)
    began = {path: path.stat().st_ino for path in tmp_path.rglob("*.page")}
    second.cache.store.shared.search = lambda *_: None  # type: ignore[method-assign]  # both computed it at once
    assert ask(second, prompt) == 0
    settle(second)
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*.page")} == began
    assert second.cache.stats.written_bytes == {} or second.runner.tiers.written_bytes["disk"] == 0  # type: ignore[union-attr]


def test_what_nobody_can_reach_goes_after_two_looks(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    meet(first, second)
    prompt = some_ids(Random(12), 400)
    ask(second, prompt)
    settle(second)
    first.cache.store.shared._survey_at = float("inf")
    (page,) = tmp_path.rglob("*.64.page")
    page.unlink()
    until(lambda: first.runner.tiers.disk.is_idle, first)  # type: ignore[union-attr]
    first.cache.store.shared._survey_at = 0.0
    until(lambda: not list(tmp_path.rglob("*.page")) and not list(tmp_path.rglob("*.state")), first)


def test_part_files_and_servers_that_are_gone_are_cleared_away(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    meet(first, second)
    ask(second, some_ids(Random(13), 200))
    settle(second)
    page = next(tmp_path.rglob("*.page"))
    old, new = (page.with_name(f"{page.name}.0000000{i}.part") for i in range(2))
    dead = next(tmp_path.rglob("servers")) / "elsewhere.1.00000000"
    for path in (old, new, dead):
        path.write_bytes(b"")
    os.utime(old, (time.time() - ABANDONED_S - 60,) * 2)
    os.utime(dead, (time.time() - ALIVE_S - 60,) * 2)
    until(lambda: not old.exists() and not dead.exists(), first, second)
    assert new.exists() and first.cache_summary()["tiers"]["disk"]["servers"] == 2


def test_the_clock_of_a_machine_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (Directory(tmp_path, "0" * 32) for _ in range(2))
    one.enter()
    monkeypatch.setattr(time, "time", lambda: 1e9)
    other.enter()
    one.beat()
    assert one.n_others == other.n_others == 1
    other.leave()
    one.beat()
    assert one.n_others == 0 and one.may_delete and not other.may_delete
    one.leave()


# At random.


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_on_one_directory(seed: int, tmp_path: Path) -> None:
    """Three servers with little room, of which one or the other is started anew."""
    rng = Random(seed)
    disk_bytes = rng.choice([5_000, 40_000, 10**9])

    def begin(i: int) -> Traffic:
        sizes = {"n_pages": rng.choice([14, 30]), "n_checkpoints": rng.choice([2, 8])}
        return Traffic(Engine(SolidRunner(tmp_path, disk_bytes=disk_bytes, **sizes)), seed + 10 * (i // 2))

    traffics = [begin(i) for i in range(3)]
    meet(*(traffic.engine for traffic in traffics))
    for _ in range(6):
        for traffic in traffics:
            traffic.trouble(3)
        i = rng.randrange(3)
        traffics[i].engine.close(5.0)
        traffics[i] = begin(i)
    for traffic in traffics:
        assert traffic.engine.runner.tiers is not None and traffic.engine.runner.tiers.n_damaged == 0
        traffic.check_end()
        traffic.engine.close(5.0)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or path.suffix not in PAYLOAD or path.stat().st_size == HEADER_BYTES + PAYLOAD[path.suffix]
