"""The output parser: what it makes of an answer, however that is cut. The cases of tests/null/drift are what models did."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltic.server.chat import arguments, calls, markup
from deltic.server.chat.arguments import convert, value_types
from deltic.server.chat.calls import AnswerDelta
from deltic.server.chat.parser import OutputParser
from tests.null import fuzz_parser
from tests.null.fuzz_parser import TOOLS, parse

DRIFT = json.loads((Path(__file__).parent / "drift" / "cases.json").read_text())
CASES = [pytest.param(case, id=f"{group}: {case['name']}") for group, cases in DRIFT["cases"].items() for case in cases]

XML = "<tool_call>\n<function=weather>\n{}</function>\n</tool_call>"
CITY = "<parameter=city>\nParis\n</parameter>\n"
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'


def canonical(value: Any) -> str:
    return json.dumps(value)


@pytest.mark.parametrize("case", CASES)
def test_recorded_drift(case: dict[str, Any]) -> None:
    """Right as a whole, cut at any one place, character by character, and in random pieces."""
    text, finish = case["text"], case.get("finish", "stop")
    tools = DRIFT["tools"] if case.get("tools", True) else None

    def read(parts: list[str]) -> tuple[AnswerDelta, bool]:
        return parse(parts, case.get("thinking", False), tools, finish == "length", case.get("fixed", False))

    whole, is_open = read([text])
    assert (whole.reasoning, whole.content) == (case.get("reasoning", ""), case.get("content", ""))
    expected = case.get("calls", [])
    assert [call.name for call in whole.calls] == [call["name"] for call in expected]
    for call, wanted in zip(whole.calls, expected, strict=True):
        if "cut" in wanted:
            assert call.arguments == wanted["cut"]
        else:
            assert canonical(json.loads(call.arguments)) == canonical(wanted["arguments"])
    assert is_open == any("cut" in call for call in expected)
    rng = random.Random(text)
    cuts = [[text[:at], text[at:]] for at in range(1, len(text))]
    for parts in (*cuts, list(text), *(fuzz_parser.cut(text, rng) for _ in range(20))):
        assert read(parts) == (whole, is_open), parts


def test_enough_was_recorded() -> None:
    assert len(CASES) >= 150


def test_random_texts() -> None:
    for seed in range(5000):
        rng = random.Random(seed)
        fuzz_parser.check(fuzz_parser.text_of(rng), rng)


PLAIN = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=200)


@settings(max_examples=300, deadline=None)
@given(PLAIN, PLAIN, st.booleans(), st.data())
def test_text_without_markup_comes_out_whole(a: str, b: str, thinking: bool, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(a)))
    delta, _ = parse([a[:at], a[at:]], thinking)
    said = a.lstrip("\n") if thinking else a
    assert (delta.reasoning, delta.content, delta.calls) == ((said, "", []) if thinking else ("", said, []))
    delta, _ = parse([f"<think>\n{a}\n</think>\n\n{b}"])
    assert delta.reasoning == (a.strip("\n") if a.strip() else "")
    assert delta.content == b.lstrip("\n")


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_string_is_an_argument(value: str) -> None:
    """Unless it has what ends it."""
    if not re.search(r"<(/?parameter|/?function|/?tool_call)", value):
        delta, _ = parse([XML.format(f"<parameter=city>\n{value}\n</parameter>\n")])
        assert json.loads(delta.calls[0].arguments) == {"city": value}
        assert delta.content == ""


PIECES = st.lists(
    st.sampled_from([*fuzz_parser.TAGS, *fuzz_parser.TEXTS, HERMES, XML, CITY, XML.format(CITY), "Paris"]), max_size=14
)


@settings(max_examples=300, deadline=None)
@given(PIECES, st.booleans(), st.booleans(), st.data())
def test_the_result_does_not_depend_on_the_cuts(
    pieces: list[str], thinking: bool, truncated: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    whole = parse([text], thinking, truncated=truncated)
    assert parse(parts, thinking, truncated=truncated) == whole
    assert parse(list(text), thinking, truncated=truncated) == whole
    if not truncated:
        for call in whole[0].calls:
            assert isinstance(json.loads(call.arguments), dict)
    if not whole[0].calls and "think" not in text and not thinking:
        assert whole[0].content == text


def test_a_value_that_a_grammar_made_has_no_example() -> None:
    """It has no closing tags, so those behind what begins like an example are the call's."""
    for begins in ('<tool_call>{"', "<tool_call>\n<function=now></function", "<function=weather><parameter=city>"):
        call = XML.format(f"<parameter=city>\n{begins}\n</parameter>\n")
        parser = OutputParser(thinking=False, tools=TOOLS, exact=True)
        said = parser.push(f"{call}\n{call}")
        said.add(parser.finish())
        assert [json.loads(one.arguments) for one in said.calls] == [{"city": begins}] * 2 and not said.content


