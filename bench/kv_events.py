"""What cache events cost: `python -m bench.kv_events --dummy qwen3.5-0.8b --quantize int8`.

Two engines in this process, one of which tells a reader of its cache, run the same prompts in turns: the CPU
time of a request's steps with events over that without. And what the engine's thread spends on a block:
prompts that enter and leave a cache without an engine, with events less without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import zmq

from deltic.bench.provenance import checked, code, machine, now, runs_directory
from deltic.engine.cache.cache import Cache
from deltic.engine.cache.events import BlocksStored, CacheEvents
from deltic.engine.engine import Engine
from deltic.engine.messages import EngineInfo, Request, SamplingParams
from deltic.engine.step import Sequence
from deltic.host.kv_events import EventPublisher, payload
from deltic.host.launch import EventSockets
from deltic.llm import LLM
from deltic.ops.geometry import PAGE_SIZE

N_BLOCKS = 512
TOPIC = b"kv@here@m"


def request_s(
    engine: Engine, publisher: EventPublisher, ids: list[int], n_answer: int
) -> tuple[float, int, int, float]:
    """CPU seconds of a request's steps, the publisher's included, their number, blocks announced meanwhile,
    and CPU seconds of the engine's thread for collecting and handing over.
    """
    params = SamplingParams(max_tokens=n_answer, temperature=0.0, ignore_eos=True, seed=0)
    engine.add(Request(id="r", prompt_ids=ids, params=params))
    events, n_blocks, n_steps, tell_s = engine.cache.store.events, 0, 0, 0.0
    begin = time.process_time()
    while engine.has_work():
        checked(engine.step())
        n_steps += 1
        if events is not None:
            before = time.thread_time()
            if told := events.collect():
                publisher.publish(TOPIC, told)
            tell_s += time.thread_time() - before
            n_blocks += sum(len(event.blocks) for event in told if isinstance(event, BlocksStored))
    return time.process_time() - begin, n_steps, n_blocks, tell_s


def block_us(n_rounds: int) -> dict[str, float]:
    """Microseconds of the engine's thread for a block that comes and goes, and of the publisher's."""
    info = EngineInfo(
        vocab_size=1000, eos_token_ids=[], max_model_len=1 << 20, max_num_seqs=1, max_step_tokens=512,
        n_pages=N_BLOCKS + 1, n_slots=4, device="cpu",
    )  # fmt: skip
    rng, spent = random.Random(0), dict[bool, list[float]]({True: [], False: []})
    for round_ in range(2 * n_rounds):
        is_told = bool(round_ % 2)
        cache = Cache(info)
        if is_told:
            events = CacheEvents(info, "m")
            cache.store.listen(events)
            events.collect()
        tokens = array("i", (rng.randrange(1000) for _ in range(N_BLOCKS * PAGE_SIZE)))
        sequence = Sequence(Request(id="r", prompt_ids=[], params=SamplingParams()), 0, 0, tokens, len(tokens))
        cache.open(sequence)
        cache.admit(sequence, [], 0)
        cache.grow(sequence, len(tokens))
        begin = time.perf_counter()
        sequence.n_computed = len(tokens)
        cache.publish(sequence)
        cache.release(sequence)  # leaves a checkpoint
        if is_told:
            told = events.collect()
            assert sum(len(event.blocks) for event in told if isinstance(event, BlocksStored)) == N_BLOCKS
        checkpoint = cache.store.device.least_state()
        assert checkpoint is not None
        cache.store._evict_state(checkpoint)
        if is_told:
            events.collect()
        spent[is_told].append((time.perf_counter() - begin) / N_BLOCKS * 1e6)
    begin = time.perf_counter()
    for _ in range(n_rounds):
        payload(0.0, told)
    encode_us = (time.perf_counter() - begin) / n_rounds / N_BLOCKS * 1e6
    without, with_ = min(spent[False]), min(spent[True])
    return {"without_us": without, "with_us": with_, "events_us": with_ - without, "encode_us": encode_us}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="checkpoint directory or hub name (default: the built-in model)")
    add("--dummy", metavar="SHAPE", help="random weights at a published shape")
    add("--quantize", choices=("int8", "int4", "int4-symmetric"))
    add("--threads", type=int, help="CPU threads of the engines")
    add("--requests", type=int, default=20)
    add("--prompt", type=int, default=1000, help="tokens of a prompt")
    add("--answer", type=int, default=128, help="tokens of an answer")
    add("--out", metavar="DIR", help="for the JSON (default: bench/runs/<date>-<machine>)")
    arguments = parser.parse_args(given)
    settings: dict[str, Any] = {
        name: value
        for name in ("model", "dummy", "quantize", "threads")
        if (value := getattr(arguments, name)) is not None
    }
    n_tokens = arguments.prompt + arguments.answer
    engines = {
        on: LLM(
            **settings, max_num_seqs=1, max_model_len=n_tokens, n_pages=4 * n_tokens // PAGE_SIZE, n_checkpoints=16
        )._engine
        for on in (True, False)
    }
    engines[True].cache.store.listen(CacheEvents(engines[True].info, "m"))
    rng = random.Random(0)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{Path(directory) / 'events'}"
        publisher, context = EventPublisher(EventSockets(address)), zmq.Context()
        reader = context.socket(zmq.SUB)
        reader.connect(address)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        for i in range(arguments.requests + 2):
            ids = [rng.randrange(10, 500) for _ in range(arguments.prompt)]
            order = (True, False) if i % 2 else (False, True)
            spent = {on: request_s(engines[on], publisher, ids, arguments.answer) for on in order}
            if i > 1:
                row = dict(zip(("on_s", "steps", "blocks", "tell_s"), spent[True], strict=True))
                rows.append(row | {"off_s": spent[False][0]})
        context.destroy(linger=0)
        publisher.close()
    ratios = sorted(row["on_s"] / row["off_s"] for row in rows)
    result = {
        "bench": "kv_events", "date": now().isoformat(), "machine": machine(), "code": code(), **settings,
        "ratio": statistics.median(ratios), "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "step_ms": statistics.median(row["off_s"] / row["steps"] for row in rows) * 1e3,
        "blocks_a_step": sum(row["blocks"] for row in rows) / sum(row["steps"] for row in rows),
        "tell_us_a_step": sum(row["tell_s"] for row in rows) / sum(row["steps"] for row in rows) * 1e6,
        "block": block_us(20),
    }  # fmt: skip
    path = runs_directory(arguments.out) / f"cache-events-{arguments.dummy or 'built-in'}-{now():%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1))
    print(f"{json.dumps(result, indent=1)}\n{path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
