"""One model on several machines: stages of layers, whose answers are one machine's, to the bit."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import msgpack, structs

from deltic.commands import stage as stage_command
from deltic.commands.plan import report
from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams
from deltic.engine.mirror import AskedMoves, Mirror, SentStep, StepTeller
from deltic.engine.step import RunnerLostError, Step, StepResult
from deltic.models.qwen.shape import stage_of
from deltic.ops.arrays import Array
from deltic.runtime import wire
from deltic.runtime.build import build_runner, check_alone, serve_stage, settle_text
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from deltic.runtime.fit import make_plan
from deltic.runtime.stages import Stages, beat, dial, divide, serve_steps, wait_for_result
from deltic.runtime.wire import (
    GREETING_S,
    Challenge,
    Join,
    LostError,
    PeerConnection,
    StageRefusal,
    Welcome,
    check_private,
    greet,
    parse_address,
)
from tests.staged import Stage
from tests.tiny import tiny_checkpoint
from tests.tiny_speech import tiny_speech

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 512,
    "max_step_tokens": 128,
    "threads": 2,
    "n_pages": 9,
    "n_checkpoints": 4,
    "cache_host_gb": 0.0,
    "max_drafts": 4,
}


class Chain:
    """Stages in one process, each of which hands its rows to the next. All but the first know of a step what a message says."""

    def __init__(self, stages: list[Any]) -> None:
        self.stages, first = stages, stages[0]
        self.teller = StepTeller(first.info.max_num_seqs)
        self.mirrors = [Mirror(first.info.max_num_seqs) for _ in stages[1:]]
        self.info, self.max_logit_rows, self.tiers = first.info, first.max_logit_rows, first.tiers
        self.info = msgspec.structs.replace(first.info, has_draft_head=stages[-1].info.has_draft_head)
        self.pictures = self.replays = self.experts = None
        self.adapters = first.adapters
        self.rows: list[Array] = []
        for stage in stages:
            stage.neighbours = self

    def is_busy(self) -> bool:
        return False

    def begin(self, step: Step) -> None:
        """All are told at once."""

    def end(self) -> None:
        """So they end."""

    def hear(self) -> None:
        """They are there."""

    def step(self, step: Step) -> StepResult:
        sent = msgspec.msgpack.encode(self.teller.of(step))
        told = [mirror.step(msgspec.msgpack.decode(sent, type=SentStep)) for mirror in self.mirrors]
        self.next = iter(list(zip(self.stages[1:], told, strict=True)))
        result = self.stages[0].step(step)
        assert not self.rows
        return result

    def receive(self, rows: Array) -> None:
        rows[:] = self.rows.pop(0)

    def pass_on(self, rows: Array) -> None:
        self.rows.append(rows.copy())

    def result(self) -> StepResult:
        stage, step = next(self.next)
        return stage.step(step)


def runner_of(config: EngineConfig, begin: int, end: int) -> Runner:
    """A runner of some layers."""
    device = Cpu()
    model = settle_text(config, device)
    if (begin, end) != (0, model.shape.n_layers):
        model = replace(model, shape=stage_of(model.shape, begin, end))
    plan = make_plan(device.text, model, 1 << 33)
    weights, _ = device.text_weights(model, plan, lambda stage, done: None)
    return device.text_runner(plan, weights, None, lambda stage, done: None)


def requests() -> list[Request]:
    """Requests with everything that a step of text may carry: company, drafts, several sequences, log-probabilities."""
    generator, every = random.Random(5), []
    for i in range(10):
        ids = generator.choices(range(256), k=generator.choice([1, 63, 64, 65, 150, 200]))
        if i % 3 == 0:
            ids = ids[:7] + [7] * 150  # and so it goes on, so that drafts are right
        params = SamplingParams(
            max_tokens=generator.choice([1, 9, 90]),
            temperature=generator.choice([0.0, 1.0]),
            seed=i,
            n=2 if i == 4 else 1,
            repetition_penalty=1.1 if i == 5 else 1.0,
            logit_bias={7: 100.0} if i % 3 == 0 else {},
            logprobs=3,
            prompt_logprobs=2 if i in (2, 6) else None,
            ignore_eos=i % 2 == 0,
        )
        every.append(Request(id=str(i), prompt_ids=ids, params=params))
    return every


def answers(
    runner: Any, rounds: int = 2, adapters: tuple[bytes, ...] = (b"",)
) -> list[dict[tuple[str, int], list[Output]]]:
    """What the requests are answered, all together; the second time from the prefix cache. They have these adapters in turn."""
    engine, found = Engine(runner), []
    for _ in range(rounds):
        outputs: dict[tuple[str, int], list[Output]] = {}
        for i, request in enumerate(requests()):
            request.adapter = adapters[i % len(adapters)]
            engine.add(request)
        for n in itertools.count():
            if n in (6, 14, 30):
                for sequence in [*engine.scheduler._decodes, *engine.scheduler._prefills][1:3]:
                    engine.scheduler._preempt(sequence)
            for output in engine.step():
                outputs.setdefault((output.id, output.index), []).append(output)
            if not engine.has_work():
                break
        engine.check()
        found.append(outputs)
    stats = engine.stats()
    assert stats.n_preemptions and stats.cache.n_hit_tokens and sum(stats.accepted.values()), stats
    return found


def said(outputs: dict[tuple[str, int], list[Output]]) -> dict[tuple[str, int], Any]:
    """Tokens, log-probabilities as they were computed, and how it ended."""
    return {
        key: (
            [token for output in each for token in output.token_ids],
            [entry for output in each for entry in output.logprobs or ()],
            [list(output.prompt_logprobs) for output in each if output.prompt_logprobs is not None],
            each[-1].finish_reason,
        )
        for key, each in outputs.items()
    }


KINDS: dict[str, dict[str, Any]] = {"dense": {}, "dense tied": {"tied": True}, "moe": {}, "next": {}}


@pytest.mark.parametrize("n_stages", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_layers_that_are_run_apart_are_the_model(name: str, n_stages: int) -> None:
    """Two and three stages of 12 layers, of which the one between has neither embedding nor head."""
    checkpoint = tiny_checkpoint(name.partition(" ")[0], n_layers=12, **KINDS[name])
    config = EngineConfig(model=str(checkpoint), **SETTINGS)
    bounds = [12 * i // n_stages for i in range(n_stages + 1)]
    alone = runner_of(config, 0, 12)
    stages = [runner_of(config, *span) for span in itertools.pairwise(bounds)]
    assert sum(stage.plan.weight_bytes for stage in stages) < alone.plan.weight_bytes * 1.1
    expected = answers(alone)
    for found, wanted in zip(answers(Chain(stages)), expected, strict=True):
        assert said(found) == said(wanted)


def test_states_in_16_bits_are_rounded_as_the_model_s() -> None:
    """By the number of a layer in the model, not in its stage."""
    config = EngineConfig(model=str(tiny_checkpoint("dense", n_layers=8)), state_dtype="bfloat16", **SETTINGS)
    alone, stages = runner_of(config, 0, 8), [runner_of(config, 0, 4), runner_of(config, 4, 8)]
    for found, wanted in zip(answers(Chain(stages)), answers(alone), strict=True):
        assert said(found) == said(wanted)


def test_random_weights_of_stages_are_the_models() -> None:
    config = EngineConfig(dummy="qwen3.5-0.8b", quantize="int8", **SETTINGS)
    device, found = Cpu(), {}
    shape = settle_text(config, device).shape
    for begin, end in ((0, 24), (0, 4), (4, 8), (20, 24)):
        model = replace(settle_text(config, device), shape=shape if end == 24 else stage_of(shape, begin, end))
        weights, _ = model.load(device.stores(make_plan(device.text, model, 1 << 34))[0], lambda stage, done: None)
        for name, memory in weights.named_memory():
            field, _, rest = name.partition(".")
            number, _, part = rest.partition(".")
            named = f"layers.{int(number) + begin}.{part}" if field == "layers" else name
            if end == 24:
                found[named] = memory
            elif memory.nbytes:
                assert np.array_equal(found[named], memory), named


def built(config: EngineConfig) -> Any:
    return build_runner(config, lambda stage, done: None, Cpu())


@pytest.mark.parametrize(("kind", "settings"), [("moe", {"quantize": "int4"}), ("dense", {"kv_cache_dtype": "k8v4"})])
def test_processes_that_are_machines(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Three stages as they are started: the bits of one machine; and when the last one dies, the end of all."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    checkpoint = str(tiny_checkpoint(kind, n_layers=12))
    config = EngineConfig(model=checkpoint, **SETTINGS, **settings)
    expected = answers(built(config))
    stages = [Stage(checkpoint, "--threads", "1", "--stages-secret", str(secret)) for _ in range(2)]
    try:
        addresses = tuple(stage.address for stage in stages)
        staged = built(replace(config, stages=addresses, stages_secret=secret))
        assert [note for note in staged.info.notices if "layers" in note] == [
            f"layers {4 * i} to {4 * i + 3} of 12 run {where} ({staged.info.kernels})"
            for i, where in enumerate(("here", *(f"on {address}" for address in addresses)))
        ]
        for found, wanted in zip(answers(staged), expected, strict=True):
            assert said(found) == said(wanted)
        stages[1].kill_worker()
        with pytest.raises(RunnerLostError, match=addresses[0]):
            answers(staged)
    finally:
        for stage in stages:
            stage.close()


def test_the_plan_of_each_machine() -> None:
    """As it is made where it runs; what fits is what fits in all."""
    stages = ("10.0.0.2:7000", "10.0.0.3:7000")
    text = report(EngineConfig(dummy="qwen3.5-0.8b", device="cpu", stages=stages))
    titles = [
        "Layers 0 to 3 of 24, here:",
        *(f"Layers {a} to {b} of 24, {s}:" for (a, b), s in zip(((4, 20), (21, 23)), stages, strict=True)),
    ]
    assert [line for line in text.splitlines() if line.startswith("Layers")] == titles
    assert "0.75 B parameters, 18 DeltaNet + 6 attention layers" in text and "one behind the other" in text
    assert "longest: 32768" in text


def test_layers_are_dealt_out_by_bytes() -> None:
    shape = settle_text(EngineConfig(dummy="qwen3.5-0.8b"), Cpu()).shape
    for n in (1, 2, 3, 6):
        spans = divide(shape, None, n)
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])] and spans[-1][1] == 24
        assert all(len(set(shape.layer_types[begin:end])) == 2 for begin, end in spans)
    (_, end), (begin, _) = divide(shape, "int8", 2)
    assert end == begin == 12  # the head is the embedding, and both machines have it
    with pytest.raises(ConfigError, match="make no 7 stages with layers of both types"):
        divide(shape, None, 7)


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_dir": Path("/tmp"), "allow_cache_transfer": True},
        {"draft_model": "x"},
        {"expert_memory": 1.0},
        {"weights_cache": Path("/tmp")},
    ],
)
def test_what_several_machines_do_not_have(settings: dict[str, Any]) -> None:
    flag = list(settings)[-1].replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{flag}: a model on several machines"):
        settle_text(EngineConfig(stages=("127.0.0.1:1",), **settings), Cpu())


def test_models_that_run_on_one_machine() -> None:
    for kind in ("flash", "next"):
        checkpoint = str(tiny_checkpoint(kind, n_layers=8))
        config = EngineConfig(model=checkpoint, stages=("127.0.0.1:1",))
        if kind == "next":
            assert settle_text(config, Cpu()).shape.n_layers == 4
            continue
        with pytest.raises(ConfigError, match="Flash-Next is not run on several machines yet"):
            settle_text(config, Cpu())


@pytest.mark.parametrize("given", ["10.0.0.1", ":80", "a:b", "a:70000"])
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        parse_address(given, "--stages")


def test_only_private_addresses() -> None:
    assert parse_address("[::1]:7000", "") == ("::1", 7000)
    for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        check_private(address, b"", "--listen")
    for address in ("10.1.2.3", "192.168.0.1", "fd00::1", "fe80::1%eth0", "0.0.0.0", "100.64.0.1"):
        check_private(address, b"secret", "--listen")
        with pytest.raises(ConfigError, match="reached by other machines"):
            check_private(address, b"", "--listen")
    for address in ("8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"):
        with pytest.raises(ConfigError, match="address of the internet"):
            check_private(address, b"secret", "--listen")


@pytest.fixture
def ends() -> Iterator[tuple[PeerConnection, PeerConnection]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    pair = PeerConnection(dialled, "stage"), PeerConnection(accepted, "front")
    yield pair
    for end in pair:
        end.close()


def welcome(end: PeerConnection, secret: bytes) -> None:
    """Lets in, as soon as all has come."""
    guest = Welcome(end, secret)
    while not guest.read():
        time.sleep(0.005)


def welcomed(end: PeerConnection, secret: bytes) -> tuple[threading.Thread, list[str]]:
    """A thread that lets in, and what it says of who calls, once it is over; empty: it is let in."""
    said: list[str] = []

    def run() -> None:
        try:
            welcome(end, secret)
        except LostError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, said


def test_both_ends_prove_the_secret(
    ends: tuple[PeerConnection, PeerConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, stage = ends
    thread, refused = welcomed(stage, b"secret")
    greet(front, b"secret")
    thread.join()
    assert not refused
    thread, refused = welcomed(stage, b"secret")
    with pytest.raises(ConfigError, match="the secret is another one"):
        greet(front, b"other")
    thread.join()
    assert refused == ["front has another secret"]
    with monkeypatch.context() as patch:  # a stage of another build, which says so to those alone who have the secret
        own, builds = wire.build(), iter(["0.0 abc"])
        patch.setattr(wire, "build", lambda: next(builds, own))
        thread, refused = welcomed(stage, b"secret")
        with pytest.raises(ConfigError, match=r"stage stage runs Deltic 0.0 abc, and this is .*; install the same"):
            greet(front, b"secret")
        thread.join()
    assert own.encode() not in msgpack.encode(Challenge(b"n" * 32))


def test_a_stage_without_the_secret_is_none(ends: tuple[PeerConnection, PeerConnection]) -> None:
    """What it was sent it sends back: that signs nothing."""
    front, stage = ends
    stage.send(Challenge(b"n" * 32))

    def echo() -> None:
        proof = stage.receive()
        assert isinstance(proof, wire.Proof)
        stage.send(proof)

    threading.Thread(target=echo).start()
    with pytest.raises(ConfigError, match="does not have the secret"):
        greet(front, b"secret")


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent a message of 542393671 bytes, where 4096 are the most"),
        (b"\xff\xff\xff\xff", "where 4096 are the most"),
        (b"\x05\0\0\0\x80\x04K\x01.", "sent what is no message"),  # a pickle
        (b"\x01\0\0\0\x01", "sent what is no message"),
        (b"\x08\0\0\0\x81\xa4type\xa1\xff", "sent what is no message"),  # text that is no UTF-8
        (
            (3909).to_bytes(4, "little") + b"\x82\xa4type\xa4beat\xa1x" + b"\x91" * 3895 + b"\x90",
            "sent what is no message",
        ),
        (b"", "shows no sign of life"),
    ],
)
def test_strangers(
    ends: tuple[PeerConnection, PeerConnection], sent: bytes, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, stage = ends
    monkeypatch.setattr(wire, "GREETING_S", 0.2)
    front.socket.sendall(sent)
    with pytest.raises(LostError, match=found):
        welcome(stage, b"secret")


def test_a_stranger_who_speaks_slowly(
    ends: tuple[PeerConnection, PeerConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte in time, and a greeting that never ends: nobody else would be let in."""
    front, stage = ends
    monkeypatch.setattr(wire, "GREETING_S", 0.4)
    is_over = threading.Event()

    def drip() -> None:
        front.socket.sendall((4096).to_bytes(4, "little"))
        for _ in range(40):
            if not is_over.wait(0.1):
                front.socket.sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    begun = time.monotonic()
    with pytest.raises(LostError, match="shows no sign of life"):
        welcome(stage, b"secret")
    is_over.set()
    dripping.join()
    assert time.monotonic() - begun < 2


