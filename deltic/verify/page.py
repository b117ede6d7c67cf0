"""The page of `deltic verify`: what each check found, as text and as JSON, with nothing in it of the
person whose machine it is.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from deltic.config import ConfigError
from deltic.json_types import JsonObject
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.text import TokenizerError

REFUSALS = (CheckpointError, UnsupportedModelError, TokenizerError, ConfigError, OSError)
"""Errors of files, or of settings, that are not as they should be."""

Verdict = Literal["skipped", "ok", "look", "wrong"]
"""look: nothing is known to be wrong, and somebody should see it."""

_RANKS: tuple[Verdict, ...] = ("skipped", "ok", "look", "wrong")

MOST_SAID = 12
"""Findings of a check that the text has; the JSON has all."""

Tell = Callable[[str, float], None]
"""Tells what is done, and the part of it that is, 0 to 1."""


@dataclass
class Check:
    """Check with its verdict, and sentences that say what was found."""

    name: str
    verdict: Verdict = "ok"
    said: list[str] = field(default_factory=list)
    figures: JsonObject = field(default_factory=dict)
    _n_judged: int = 0

    def note(self, text: str) -> None:
        """Adds what was found, good or neutral."""
        self.said.append(text)

    def look(self, text: str) -> None:
        """Adds what somebody should see."""
        self._judge("look", text)

    def wrong(self, text: str) -> None:
        """Adds what is wrong."""
        self._judge("wrong", text)

    def skip(self, text: str) -> None:
        """Says why nothing was checked, and what to do."""
        self.verdict = "skipped"
        self.said.append(text)

    def _judge(self, verdict: Verdict, text: str) -> None:
        if _RANKS.index(verdict) > _RANKS.index(self.verdict):
            self.verdict = verdict
        self.said.insert(self._n_judged, text)  # before what is good
        self._n_judged += 1


@dataclass
class Page:
    """Checks, and what they were made with."""

    head: dict[str, str]
    """The model, its settings and the machine, by what they are called on the page."""
    checks: list[Check] = field(default_factory=list)
    secrets: tuple[str, ...] = ()
    """Texts that must not be on the page, such as keys."""
    places: dict[str, str] = field(default_factory=dict)
    """Names that the page has for directories and files."""

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """Adds a check. What the block raises is what the check found wrong: the page is never lost."""
        check = Check(name)
        self.checks.append(check)
        try:
            yield check
        except REFUSALS as error:
            check.wrong(str(error))
        except Exception as error:
            check.wrong(f"this check failed: {error_text(error)}")

    @property
    def verdict(self) -> Verdict:
        """The worst of the verdicts."""
        return max((check.verdict for check in self.checks), key=_RANKS.index, default="skipped")

    def text(self) -> str:
        """The page in Markdown, to be pasted."""
        n = {verdict: sum(check.verdict == verdict for check in self.checks) for verdict in _RANKS}
        lines = [f"# deltic verify: {self.verdict}", ""]
        lines += [f"- {name}: {value}" for name, value in self.head.items()]
        lines += ["", ", ".join(f"{n[verdict]} {verdict}" for verdict in reversed(_RANKS) if n[verdict]), ""]
        for check in self.checks:
            lines += [f"## {check.name}: {check.verdict}", ""]
            lines += [f"- {text}" for text in check.said[:MOST_SAID]]
            if (more := len(check.said) - MOST_SAID) > 0:
                lines.append(f"- and {more} more, which the JSON has")
            lines.append("")
        return self._private("\n".join(lines))

    def json(self) -> JsonObject:
        """The same as an object, with all figures."""
        names = ("name", "verdict", "said", "figures")
        checks: list[object] = [{name: getattr(each, name) for name in names} for each in self.checks]
        made: JsonObject = {"verdict": self.verdict, "head": self.head, "checks": checks}
        return dict(self._private_value(made))

    def _private_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._private(value)
        if isinstance(value, Mapping):
            return {self._private(str(name)): self._private_value(inner) for name, inner in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)  # JSON has no such number
        return [*map(self._private_value, value)] if isinstance(value, list | tuple) else value

    def _private(self, text: str) -> str:
        """The text without keys and addresses, and with names in place of directories."""
        for secret in filter(None, self.secrets):
            text = text.replace(secret, "(a key)")
        for place, name in sorted(self.places.items(), key=lambda item: -len(item[0])):
            text = text.replace(place, name)
        text = re.sub(r"(?<=//)[^/@\s]+@", "", text)  # of a URL
        text = re.sub(r"\('[\w.:%]+', \d+(, \d+)*\)", "(an address)", text)  # as asyncio writes it
        for home in {str(Path.home()), os.path.realpath(Path.home())} - {"/"}:
            text = text.replace(home, "~")
        return text


def error_text(error: Exception) -> str:
    """The class of an error, and the beginning of what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
