"""Jinja with a meter: what a template may take of time and memory, whoever wrote it.

Jinja's sandbox keeps a template from the process, not from its time: loops in loops, a string times three
billion, a width of a billion. Here all that makes a template long or large passes the Meter: each turn of a
loop and each call is a step, what is searched or compared is some more by its size, each text that is made
counts its characters, and what one call would make is looked at before it is made. So a call takes
milliseconds, and a rendering that takes more of them than it may ends with TooMuch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace

from deltic.text import pause

MOST_STEPS = 4_000_000
"""The most steps of one rendering: some seconds, twenty for each object that a body may have."""

CALL_STEPS = 4
"""A call takes longer than a turn of a loop."""

MOST_CHARACTERS = 256_000_000
"""The most characters that a rendering makes in all: sixteen times the largest body."""

LARGEST = 32_000_000
"""Characters of one text."""

MOST_ITEMS = 1_000_000
"""The most items of one list, and the greatest size that a call takes."""

MOST_BITS = 4096
"""Bits that an integer may have."""

INLINE_STEPS, INLINE_CHARACTERS = 5_000, 1_000_000
"""The limits of a rendering in the event loop: some ten milliseconds."""

STEPS_AT_ONCE = 8_192
"""Steps between two pauses, where others go first."""

LARGEST_SOURCE = 1_000_000

T = TypeVar("T")


class TooMuch(jinja2.TemplateError):
    """A template takes more than it may."""


class Meter(threading.local):
    """The steps and characters that the rendering of this thread may still take."""

    n_steps = n_characters = 0

    def start(self, is_inline: bool) -> None:
        self.n_steps = INLINE_STEPS if is_inline else MOST_STEPS
        self.n_characters = INLINE_CHARACTERS if is_inline else MOST_CHARACTERS

    def step(self, n: int = 1) -> None:
        self.n_steps -= n
        if (self.n_steps + n) // STEPS_AT_ONCE != self.n_steps // STEPS_AT_ONCE:
            pause.get()(STEPS_AT_ONCE)
        if self.n_steps < 0:
            raise TooMuch(f"it takes more than {MOST_STEPS} steps")

    def characters(self, n: int) -> None:
        """`n` are about to be made at once."""
        self.n_characters -= n
        if n > LARGEST or self.n_characters < 0:
            raise TooMuch(f"it makes a text of more than {LARGEST} characters, or more than {MOST_CHARACTERS} in all")

    def items(self, n: int) -> None:
        if n > MOST_ITEMS:
            raise TooMuch(f"it makes a list of more than {MOST_ITEMS} items")
        self.step(n >> 3)

    def size(self, value: object) -> int:
        """Characters that `value` has as text, about; counted as they are found, since a list may hold itself
        many times over.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Namespace):
            value = value._Namespace__attrs
        if isinstance(value, Mapping):
            value = [part for pair in value.items() for part in pair]
        if not isinstance(value, Collection):
            return 32
        self.step(len(value))
        n = 2
        for part in value:
            n += self.size(part) + 4
            if n > LARGEST:
                self.characters(n)
        return n

    def read(self, value: object) -> None:
        """A text or list is about to be gone through, whatever is in it: what counts and compares texts reads
        256 characters in a step or more.
        """
        if isinstance(value, str):
            self.step(len(value) >> 8)
        elif isinstance(value, Collection) and not isinstance(value, range):
            self.step(self.size(value) >> 8)

    def made(self, value: T) -> T:
        """A result, counted."""
        if isinstance(value, str | bytes):
            self.characters(len(value))
        elif isinstance(value, list | tuple | dict):
            self.items(len(value))
        return value


