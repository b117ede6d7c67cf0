"""Deltic: a serving engine for the Qwen gated-DeltaNet hybrids.

`from deltic import LLM, SamplingParams` is the offline API. Its names are imported when first used, so that
the command line and the server process start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltic.async_llm import AsyncLLM
    from deltic.llm import LLM
    from deltic.llm_calls import AnswerParams as SamplingParams
    from deltic.llm_calls import AnswerPiece, Completion

__all__ = ["LLM", "AnswerPiece", "AsyncLLM", "Completion", "SamplingParams", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "AsyncLLM":
        from deltic.async_llm import AsyncLLM

        return AsyncLLM
    if name in ("LLM", "AnswerPiece", "Completion", "SamplingParams"):
        from deltic import llm

        return getattr(llm, "AnswerParams" if name == "SamplingParams" else name)
    raise AttributeError(f"module 'deltic' has no attribute {name!r}")
