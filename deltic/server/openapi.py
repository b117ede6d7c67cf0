"""A row of the table of routes, and the OpenAPI document of all, made from the structs that their bodies are
parsed with.

What a body may hold beyond its types (a field that is refused, one that excludes another) is a 400 that says
so. Answers are described by their media type; their fields are those of the API that the route belongs to.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic import __version__
from deltic.json_types import JsonObject
from deltic.server.service import Kind, Service
from deltic.server.transport import OLLAMA

FAILURES = {
    400: "The request cannot be honoured; `param` names the field.",
    401: "No valid API key.",
    403: "The Host header names another machine, or the key may not see what all keys share.",
    404: "No such model or object.",
    409: "There is such an object already, or no room for one more.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "Too many requests, or a limit of the key; see Retry-After.",
    500: "A fault of the server.",
    501: "Not offered by this server.",
    503: "The engine is loading, restarting, or stopping; see Retry-After.",
    504: "The request took longer than it may.",
    529: "Too many requests.",
}

_OF_OPEN_ROUTES = (403, 500)

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
}

OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Route:
    """Row of ROUTES. The first line of the endpoint's docstring is its summary in /openapi.json."""

    method: str
    path: str
    endpoint: Callable[[Service, Request], Awaitable[ASGIApp]]
    body: type[msgspec.Struct] | None = None
    """The struct of its JSON body."""
    open_: bool = False
    """True if no key is needed."""
    kind: Kind = "text"
    """The kind of the model that is used when the request names none."""
    takes_model: bool = False
    """The query's `model` names one; else the body's does, if there is one."""
    generates: bool = False
    """True if the route generates, so the limits of a key hold."""
    prepares: bool = False
    """True if the route makes a prompt or a text that goes nowhere: the limit of a key's requests at once
    holds.
    """
    is_shared: bool = False
    """True if the route reads or changes what all keys share: for administrators."""
    form: bool = False
    """True if the body is not JSON but a form."""
    any_type: bool = False
    """True if the JSON may be declared as anything: Ollama's manual shows `curl -d`, which calls it a form.
    """
    gives: tuple[str, ...] = ("application/json",)
    """The media types of its answers, beside event streams."""


def document(routes: Sequence[Route], root_path: str = "") -> JsonObject:
    """OpenAPI 3.1. root_path: the prefix under which a proxy offers them."""
    bodies = {route.body for route in routes if route.body is not None}
    schemas, components = msgspec.json.schema_components(
        list(bodies), schema_hook=lambda _: {"description": "Any JSON."}, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: JsonObject = {}
    for route in routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        operation = paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
        if route.body is not None:
            kind = "multipart/form-data" if route.form else "application/json"
            content = {kind: {"schema": schema_of[route.body]}}
            required = bool(route.body.__struct_fields__)
            operation["requestBody"] = {"required": required, "content": content}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Deltic", "version": __version__},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR, "OllamaError": OLLAMA_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, path: str) -> JsonObject:
    line = (inspect.getdoc(route.endpoint) or "").partition("\n")[0]
    summary = line.removeprefix(f"{route.method} {route.path}").lstrip(".: ")
    form = "OllamaError" if path.startswith(OLLAMA) else "Error"
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}
    gives = (*route.gives, "text/event-stream") if route.generates else route.gives
    responses: JsonObject = {"200": {"description": "The answer.", "content": {kind: {} for kind in gives}}}
    for status, text in FAILURES.items():
        if not route.open_ or status in _OF_OPEN_ROUTES or (status == 404 and "{" in path):
            responses[str(status)] = {"description": text, "content": error}
    if route.open_:
        responses["503"] = {"description": "The engine is not ready.", "content": {"application/json": {}}}
    operation: JsonObject = {"summary": summary or path, "responses": responses}
    parameters: list[JsonObject] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if route.takes_model:
        parameters.append({"name": "model", "in": "query", "schema": {"type": "string"}})
    if parameters:
        operation["parameters"] = parameters
    if not route.open_:
        operation["security"] = [{"key": []}, {}]  # a server may be without keys
    return operation
