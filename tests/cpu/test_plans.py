"""Memory plans stay what they were, refusals and their words among them."""

from __future__ import annotations

import json

from tests.plans import GOLDEN, all_plans


def test_plans_are_those_that_were_kept() -> None:
    """Where one is to change: python -m tests.plans, and read the difference."""
    kept, found = json.loads(GOLDEN.read_text()), all_plans()
    assert found.keys() == kept.keys()
    changed = {case: (kept[case], line) for case, line in found.items() if line != kept[case]}
    assert not changed
