"""Markdown as nodes of a page: the program that markdown.py asks.

A node is a text, or a list of a tag, its attributes and its nodes. There is no markup in it: HTML that a
model writes is text. The page makes elements of the tags that it knows (markdown.js).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import latex2mathml.converter
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, paragraph
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String, _TokenType
from pygments.util import ClassNotFound

from deltic.server.isolated import answer
from deltic.server.page.markdown import DRAW_S, MAX_BYTES, MEMORY

MAX_COLOURED = 100_000
"""Characters of the longest code with colours."""
MAX_FORMULA = 5_000
"""Characters of the longest formula that is drawn."""
MAX_INLINE = 1_000
"""Characters within which a formula in a line must end."""
MAX_NESTING = 24
"""Levels of the deepest block; a list takes two."""
CLOSERS = {"\\[": "\\]", "\\(": "\\)", "$$": "$$"}
"""Ends of formulas, by their beginnings; a single dollar ends with another."""
MEANT = (
    (re.compile(r"\\(?:begin|end)\{equation\*?\}|\\(?:nonumber|notag|nolimits)\b|\\label\{[^}]*\}"), ""),
    (re.compile(r"(\\begin\{align(?:ed)?(?:at)?\*?\})(?:\{\d+\}|\[[tbc]\])"), r"\1"),
    (re.compile(r"\\(begin|end)\{(?:aligned(?:at)?|alignat|gather(?:ed)?|eqnarray|multline)\*?\}"), r"\\\1{align*}"),
    (re.compile(r"(\\\\)\s*\[-?[\d.]+\s*[a-z]{2}\]"), r"\1"),  # the space between two lines
    (re.compile(r"\\arg(?![A-Za-z])"), r"\\operatorname{arg}"),
)
"""Patterns that the library does not know, and what it knows instead. The page numbers no equations."""
USUAL = "python javascript typescript bash json html css c cpp java go rust sql yaml diff"
"""Languages of most code."""
COLOURS: tuple[tuple[_TokenType, str], ...] = (
    (Comment, "c"), (String, "s"), (Number, "n"), (Keyword, "k"), (Operator.Word, "k"), (Name.Tag, "k"),
    (Name.Function, "f"), (Name.Class, "f"), (Name.Decorator, "f"), (Name.Attribute, "f"), (Name.Builtin, "b"),
    (Generic.Inserted, "s"), (Generic.Deleted, "d"), (Generic.Heading, "k"),
)  # fmt: skip
"""Kinds of words in code, and the class that the page colours them by."""

Node = Any
"""Text, or [tag, attributes, *nodes]."""


def too_deep(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A rule of the parser: what is nested deeper than it goes is text, which it would leave out."""
    return state.level >= MAX_NESTING - 2 and paragraph(state, start, end, silent)


