"""What routers ask of a server, under the names that they know: what it is (/server_info, /model_info,
/is_sleeping), and the ids of a prompt that they are about to send somewhere (/v1/chat/completions/render,
/v1/completions/render).

Nothing here needs an engine that runs, so all of it is answered while the server drains, too. Sources:
SGLang's `discover_metadata.rs`, llm-d's `vllm_http.go`, vLLM's `serve/render`.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from deltic import __version__
from deltic.engine.messages import Picture
from deltic.ops.geometry import PAGE_SIZE
from deltic.server.api import decode, protocol
from deltic.server.api.completions import check, encoded, prompts_of, rendered
from deltic.server.errors import naming
from deltic.server.preparation import Preparation
from deltic.server.service import Service
from deltic.server.transport import LargeResponse, json_response


async def server_info(service: Service, request: Request) -> ASGIApp:
    """GET /server_info: what the server has room for; SGLang's gateway asks it."""
    info = service.client.info
    sizes: dict[str, Any] = {}
    if info is not None:
        sizes = {
            "max_model_len": info.max_model_len,
            "context_length": protocol.context_limit(info),
            "max_total_tokens": info.n_pages * PAGE_SIZE,
            "max_prefill_tokens": info.max_step_tokens,
            **dict.fromkeys(("max_running_requests", "max_num_reqs", "max_batch_size"), info.max_num_seqs),
            "page_size": PAGE_SIZE,
            "kv_cache_dtype": info.kv_cache_dtype,
            "device": info.device,
        }
    return json_response(
        {
            "version": __version__,
            "status": service.status()["status"],
            "model_id": service.model_name,
            "served_model_name": service.model_name,
            "model_path": service.origin.get("model_path"),
            "dp_size": 1,
            "tp_size": service.client.config.tensor_parallel,
            "max_queued_requests": service.config.max_queue,
            **sizes,
        }
    )


async def model_info(service: Service, request: Request) -> ASGIApp:
    """GET /model_info: which model it is; SGLang's gateway asks it."""
    named = {"served_model_name": service.model_name, "is_generation": True, "has_image_understanding": service.sees}
    return json_response({**service.origin, **named})


async def is_sleeping(service: Service, request: Request) -> ASGIApp:
    """GET /is_sleeping: false; vLLM's production stack asks it."""
    return json_response({"is_sleeping": False})


async def render_chat(service: Service, request: Request) -> ASGIApp:
    """POST /v1/chat/completions/render: the ids of a chat's prompt, for routers."""
    info = service.rendering()
    async with Preparation(service, request) as preparation:
        chat = await preparation.parse(protocol.ChatRequest)
        decode.take_functions(chat)
        pictures = await preparation.read_pictures(chat)
        with naming(decode.older_names(chat)):
            check(service, chat)
            prompt, _, _ = await preparation.run(rendered, service, chat, info, pictures)
    return LargeResponse(_told(service, prompt.ids, prompt.pictures))


async def render_completion(service: Service, request: Request) -> ASGIApp:
    """POST /v1/completions/render: the ids of each prompt, for routers."""
    info = service.rendering()

    def ids_of(asked: protocol.CompletionRequest) -> list[dict[str, Any]]:
        prompts = prompts_of(service, asked, info)
        return [_told(service, ids) for ids, _ in encoded(service, asked, prompts, info)]

    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(protocol.CompletionRequest)
        return LargeResponse(await preparation.run(ids_of, asked))


def _told(service: Service, ids: list[int], pictures: list[Picture] | None = None) -> dict[str, Any]:
    """A prompt as vLLM tells it, without what only its own engines read. A video is pairs of frames, each of
    its own hash.
    """
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[dict[str, int]]] = {}
    for picture in pictures or ():
        kind = "image" if picture.n_frames == 1 else "video"
        hashes.setdefault(kind, []).append(picture.identifier)
        places.setdefault(kind, []).append({"offset": picture.first, "length": picture.n_tokens})
    features = {"mm_hashes": hashes, "mm_placeholders": places} if hashes else None
    return {"model": service.model_name, "token_ids": ids, "features": features}