class MeteredValues:
    """Values that a loop goes through, each turn a step, and the template's own text in it counted."""

    def __init__(self, meter: Meter, values: Iterable[object], n_characters: int) -> None:
        self._meter, self._values, self._n_characters = meter, values, n_characters

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # TypeError where it has none, as the loop expects

    def __iter__(self) -> Iterator[object]:
        for value in self._values:
            self._meter.step()
            self._meter.characters(self._n_characters)
            yield value


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`~`, which the sandbox does not let be taken over as it does other operators."""
        self.write("environment.tilde((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Writes a comparison as Jinja does, with each side passed through `compared`."""
        self.write("(environment.compared(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f") {operators[operand.op]} environment.compared(")
            self.visit(operand.expr, frame)
            if operand is node.ops[-1] and operand.op in ("in", "notin"):
                self.write(", True")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Slices, which Jinja does not show to its environment."""
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.meter.made(" * is_slice)
        super().visit_Getitem(node, frame)
        self.write(")" * is_slice)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks what a model is trained to say, and changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of chat templates. A rendering begins with `meter.start`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
        self.meter = Meter()
        self.finalize = self._shown
        self.optimized = False  # or constants would be computed as it compiles
        del self.globals["lipsum"]

    def finish(self) -> None:
        """Meters filters and tests, once all of them are there."""
        self.filters = {name: _metered(self.meter, name, made) for name, made in self.filters.items()}
        for name, test in self.tests.items():
            if test.__module__ == "_operator" or name in READING_TESTS:
                self.tests[name] = self._metered_test(test)
        self.filters["*turns"] = lambda values, n: MeteredValues(self.meter, values, n)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            n_characters = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            loop.iter = nodes.Filter(
                loop.iter, "*turns", [nodes.Const(n_characters)], [], None, None, lineno=loop.lineno
            )
            loop.iter.set_environment(self)
        return tree

    @jinja2.pass_context  # so that it is not called as the template compiles
    def _shown(self, context: Context, value: T) -> T:
        self.meter.characters(self.meter.size(value))
        return value

    def tilde(self, parts: tuple[object, ...]) -> str:
        self.meter.characters(sum(map(self.meter.size, parts)))
        return "".join(map(str, parts))

    def compared(self, value: T, is_holder: bool = False) -> T:
        """Counts one side of a comparison and returns it. is_holder: the side in which something is looked
        for, which takes no time in a mapping.
        """
        if not (is_holder and isinstance(value, Mapping)):
            self.meter.read(value)
        return value

    def _metered_test(self, test: Any) -> Callable[..., bool]:
        def metered(value: object, *others: object) -> bool:
            self.meter.step()
            return bool(test(self.compared(value), *(self.compared(other, is_holder=True) for other in others)))

        return metered

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        meter = self.meter
        meter.step()
        if operator == "%" and isinstance(left, str):
            _check_format(meter, PERCENT, left, [right])
        elif operator in ("*", "**"):
            for whole, times in ((left, right), (right, left)):
                if isinstance(whole, str | bytes) and isinstance(times, int):
                    meter.characters(len(whole) * max(0, times))
                elif isinstance(whole, list | tuple) and isinstance(times, int):
                    meter.items(len(whole) * max(0, times))
            if isinstance(left, int) and isinstance(right, int):
                n_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if n_bits > MOST_BITS:
                    raise TooMuch(f"it makes a number of more than {MOST_BITS} bits")
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            meter.characters(len(left) + len(right))
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            meter.items(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: object) -> object:
        meter = __self.meter
        meter.step(CALL_STEPS)
        if isinstance(__obj, LoopContext) and args:  # a loop that calls itself
            args = (MeteredValues(meter, args[0], 0), *args[1:])
        else:
            method = getattr(__obj, "__wrapped__", __obj)  # str.format comes in a wrapper of the sandbox's
            owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            given = [*args, *(value for key, value in kwargs.items() if not key.startswith("_"))]
            text = owner if isinstance(owner, str) else None
            if isinstance(owner, str | list | tuple):
                for value in (owner, *args):
                    meter.read(value)
            if text is not None and name in ("format", "format_map"):
                _check_format(meter, BRACES, text, given)
            # Numbers of a macro, a list, a mapping, and of what is formatted, are values and no sizes.
            sized = isinstance(owner, str | bytes | int | float) and name not in ("format", "format_map")
            _check_call(meter, name, text, given, is_sized=sized)
        return meter.made(super().call(__context, __obj, *args, **kwargs))


READING_TESTS = frozenset(("in", "lower", "upper"))
"""Tests of Jinja's that go through what they are asked about, beside Python's comparisons."""

TEXTS = frozenset(("tojson", "string", "pprint", "urlencode", "xmlattr", "urlize", "escape", "e", "forceescape"))
"""Filters that make a text of anything."""

COMPARING = frozenset(("sort", "dictsort", "min", "max", "groupby", "unique"))
"""Filters that compare what is in their lists."""

WHOLE = COMPARING | {"join", "list", "batch", "slice", "reverse"}
"""Filters that take all that a generator gives."""

ITEMS = frozenset(("list", "batch", "slice", "sort", "reverse", "unique", "groupby"))
"""Filters that make a list of a text's characters."""


SIZED = frozenset(("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap"))
"""Filters that are given a size."""

_MOST = {"tojson": 16, "round": 400}
"""The greatest sizes, but for MOST_ITEMS."""


def _metered(meter: Meter, name: str, made: Callable[..., object]) -> Callable[..., object]:
    """A filter that is looked at before and after."""
    # Jinja hands the first argument or not by what the function is marked with.
    mark = getattr(made, "jinja_pass_arg", None)

    def filtered(*args: object, **kwargs: object) -> object:
        meter.step(CALL_STEPS)
        first = int(mark is not None)
        value, rest = args[first] if len(args) > first else None, args[first + 1 :]
        if name in WHOLE and isinstance(value, Iterator):
            value = list(value)
            args = (*args[:first], value, *rest)
        given = [*rest, *kwargs.values()]
        if name in TEXTS:
            meter.characters(meter.size(value))
        elif isinstance(value, str):
            meter.step(len(value) >> 10)
        elif isinstance(value, Collection):
            meter.items(len(value))
        if name in COMPARING:
            meter.read(value)
        if name in ITEMS and isinstance(value, str):
            meter.items(len(value))
        if name == "sum" and not isinstance(kwargs.get("start", rest[1] if len(rest) > 1 else 0), int | float):
            raise TooMuch("it sums what is no number")
        if name == "format":
            _check_format(meter, PERCENT, str(value), given)
        _check_call(meter, name, value if isinstance(value, str) else None, given, value, name in SIZED)
        return meter.made(made(*args, **kwargs))

    filtered.__name__ = name
    if mark is not None:
        filtered.jinja_pass_arg = mark  # type: ignore[attr-defined]
    return filtered


def _check_call(
    meter: Meter, name: str, text: str | None, given: Sequence[object], value: object = None, is_sized: bool = False
) -> None:
    """Counts how large the result of a method or filter may become. text: what it is applied to, if that is
    text; value: what a filter is applied to, whatever it is; is_sized: a number that it is given may say how
    large.

    Raises TooMuch.
    """
    most = max((abs(n) for n in given if isinstance(n, int)), default=0)
    if is_sized and most > (limit := _MOST.get(name, MOST_ITEMS)):
        raise TooMuch(f"it calls {name!r} with a number beyond {limit}")
    if name == "join":
        parts = value if value is not None and text is None else next(iter(given), ())
        separator = text if value is None else next(iter(given), "")
        n_parts = len(parts) if isinstance(parts, Sized) else MOST_ITEMS
        meter.items(n_parts)
        meter.characters(n_parts * meter.size(separator) + (meter.size(parts) if isinstance(parts, Sized) else 0))
    if text is None:
        return
    longest = max((len(other) for other in given if isinstance(other, str)), default=0)
    if name in ("center", "ljust", "rjust", "zfill"):
        meter.characters(max(most, len(text)))
    elif name == "expandtabs":
        meter.characters(len(text) + text.count("\t") * max(most, 8))
    elif name in ("indent", "wordwrap"):
        n_lines = len(text) if name == "wordwrap" else text.count("\n") + 1
        meter.characters(len(text) + n_lines * max(most if name == "indent" else 0, longest, 4))
    elif name == "replace" and len(given) >= 2 and isinstance(given[0], str):
        meter.characters(len(text) + text.count(given[0]) * len(str(given[1])))
    elif name in ("split", "rsplit", "splitlines", "wordcount"):
        separator = next((other for other in given if isinstance(other, str) and other), None)
        meter.items(text.count(separator) if separator else text.count(" ") + text.count("\n"))
    elif name == "translate":
        raise TooMuch("it translates texts")


PERCENT = re.compile(r"%(?:\([^()]{0,200}\))?[^a-zA-Z%(]*(?:[0-9]{5}|\*)|%\([^()]{0,200}+(?!\)|\Z)"), "%"
BRACES = re.compile(r":[^{}:]*(?:[0-9]{5}|\{)"), "{"
"""Widths of five digits, and those that are values, in either kind of format, and names that could hide them;
and how a place in it begins. A search takes time by the length of the text, whatever is in it.
"""


def _check_format(meter: Meter, kind: tuple[re.Pattern[str], str], pattern: str, given: Sequence[object]) -> None:
    """Raises TooMuch for one that makes much: of widths, or of values that it names often."""
    wide, place = kind
    if wide.search(pattern):
        raise TooMuch("it formats with a width of five digits, or one that is a value")
    meter.characters(len(pattern) + (pattern.count(place) + 1) * (10_000 + sum(map(meter.size, given))))
