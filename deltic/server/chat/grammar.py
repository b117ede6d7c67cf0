r"""JSON schemas, regular expressions and the forms of a tool call, as grammars of llguidance (Lark with
inline `%json`).

What a grammar admits is what is valid; order of properties is the schema's (see schema.py for what one may
have).

Where the model writes calls as XML, a parameter is its text: a string as it is, anything else as JSON. Such a
text must come back from `arguments.convert` as the value that was meant, so it may not hold what ends a
parameter, and where a string or a number is asked for, a string that reads as a number is a number. Of the
formats of such a string, those of _RAW_FORMATS are enforced.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import llguidance

from deltic.engine.messages import MAX_GRAMMAR
from deltic.json_types import JsonObject
from deltic.server.chat.arguments import convert, value_types
from deltic.server.chat.markup import PARAMETER, unquoted
from deltic.server.chat.schema import DEFS, GrammarError, Schema, children, clean, target_of

CallForm = Literal["xml", "json"]

STACK_BYTES = 16_000_000
"""Stack of a thread that compiles: the library ends the process if it is too small."""
MAX_BRANCHES = 256
"""Schemas that one parameter may choose from."""
MAX_VALUES = 2000
"""Values that one parameter may choose from."""
BUILDING_S = 1.0
"""Seconds of its thread's time that writing the rules of calls may take: there may be much to look through in
definitions that refer to each other.
"""
LOCATING_S = 0.3
"""Seconds for which an error's place in a schema is looked for."""

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Limits of a grammar: the defaults of the library, with which the engine compiles.

They bound the time (20 ms for the lexer, say) and the memory of a hostile grammar.
"""

PRETTY = {"whitespace_pattern": r" |\r?\n[ \t]{0,64}"}
"""JSON with line breaks and indentation; not endless, or a model that likes blanks never comes back."""
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON on one line, as the templates write arguments."""


# Schemas.


def json_rule(schema: Schema, options: Mapping[str, object]) -> str:
    """The inline grammar of a schema that `clean` gave."""
    whole: JsonObject = {} if schema is True else {"enum": []} if schema is False else schema
    try:
        return "%json " + json.dumps(whole | {"x-guidance": options})
    except RecursionError:
        raise GrammarError("", "has a value that is nested too deeply") from None


def check_schema(schema: Schema, options: Mapping[str, object]) -> None:
    """Raises GrammarError, with the innermost schema that cannot be compiled, for one that `clean` gave."""
    message = error_of(f"start: {json_rule(schema, options)}")
    if not message:
        return
    definitions = {key: schema[key] for key in DEFS if key in schema} if isinstance(schema, dict) else {}
    path, deadline, inner = "", time.monotonic() + LOCATING_S, schema
    while isinstance(inner, dict):
        for below, part in children(inner):
            if time.monotonic() > deadline or isinstance(part, bool):
                continue
            if fault := error_of(f"start: {json_rule(definitions | part, options)}"):
                path, inner, message = path + below, part, fault
                break
        else:
            break
    raise GrammarError(path, message)


# Compiling.


class _Bytes:
    """The tokenizer interface that the library asks for.

    Its special tokens, the last of which stands for any, have no name in a grammar.
    """

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end of text>", b"", b"<added token>"]  # noqa: RUF012
    special_token_ids = (256, 258)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def _bytes_only() -> llguidance.LLTokenizer:
    """A tokenizer of single bytes: it finds the faults of a grammar, whatever the model's tokenizer is."""
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


_SPECIAL = re.compile(r"<\[\d+(?:,\d+)*\]>")
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_POSITION = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_NAMES = re.compile(r"; following special tokens are available: \u27e6[^\u27e7]*\u27e7")
_ONE_OF = re.compile(r"oneOf constraints are not supported\..*")


N_WALKED = 8
"""Bytes of a text that are tried: the last of those that may come, so a letter or a bracket before white
space.
"""
ASCII = (1 << 128) - 1