def test_string_arguments_are_streamed() -> None:
    parser = OutputParser(thinking=False, tools=TOOLS)
    parser.push("<tool_call>\n<function=weather>\n")
    started = parser.push("<parameter=city>\n")
    assert started.calls[0].name == "weather" and started.calls[0].arguments == '{"city": "'
    assert [call.arguments for call in parser.push('New "').calls] == ['New \\"']
    assert [call.arguments for call in parser.push("York\n</para").calls] == ["York"]
    assert not parser.push("meter>\n")  # it is an end only if the call goes on behind it
    assert not parser.push("</function>\n</tool_call>")
    assert [call.arguments for call in parser.push("\n<tool_call>").calls] == ['"}']


def test_thoughts_and_text_are_streamed() -> None:
    parser = OutputParser(thinking=True, tools=TOOLS)
    assert parser.push("I see.").reasoning == "I see."
    assert not parser.push("\n") and parser.in_reasoning
    assert parser.push("So <").reasoning == "\nSo "
    assert parser.push("b> <tool_call> is ").reasoning == "<b> <tool_call> is "
    assert parser.push("</think>\n\nHi").content == "Hi" and not parser.in_reasoning
    assert parser.push(" there").content == " there"


def test_a_draft_is_held_until_it_shows_what_it_is() -> None:
    call = XML.format(CITY)
    parser = OutputParser(thinking=True, tools=TOOLS)
    assert parser.push("I look.\n\n").reasoning == "I look."
    assert not parser.push(call)
    assert not parser.push("\nwhich") and parser.in_reasoning
    assert parser.push("\n</think>").reasoning == f"\n\n{call}\nwhich"
    parser = OutputParser(thinking=True, tools=TOOLS)
    parser.push(f"I look.\n{call}")
    assert parser.finish().calls[0].name == "weather" and not parser.in_reasoning


def test_numbers_too_large_for_clients_are_the_largest() -> None:
    for number in ("8E47366", "9" * 5000):
        text = HERMES.replace("3}", f"{number}}}")
        delta, _ = parse([text])
        assert json.loads(delta.calls[0].arguments)["days"] == sys.float_info.max
        assert isinstance(msgspec.json.decode(delta.calls[0].arguments), dict)


@pytest.mark.parametrize(
    "value", [["</parameter></function>"], {"a": ["</parameter><parameter=x>", 1]}, ["\\</parameter></tool_call>"]]
)
def test_markup_in_strings_of_json(value: Any) -> None:
    tools = {"weather": {"properties": {"at": {"type": ["object", "array"]}, "city": {"type": "string"}}}}
    text = XML.format(f"<parameter=at>\n{json.dumps(value)}\n</parameter>\n{CITY}")
    whole = parse([text], tools=tools)
    assert json.loads(whole[0].calls[0].arguments) == {"at": value, "city": "Paris"}
    assert parse(list(text), tools=tools) == whole
    broken = text.replace('"', "", 1)  # then the next tag in a line of its own ends it
    assert parse([broken], tools=tools)[0].calls and parse(list(broken), tools=tools) == parse([broken], tools=tools)


def test_only_a_call_that_was_cut_is_open() -> None:
    head = "<tool_call>\n<function=weather>\n"
    for text, is_open in (
        (head + "<parameter=city>\nPar", True),
        (head + CITY, True),
        (head + CITY + "</function>", False),
        (head + CITY + "</function>\n</tool_call>\n", False),
        (XML.format(CITY) + head + CITY, True),
        (HERMES, False),
        (HERMES.removesuffix("</tool_call>"), False),
        (HERMES[:40], False),  # content
    ):
        for truncated in (True, False):
            assert parse([text], truncated=truncated)[1] == (is_open and truncated), text


class Counted:
    """A pattern that counts the characters it went through."""

    n = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def match(self, text: str, start: int) -> re.Match[str] | None:
        found = self._pattern.match(text, start)
        assert found
        Counted.n += found.end() - start + 1
        return found


