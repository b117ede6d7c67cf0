"""What the routes share: the engine's client, the tokenizer, the settings, and the state of the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deltic.config import ServerConfig
from deltic.engine.client import EngineClient
from deltic.engine.request import EngineInfo
from deltic.metrics import Metrics
from deltic.server.chat import ChatTemplate
from deltic.server.errors import ApiError
from deltic.server.generation import unavailable
from deltic.server.protocol import SamplingDefaults
from deltic.text import Tokenizer

INLINE_BYTES = 8192
"""A body up to this size is parsed and tokenised in the event loop; a larger one in a thread beside it."""

T = TypeVar("T")


@dataclass
class Service:
    """What the routes need, and what the process knows of its own end."""

    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model_name: str
    config: ServerConfig
    defaults: SamplingDefaults
    metrics: Metrics = field(init=False)
    started_s: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    """Set when the process is told to stop: no new requests."""
    n_open: int = 0
    """HTTP requests that have not been answered whole."""
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "prepare"))
    """One thread, so that large prompts cannot take the engine's cores."""

    def __post_init__(self) -> None:
        client = self.client
        self.metrics = Metrics(
            lambda: client.stats, lambda: client.n_restarts, lambda: client.state == "ready"
        )

    def engine_info(self) -> EngineInfo:
        """What the engine has. Raises ApiError (503) while it takes no requests."""
        if self.draining:
            raise unavailable("the server is shutting down")
        if self.client.state == "ready" and self.client.info is not None:
            return self.client.info
        raise unavailable(self.status()["message"])

    def status(self) -> dict[str, Any]:
        """For /health and /ready."""
        client = self.client
        status: dict[str, Any] = {"status": "stopping" if self.draining else client.state}
        if client.state == "failed":
            status["message"] = f"the engine cannot be started: {client.failure}"
        elif client.state == "restarting":
            status["message"] = "the engine is being restarted; try again in a few seconds"
        elif self.draining or client.state == "stopped":
            status["message"] = "the server is shutting down"
        elif client.state == "starting":
            loading = client.loading
            stage = f" ({loading.stage}, {loading.done:.0%})" if loading else ""
            status["message"] = f"the model is loading{stage}; try again in a few seconds"
            if loading:
                status["loading"] = {"stage": loading.stage, "done": loading.done}
        return status

    async def prepare(self, size: int, work: Callable[[], T]) -> T:
        """Runs `work` (parsing, rendering, tokenising `size` bytes) without holding up other answers for long."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.worker, work)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"no model {name!r}; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )
