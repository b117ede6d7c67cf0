"""Types of JSON from outside whose fields this program does not know: schemas, tools' arguments, metadata."""

from typing import Any

JsonObject = dict[str, Any]
"""Object of any fields. JSON whose fields are known has a struct or a TypedDict instead."""
Json = None | bool | int | float | str | list[Any] | JsonObject
"""Value of any kind, which is looked into before use."""