def test_a_machine_that_works_beside_its_steps_lives(ends: tuple[PeerConnection, PeerConnection]) -> None:
    """As one that clears a large directory."""
    front, stage = ends
    beside = SimpleNamespace(is_waiting=False, take=lambda task: time.sleep(1), answers=lambda: ())
    runner = SimpleNamespace(info=SimpleNamespace(max_num_seqs=1), tiers=None, step=lambda step: StepResult([], [], {}))
    own = SimpleNamespace(behind=None, hear=lambda: None, tell=lambda message: None)

    def run() -> None:
        with contextlib.suppress(LostError):
            serve_steps(stage, runner, own, beside)  # type: ignore[arg-type]

    threading.Thread(target=beat, args=(stage, 0.1), daemon=True).start()
    thread = threading.Thread(target=run)
    thread.start()
    front.send(AskedMoves("clear"))
    front.send(SentStep([], [], [], [], []))
    wait_for_result(front, 0.4, lambda answer: None)
    front.close()
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_that_hangs_before_it_says_the_sizes(ends: tuple[PeerConnection, PeerConnection]) -> None:
    """The stage is free for the next one."""
    own = wire.Limits({"max_num_seqs": 4}, 7)
    with pytest.raises(LostError, match=r"front is lost \(it shows no sign of life\)"):
        ends[1].agreed(own, 0.1)
    ends[0].send(wire.Limits({"max_num_seqs": 2}, 5))
    assert ends[1].agreed(own, 5.0).sizes == {"max_num_seqs": 2}


