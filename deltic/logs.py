"""Lines of the log: text for people, or a JSON object each. Both processes write to stderr."""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, message; `fields` of the record beside them; the traceback under
    `exception`.

    Nothing but ASCII: what a client sent cannot reach a terminal as a control character.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def printable(text: str) -> str:
    """Returns a text without control characters, which a terminal would obey: names are others'."""
    return _CONTROL.sub("", text)


def counted(n: int, what: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{n} {what}{'s' * (n != 1)}"


def set_up(level: str, form: str, text: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    """Has this process log. form: "text", in the format `text`, or "json"."""
    destination = logging.StreamHandler(sys.stderr)
    destination.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[destination])