def error_of(grammar: str, own: bool = True) -> str:
    """The fault of a grammar, "" for none. own: the grammar is ours, not the user's."""
    if len(grammar) > MAX_GRAMMAR:
        return f"too large: its grammar has {len(grammar)} characters, and may have {MAX_GRAMMAR}"
    if own:  # the tokens of the model's vocabulary stand for themselves
        grammar = _SPECIAL.sub("<[258]>", grammar)
    matcher = llguidance.LLMatcher(_bytes_only(), grammar, log_level=0, limits=LIMITS)
    for _ in range(N_WALKED):  # some limits show only when something is taken
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ASCII
        if not allowed or matcher.is_error() or not matcher.consume_token(allowed.bit_length() - 1):
            break
    message: str = _NAMES.sub("", matcher.get_error().removesuffix("\n<non-verbose/>"))
    if not message and matcher.is_stopped() and not matcher.is_accepting():
        message = "nothing can match it"
    if own:
        message = _POSITION.sub("", _EXCERPT.sub("", message))
        message = message.removeprefix("failed to compile JSON schema: ")
    message = _ONE_OF.sub("oneOf is supported where no value fits two of its schemas. Use anyOf.", message)
    if message.startswith("NoExtension"):
        message = "nothing can match it"
    return _POSITION.sub(r"line \1, column \2: ", message)[:2000].strip()


# Tool calls.


class GrammarTool(NamedTuple):
    """Function that the answer may call."""

    name: str
    parameters: JsonObject | None
    strict: bool | None
    """True if its arguments follow the schema, or the request is refused."""
    path: str
    grammar: str = ""
    """Grammar in Lark of the text that is its one parameter `input`."""


