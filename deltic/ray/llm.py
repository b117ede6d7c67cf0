"""A `server_cls` for `ray.serve.llm`: Ray's own OpenAI front, with Deltic's engines behind it.

    LLMConfig(
        model_loading_config={"model_id": "chat", "model_source": "Qwen/Qwen3.5-4B"},
        engine_kwargs={"quantize": "int8"},  # settings of deltic serve
        server_cls="deltic.ray.llm:DelticLLMServer",
    )

It keeps to the LLMServerProtocol of Ray 2.60. Ray's front takes the types of requests and answers from vLLM
or SGLang, one of which must be installed; no engine of theirs is started.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from ray import get_runtime_context

from deltic.config import ConfigError
from deltic.json_types import JsonObject
from deltic.ray.app import AUTOSCALED, DRAIN_LEFT_S, HOPS, MAX_ONGOING, EngineDeployment
from deltic.ray.replica import Ask, Hosted
from deltic.ray.settings import Settings, settings

if TYPE_CHECKING:
    from pydantic import BaseModel
    from ray.llm._internal.serve.core.protocol import RawRequestInfo
    from ray.serve.llm import LLMConfig

WHENCE = "engine_kwargs"
"""Source of the settings, for complaints."""

Answer = AsyncGenerator["BaseModel | str", None]
"""An answer of Ray's types, or the events of a stream as they come."""

TYPES = "ray.llm._internal.serve.core.configs.openai_api_models"
"""Module that has the protocol's types; Ray's public one lacks those of errors."""


def settings_of(config: LLMConfig) -> Settings:
    """Returns what an LLMConfig asks for. Raises ConfigError, also for what would be passed over."""
    unserved = {
        "lora_config": "give adapters as engine_kwargs lora",
        "placement_group_config": "a replica is one actor",
    }
    for name, instead in unserved.items():
        if getattr(config, name, None) is not None:
            raise ConfigError(f"{name}: {instead}")
    loading = config.model_loading_config
    source = loading.model_source or loading.model_id
    if not isinstance(source, str):
        raise ConfigError("model_source: give a directory or a name on the hub")
    given: JsonObject = {"served_model_name": [loading.model_id]}
    if "dummy" not in config.engine_kwargs:
        given["model"] = source
    if loading.tokenizer_source is not None:
        given["tokenizer"] = loading.tokenizer_source
    return settings(WHENCE, given | config.engine_kwargs)


class DelticLLMServer(EngineDeployment):
    """A replica of `ray.serve.llm` with Deltic's engine."""

    async def __init__(self, llm_config: LLMConfig) -> None:  # type: ignore[misc]
        self._config = llm_config
        resources = get_runtime_context().get_assigned_resources()
        self.hosted = Hosted(settings_of(llm_config).placed(resources.get("CPU", 0.0), resources.get("GPU", 0.0)))
        await self.start()

    async def start(self) -> None:
        """Returns when requests are taken."""
        await self.hosted.start()

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> JsonObject:
        """The deployment_config, with what a replica needs. Raises ConfigError."""
        given = settings_of(llm_config)
        options: JsonObject = copy.deepcopy(llm_config.deployment_config)
        for name in ("placement_group_bundles", "placement_group_strategy"):
            if name in options:
                raise ConfigError(f"deployment_config {name}: a replica is one actor. Give ray_actor_options.")
        actor = options.setdefault("ray_actor_options", {})
        kind = getattr(llm_config.accelerator_config, "kind", "gpu")
        if kind not in ("cpu", "gpu"):
            raise ConfigError(f"accelerator_config {kind!r}: Deltic runs on CPUs and GPUs")
        actor.setdefault("num_gpus", given.models[0][0].tensor_parallel if kind == "gpu" else 0)
        actor.setdefault("num_cpus", 1)
        given.placed(actor["num_cpus"], actor["num_gpus"])
        if llm_config.accelerator_type is not None:
            actor["accelerator_type"] = llm_config.accelerator_type
        if llm_config.runtime_env:
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
        if isinstance(options.get("autoscaling_config"), dict):
            options["autoscaling_config"].setdefault("policy", {"policy_function": AUTOSCALED})
        options.setdefault("max_ongoing_requests", MAX_ONGOING)
        options.setdefault("graceful_shutdown_timeout_s", given.server.drain_s + DRAIN_LEFT_S)
        return options

    async def chat(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> Answer:
        """A ChatCompletionResponse, an ErrorResponse, or the events of a stream as they come."""
        async for item in self._asked("/v1/chat/completions", request, raw_request_info, "ChatCompletionResponse"):
            yield item

    async def completions(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> Answer:
        """A CompletionResponse, an ErrorResponse, or the events of a stream as they come."""
        async for item in self._asked("/v1/completions", request, raw_request_info, "CompletionResponse"):
            yield item

    async def tokenize(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> Answer:
        """A TokenizeResponse or an ErrorResponse."""
        async for item in self._asked("/tokenize", request, raw_request_info, "TokenizeResponse"):
            yield item

    async def detokenize(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> Answer:
        """A DetokenizeResponse or an ErrorResponse."""
        async for item in self._asked("/detokenize", request, raw_request_info, "DetokenizeResponse"):
            yield item

    async def embeddings(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> Answer:
        """An EmbeddingResponse or an ErrorResponse."""
        async for item in self._asked("/v1/embeddings", request, raw_request_info, "EmbeddingResponse"):
            yield item

    async def score(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> Answer:
        """An ErrorResponse: the models here make none."""
        async for item in self._asked("/score", request, raw_request_info, "ScoreResponse"):
            yield item

    async def transcriptions(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> Answer:
        """An ErrorResponse: the models here do not hear. Their file is not passed on."""
        async for item in self._asked("/v1/audio/transcriptions", None, raw_request_info, "TranscriptionResponse"):
            yield item

    async def _asked(self, path: str, request: BaseModel | None, about: RawRequestInfo | None, answer: str) -> Answer:
        """request: of Ray's types; what it does not say is left to our server. answer: the name of a type."""
        types = importlib.import_module(TYPES)
        body = b"" if request is None else request.model_dump_json(exclude_unset=True, exclude={"request_id"}).encode()
        given = {} if about is None else about.headers
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()]
        headers = [(name, value) for name, value in headers if name not in (*HOPS, b"content-type")]
        headers.append((b"content-type", b"application/json"))
        status, whole, is_events = 0, b"", False
        async for piece in self.hosted.stream(Ask("POST", path, body, headers)):
            if not isinstance(piece, bytes):
                status, is_events = piece[0], dict(piece[1])[b"content-type"].startswith(b"text/event-stream")
            elif is_events:
                yield piece.decode()
            else:
                whole += piece
        if whole and status < 400:
            yield getattr(types, answer).model_validate_json(whole)
        elif whole:
            error = json.loads(whole)["error"]
            yield types.ErrorResponse(
                error=types.ErrorInfo(message=error["message"], type=error["type"], param=error["param"], code=status)
            )

    async def reset_prefix_cache(self) -> None:
        """Empties the prefix cache."""
        await self.hosted.reset_cache()

    async def llm_config(self) -> LLMConfig:
        """Returns the configuration as it was given."""
        return self._config

    async def is_sleeping(self) -> bool:
        """Returns False: an engine never sleeps."""
        return False

    async def is_paused(self) -> bool:
        """Returns False: an engine never pauses."""
        return False

    async def sleep(self, **kwargs: object) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError("Deltic's engine does not sleep; let Serve scale to fewer replicas")

    wakeup = pause = resume = sleep

    async def start_profile(self) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError("Deltic has no profiler behind its server; see deltic bench")

    stop_profile = start_profile
