"""Pictures of a model on several machines: the first one has the tower, and answers are one machine's, to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.mirror import StepTeller
from deltic.engine.step import Step
from tests.cpu.test_picture_prompts import PROMPTS, request
from tests.cpu.test_stages import SETTINGS, built, said
from tests.staged import Stage
from tests.tiny import tiny_checkpoint


def answers(runner: Any) -> list[Any]:
    """What the prompts are answered, all at once, with some preempted; the second time from the cache."""
    found = []
    for _ in range(2):
        engine, outputs = Engine(runner), dict[tuple[str, int], list[Any]]()
        for name, parts in PROMPTS.items():
            engine.add(request(name, *parts, max_tokens=40, logprobs=3))
        n = 0
        while engine.has_work():
            n += 1
            if n in (6, 14, 30):
                for sequence in [*engine.scheduler._decodes, *engine.scheduler._prefills][1:3]:
                    engine.scheduler._preempt(sequence)
            for output in engine.step():
                outputs.setdefault((output.id, output.index), []).append(output)
            engine.check()
        found.append(said(outputs))
    return found


@pytest.mark.parametrize(("kind", "settings"), [("dense", {}), ("moe", {"quantize": "int8"})])
def test_answers_about_pictures(kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = str(tiny_checkpoint(kind, n_layers=12, has_tower=True))
    config = EngineConfig(model=checkpoint, **{**SETTINGS, "n_pages": 40, "max_picture_tokens": 128, **settings})
    expected = answers(built(config))
    assert all(said_of[0] for said_of in expected[0].values())
    sent: list[int] = []
    of = StepTeller.of

    def told(teller: StepTeller, step: Step) -> Any:
        message = of(teller, step)
        sent.extend(len(p.pixels) for one in message.sequences if one.newcomer for p in one.newcomer.request.pictures)
        return message

    monkeypatch.setattr(StepTeller, "of", told)
    stages = [Stage(checkpoint, "--threads", "1") for _ in range(2)]
    try:
        staged = built(dataclasses.replace(config, stages=tuple(stage.address for stage in stages)))
        assert staged.info.pictures is not None
        assert answers(staged) == expected
        assert sent and not any(sent)  # pixels stay here
        staged.neighbours.behind.close()
        without = dataclasses.replace(config, max_picture_tokens=0, stages=tuple(stage.address for stage in stages))
        assert built(without).info.pictures is None
    finally:
        for stage in stages:
            stage.close()