class CallRules:
    """The rules of the calls that an answer may make: `call` is the name of the rule of one."""

    def __init__(self, form: CallForm, tools: list[GrammarTool], token: Callable[[str], str], checked: bool) -> None:
        """token: the Lark of an added token of the vocabulary, or "" if it has none such. checked: each part
        is compiled by itself, to find the one that cannot be; it takes a millisecond for each. Raises
        GrammarError.
        """
        self._deadline = time.thread_time() + BUILDING_S
        self._check_until = time.monotonic() + LOCATING_S if checked else 0.0
        self._size = 0
        self.rules: list[str] = []
        self._names: dict[tuple[str, str], str] = {}
        self._token = token
        self._added = [
            t for name in ("think", "/think", "tool_response", "/tool_response") if (t := token(f"<{name}>"))
        ]
        bodies = [self._tool(form, tool) for tool in tools]
        self.call = self._rule(f'{token("<tool_call>")} "\\n" ({" | ".join(bodies)}) {token("</tool_call>")}')

    def text(self) -> str:
        """The rule of text before the first call: anything that does not look like one."""
        piece = self._terminal(f"/(?s:.*)/ & ~/(?s:.*)(<tool_call>|<function)(?s:.*)/ & ~/{_BARE_CALL}/")
        return self._rule(f"({piece} ({' | '.join(self._added)}))* {piece}" if self._added else piece)

    def _rule(self, body: str, head: str = "r", options: str = "") -> str:
        name = self._names.get((options, body))
        if name is None:
            name = self._names[options, body] = f"{head}{len(self.rules)}"
            self.rules.append(f"{name}{options}: {body}")
            self._size += len(body)
        return name

    def _terminal(self, body: str) -> str:
        return self._rule(body, "T")

    @property
    def _is_checking(self) -> bool:
        return time.monotonic() < self._check_until

    def _go_on(self) -> None:
        """Raises GrammarError when it takes too long, or becomes too large."""
        if self._size > MAX_GRAMMAR or time.thread_time() > self._deadline:
            raise GrammarError("", "too much to be made a grammar, with what it refers to")

    def _check(self, schema: Schema) -> None:
        if self._is_checking:
            check_schema(schema, COMPACT)

    def _tool(self, form: CallForm, tool: GrammarTool) -> str:
        if form == "xml" and tool.grammar:
            value = f"%lark {{\n{tool.grammar}\n}}"
            if not error_of(f"start: text {quoted(_END)}\ntext: {value}"):
                head = quoted(f"<function={tool.name}>\n<parameter=input>\n")
                return self._rule(f'{head} {self._rule(value)} {quoted(_END)} "</function>\\n"')
        build = self._xml if form == "xml" else self._json
        try:
            return build(tool.name, clean(tool.parameters or {"type": "object", "properties": {}}))
        except GrammarError as error:
            if tool.strict:
                raise GrammarError(tool.path + error.path, error.message) from None
            return build(tool.name, {"type": "object"})

    def _json(self, name: str, schema: Schema) -> str:
        if isinstance(schema, bool) or schema.get("type", "object") != "object":
            raise GrammarError(".type", "arguments are an object")
        self._check(schema := schema | {"type": "object"})
        arguments = self._rule(json_rule(schema, COMPACT))
        return self._rule(f'{quoted(f"""{{"name": "{name}", "arguments": """)} {arguments} "}}\\n"')

    def _xml(self, name: str, schema: Schema) -> str:
        if isinstance(schema, bool) or schema.get("type", "object") != "object":
            raise GrammarError(".type", "arguments are an object")
        known = {"type", "properties", "required", "additionalProperties", *DEFS}
        if odd := schema.keys() - known:
            raise GrammarError(f".{min(odd)}", "not supported for all arguments together")
        properties: JsonObject = schema.get("properties", {})
        required = schema.get("required", [])
        more = schema.get("additionalProperties", True)
        named = dict.fromkeys([*properties, *required])
        parts = []
        if "properties" not in schema and not named and more is not False:
            key = self._terminal(r"/[A-Za-z0-9_.\-]{1,64}/")
            value = self._value(more, schema, ".additionalProperties")
            parts.append(f'("<parameter=" {key} ">\\n" {value})*')
        for key in named:
            path = f".properties.{key}"
            head = PARAMETER.fullmatch(f"<parameter={key}>")
            if not head or unquoted(head[1]) != key or not re.fullmatch(r"[^\s<>]([^<>]*[^\s<>])?", key):
                raise GrammarError(path, "a parameter of that name cannot be written")
            if key not in properties and more is not True:
                raise GrammarError(".required", f"{key!r} is not among the properties")
            value = self._value(properties.get(key, True), schema, path)
            parts.append(f"({quoted(f'<parameter={key}>' + chr(10))} {value}){'' if key in required else '?'}")
        return self._rule(f'{quoted(f"<function={name}>" + chr(10))} {" ".join(parts)} "</function>\\n"')

    def _value(self, schema: Schema, root: JsonObject, path: str) -> str:
        """The rule of a parameter's text, its end included."""
        if schema is True:
            return self._raw()
        try:
            return self._declared(schema, root)
        except GrammarError as error:
            raise GrammarError(path + error.path, error.message) from None

    def _declared(self, schema: Schema, root: JsonObject) -> str:
        self._go_on()
        types = value_types(schema, root)
        if schema is False:
            raise GrammarError("", "nothing can match it")
        try:
            branches = list(itertools.islice(_branches(schema, root, self._go_on), MAX_BRANCHES + 1))
            if len(branches) > MAX_BRANCHES:
                raise GrammarError("", f"chooses from more than {MAX_BRANCHES} schemas")
        except GrammarError:
            if not types or "string" in types:
                raise
            return self._rule(f"{self._inner_json(schema, root)} {quoted(_END)}")
        rules: list[str] = []
        others = [regex for branch in branches for regex in _misread(branch)] if types - {"string"} else []
        n_values = 0
        for branch in branches:
            self._go_on()
            values = [branch["const"]] if "const" in branch else branch.get("enum")
            declared = branch.get("type", [])
            kinds = [declared] if isinstance(declared, str) else declared
            if (n_values := n_values + len(values or ())) > MAX_VALUES:
                raise GrammarError("", f"may list at most {MAX_VALUES} values")
            if values is not None:
                for value in values:
                    self._go_on()
                    rules += [quoted(text + _END) for text in _texts(value, types, schema, root)]
            elif not kinds and branch:
                raise GrammarError("", "needs a type")
            for kind in [] if values is not None else kinds or [""]:
                if kind in ("", "string"):
                    rules.append(self._raw(branch, others))
                elif kind in _NUMBERS and branch.keys() == {"type"}:
                    rules.append(self._terminal(f"{_NUMBERS[kind]} {quoted(_END)}"))
                elif kind in _SPELLED:
                    rules += [quoted(text + _END) for text in _SPELLED[kind]]
                else:
                    rules.append(f"{self._inner_json(branch | {'type': kind}, root)} {quoted(_END)}")
        if not rules:
            raise GrammarError("", "none of its values can be written as a parameter")
        return rules[0] if len(rules) == 1 else self._rule(" | ".join(rules))

    def _inner_json(self, schema: Schema, root: JsonObject) -> str:
        """The rule of a value inside a call, with the definitions that it refers to."""
        wanted: dict[str, JsonObject] = {}
        waiting = [schema]
        while waiting:
            self._go_on()
            text = json.dumps(waiting.pop())
            for which, name in re.findall(r'"\$ref": "#/(\$defs|definitions)/([^"/]+)', text):
                if name not in wanted.setdefault(which, {}):
                    wanted[which][name] = root.get(which, {}).get(name, False)
                    waiting.append(wanted[which][name])
            if re.search(r'"\$ref": "(?!#/(\$defs|definitions)/)', text):
                raise GrammarError("", "may refer to #/$defs only")
        whole = schema if isinstance(schema, bool) else schema | wanted
        self._check(whole)
        return self._rule(json_rule(whole, COMPACT))

    def _raw(self, schema: JsonObject | None = None, others: list[str] | None = None) -> str:
        """The rule of a string's text, as it is. others: regular expressions of texts that are no string."""
        schema, others = schema or {}, others or []
        least, most, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
        body = "/(?s:.*)/"
        if least or most is not None:
            if most is not None and most < least:
                raise GrammarError(".maxLength", "is less than minLength")
            body = f"/(?s:.){{{least},{'' if most is None else most}}}/"
        name = self._terminal(body)
        if form := _RAW_FORMATS.get(schema.get("format", "")):
            name = self._terminal(f"{name} & /{form}/")
        if pattern is not None:
            regex = f"/{_searched(pattern)}/"
            if self._is_checking and (message := error_of(f"start: {regex}")):
                raise GrammarError(".pattern", message)
            name = self._terminal(f"{name} & {regex}")

        def tail(*excluded: str) -> str:
            """The rule of the text up to its end."""
            kept = [f"({name} {quoted(_END)})", *(f"/{regex}/" for regex in (_TWO_ENDS, _FALSE_ENDS, *excluded))]
            return self._rule(self._terminal(" & ~".join(kept)), options="[lazy]")

        whole = tail(_FALSE_START, *others)
        if schema.keys() - {"type"} or not self._added:
            return whole
        # Added tokens of the vocabulary are no letters to the grammar: where anything may stand, they may,
        # too.
        added = f"({' | '.join([*self._added, self._token('<tool_call>')])})"
        piece = f"/(?s:.*)/ & ~/(?s:.*){_ENDS}(?s:.*)/"
        starts = [_FALSE_START, *(regex for regex in others if regex.endswith(_ANY))]
        first = self._terminal(" & ~".join([piece, *(f"/{regex}/" for regex in starts)]))
        return self._rule(f"{whole} | {first} {added} ({self._terminal(piece)} {added})* {tail()}")


