"""The tags of the family's answers: patterns of them, and what may be the beginning of one.

Read by calls.py and parser.py.
"""

from __future__ import annotations

import re

from deltic.server.chat.arguments import NAME

THINK_END = re.compile(r"</think[ \t]{0,2}(?:>|(?=[<\n]))")
CUT_THINK_END = re.compile(r"</think[ \t]{0,2}$")
FUNCTION = re.compile(rf"<function(?:==?| name=)[ \t]{{0,8}}[\"']?({NAME.pattern})[\"']?[ \t]{{0,8}}[>\n]")
PARAMETER = re.compile(r"<parameter(?:==?| name=)[ \t]{0,8}([^>\n]{1,256}?)[ \t]{0,8}[>\n]")
CUT_PARAMETER = re.compile(r"<parameter(?:==?| name=)[\"']?[\w.\-]*$")
JSON_START = re.compile(r"(?:```\w{0,10}\s{0,8})?[\[{]")
MAYBE_JSON = re.compile(r"`{1,2}|```\w{0,10}\s{0,8}")
BARE = '{"name": "'
BARE_NAME = re.compile(rf'{{"name": "({NAME.pattern})"')
BARE_CALL = re.compile(rf'{{"name": "{NAME.pattern}",\s{{0,8}}"(?:arguments|parameters)":')
OUTSIDE_STRING = re.compile(r'[^"<\\]*')
JSON_VALUE = re.compile(r"\s*[\[{]")
QUOTE = re.compile(r'\\.|"', re.DOTALL)
IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
VALUE_EVENT = re.compile(
    r"\n?</parameter>|\n</(?:function|tool_call)>|\n?<parameter(?:=| name=)|<tool_call>|<function(?:=| name=)"
)
INNER_EVENT = re.compile(r"\n?</(?:parameter|function|tool_call)>|<tool_call>|<function(?:=| name=)")
"""Tags in a value, behind the beginning of an example of a call."""
FENCE = re.compile(r"[ \t]{0,16}(?:```[^`]{0,80}|~~~.{0,80})")
"""A line that begins or ends a block of code."""

TOOL_CALL = "<tool_call>"
FUNCTIONS = ("<function=", "<function name=")
PARAMETERS = ("<parameter=", "<parameter name=")
STRAY = {"function_invocation": 2, "function_call": 2, "invoke": 2, "function_calls": 3, "tool_calls": 3}
"""Closing tags of other formats, which models add, and in the place of which they stand."""
CLOSERS = {"parameter": 1, "function": 2, "tool_call": 3} | STRAY
CLOSER = re.compile(rf"\s{{0,64}}</({'|'.join(CLOSERS)})>")
CALL_END = "</tool_call>"
CLOSING = ("</function>", CALL_END)
STRAY_TAGS = tuple(f"</{name}>" for name in STRAY)
CALL_OPENERS = (TOOL_CALL, *FUNCTIONS)
CALL_OPENER = re.compile("|".join(CALL_OPENERS))
THOUGHT_TAGS = ("</think>", *CALL_OPENERS)
AFTER_NAME = (*PARAMETERS, *CLOSING)
IN_FUNCTION = (*PARAMETERS, "</parameter>", *CLOSING, *CALL_OPENERS, *STRAY_TAGS)
AFTER_JSON = (*CLOSING, TOOL_CALL, *STRAY_TAGS)
INNER_CALL = re.compile(
    rf"<tool_call>\s{{0,64}}\[?{{\s{{0,8}}\"|(?:<tool_call>\s{{0,64}})?{FUNCTION.pattern}\s{{0,64}}(?=<parameter|</function)"
)
"""An example of a call, as it begins in a value."""
MAX_INNER = 320
"""Characters of the beginning of such an example."""
VALUE_TAGS = ("</parameter>", *PARAMETERS, *CALL_OPENERS)
LINE_TAGS = (*VALUE_TAGS, *CLOSING)
AFTER_VALUE = (*PARAMETERS, *CALL_OPENERS)
MAX_TAG = 300
"""Characters that an unfinished tag may have before it is taken for text: more than any of the patterns
above.
"""
MAX_SPACE = 64
"""Characters of white space between two tags of a call, and (fourfold) before a call or a thought's end."""


def starts_any(text: str, tags: tuple[str, ...]) -> bool:
    """Returns whether `text` is the beginning of one of `tags`, but not all of it."""
    return any(tag.startswith(text) and tag != text for tag in tags)


def n_held(text: str, tags: tuple[str, ...], line_tags: tuple[str, ...] = ()) -> int:
    """Length of the end of `text` that may be the beginning of a tag. line_tags: of those with their newline
    before.
    """
    at = text.rfind("<")
    tail = text[at:] if at >= 0 else ""
    if tail and starts_any(tail, line_tags) and text.startswith("\n", at - 1) and at:
        return len(tail) + 1
    if tail and starts_any(tail, tags):
        return len(tail)
    return 1 if line_tags and text.endswith("\n") else 0


def n_before_space(text: str, end: int, space: str | None = None) -> int:
    """Length of `text[:end]` without the white space at its end, but for more of that than a format has
    there.
    """
    return max(len(text[:end].rstrip(space)), end - 4 * MAX_SPACE)


def is_better(tag: str, second: str) -> bool:
    """Returns whether only the second of two closing tags in a row is on a line of its own, as the format has
    it.
    """
    return not tag.startswith("\n") and "\n</" in second


def n_cut_think_end(text: str) -> int:
    """Length of a `</think` with white space but no `>` yet at the end of `text`."""
    cut = CUT_THINK_END.search(text, max(0, len(text) - len("</think") - 2))
    return len(text) - cut.start() if cut else 0


def is_over(tag: str) -> bool:
    """Returns whether a tag that is not well-formed so far cannot become so."""
    return len(tag) >= MAX_TAG or ">" in tag or "\n" in tag


def unquoted(name: str) -> str:
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'" else name
