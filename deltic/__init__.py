"""Deltic: a serving engine for the Qwen gated-DeltaNet hybrids.

`from deltic import LLM, SamplingParams` is the offline API. Both are imported when first used, so that the
command line and the server process start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltic.engine.messages import SamplingParams
    from deltic.llm import LLM, Completion

__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion"):
        from deltic import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from deltic.engine.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'deltic' has no attribute {name!r}")