@pytest.mark.parametrize(
    "parts",
    [
        ["<tool_call>", '{"'] + ["</tool_call>"] * 1000,
        ["<tool_call>", '{"'] + ["<tool_call>", "{x"] * 500,
        ["<tool_call>", '{"'] * 500,
        ["<tool_call>", '{"\\'] * 500,
        ["<tool_call>", '{"\\"'] * 500,
        ["<tool_call>", '{"a": "b", ', " </tool_call "] * 500,
    ],
    ids=["ends", "openers", "quotes", "escapes", "escaped quotes", "broken"],
)
def test_malformed_json_is_read_a_bounded_number_of_times(parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markup, "IN_STRING", Counted(markup.IN_STRING))
    monkeypatch.setattr(markup, "OUTSIDE_STRING", Counted(markup.OUTSIDE_STRING))
    n_decoded = 0
    read_calls = arguments.read_calls

    def counted(body: str, *rest: Any) -> Any:
        nonlocal n_decoded
        n_decoded += len(body)
        return read_calls(body, *rest)

    monkeypatch.setattr(calls, "read_calls", counted)
    Counted.n = 0
    assert parse(parts)[0].content == "".join(parts)
    assert Counted.n + n_decoded <= 5 * len("".join(parts))


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("5", {"type": "number"}, 5),
        ("1e3", {"type": "number"}, 1000.0),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("12", {"type": "string"}, "12"),
        ("null", {"type": "string"}, "null"),
        ("12", {"enum": ["12", "13"]}, "12"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("{'a': None}", {"type": "object"}, {"a": None}),
        ("{1, 2}", {"type": "array"}, "{1, 2}"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("(1, 2)", {"type": "array"}, "(1, 2)"),
        ("9" * 5000, {"type": "integer"}, int(sys.float_info.max)),
        ("9" * 250, {"type": "integer"}, int("9" * 250)),
        ("[8E47366, -1e999]", {"type": "array"}, [sys.float_info.max, -sys.float_info.max]),
        ("[NaN]", {"type": "array"}, "[NaN]"),
        ("1e999", {"type": "string"}, "1e999"),
        ("x y", None, "x y"),
        ("7", None, 7),
        ('"7"', None, '"7"'),
        ('"7"', {"type": "integer"}, 7),
        ('"7"', {"type": "string"}, '"7"'),
        ("7", {"const": "7"}, "7"),
        (" 7 ", {"type": ["integer", "string"]}, 7),
        ("1e999", {"type": "number"}, sys.float_info.max),
    ],
)
def test_values_are_typed_by_the_schema(raw: str, schema: Any, value: Any) -> None:
    converted = convert(raw, schema, {})
    assert converted == value and type(converted) is type(value)


def test_schema_types_end_on_cycles() -> None:
    schema: dict[str, Any] = {"$ref": "#/$defs/a"}
    root = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}}}
    assert value_types(schema, root) == {"integer"}


def test_schema_types_take_bounded_time() -> None:
    """Fifty definitions, each the union of all."""
    names = [f"d{i}" for i in range(50)]
    every = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    root: dict[str, Any] = {"$defs": {name: every | {"type": "integer"} for name in names}}
    assert value_types(every, root) == {"integer"}


def test_reading_takes_linear_time() -> None:
    """Twice the text takes about twice the time, whatever is repeated: one that is quadratic takes four times."""
    head = "<tool_call>\n<function=weather>\n"
    for unit, before, thinking in (
        ("<tool_call>", "", False), ("<tool_call> a ", "", True), ("<tool_call>\n", "", True), ("</parameter>", head + "<parameter=city>", False),
        ("\n</parameter>\n", head + "<parameter=city>", False), ("\n", head + "<parameter=city>\na</parameter>", False), ("<think>", "", True), (" ", "a", False), ("\n", "a", True), ("\n ", "", False),
        ("\n<parameter=city", head + "<parameter=days>", False), ("</think ", "", True), (XML.format(CITY), "", True), ("{\"", "<tool_call>", True),
        ("<tool_call> a ", '<tool_call>\n{"', True),
        ('"</parameter>', head + "<parameter=at>[", False),
    ):  # fmt: skip
        took = [math.inf, math.inf]
        for i in (0, 1, 0, 1):  # the better of two, since others have the processor, too
            parts = list(before + unit * ((2_000, 8_000)[i] // len(unit)))
            start = time.process_time()
            parse(parts, thinking)
            took[i] = min(took[i], time.process_time() - start)
        assert took[1] < 10 * took[0], (unit, took)
