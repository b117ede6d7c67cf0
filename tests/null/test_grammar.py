"""Schemas and grammars: what a request asks for becomes a Constraint, and the grammar admits what is valid and nothing else."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

import deltic
from deltic.engine.messages import Constraint
from deltic.server.chat import grammar
from deltic.server.chat import schema as schemas
from deltic.server.chat.arguments import convert
from deltic.server.chat.constraint import Constrainer
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.request import Sampling
from deltic.text import Tokenizer
from tests.fake_engine import END, TEMPLATE, FakeEngineClient, byte_tokenizer
from tests.null.test_http import client_of, error_of, post

DEMO = Path(deltic.__file__).parent / "demo"


def tagged(triggers: list[str], begin: str, schema: Any = True) -> dict[str, Any]:
    part = {"begin": begin, "schema": schema, "end": ">"}
    return {"type": "structural_tag", "structures": [part], "triggers": triggers}


HELLO: Any = [{"role": "user", "content": "hello"}]
TOKENIZER = byte_tokenizer()
BYTES = llguidance.LLTokenizer(TOKENIZER._backend.to_str(), eos_token=END)
THINK_END = 264
JSON_TEMPLATE = TEMPLATE.replace("<function=", "<call=").replace("<tool_call>", '<tool_call>{"name": "arguments"}')
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "label": {"type": "string"}},
    "required": ["x"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, strict: bool | None = None) -> dict[str, Any]:
    function = {"name": name, "parameters": POINT if parameters is None else parameters}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


def constraint_of(path: str = "/v1/chat/completions", template: str = TEMPLATE, **fields: Any) -> Constraint | None:
    """What the engine gets."""
    engine = FakeEngineClient()
    body = fields | ({"messages": HELLO} if "chat" in path else {"prompt": "hello"})
    response = post(engine, path, body, template=template)
    assert response.status_code == 200, response.text
    return engine.requests[0].params.constraint


def grammar_of(**fields: Any) -> str:
    constraint = constraint_of(**fields)
    assert constraint is not None
    return constraint.grammar


def accepts(text_of_grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, text_of_grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def xml(name: str, **arguments: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def parsed(text: str, tools: dict[str, Any]) -> list[tuple[str | None, Any]]:
    parser = OutputParser(thinking=False, tools=tools)
    delta = parser.push(text)
    delta.add(parser.finish())
    return [(call.name, json.loads(call.arguments)) for call in delta.calls]


# From the wire.


def json_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": schema} | more}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {}]}', "[1]"),
        ({"response_format": {"type": "json_object", "schema": POINT}}, '{"x": 1}', '{"a": 1}'),
        ({"response_format": json_format(POINT)}, '{"x": 1, "label": "a"}', '{"x": 1.5}'),
        ({"response_format": json_format(POINT, strict=False)}, '{\n  "x": 1\n}', '{"x": 1, "y": 2}'),
        ({"response_format": json_format(None)}, "{}", "1"),
        ({"response_format": json_format({"type": "array", "items": {"enum": ["a", None]}})}, '["a", null]', '["b"]'),
        ({"guided_json": POINT}, '{"x": 1}', "{}"),
        ({"guided_json": json.dumps(POINT)}, '{"x": 1}', "{}"),
        ({"guided_regex": r"[a-c]+/\d"}, "abc/1", "abd/1"),
        ({"guided_choice": ["yes", 'n"o\n']}, 'n"o\n', "maybe"),
        ({"guided_grammar": 'start: "a" /b+/'}, "abb", "ab c"),
        ({"guided_grammar": 'root ::= "a" [0-9]+'}, "a17", "a"),
        ({"grammar": 'root ::= "a" [0-9]+'}, "a17", "a"),
        ({"ebnf": 'root ::= "a" [0-9]+', "grammar": ""}, "a17", "a"),
        ({"regex": "a{3}", "guided_decoding_backend": "guidance"}, "aaa", "aa"),
        ({"json_schema": POINT}, '{"x": 1}', "{}"),
        ({"json_schema": json.dumps(POINT), "guided_json": POINT}, '{"x": 1}', "{}"),
        ({"guided_grammar": "start: A\nA: /b+/", "structured_outputs": {"grammar": "start: A\nA: /b+/"}}, "bb", "a"),
        ({"guided_grammar": 'start: a ";"\na[capture, max_tokens=2]: A\nA: /[a-z]*/'}, "bb;", "b"),
        ({"structured_outputs": {"json": POINT}}, '{"x": 1}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"structured_outputs": {"regex": "a{3}"}}, "aaa", "aa"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "b", "ab"),
        ({"structured_outputs": {"grammar": 'start: x ";"\nx: "(" x ")" | "1"'}}, "((1));", "((1);"),
    ],
)
def test_formats(fields: dict[str, Any], good: str, bad: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        text = grammar_of(path=path, **fields)
        assert accepts(text, good) and not accepts(text, bad)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"tools": [tool("f")]}, {"tools": [tool("f", strict=True)], "tool_choice": "none"},
     {"tools": [tool("f")], "parallel_tool_calls": True}, {"thinking_budget": 5}],
)  # fmt: skip
def test_what_asks_for_nothing_is_not_constrained(fields: dict[str, Any]) -> None:
    assert constraint_of(**fields) is None


def test_thoughts() -> None:
    gap, line = (10, 10), 10
    free = constraint_of(enable_thinking=True, response_format={"type": "json_object"})
    assert free and (free.think_end_id, free.think_budget, free.close_ids, free.begin_ids) == (THINK_END, None, (), gap)
    for fields in ({"thinking_budget": 7}, {"chat_template_kwargs": {"thinking_budget": 7}}):
        budget = constraint_of(enable_thinking=True, **fields)
        assert budget == Constraint(think_end_id=THINK_END, think_budget=7, close_ids=(line, THINK_END, *gap))
    both = constraint_of(enable_thinking=True, thinking_budget=0, guided_choice=["a"])
    assert both and both.grammar and (both.think_budget, both.close_ids) == (0, (line, THINK_END))
    assert both.begin_ids == gap
    engine = FakeEngineClient()
    twice: dict[str, Any] = {"thinking_budget": 3, "chat_template_kwargs": {"thinking_budget": 4}}
    response = post(engine, "/v1/chat/completions", {"messages": HELLO, "enable_thinking": True} | twice)
    assert error_of(response)["param"] == "thinking_budget"


def test_structural_tags() -> None:
    call = {"begin": "<tool_call>\n<function=f>", "schema": POINT, "end": "</function>\n</tool_call>"}
    parts = [{"begin": f"<say={i}>", "schema": {"enum": [i]}, "end": "</say>"} for i in range(3)]
    tags = {
        "type": "structural_tag",
        "structures": [*parts, call, {"begin": "!", "end": ""}],
        "triggers": ["<tool_call>", "<say=", "!"],
    }
    said = '<tool_call>\n<function=f>{"x": 1}</function>\n</tool_call>'
    for fields in (
        {"response_format": tags},
        {"structured_outputs": {"structural_tag": json.dumps(tags)}},
        {"structured_outputs": {"structural_tag": tags}, "response_format": tags},
    ):
        text = grammar_of(**fields)
        for good in (
            "",
            "a < <say b\n",
            "<say=1>1</say>",
            f"a <say=1>1</say>\n<say=0>0</say>b{said}{said} !null",
            'e![{"a": "!<say="}]',
        ):
            assert accepts(text, good), good
        for bad in ("a <say=1>2</say>", "<say=3>", "<say=1>1", "<tool_call>", "!", "! a", said.replace("1", '"1"')):
            assert not accepts(text, bad), bad


def test_words_that_may_and_may_not_come() -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        found = constraint_of(path, bad_words=["ab", " c", "<|im_end|>"], allowed_token_ids=[0, 9, 97, 9])
        assert found and found.allowed == bytes([1, 2, *[0] * 10, 2])
        assert found.bad_ids == ((97, 98), (99,), (END,))  # no token begins with a space here, but the space
        both = constraint_of(path, bad_words=["a"], guided_choice=["a", "b"])
        assert both and both.bad_ids == ((97,),) and both.grammar and not both.allowed
        assert constraint_of(path, bad_words=[]) is None
    demo = Constrainer(Tokenizer.load(DEMO), None)
    made = demo.completion(Sampling(bad_words=["hello", "zqxzq"]))
    assert made and [demo._tokenizer.decode(ids) for ids in made.bad_ids] == ["hello", " hello", "zqxzq"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [272]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**30]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["a", " "]}, "bad_words[1]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"bad_words": ["a" * 70_000]}, "bad_words"),
    ],
)
def test_words_that_cannot_be(fields: dict[str, Any], param: str) -> None:
    for path, more in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
        response = post(FakeEngineClient(), path, more | fields)
        assert response.status_code == 400 and error_of(response)["param"] == param, response.text


def test_limits_that_show_only_in_a_text() -> None:
    """They are found before the engine is asked."""
    assert grammar_of(structured_outputs={"choice": [f"choice number {i}" for i in range(3000)]})
    one = {"type": "object", "additionalProperties": False}
    names = [one | {"properties": {f"p{i}": {"type": "integer"}}, "required": [f"p{i}"]} for i in range(2100)]
    for fields, said in (
        ({"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}}, "too many expressions constructed"),
        ({"response_format": json_format({"anyOf": names})}, "2000"),
    ):
        response = post(FakeEngineClient(), "/v1/chat/completions", {"messages": HELLO} | fields)
        assert response.status_code == 400 and said in error_of(response)["message"]


def test_tool_choice() -> None:
    tools = [tool("f"), tool("g", {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]})]
    two = f"{xml('f', x='1')}\n{xml('g', s='a')}"
    required = grammar_of(tools=tools, tool_choice="required")
    assert accepts(required, xml("f", x="1")) and accepts(required, two) and not accepts(required, "hello")
    assert not accepts(required, xml("f", x="one")) and not accepts(required, xml("h"))
    once = grammar_of(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert accepts(once, xml("g", s="a")) and not accepts(once, two)
    named = grammar_of(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert accepts(named, xml("g", s="<b>\n")) and not accepts(named, xml("f", x="1")) and not accepts(named, two)
    for mode in ("auto", "required"):
        some = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "g"}}]},
        }
        text = grammar_of(tools=tools, tool_choice=some, parallel_tool_calls=False)
        assert accepts(text, xml("g", s="a")) and not accepts(text, xml("f", x="1"))
        assert accepts(text, "hello") is (mode == "auto")


def test_strict_tools() -> None:
    text = grammar_of(tools=[tool("f", strict=True), tool("g")])
    call = xml("f", x="-5")
    for good in (
        "",
        "any <b> text\n",
        f"text\n\n{call}",
        call,
        f"{call}\n{call}",
        "<think>a</think> b",
        xml("g", x="5"),
    ):
        assert accepts(text, good), good
    for bad in (
        xml("f"),
        xml("f", x="a"),
        xml("f", x="1", y="2"),
        f"{call}\nmore",
        call[:-1],
        "<function=f>",
        "<tool_call>",
    ):
        assert not accepts(text, bad), bad
    once = grammar_of(tools=[tool("g")], parallel_tool_calls=False)
    assert accepts(once, xml("g", x="5")) and not accepts(once, f"{xml('g', x='5')}\n{xml('g', x='5')}")


def test_json_form_of_calls() -> None:
    text = grammar_of(tools=[tool("f", strict=True)], template=JSON_TEMPLATE)
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert accepts(text, call) and accepts(text, f"hello {call}")
    assert not accepts(text, call.replace("1", '"1"'))
    assert parsed(call, {"f": POINT}) == [("f", {"x": 1})]


def test_json_or_calls() -> None:
    text = grammar_of(tools=[tool("f")], response_format=json_format(POINT))
    assert accepts(text, '{"x": 1}') and accepts(text, xml("f", x="1")) and not accepts(text, "hello")


def test_a_tool_that_cannot_be_constrained() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    text = grammar_of(tools=[tool("f", odd)], tool_choice="required")
    assert accepts(text, xml("f", a="[1]", b="c")) and not accepts(text, "hello")
    assert accepts(
        grammar_of(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"), xml("f")
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": 1}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": json_format({"type": "strin"})}, "response_format.json_schema.schema.type"),
        ({"response_format": json_format({"items": {"type": ["null", "objekt"]}})}, "response_format.json_schema.schema.items.type"),
        (
            {"response_format": json_format({"properties": {"a": {"anyOf": [{"type": "strin"}]}}})},
            "response_format.json_schema.schema.properties.a.anyOf[0].type",
        ),
        (
            {"response_format": json_format({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"pattern": "("}}})},
            "response_format.json_schema.schema.$defs.n",
        ),
        ({"response_format": json_format({"items": {"minLenght": 1}})}, "response_format.json_schema.schema.items.minLenght"),
        ({"response_format": json_format({"minLength": 10**9})}, "response_format.json_schema.schema.minLength"),
        ({"response_format": json_format({"uniqueItems": True})}, "response_format.json_schema.schema.uniqueItems"),
        ({"response_format": json_format({"$ref": "http://x/y"})}, "response_format.json_schema.schema.$ref"),
        ({"response_format": json_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})}, "response_format.json_schema.schema.$defs.a"),
        ({"response_format": json_format({"required": "a"})}, "response_format.json_schema.schema.required"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": r"a(?=b)"}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"guided_grammar": "start: <|im_end|>"}, "guided_grammar"),
        ({"guided_grammar": "start: <[5]>"}, "guided_grammar"),
        ({"guided_grammar": "start: <|user|>"}, "guided_grammar"),
        ({"guided_grammar": "start: a\na[temperature=0.5]: /x+/"}, "guided_grammar"),
        ({"ebnf": "start: a("}, "ebnf"),
        ({"json_schema": {"type": "strin"}}, "json_schema.type"),
        ({"json_schema": "{"}, "json_schema"),
        ({"regex": "a", "guided_regex": "b"}, "regex"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
        ({"response_format": tagged(["<a"], "<b>")}, "response_format.structures[0].begin"),
        ({"response_format": tagged(["<", "<b"], "<b>")}, "response_format.structures[0].begin"),
        ({"response_format": tagged(["<b", "<c"], "<b>")}, "response_format.triggers"),
        ({"response_format": tagged(["<b<think>"], "<b<think>")}, "response_format.triggers"),
        ({"response_format": tagged(["<b"], "<b>", {"type": "strin"})}, "response_format.structures[0].schema.type"),
        ({"response_format": tagged(["<b"], "<b>"), "tools": [tool("f")]}, "response_format"),
        ({"guided_grammar": "start[temperature=0.5]: /a/"}, "guided_grammar"),
        ({"guided_grammar": "start: start"}, "guided_grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "tools": [tool("f")]}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [tool("f")]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool("f")]}, "tool_choice.function"),
        ({"tool_choice": {"type": "tool"}, "tools": [tool("f")]}, "tool_choice.type"),
        ({"tools": [tool("f", {"properties": {"a": {"not": {}}}}, strict=True)]}, "tools[0].function.parameters.properties.a.not"),
        ({"tools": [tool("f", {"type": "array"}, strict=True)]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("f", {"properties": {"a": {"type": "string", "pattern": "("}}}, strict=True)]}, "tools[0].function.parameters.properties.a.pattern"),
        ({"tools": [tool("f", strict=True), tool("f")]}, "tools[1].function.name"),
        (
            {"response_format": {"type": "json_object"}, "continue_final_message": True,
             "messages": [*HELLO, {"role": "assistant", "content": "{"}]},
            "continue_final_message",
        ),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngineClient()
    response = post(engine, "/v1/chat/completions", {"messages": HELLO} | fields)
    assert response.status_code == 400 and error_of(response)["param"] == param, response.text
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": json_format({"oneOf": [{"type": "string"}] * 2})}, "Use anyOf"),
        ({"response_format": json_format({"items": {"type": "objekt"}})}, "'objekt' is no type. Give one of null, boolean"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex: excludes response_format. Give"),
        ({"response_format": json_format(POINT), "guided_regex": "a"}, "guided_regex: excludes response_format. Give"),
        ({"guided_grammar": "hello"}, "is neither Lark, which has a rule `start:`, nor GBNF, which has `root ::=`"),
        ({"guided_grammar": 'root ::= "a" ('}, "cannot be read as GBNF: Expected ')' at line 1"),
        ({"guided_grammar": "root ::= a\na ::= [b-a]"}, "written as Lark: line 4, column 4: invalid regex"),
        ({"guided_grammar": 'start: "a" ('}, "guided_grammar: line 1, column 13: Expected token ')'"),
    ],
)  # fmt: skip
def test_what_a_refusal_says(fields: dict[str, Any], said: str) -> None:
    """In terms of what was sent, not of what it became."""
    message = error_of(post(FakeEngineClient(), "/v1/chat/completions", {"messages": HELLO} | fields))["message"]
    assert said in message and "coerce" not in message


def test_refusals_of_the_vocabulary() -> None:
    body = {"messages": HELLO, "tools": [tool("f")], "tool_choice": "required"}
    response = post(FakeEngineClient(), "/v1/chat/completions", body, template="{{ messages[0].content }}")
    assert error_of(response)["param"] == "tool_choice"


def deep(n: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


def chained(link: Callable[[Any], Any], n: int) -> Any:
    """Definitions each of which refers to the next."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{n}": {"type": "string"}}}


