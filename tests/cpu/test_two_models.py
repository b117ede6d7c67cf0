"""A language model and a speech model in one engine process: each says, to the bit, what it says alone."""

from __future__ import annotations

import asyncio

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams
from deltic.host.client import EngineClient
from deltic.host.supervisor import EngineHost
from deltic.runtime.build import build_runner
from tests.cpu.test_engine import prompt
from tests.cpu.test_speech_engine import Speaking, drawn
from tests.tiny import tiny_checkpoint

Said = dict[tuple[str, int], tuple[list[int], list[float], bytes]]
"""Token ids, log-probabilities and audio, by sequence."""


def said(outputs: list[Output]) -> Said:
    found: Said = {}
    for output in outputs:
        assert output.finish_reason in (None, "stop", "length"), output.error
        ids, logprobs, audio = found.get((output.id, output.index), ([], [], b""))
        more = [entry.logprob for entry in output.logprobs or []]
        found[output.id, output.index] = ids + output.token_ids, logprobs + more, audio + output.audio
    return found


def said_alone(engine: Engine, requests: list[Request]) -> Said:
    outputs = []
    for request in requests:
        engine.add(request)
        while engine.has_work():
            outputs += engine.step()
    return said(outputs)


async def said_together(jobs: list[tuple[EngineConfig, list[Request]]]) -> list[Said]:
    """All requests of all models at once, in one process."""
    clients = [EngineClient(config, 100) for config, _ in jobs]
    host = EngineHost(clients)
    await host.start()
    try:
        heard: list[list[Output]] = [[] for _ in jobs]
        for client, (_, requests), outputs in zip(clients, jobs, heard, strict=True):
            await client.ready()
            for request in requests:
                client.submit(request, outputs.extend)
        await asyncio.wait_for(asyncio.gather(*(client.drained() for client in clients)), 60)
        assert all(client.n_restarts == 0 for client in clients)
        return [said(outputs) for outputs in heard]
    finally:
        await host.stop()


def test_each_says_what_it_says_alone() -> None:
    """They share a pool of threads, of which one wants fewer."""
    text = EngineConfig(
        model=str(tiny_checkpoint("dense")), device="cpu", threads=2, max_model_len=512, memory_gb=1,
        max_num_seqs=4,
    )  # fmt: skip
    speaking = Speaking(threads=1)
    speech = EngineConfig(model=str(speaking.path), device="cpu", threads=1, max_model_len=512, memory_gb=1)
    chats = [
        Request(
            id=str(i), prompt_ids=prompt(150 + 50 * i),
            params=SamplingParams(max_tokens=60, seed=i, temperature=0.8, logprobs=0, ignore_eos=True, n=1 + i % 2),
        )
        for i in range(4)
    ]  # fmt: skip
    utterances = drawn(speaking)
    for i, request in enumerate(utterances):
        request.id = str(i)  # both models have the same ids
    alone = [
        said_alone(Engine(build_runner(text, lambda stage, done: None)), chats),
        said_alone(speaking.engine, utterances),
    ]
    assert asyncio.run(said_together([(text, chats), (speech, utterances)])) == alone
    assert all(audio for _, _, audio in alone[1].values())