def formula_block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A rule of the parser: `$$` or `\\[` at the beginning of a line, to its closer at the end of one.

    One that is not closed goes on to the end, as a fence does; blank lines are within it.
    """
    if state.is_code_block(start):
        return False
    at, last = state.bMarks[start] + state.tShift[start], state.eMarks[start]
    closer = CLOSERS.get(state.src[at : at + 2])
    if closer is None or closer == "\\)":
        return False
    lines, n_line, is_closed = [state.src[at + 2 : last]], start, False
    while True:
        head, found, tail = lines[-1].partition(closer)
        if found:
            if tail.strip(" .,;"):
                return False  # a sentence that begins with a formula
            lines[-1], is_closed = head, True
            break
        n_line += 1
        if n_line >= end or (state.sCount[n_line] < state.blkIndent and not state.isEmpty(n_line)):
            break
        lines.append(state.src[state.bMarks[n_line] + state.tShift[n_line] : state.eMarks[n_line]])
    if not is_closed and len(lines) == 1 and end < state.lineMax:
        return False
    if silent:
        return True
    state.line = min(n_line + 1, end)
    token = state.push("formula_block", "math", 0)
    token.content, token.map = "\n".join(lines).strip(), [start, state.line]
    token.markup, token.hidden = state.src[at : at + 2], not is_closed
    return True


def formula(state: StateInline, silent: bool) -> bool:
    """A rule of the parser: `$…$`, `$$…$$`, `\\(…\\)` or `\\[…\\]` within a line.

    A price is none: no space stands within the dollars, and no digit behind them.
    """
    source, at = state.src, state.pos
    opener = source[at : at + 2] if source[at : at + 2] in CLOSERS else "$" if source[at] == "$" else ""
    if not opener:
        return False
    closer, begin = CLOSERS.get(opener, "$"), at + len(opener)
    end = source.find(closer, begin, min(state.posMax, begin + MAX_INLINE))
    if end <= begin:
        return False
    text = source[begin:end]
    if opener == "$":
        while source[end - 1] == "\\":  # an escaped dollar
            end = source.find("$", end + 1, min(state.posMax, begin + MAX_INLINE))
            if end < 0:
                return False
        text, behind = source[begin:end], source[end + 1 : end + 2]
        if text[0].isspace() or text[-1].isspace() or behind.isdigit() or "\n" in text:
            return False
    if not silent:
        token = state.push("formula", "math", 0)
        token.content, token.markup = text.strip(), opener
    state.pos = end + len(closer)
    return True


@functools.cache
def parser() -> MarkdownIt:
    made = MarkdownIt("commonmark", {"html": False, "linkify": True, "maxNesting": MAX_NESTING})
    made.enable(["table", "strikethrough", "linkify"]).disable(["html_block", "html_inline"])
    assert made.linkify is not None
    made.linkify.set({"fuzzy_link": False, "fuzzy_email": False})
    made.block.ruler.before("table", "too_deep", too_deep)
    made.block.ruler.before("fence", "formula_block", formula_block, {"alt": ["paragraph", "reference", "blockquote"]})
    made.inline.ruler.before("escape", "formula", formula)
    return made


def blocks(text: str) -> list[tuple[int, Node]]:
    """Returns the blocks of a text, each with the number of the line that it begins in."""
    found: list[tuple[int, Node]] = []
    root: Node = ["", {}]
    stack = [root]
    for token in parser().parse(text):
        if token.level == 0 and token.nesting >= 0:
            found.append(((token.map or [0])[0], None))
        if token.nesting == 1:
            node = stack[-1] if token.hidden else [token.tag, _attributes(token)]
            if not token.hidden:
                stack[-1].append(node)
            stack.append(node)
        elif token.nesting == -1:
            stack.pop()
        elif token.type == "inline":
            stack[-1].extend(_inline(token.children or []))
            if len(stack) > 1:
                _mark_task(stack[-1], stack[-2])
        else:
            stack[-1].append(_leaf(token))
    return [(line, node) for (line, _), node in zip(found, root[2:], strict=True)]


def _attributes(token: Token) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if token.type == "ordered_list_open" and token.attrs.get("start", 1) != 1:
        attributes["start"] = token.attrs["start"]
    if align := re.search(r"text-align:(\w+)", str(token.attrs.get("style", ""))):
        attributes["class"] = align[1]
    if token.type == "link_open":
        attributes["href"] = token.attrs["href"]
    return attributes


def _mark_task(into: Node, above: Node) -> None:
    """Makes a box of the `[ ]` or `[x]` that the text of an item begins with."""
    if not into[2:]:
        return
    item = above if above[0] == "li" and into is above[2] else into
    if item[0] == "li" and isinstance(into[2], str) and (mark := re.match(r"\[([ xX])\]\s", into[2])):
        item[1]["class"] = "task"
        into[2:3] = [["input", {"checked": mark[1] != " "}], into[2][mark.end() :]]


def _inline(tokens: Sequence[Token]) -> list[Node]:
    root: Node = ["", {}]
    stack = [root]
    for token in tokens:
        if token.nesting == 1:
            node = [token.tag, _attributes(token)]
            stack[-1].append(node)
            stack.append(node)
        elif token.nesting == -1:
            stack.pop()
        else:
            nodes = stack[-1]
            made = _leaf(token)
            if isinstance(made, str) and isinstance(nodes[-1], str) and len(nodes) > 2:
                nodes[-1] += made
            elif made != "":
                nodes.append(made)
    return root[2:]  # type: ignore[no-any-return]


def _leaf(token: Token) -> Node:
    match token.type:
        case "code_inline":
            return ["code", {}, token.content]
        case "softbreak":
            return "\n"
        case "hardbreak":
            return ["br", {}]
        case "image":  # what is elsewhere stays there, and a person may look at it
            return ["a", {"href": token.attrs.get("src", "")}, token.content or str(token.attrs.get("src", ""))]
        case "fence" | "code_block":
            language = token.info.split()[0] if token.info.strip() else ""
            return ["figure", {"class": "code", "title": language[:40]}, *_coloured(token.content, language)]
        case "formula" | "formula_block":
            is_block = token.type == "formula_block" or token.markup in ("$$", "\\[")
            return _drawn(token.content, token.markup, is_block, is_open=token.hidden)
        case "hr":
            return ["hr", {}]
    return token.content


def _coloured(code: str, language: str) -> list[Node]:
    """Returns code as texts, and words with a class."""
    code = code.removesuffix("\n")
    lexer = _lexer(language.lower()) if len(code) <= MAX_COLOURED else None
    if lexer is None:
        return [code]
    nodes: list[Node] = []
    for kind, text in lexer.get_tokens(code):
        name = next((name for above, name in COLOURS if kind in above), "")
        last = nodes[-1] if nodes else None
        if not name and isinstance(last, str):
            nodes[-1] = last + text
        elif name and isinstance(last, list) and last[1]["class"] == name:
            last[2] += text
        else:
            nodes.append(["span", {"class": name}, text] if name else text)
    return nodes


@functools.lru_cache(64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
    except ClassNotFound:
        return None


def _drawn(source: str, opener: str, is_block: bool, is_open: bool) -> Node:
    """Returns a formula as MathML; as it was written while it is open, or where it is not understood."""
    if not is_open and len(source) <= MAX_FORMULA:
        with contextlib.suppress(Exception):  # its parser raises many things
            known = functools.reduce(lambda text, meant: meant[0].sub(meant[1], text), MEANT, source)
            display = "block" if is_block else "inline"  # which decides where the bounds of a sum stand
            root = latex2mathml.converter.convert_to_element(known, display=display)
            return ["math", {"display": display, "alttext": source}, *_children(root)]
    closer = "" if is_open else CLOSERS.get(opener, "$")
    space = "\n" if is_block and "\n" in source else ""
    return ["code", {"class": "formula"}, f"{opener}{space}{source}{space}{closer}"]


def _children(element: Any) -> Iterator[Node]:
    if element.text:
        yield _unescaped(element.text)
    for child in element:
        yield [child.tag, {name: str(value) for name, value in child.attrib.items()}, *_children(child)]


def _unescaped(text: str) -> str:
    """Returns the letters of references such as `&#x0222B;`, which the library writes into its texts."""
    return re.sub(r"&#x([0-9A-Fa-f]{1,6});", lambda found: chr(int(found[1], 16)), text).replace("&amp;", "&")


def prepare() -> None:
    """Makes what most texts need, once: each process that draws begins with it."""
    blocks("\n".join(["a https://example.org \\(x^2\\)\n", *(f"```{name}\na\n```" for name in USUAL.split())]))


def main() -> int:
    """Texts in stdin, as JSON; their blocks, and the milliseconds that they took, out of stdout."""
    return answer(_draw, limit_s=DRAW_S, memory=MEMORY, most_bytes=MAX_BYTES)


def _draw(data: bytes) -> bytes:
    drawn: list[list[tuple[int, Node]]] = []
    for text in json.loads(data):
        try:
            drawn.append(blocks(text))
        except Exception:  # whatever it is, the other texts are drawn
            drawn.append([(0, ["figure", {"class": "code", "title": ""}, text])])
    told = {"drawn": drawn, "ms": round(1000 * time.process_time(), 2)}  # a fork's clock begins with it
    return json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