HOSTILE: dict[str, Any] = {
    "deep": deep(200),
    "deep value": {"const": json.loads("[" * 400 + "]" * 400)},
    "enum": {"enum": [f"{i:08}" for i in range(100_000)]},
    "long": {"type": "string", "minLength": 10**9},
    "wide": {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}},
    "optional": {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(2000)}},
    "states": {"type": "string", "pattern": "^(a|b)*a(a|b){200}{200}{200}$"},
    "loop": {"$ref": "#"},
    "mutual": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    "product": {"allOf": [{"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(12)]} for i in range(12)]},
    "many bad": {"properties": {f"p{i}": {"anyOf": [{"type": "string"}] * 50 + [{"type": "x"}]} for i in range(300)}},
    "chain": chained(lambda next: {"type": "object", "properties": {"a": next}}, 5000),
    "plain chain": chained(lambda next: next, 3000),
    "pointers": {"properties": {f"p{i}": {"$ref": f"#/properties/p{i + 1}"} for i in range(3000)}},
    "listed": {"anyOf": [{"enum": list(range(1000 * i, 1000 * i + 1000))} for i in range(100)]},
    "listed texts": {"anyOf": [{"enum": [str(1000 * i + j) for j in range(1000)]} for i in range(100)] + [{"type": "integer"}]},
    "oneOf": {"oneOf": [{"$ref": "#/$defs/u"}] * 3000, "$defs": {"u": {"anyOf": [{"title": f"{i}"} for i in range(3000)]}}},
    "remainders": {"multipleOf": 999_983},
    "many remainders": {"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]},
    "large": {"properties": {f"p{i}": {"type": "string"} for i in range(40_000)}, "required": [f"p{i}" for i in range(40_000)]},
}  # fmt: skip


A, B = "A: /.*/\n", f"B: {'A ' * 30}\n"
HOSTILE_TEXTS: dict[str, dict[str, str]] = {
    "long": {"guided_regex": ".*" * 20_000},
    "nested": {"guided_grammar": f"start: T\n{A}{B}C: {'B ' * 30}\nT: {'C ' * 30}\n"},
    "loop": {"guided_grammar": "start: T\nT: T"},
    "flat": {"guided_grammar": f"start: T\n{A}T: {'A ' * 8000}"},
    "brackets": {"guided_grammar": "root ::= " + "(" * 16_000},
    "repeated": {"guided_grammar": "start: x{1000}\nx: y{1000}\ny: z{1000}\nz: /a|b/"},
    "ambiguous": {"guided_grammar": 'start: x\nx: x x x x | "a" | ""'},
}


@pytest.mark.parametrize("which", HOSTILE_TEXTS)
def test_hostile_texts_end_soon(which: str) -> None:
    """In time of a CPU, which does not depend on what else the machine does."""
    started_s = time.process_time()
    response = post(FakeEngineClient(), "/v1/chat/completions", {"messages": HELLO} | HOSTILE_TEXTS[which])
    assert time.process_time() - started_s < 4.0
    assert response.status_code == (200 if which in ("repeated", "ambiguous") else 400), response.text


@pytest.mark.parametrize("which", HOSTILE)
def test_hostile_schemas_end_soon(which: str) -> None:
    """Refused, or taken and compiled: in bounded time, and the next request is answered."""
    engine = FakeEngineClient(max_model_len=10**7, n_pages=200_000)
    started_s = time.process_time()
    response = post(engine, "/v1/chat/completions", {"messages": HELLO, "response_format": json_format(HOSTILE[which])})
    assert time.process_time() - started_s < 4.0
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert error_of(response)["param"].startswith("response_format.json_schema.schema")
        assert len(response.content) < 4096
    body = {"messages": HELLO, "tools": [tool("f", {"properties": {"a": HOSTILE[which]}}, strict=True)]}
    started_s = time.process_time()
    assert post(engine, "/v1/chat/completions", body).status_code in (200, 400)
    assert time.process_time() - started_s < 4.0


def at_doors(schema: Any) -> dict[str, dict[str, Any]]:
    """A request for an answer of this schema, by the path of each door that takes one."""
    named = {"type": "json_schema", "name": "s", "schema": schema}
    return {
        "/v1/chat/completions": {"messages": HELLO, "response_format": json_format(schema)},
        "/v1/completions": {"prompt": "Hello", "guided_json": schema},
        "/v1/responses": {"input": "Hello", "text": {"format": named}},
        "/v1/messages": {
            "messages": HELLO,
            "max_tokens": 5,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        "/api/chat": {"messages": HELLO, "format": schema, "stream": False},
        "/api/generate": {"prompt": "Hello", "format": schema, "stream": False},
    }


@pytest.mark.parametrize("path", at_doors({}))
def test_hostile_schemas_end_soon_at_every_door(path: str) -> None:
    """Those of each kind: deep, endless, large, exponential; as that door's error, and a good one is taken behind them."""
    for which in ("deep", "deep value", "long", "states", "loop", "mutual", "product", "large"):
        body = {"model": "fake", **at_doors(HOSTILE[which])[path]}
        began_s = time.process_time()
        response = post(FakeEngineClient(), path, body)
        assert response.status_code in (200, 400) and time.process_time() - began_s < 4.0, which
        assert response.status_code == 200 or len(response.content) < 4096, which
    response = post(FakeEngineClient(), path, {"model": "fake", **at_doors(POINT)[path]})
    assert response.status_code == 200, response.text


def test_a_grammar_is_compiled_beside_the_event_loop_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []
    error_of_grammar = grammar.error_of

    def counted(text: str, own: bool = True) -> str:
        built.append(True)
        return error_of_grammar(text, own)

    monkeypatch.setattr(grammar, "error_of", counted)

    async def go() -> None:
        engine = FakeEngineClient()
        async with client_of(engine) as client:
            body = {"messages": HELLO, "response_format": json_format(POINT)}
            counts = []
            for _ in range(3):
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
                counts.append(len(built))
            assert counts[0] > 0 and counts == counts[:1] * 3

    asyncio.run(go())


@pytest.mark.parametrize("where", ["format", "tool"])
def test_chains_of_references(where: str) -> None:
    """The longest that are taken are compiled, and one that would end the process is not."""
    for link, n in (
        (lambda next: next, 900),
        (lambda next: {"type": "object", "properties": {"a": next}}, 450),
        (lambda next: {"type": "array", "items": next}, 450),
        (lambda next: {"anyOf": [next, {"type": "integer"}]}, 450),
        (lambda next: {"allOf": [next]}, 450),
    ):  # fmt: skip
        for more, status in ((0, 200), (200, 400)):
            schema = chained(link, n + more)
            fields: dict[str, Any] = {"response_format": json_format(schema)}
            if where == "tool":
                root = {
                    "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/d0"}}},
                    "$defs": schema["$defs"],
                }
                fields = {"tools": [tool("f", root, strict=True)]}
            engine = FakeEngineClient(max_model_len=10**7, n_pages=200_000)
            response = post(engine, "/v1/chat/completions", {"messages": HELLO} | fields)
            assert response.status_code == status, response.text[:300]


def test_multiples() -> None:
    for good in ({"multipleOf": 1e-9}, {"multipleOf": 0.25}, {"allOf": [{"multipleOf": 12}, {"multipleOf": 0.5}]}):
        format_grammar(good)
    for bad in ("2", 0, -1, True, 20_001, 0.20001):
        with pytest.raises(schemas.GrammarError):
            schemas.clean({"multipleOf": bad})


@pytest.mark.parametrize("key", ['"a"', "'a'", "k" * 257, " a", "a>b"])
def test_names_that_cannot_be_written(key: str) -> None:
    with pytest.raises(schemas.GrammarError):
        calls_grammar({"properties": {key: {"type": "string"}}})


def test_a_call_without_tags_is_no_text() -> None:
    """It would be read as a call, whose arguments nothing had held to the schema."""
    text = grammar_of(tools=[tool("f", strict=True)])
    bare = '{"name": "f", "arguments": {"y": 1}}'
    assert parsed(bare, {"f": POINT}) and not accepts(text, bare) and not accepts(text, f"\n{bare}")
    assert accepts(text, f"So: {bare}") and accepts(text, '{"name": "f"}')


def test_names_of_tools_are_one_line() -> None:
    response = post(FakeEngineClient(), "/v1/chat/completions", {"messages": HELLO, "tools": [tool("f\n")]})
    assert response.status_code == 400


# What the grammars admit.


def random_schema(rng: random.Random, depth: int = 2, bounded: bool = False) -> dict[str, Any]:
    """A schema of the kinds that requests have. bounded: its values cannot be long."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: (
            {"type": "string", "maxLength": rng.randint(0, 12)} if bounded or rng.random() < 0.5 else {"type": "string"}
        ),
        lambda: {"type": "string", "pattern": rng.choice(["^[a-f]{1,6}$", "^(on|off)$", r"^[0-9]{4}-[0-9]{2}$"])},
        lambda: {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
        lambda: {"enum": rng.sample(["red", "green", "12", 12, None, True, 1.5], rng.randint(1, 4))},
        lambda: {"const": rng.choice(["x", 3, False, None])},
        lambda: {"type": "integer", "minimum": rng.randint(-20, 5), "maximum": rng.randint(6, 3000)},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": ["string", "null"], "maxLength": 8},
        lambda: {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    ]
    if not bounded:
        kinds += [
            lambda: {"type": "integer"},
            lambda: {"type": "number"},
            lambda: {"type": "number", "exclusiveMinimum": 0},
        ]
    if depth:
        kinds += [
            lambda: {
                "type": "array", "items": random_schema(rng, depth - 1, bounded), "minItems": rng.randint(0, 1),
                "maxItems": rng.randint(1, 3),
            },
            lambda: random_object(rng, depth - 1, bounded),
            lambda: {"anyOf": [random_schema(rng, depth - 1, bounded) for _ in range(2)]},
        ]  # fmt: skip
    return rng.choice(kinds)()


def random_object(rng: random.Random, depth: int = 2, bounded: bool = False) -> dict[str, Any]:
    names = rng.sample(["name", "age", "tags", "ok", "größe", "x-y", "a b"], rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth, bounded) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def valid_value(data: st.DataObject, schema: dict[str, Any]) -> Any:
    """Any value of the schema, its keys in the schema's order."""
    if "anyOf" in schema:
        return valid_value(data, data.draw(st.sampled_from(schema["anyOf"])))
    if schema.get("type") == "array":
        n = data.draw(st.integers(schema["minItems"], schema["maxItems"]))
        return [valid_value(data, schema["items"]) for _ in range(n)]
    if schema.get("type") == "object":
        kept = {
            name: part
            for name, part in schema["properties"].items()
            if name in schema["required"] or data.draw(st.booleans())
        }
        return {name: valid_value(data, part) for name, part in kept.items()}
    if "format" in schema:
        some = {"date": "2024-02-29", "uuid": "123e4567-e89b-12d3-a456-426614174000", "ipv4": "127.0.0.1"}
        return some[schema["format"]]
    value = data.draw(from_schema(schema))
    if isinstance(value, str):
        return value.replace("\x7f", "~")  # in JSON of the grammar's it comes as an escape
    return (
        round(value % 1e6 + 1e-3, 3) if schema.get("type") == "number" else value
    )  # bounds are followed without exponents


def format_grammar(schema: Any) -> str:
    cleaned = schemas.clean(schema)
    grammar.check_schema(cleaned, grammar.PRETTY)
    return f"start: {grammar.json_rule(cleaned, grammar.PRETTY)}"


def calls_grammar(schema: dict[str, Any], form: grammar.CallForm = "xml") -> str:
    return _calls_grammar(json.dumps(schema), form)


@functools.cache
def _calls_grammar(schema: str, form: grammar.CallForm) -> str:
    def token(name: str) -> str:
        return f"<[{TOKENIZER.encode(name)[0]}]>"

    built = grammar.CallRules(form, [grammar.GrammarTool("f", json.loads(schema), True, "")], token, checked=True)
    return "\n".join([f"start: {built.call}", *built.rules])


QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(st.data(), st.integers(0, 2**32))
def test_valid_values_are_admitted(data: st.DataObject, seed: int) -> None:
    schema = random_object(random.Random(seed))
    value = valid_value(data, schema)
    check(value, schema)
    for indent in (None, 2):
        text = json.dumps(value, ensure_ascii=False, indent=indent)
        assert accepts(format_grammar(schema), text), (schema, text)
    call = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(value, ensure_ascii=False)}}}\n</tool_call>'
    assert accepts(calls_grammar(schema, "json"), call)


