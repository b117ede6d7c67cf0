"""The models that there are, what a tokenizer makes of a text, and adapters that come and go: /v1/models,
/tokenize, /detokenize, /v1/load_lora_adapter and /v1/unload_lora_adapter; and what routers ask: /server_info,
/model_info, /is_sleeping, /v1/chat/completions/render and /v1/completions/render.
"""

from __future__ import annotations

import datetime
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from deltic import __version__
from deltic.config import ADAPTER_NAME
from deltic.engine.messages import EngineInfo, Picture
from deltic.json_types import JsonObject
from deltic.ops.geometry import PAGE_SIZE
from deltic.server.adapters import AdapterRefused, full_path
from deltic.server.api import protocol
from deltic.server.api.completions import CompletionRequest, check, completion_of, encoded, rendered
from deltic.server.chat.generation import refusals, unavailable
from deltic.server.chat.messages import Message
from deltic.server.chat.picture_parts import PictureBounds, Pictures
from deltic.server.chat.request import Chat, Effort, context_limit
from deltic.server.chat.template import render
from deltic.server.errors import ApiError, bad_request
from deltic.server.limits import TICKET
from deltic.server.offered import Offered
from deltic.server.on_demand import lets_change
from deltic.server.preparation import Preparation, parsed
from deltic.server.service import SHUTTING_DOWN, Server, Service
from deltic.server.transport import EncodedArray, LargeResponse, json_response


async def list_models(service: Service, request: Request) -> ASGIApp:
    """GET /v1/models: those there are."""
    server, on_demand, more = service.server, service.server.on_demand, {}
    if on_demand is not None:
        await on_demand.look()
        may_change = lets_change(service.config, request.scope[TICKET])
        more = {"may_pull": may_change}
        cards = []
        for model in on_demand.models.values():
            also = {"deletable": True} if may_change and model.is_cached else {}
            cards += [offered_card(server, model, name, **also) for name in model.names]
    else:
        cards = [model_card(other, name) for other in server.models.values() for name in other.names]
    cards += [model_card(other, other.model_name) for other in server.adapted()]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}  # Anthropic's form of a list
    return json_response({"object": "list", "data": cards, "has_more": False} | ends | more)


async def get_model(service: Service, request: Request) -> ASGIApp:
    """GET /v1/models/{model:path}: one of them, by a name that it answers to."""
    name, server = request.path_params["model"], service.server
    if server.on_demand is not None and (server.on_demand.called(name) or not server.known(name)):
        return json_response(offered_card(server, await server.on_demand.find(name), name))
    return json_response(model_card(service.server.find(name), name))


def model_card(service: Service, name: str) -> dict[str, object]:
    """The entry of /v1/models for a model under one of its names; `root` is the first of them. That of an
    adapter has its path as `root`, and its model as `parent`.
    """
    return _card(
        service.server,
        name,
        service.adapter.path if service.adapter else service.model_name,
        service.client.info,
        **({"parent": service.adapter.parent} if service.adapter else {}),
        **({"input_modalities": ["text", "image"]} if service.sees else {}),
        **({"speech": service.speech.card()} if service.speech else {}),
    )


LLAMA_STATUS = {"waiting": "loading", "unloading": "loaded", "failed": "unloaded"}
"""States as llama.cpp's router has them, where the word is another."""


def offered_card(server: Server, model: Offered, name: str, **more: bool) -> dict[str, object]:
    """The entry of a model that may be loaded. `status` has the form of llama.cpp's router."""
    status: JsonObject = {"value": LLAMA_STATUS.get(model.state, model.state), **more}
    if model.state == "loading" and (loading := model.client.loading):
        status["progress"] = {"stage": loading.stage, "done": loading.done}
    if model.failure:
        status |= {"failed": True, "message": model.failure}
    card = model_card(server.models[model.name], name) if model.is_open else _card(server, name, model.name, None)
    return card | {"status": status}