_BARE_CALL = r'\s*\{"name": "[A-Za-z0-9_.\-]+",\s*"(arguments|parameters)":(?s:.*)'
_END = "\n</parameter>\n"
_ENDS = r"(<\/parameter>|\n<parameter=|\n<\/function>|\n<\/tool_call>)"
_DAY = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_RAW_FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
}
"""Formats of a string that stands for itself; the 29th of February is left out."""
_TWO_ENDS = r"(?s:.*)<\/parameter>(?s:.*)<\/parameter>\n"
_FALSE_ENDS = r"(?s:.*)\n(<parameter=|<\/function>|<\/tool_call>)(?s:.*)"
_FALSE_START = r"(<parameter=|<\/function>|<\/tool_call>)(?s:.*)"
_ANY = "(?s:.*)"
_SPELLED = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
"""Texts of scalars: as JSON, and as Python, which the templates write them as."""
_NUMBERS = {
    "integer": r"/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+\-]?[0-9]{1,2})?/",
}
"""Patterns of numbers, of as many digits as 64 bits hold."""


def _misread(branch: JsonObject) -> Iterator[str]:
    """Regular expressions of the texts, their end included, that `arguments.convert` may take for a value of
    another type than string; by their beginning where the value's own rule does not hold the end.
    """
    kinds = value_types(branch, branch)
    if kinds & {"integer", "number"}:
        plain = branch.keys() == {"type"}
        yield (r"\s*-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?\s*<\/parameter>\n" if plain else r"\s*-?[0-9](?s:.*)")
    if "boolean" in kinds:
        yield r"\s*(?i:true|false)\s*<\/parameter>\n"
    if "null" in kinds:
        yield r"\s*(null|None)\s*<\/parameter>\n"
    if kinds & {"object", "array"}:
        yield r"\s*[\[{(#\\](?s:.*)"