def walk(rng: random.Random, text_of_grammar: str, most: int = 600) -> str | None:
    """A text that the grammar admits, or None if that takes too long: bytes at random, ends preferred."""
    matcher = llguidance.LLMatcher(BYTES, text_of_grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    for _ in range(most):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(265) if mask[i // 8] >> i % 8 & 1]
        assert not matcher.is_error() and allowed, matcher.get_error()
        if END in allowed:
            return TOKENIZER.decode(ids)
        ends = [i for i in allowed if chr(i) in '"]}\n<,' or i > 255]
        chosen = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        assert matcher.consume_token(chosen)
        ids.append(chosen)
    return None


def check(value: Any, schema: Any) -> None:
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


def test_what_is_admitted_is_valid() -> None:
    rng = random.Random(1)
    n = 0
    for _ in range(80):
        schema = random_object(rng)
        text = walk(rng, format_grammar(schema))
        if text is not None:
            check(json.loads(text), schema)
            n += 1
    assert n > 60


def writable(schema: Any) -> bool:
    """Whether a strict tool may have the schema."""
    try:
        calls_grammar(schema)
    except schemas.GrammarError:
        return False
    return True


@pytest.mark.parametrize("form", ["xml", "json"])
def test_admitted_calls_are_read_back_as_valid(form: grammar.CallForm) -> None:
    rng = random.Random(2)
    n = 0
    for _ in range(120):
        schema = random_object(rng)
        if form == "xml" and not writable(schema):
            continue
        text = walk(rng, calls_grammar(schema, form))
        if text is not None:
            ((name, arguments),) = parsed(text, {"f": schema})
            assert name == "f"
            check(arguments, schema)
            n += 1
    assert n > 60


MARKUP = st.lists(
    st.sampled_from(
        ["</parameter>", "\n</parameter>", "<parameter=s>", "\n<parameter=t>", "</function>", "\n</function>", "</tool_call>", "\n",
         "<tool_call>", "<think>", "</think>", " ", "a", "é", "<", "\n</tool_call>", "5", "null", "True", "{", '"', "[1]", "#",
         '["', '"]', "[8E47366]", '["</parameter></function>"]', '["</parameter><parameter=t>"]']
    ),
    max_size=7,
).map("".join)  # fmt: skip


@settings(QUICK, max_examples=150)
@given(
    MARKUP,
    st.sampled_from(
        [{"type": "string"}, {}, {"type": ["string", "integer", "null"]}, {"type": ["string", "boolean", "array"]},
         {"type": "string", "minLength": 1, "maxLength": 9}, {"type": "string", "pattern": "a"}]
    ),
)  # fmt: skip
def test_text_of_parameters(text: str, schema: dict[str, Any]) -> None:
    """A text that is admitted is the value's, all of it."""
    whole = {"type": "object", "properties": {"s": schema, "t": {"type": "string"}}, "required": ["s"]}
    grammar_text = calls_grammar(whole)
    for more in ({}, {"t": "end"}):
        call = xml("f", s=text, **more)
        if accepts(grammar_text, call):
            value = convert(text, schema, whole)
            assert parsed(call, {"f": whole}) == [("f", {"s": value} | more)]
            check(value, schema)
    harmless = not any(mark in f"\n{text}" for mark in ("</parameter>", "\n<parameter", "\n</"))
    if harmless and schema == {"type": "string"} and "</t" not in text:
        assert accepts(grammar_text, xml("f", s=text))