def test_what_is_sent_to_a_machine_without_power(ends: tuple[PeerConnection, PeerConnection]) -> None:
    """It is not sent again for a quarter of an hour, in which the stage would be free for nobody."""
    assert [end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in ends] == [25_000] * 2


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_an_engine_without_stages_sets_nothing_here(ends: tuple[PeerConnection, PeerConnection], number: int) -> None:
    """With none, no flag of files on this machine would be refused."""
    front, stage = ends
    front.send(Join(json.dumps({"weights_cache": "/nowhere"}).encode(), number, "", "cpu"))
    serve_stage(stage, EngineConfig(dummy="qwen3.5-0.8b"))
    answer = front.receive(5)
    assert isinstance(answer, StageRefusal) and f"has no stage {number}, of 0" in answer.why


def test_a_stage_has_one_place() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 is named twice"):
        settle_text(EngineConfig(stages=("127.0.0.1:1",) * 2), Cpu())
    several = [EngineConfig(stages=(f"127.0.0.1:{port}",)) for port in (1, 2, 1)]
    check_alone(several[:2])
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 is named twice"):
        check_alone(several)


def test_a_speech_model_beside_machines_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the environment holds for every model, and means nothing to one that speaks."""
    monkeypatch.setenv("DELTIC_STAGES", "127.0.0.1:1")
    config = EngineConfig(model=str(tiny_speech("base")), device="cpu", stages=("127.0.0.1:1",))
    check_alone([config, config])
    assert "127.0.0.1" not in report(config)
    on_gpu = replace(config, device="cuda", memory_gb=20.0)
    assert "other machines" not in report(on_gpu)


def test_a_stage_outlives_a_lack_of_files_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what it needs the third time."""
    calls: list[str] = []

    class Listener:
        """The first call to it fails, and a process for the second."""

        def accept(self) -> Any:
            calls.append("accept")
            if len(calls) == 1:
                raise OSError(errno.EMFILE, "Too many open files")
            return server.accept()

        def fileno(self) -> int:
            return server.fileno()

    def no_process(*given: object) -> None:
        calls.append("fork")
        if calls.count("fork") == 2:
            raise KeyboardInterrupt
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    class Guest:
        """It is let in at once."""

        until_s = 0.0

        def __init__(self, front: PeerConnection, secret: bytes) -> None:
            self.connection = front

        def read(self) -> bool:
            return True

    monkeypatch.setattr(stage_command, "Welcome", Guest)
    monkeypatch.setattr(stage_command, "Worker", no_process)
    with socket.create_server(("127.0.0.1", 0)) as server:
        callers = [socket.create_connection(server.getsockname()) for _ in range(2)]
        with pytest.raises(KeyboardInterrupt):
            stage_command.serve(Listener(), b"", EngineConfig())  # type: ignore[arg-type]
        for caller in callers:
            caller.close()
    assert calls == ["accept", "accept", "fork", "accept", "fork"]


