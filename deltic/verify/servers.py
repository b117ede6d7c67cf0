"""Asks another server with the same model: its log-probabilities of a prompt's tokens, its ids of texts, its
renderings.

Each kind has a form of its own. vLLM (and Deltic): `prompt_logprobs` of /v1/completions. SGLang:
`return_logprob` of /generate. llama-server tells none of a prompt, but that of a drawn token, out of the
logits as the model gives them: so each token is asked for by itself, behind those before it, and a bias
makes sure that it is drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deltic.commands.endpoint import Endpoint, EndpointError, error_message
from deltic.verify.page import Tell
from deltic.verify.texts import CHATS, TEXTS

KINDS = {"vllm": "vLLM", "deltic": "Deltic", "sglang": "SGLang", "llamacpp": "llama.cpp"}
"""Servers by `owned_by` in /v1/models."""

T = TypeVar("T")

SURE = 1000.0
"""A bias in logits that makes a token be drawn."""


@dataclass
class Answers:
    """Answers of a server."""

    kind: str
    model: str
    """The name that it has for its model."""
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    """Log-probabilities of each text's tokens but the first."""
    ids: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, str | list[int]] = field(default_factory=dict)
    """Renderings of chats."""
    refused: list[str] = field(default_factory=list)
    """Questions that it does not answer, with its words."""

    async def take(self, told: dict[str, T], name: str, asked: Awaitable[T], what: str) -> None:
        """Keeps an answer among those told, or its refusal. what: what was asked for, in words."""
        try:
            told[name] = await asked
        except EndpointError as error:
            self.refused.append(f"it does not tell {what} of {name!r}: {error}")


def ask(url: str, key: str | None, cacert: str | None, texts: Mapping[str, Sequence[int]], tell: Tell) -> Answers:
    """Asks a server everything. texts: ids by their names. Raises EndpointError, ConfigError."""

    async def asking() -> Answers:
        endpoint = Endpoint(url, key, cacert)
        try:
            return await _ask(endpoint, texts, tell)
        finally:
            endpoint.close()

    return asyncio.run(asking())


async def _ask(endpoint: Endpoint, texts: Mapping[str, Sequence[int]], tell: Tell) -> Answers:
    status, body = await endpoint.json("GET", "/v1/models")
    try:
        card = body["data"][0]
        model, kind = str(card["id"]), str(card.get("owned_by"))
    except (TypeError, LookupError, AttributeError):
        raise EndpointError(f"{endpoint.url} lists no model: {error_message(body, status)}") from None
    if kind not in KINDS:
        raise EndpointError(
            f"{endpoint.url}: a server of {kind!r}, of which this does not know how it tells log-probabilities; known are "
            f"{', '.join(KINDS.values())}"
        )
    answers = Answers(KINDS[kind], model)
    server = _Server(endpoint, kind, model)
    for name, text in TEXTS.items():
        await answers.take(answers.ids, name, server.ids(text), "the ids")
    for chat in CHATS:
        await answers.take(answers.prompts, chat["name"], server.prompt(chat), "the rendering")
    for nth, (name, ids) in enumerate(texts.items()):
        tell(f"asking {KINDS[kind]} for {name}", nth / len(texts))
        await answers.take(answers.logprobs, name, server.logprobs(list(ids)), "the log-probabilities")
    return answers


@dataclass(frozen=True)
class _Server:
    endpoint: Endpoint
    kind: str
    model: str

    async def _asked(self, path: str, body: dict[str, Any]) -> Any:
        """Raises EndpointError unless it answers with 200."""
        status, found = await self.endpoint.json("POST", path, body)
        if status != 200:
            raise EndpointError(f"{path}: {error_message(found, status)}")
        return found

    async def ids(self, text: str) -> list[int]:
        if self.kind == "llamacpp":
            said = await self._asked("/tokenize", {"content": text, "add_special": False, "parse_special": False})
        else:
            said = await self._asked("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        return _read(lambda: list(map(int, said["tokens"])), "/tokenize")

    async def prompt(self, chat: dict[str, Any]) -> str | list[int]:
        body: dict[str, Any] = {name: chat[name] for name in ("messages", "tools") if name in chat}
        if "enable_thinking" in chat:
            body["chat_template_kwargs"] = {"enable_thinking": chat["enable_thinking"]}
        if self.kind == "llamacpp":
            said = await self._asked("/apply-template", body)
            return _read(lambda: str(said["prompt"]), "/apply-template")
        said = await self._asked("/tokenize", {"model": self.model, "add_generation_prompt": True} | body)
        return _read(lambda: list(map(int, said["tokens"])), "/tokenize")

    async def logprobs(self, ids: list[int]) -> list[float]:
        """Log-probabilities of the tokens but the first. Raises EndpointError."""
        if self.kind == "llamacpp":
            return [await self._of_next(ids[:at], ids[at]) for at in range(1, len(ids))]
        if self.kind == "sglang":
            asked = {"max_new_tokens": 1, "temperature": 0}
            body = {"input_ids": ids, "sampling_params": asked, "return_logprob": True, "logprob_start_len": 0}
            said = await self._asked("/generate", body)
            return _read(
                lambda: [float(each[0]) for each in said["meta_info"]["input_token_logprobs"][1:]], "/generate"
            )
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        said = await self._asked("/v1/completions", body)

        def read() -> list[float]:
            entries = said["choices"][0]["prompt_logprobs"][1:]
            return [float(each[str(id)]["logprob"]) for each, id in zip(entries, ids[1:], strict=True)]

        return _read(read, "/v1/completions")

    async def _of_next(self, before: list[int], id: int) -> float:
        body = {"prompt": before, "n_predict": 1, "temperature": 0, "n_probs": 1, "cache_prompt": True}
        said = await self._asked("/completion", body | {"logit_bias": [[id, SURE]], "post_sampling_probs": False})

        def read() -> float:
            drawn = said["completion_probabilities"][0]
            if drawn["id"] != id:
                raise ValueError
            return float(drawn["logprob"])

        return _read(read, "/completion")


def _read(read: Callable[[], T], path: str) -> T:
    """Takes what a reader wants out of an answer. Raises EndpointError where it is not there."""
    try:
        return read()
    except (TypeError, LookupError, ValueError):
        raise EndpointError(f"{path}: the answer does not have the form that this kind of server has") from None
