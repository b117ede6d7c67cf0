"""Forms of offline answers, from the built-in model: schemas, types, texts to choose from, forced calls."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Literal

import jsonschema
import msgspec
import pytest

from deltic import LLM, SamplingParams
from deltic.llm import ELSEWHERE, SAMPLING

ASKED = [{"role": "user", "content": "Who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "sky": {"enum": ["blue", "grey"]}},
    "required": ["age", "sky"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}}}


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    is_day: bool
    sky: Literal["blue", "grey"]


@dataclasses.dataclass
class Plain:
    is_day: bool


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=2, max_num_seqs=4)


@pytest.mark.parametrize(
    "form", [SCHEMA, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}], ids=["own", "openai"]
)
def test_a_schema(llm: LLM, form: object) -> None:
    for given in (ASKED, "Once upon a time"):
        call = llm.chat if given is ASKED else llm.generate
        (answer,) = call(given, response_format=form, max_tokens=300, temperature=0.0)  # type: ignore[operator]
        jsonschema.validate(answer.parsed, SCHEMA)
        assert answer.finish_reason == "stop"


def test_types(llm: LLM) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        is_day: bool

    for kind in (Struct, Plain, Model):
        (answer,) = llm.chat(ASKED, response_format=kind, max_tokens=300, temperature=0.0)
        assert type(answer.parsed) is kind and answer.parsed.is_day in (True, False)


def test_each_prompt_has_its_own_form(llm: LLM) -> None:
    each = [
        SamplingParams(max_tokens=300, temperature=0.0, response_format=Struct),
        SamplingParams(max_tokens=40, seed=1, structured_outputs={"choice": ["yes", "no"]}),
        SamplingParams(max_tokens=40, seed=1, structured_outputs={"regex": "[0-9]{3}"}),
        SamplingParams(max_tokens=3, seed=1, response_format=Struct),
    ]
    one, two, three, cut = llm.chat([ASKED] * 4, each)
    assert type(one.parsed) is Struct and two.text in ("yes", "no") and re.fullmatch("[0-9]{3}", three.text)
    assert (cut.finish_reason, cut.parsed, two.parsed) == ("length", None, None)


def test_behind_a_thought_that_has_a_budget(llm: LLM) -> None:
    (answer,) = llm.chat(
        ASKED, response_format=Struct, max_tokens=300, temperature=0.0, enable_thinking=True, thinking_budget=5
    )
    assert type(answer.parsed) is Struct and answer.reasoning


def test_a_forced_call(llm: LLM) -> None:
    (answer,) = llm.chat(
        ASKED,
        tools=[{"type": "function", "function": WEATHER}],
        tool_choice="required",
        max_tokens=300,
        temperature=0.0,
    )
    assert answer.finish_reason == "tool_calls" and answer.tool_calls[0]["name"] == "weather"


def test_within_an_event_loop_as_a_notebook_has_one(llm: LLM) -> None:
    async def cell() -> object:
        return llm.chat(ASKED, response_format=Plain, max_tokens=300, temperature=0.0)[0].parsed

    assert type(asyncio.run(cell())) is Plain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"response_format": {"type": "object", "properties": {"a": {"pattern": "("}}}}, "response_format"),
        ({"response_format": int.__add__}, "no JSON schema can be made of"),
        ({"structured_outputs": {"colour": "red"}}, "structured_outputs"),
        ({"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, "excludes response_format"),
        ({"tool_choice": "required"}, "there are no tools"),
    ],
)
def test_what_cannot_be_held_to_is_refused(llm: LLM, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        llm.chat(ASKED, **options)
    if "tool_choice" not in options:
        with pytest.raises(ValueError, match=said):
            llm.generate("x", **options)
    assert not llm.has_work


def test_names_of_other_libraries_are_of_what_there_is() -> None:
    assert {*ELSEWHERE.values()} <= {*SAMPLING, "params", "progress", "lora"} and not {*ELSEWHERE} & {*SAMPLING}