def _card(server: Server, name: str, root: str, info: EngineInfo | None, **more: object) -> dict[str, object]:
    """info: of its engine, where one has told."""
    limit = context_limit(info) if info else None
    at = datetime.datetime.fromtimestamp(server.started_s, datetime.UTC)
    return {
        "id": name,
        "root": root,
        "object": "model",
        "created": server.started_s,
        "owned_by": "deltic",
        "max_model_len": info.max_model_len if info else None,
        # What other clients look for, under names of their own.
        **dict.fromkeys(("context_length", "context_window", "max_input_tokens", "max_tokens"), limit),
        **more,
        "type": "model",
        "display_name": name,
        "created_at": at.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
    }


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text, or a chat as /v1/chat/completions would render it."""

    model: str | None = None
    return_token_strs: bool = False
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Changes nothing: the family's tokenizers add none."""
    parse_special_tokens: bool | None = None
    """Unless false, `<|im_end|>` written in the prompt is the token, and not its letters."""
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: object = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    mm_processor_kwargs: PictureBounds | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None
    skip_special_tokens: bool = False


def check_tokenize(request: TokenizeRequest) -> None:
    """Raises ApiError (400) unless the request has a prompt or messages, and no field of the other."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("prompt", "give either prompt or messages")
    form, other = ("prompt", _CHAT_ONLY) if request.messages is None else ("messages", ("parse_special_tokens",))
    for field in other:
        if getattr(request, field) is not None:
            raise bad_request(field, f"has no meaning with {form}. Leave it out.")


_CHAT_ONLY = TokenizeRequest.__struct_fields__[TokenizeRequest.__struct_fields__.index("tools") :]


def tokenized_chat(request: TokenizeRequest) -> Chat:
    """The chat of a body that has one. Raises ApiError (400)."""
    fields = {name: getattr(request, name) for name in ("model", *_CHAT_ONLY)}
    return protocol.chat_of(protocol.ChatRequest(messages=request.messages or [], **fields))


async def tokenize(service: Service, request: Request) -> ASGIApp:
    """POST /tokenize: the ids of a text or a chat."""

    def encode(asked: TokenizeRequest, chat: Chat | None, pictures: Pictures) -> dict[str, object]:
        if chat is None:
            is_text = asked.parse_special_tokens is False
            pieces = service.tokenizer.encode_pieces(asked.prompt or "", "text" if is_text else "parse")
        else:
            pieces = iter([render(service.template, chat, pictures=pictures).ids])
        count, tokens, strings = 0, EncodedArray(), EncodedArray()
        for ids in filter(None, pieces):  # of a long text each would take a hundred bytes
            count += len(ids)
            tokens.append(msgspec.json.encode(ids)[1:-1])
            if asked.return_token_strs:
                texts = [service.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
                strings.append(msgspec.json.encode(texts)[1:-1])
        info = service.client.info
        fields: dict[str, object] = {
            "count": count,
            "max_model_len": info.max_model_len if info else None,
            "tokens": tokens,
        }
        return fields | ({"token_strs": strings} if asked.return_token_strs else {})

    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(TokenizeRequest)
        service.check_model(asked.model)
        check_tokenize(asked)
        chat, pictures = None, Pictures()
        if asked.messages is not None:
            chat, pictures = await preparation.read_chat(tokenized_chat, asked)
        return LargeResponse(await preparation.run(encode, asked, chat, pictures))


async def detokenize(service: Service, request: Request) -> ASGIApp:
    """POST /detokenize: the text of ids."""

    def decode(asked: DetokenizeRequest) -> dict[str, object]:
        service.check_model(asked.model)
        info = service.client.info
        n_ids = max(service.tokenizer.n_tokens, info.vocab_size if info else 0)
        if asked.tokens and max(asked.tokens) >= n_ids:
            raise bad_request("tokens", f"{max(asked.tokens)} is not a token id. They go from 0 to {n_ids - 1}.")
        return {"prompt": service.tokenizer.decode(asked.tokens, asked.skip_special_tokens)}

    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(DetokenizeRequest)
        return LargeResponse(await preparation.run(decode, asked))


class LoadAdapterRequest(Struct, forbid_unknown_fields=True):
    """Body of POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: Annotated[str, Meta(pattern=rf"^{ADAPTER_NAME}(?![\s\S])")]
    """Python's `$` would let a newline end it."""
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool | None = None
    """True: the adapter replaces that of this name, if there is one."""