def quoted(text: str) -> str:
    """Writes a text as Lark does, which is as JSON does, but for the one control character that JSON leaves
    alone.
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _texts(value: object, types: set[str], schema: Schema, root: JsonObject) -> Iterator[str]:
    """Yields the texts as which a value may be written as a parameter."""
    kind = {bool: "boolean", type(None): "null"}.get(type(value))
    written = [value] if isinstance(value, str) else _SPELLED[kind] if kind else [json.dumps(value, ensure_ascii=False)]
    for text in written:
        if isinstance(value, str) and types == {"string"} and not re.search(_ENDS, f"\n{text}"):
            yield text
            continue
        back = convert(text, schema, root)
        if type(back) is type(value) and back == value and not re.search(_ENDS, f"\n{text}"):
            yield text


def _branches(schema: Schema, root: JsonObject, go_on: Callable[[], None], depth: int = 0) -> Iterator[JsonObject]:
    """The schemas that together are the schema, without references and unions at their top.

    Raises GrammarError.
    """
    go_on()
    if schema is True or schema is False:
        yield {} if schema else {"enum": []}
        return
    unions = [key for key in ("$ref", "anyOf", "oneOf", "allOf") if key in schema]
    if not unions:
        yield schema
        return
    key = unions[0]
    if len(schema.keys() - set(DEFS)) > 1 or depth > 8:
        raise GrammarError(f".{key}", "cannot be combined with other keywords where a string may stand")
    if key == "$ref":
        target = target_of(schema[key], root)
        if target is None:
            raise GrammarError(".$ref", f"{schema[key]} is not there")
        yield from _branches(target, root, go_on, depth + 1)
        return
    parts: list[Schema] = schema[key]
    if (key == "allOf" and len(parts) > 1) or (key == "oneOf" and not _disjoint(parts, root, go_on)):
        raise GrammarError(f".{key}", "not supported where a string may stand. Use anyOf.")
    for part in parts:
        yield from _branches(part, root, go_on, depth + 1)


def _disjoint(parts: list[Schema], root: JsonObject, go_on: Callable[[], None]) -> bool:
    """Returns whether no value fits two of the schemas, as far as their types or their listed values show."""
    listed = [p.get("enum", [p["const"]] if "const" in p else None) for p in parts if isinstance(p, dict)]
    if len(listed) == len(parts) and all(values is not None for values in listed):
        texts = [json.dumps(value, sort_keys=True) for values in listed for value in values or ()]
        return len(set(texts)) == len(texts)
    seen: set[str] = set()
    for part in parts:
        go_on()
        types = {"number" if kind == "integer" else kind for kind in value_types(part, root)}
        if not types or types & seen:
            return False
        seen |= types
    return True


def _searched(pattern: str) -> str:
    """A schema's pattern, which is searched for, as a regular expression of the whole text."""
    starts, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[starts : len(pattern) - ends]
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", inner)
    while (less := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = less
    if "|" in bare and (starts or ends):
        raise GrammarError(".pattern", "put parentheses around what is between ^ and $")
    inner = llguidance.regex_to_lark(inner, "dw")
    return f"{'' if starts else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"
