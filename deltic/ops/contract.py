"""What an operator requires of its arguments, checked while a program is recorded."""

from __future__ import annotations


class KernelError(ValueError):
    """The compiled kernels are missing or an operator was given what its contract excludes."""


def check(operator: str, condition: bool, expected: str) -> None:
    """Raises KernelError naming the operator when its contract does not hold.

    Costs nothing after recording.
    """
    if not condition:
        raise KernelError(f"{operator}: expected {expected}")
