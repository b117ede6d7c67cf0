"""What is read out of msgspec's messages: these tests fail when it puts them in other words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from deltic.server.api.decode import Fault, fault_of


class Inner(Struct, forbid_unknown_fields=True):
    name: str
    n: Annotated[int, Meta(ge=0)] = 0
    off: Literal[False] | None = None


class Outer(Struct, forbid_unknown_fields=True):
    inner: list[Inner] = []
    by_name: dict[str, Inner] = {}
    by_id: dict[int, float] = {}


@pytest.mark.parametrize("strict", [True, False], ids=["decode", "convert"])
@pytest.mark.parametrize(
    "value, fault",
    [
        ({"a b": 1}, ("unknown", "", "a b")),
        ({"inner": [{"name": "x"}, {"name": "x", "a`b": 1}]}, ("unknown", "inner[1]", "a`b")),
        ({"by_name": {"k": {"name": "x", "y": 1}}}, ("unknown", "by_name[...]", "y")),
        ({"inner": [{}]}, ("missing", "inner[0]", "name")),
        ({"inner": [{"name": "x", "n": -1}]}, ("value", "inner[0].n", "")),
        ({"inner": [{"name": 3}]}, ("value", "inner[0].name", "")),
        ({"by_id": {"x": 1}}, ("value", "by_id", "")),
        (3, ("value", "", "")),
    ],
)
def test_faults(value: Any, fault: tuple[str, str, str], strict: bool) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        if strict:
            msgspec.json.decode(msgspec.json.encode(value), type=Outer)
        else:
            msgspec.convert(value, Outer)
    found = fault_of(caught.value)
    assert found[:3] == fault and "$" not in found.reason and found.reason


def test_only_false() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"name": "x", "off": true}', type=Inner)
    assert fault_of(caught.value) == Fault("only_false", "off", "", "Invalid enum value True")
