"""Types of JSON from outside whose fields this program does not know: schemas, tools' arguments, metadata."""

from typing import Any

JsonObject = dict[str, Any]
"""Object of any fields, read from outside or written for others. One that we look into has a struct."""
Json = None | bool | int | float | str | list[Any] | JsonObject
"""Value of any kind, which is looked into before use."""