class UnloadAdapterRequest(Struct, forbid_unknown_fields=True):
    """Body of POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: Annotated[str, Meta(min_length=1)]


async def load_adapter(service: Service, request: Request) -> ASGIApp:
    """POST /v1/load_lora_adapter: gives a name to a LoRA adapter on the server's disk."""
    _check_loading(service)
    asked = await parsed(service, request, LoadAdapterRequest)
    name = asked.lora_name
    try:
        with refusals():
            await service.adapters.load(name, full_path(asked.lora_path), replaces=bool(asked.load_inplace))
    except AdapterRefused as error:
        raise ApiError(400, str(error), code="adapter_refused") from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(service: Service, request: Request) -> ASGIApp:
    """POST /v1/unload_lora_adapter: forgets a name; requests that have its adapter run to their end."""
    name = (await parsed(service, request, UnloadAdapterRequest)).lora_name
    service = next((other for other in service.server.models.values() if other.adapters.find(name)), service)
    _check_loading(service)
    if not await service.adapters.unload(name):
        known = ", ".join(repr(adapter.name) for adapter in service.adapters.all()) or "none"
        message = f"no adapter {name!r}. {service.model_name!r} has {known}."
        raise ApiError(404, message, param="lora_name", code="adapter_not_found")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_loading(service: Service) -> None:
    """Raises ApiError: 403 without --allow-lora-loading, 503 while the server stops."""
    if not service.client.config.allow_lora_loading:
        message = (
            f"clients may not load adapters of {service.model_name!r}. Start the server with --allow-lora-loading."
        )
        raise ApiError(403, message, code="lora_loading_off")
    if service.server.draining:
        raise unavailable(SHUTTING_DOWN)


# What routers ask of a server, under the names that they know: what it is, and the ids of a prompt that they
# are about to send somewhere. None of it needs an engine that runs, so all is answered while the server
# drains, too. Sources: SGLang's `discover_metadata.rs`, llm-d's `vllm_http.go`, vLLM's `serve/render`.


async def server_info(service: Service, request: Request) -> ASGIApp:
    """GET /server_info: what the server has room for; SGLang's gateway asks it."""
    info = service.client.info
    sizes: dict[str, object] = {}
    if info is not None:
        sizes = {
            "max_model_len": info.max_model_len,
            "context_length": context_limit(info),
            "max_total_tokens": info.n_pages * PAGE_SIZE,
            "max_prefill_tokens": info.max_step_tokens,
            **dict.fromkeys(("max_running_requests", "max_num_reqs", "max_batch_size"), info.max_num_seqs),
            "page_size": PAGE_SIZE,
            "kv_cache_dtype": info.kv_cache_dtype,
            "precision": info.precision,
            "device": info.device,
            "kernels": info.kernels,
            "system_fingerprint": service.fingerprint,
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
        asked = await preparation.parse(protocol.ChatRequest)
        chat, pictures = await preparation.read_chat(protocol.chat_of, asked, service.defaults)
        check(service, chat)
        prompt, _ = await preparation.run(rendered, service, chat, info, pictures)
    return LargeResponse(_rendered(service, prompt.ids, prompt.pictures))


async def render_completion(service: Service, request: Request) -> ASGIApp:
    """POST /v1/completions/render: the ids of each prompt, for routers."""
    info = service.rendering()

    def ids_of(asked: CompletionRequest) -> list[dict[str, object]]:
        completion = completion_of(asked, info, service.defaults)
        return [_rendered(service, ids) for ids, _ in encoded(service, completion, info)]

    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(CompletionRequest)
        return LargeResponse(await preparation.run(ids_of, asked))


def _rendered(service: Service, ids: list[int], pictures: list[Picture] | None = None) -> dict[str, object]:
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
