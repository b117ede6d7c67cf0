"""Tools of Anthropic's that the client runs: a request names their type, and the model knows their parameters
by heart.

Other models do not, so here they have a description and a schema, after which a call is what such a client
expects: `bash`, the text editor, and the memory. Tools that Anthropic's servers run have none: nobody here
would answer their calls.
"""

from __future__ import annotations

import re
from typing import Any

_PATH = {"type": "string", "description": "Absolute path of a file or directory."}
_TEXT = {
    "path": _PATH,
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
        "description": "view: first and last line to show, from 1; a last line of -1 is the end of the file.",
    },
    "file_text": {"type": "string", "description": "create: the content of the new file."},
    "old_str": {
        "type": "string",
        "description": "str_replace: the text to replace, to the letter; the file must have it exactly once.",
    },
    "new_str": {"type": "string", "description": "str_replace: what stands there afterwards."},
    "insert_line": {"type": "integer", "description": "insert: the line to insert after; 0: the beginning."},
    "insert_text": {"type": "string", "description": "insert: the text."},
}
_OLDER_TEXT = {name: schema for name, schema in _TEXT.items() if name != "insert_text"} | {
    "new_str": {"type": "string", "description": "str_replace: what stands there afterwards. insert: the text."}
}
_MOVED = {
    "old_path": {"type": "string", "description": "rename: the path as it is."},
    "new_path": {"type": "string", "description": "rename: the path as it is to be."},
}
_EDITS = ("view", "create", "str_replace", "insert")


def _commands(names: tuple[str, ...], parameters: dict[str, Any], required: list[str]) -> dict[str, Any]:
    command = {"type": "string", "enum": list(names), "description": "What to do."}
    properties = {"command": command} | parameters
    return {"type": "object", "properties": properties, "required": ["command", *required]}


_BASH = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command line to run."},
        "restart": {"type": "boolean", "description": "True: start the shell anew, without a command."},
    },
}
_EDITOR = (
    "Views, creates and changes text files, and lists directories. The command view shows a file with line numbers, create writes "
    "a new one, str_replace replaces one passage, insert adds lines behind a line"
)

_TOOLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (r"bash_\d{8}", "Runs a command in a bash shell that lives on between calls, and gives its output.", _BASH),
    (
        r"text_editor_(20241022|20250124)",
        f"{_EDITOR}, undo_edit takes back the last change of a file.",
        _commands((*_EDITS, "undo_edit"), _OLDER_TEXT, ["path"]),
    ),
    (r"text_editor_\d{8}", f"{_EDITOR}.", _commands(_EDITS, _TEXT, ["path"])),
    (
        r"memory_\d{8}",
        "A directory of your own, /memories, that lasts from one conversation to the next. Look into it (view) before you begin, and "
        "write down there what will be worth knowing later. Commands: view, create, str_replace, insert, delete, rename.",
        _commands((*_EDITS, "delete", "rename"), _TEXT | _MOVED, []),
    ),
)
"""Types, as a pattern, the first that fits; description; schema."""


def described(tool: dict[str, Any]) -> dict[str, Any] | None:
    """A tool of a known type, written out as one of the client's own; None: the type is another."""
    kind = tool.get("type")
    for pattern, description, schema in _TOOLS:
        if isinstance(kind, str) and re.fullmatch(pattern, kind):
            own = {name: value for name, value in tool.items() if name not in ("type", "max_characters")}
            return own | {"description": description, "input_schema": schema}
    return None