def test_a_stage_outlives_strangers_and_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = str(tiny_checkpoint("dense", n_layers=8))
    stage = Stage(checkpoint, "--threads", "1")
    try:
        host, port = parse_address(stage.address, "")
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"", json.dumps({}).encode()):
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(sent)
        slow = [socket.create_connection((host, port)) for _ in range(3)]
        slow[1].sendall((90).to_bytes(4, "little") + b"x")
        begun = time.monotonic()
        dial(stage.address, b"").close()
        assert time.monotonic() - begun < GREETING_S, "nobody waits for them"
        for stranger in slow:
            stranger.close()
        config = EngineConfig(model=checkpoint, stages=(stage.address,), **SETTINGS)
        wait = Stages.wait
        with monkeypatch.context() as patch:
            patch.setattr(
                Stages, "wait", lambda self, own, progress: wait(self, structs.replace(own, kernels="abacus"), progress)
            )
            first = built(config)
        assert any("answers have the bits of no single one" in notice for notice in first.info.notices)
        assert first.info.kernels.startswith("abacus and ")  # fingerprints of answers tell
        second: list[Any] = []
        waiting = threading.Thread(target=lambda: second.append(built(config)))
        waiting.start()
        waiting.join(1.5)
        assert not second  # it waits until the first has gone
        first.neighbours.behind.close()
        waiting.join(30)
        assert second and answers(second[0])
        assert not any("bits of no single one" in notice for notice in second[0].info.notices)
    finally:
        stage.close()
