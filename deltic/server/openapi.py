"""A row of the table of routes, and the OpenAPI document of all, made from the structs that their bodies are
parsed with and the schemas of their answers (answers.json).

What a body may hold beyond its types (a field that is refused, one that excludes another) is a 400 that says
so. A field is described by the docstring behind it, else by its name (fields.toml). Examples of bodies are
in examples.toml, all other texts in openapi.toml.

Answers are written as bytes where they are made, since a token costs one small encoding there. So nothing
constructs what answers.json describes; tests hold real answers to it, and find a field that is missing there.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic import __version__
from deltic.config import docstrings
from deltic.json_types import JsonObject
from deltic.server.service import Kind, Service
from deltic.server.transport import ANTHROPIC, OLLAMA

_OF_OPEN_ROUTES = ("403", "500")

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Route:
    """Row of ROUTES. The first line of the endpoint's docstring is its summary in /openapi.json, the others
    are its description.
    """

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
    names_later: bool = False
    """True if its endpoint looks for the model that its body names, which need not be there."""
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
    is_polled: bool = False
    """True if it is asked again and again, and gets no line in the log."""
    query: type[msgspec.Struct] | None = None
    """The struct of what its query may have, beside `model`."""
    gives: tuple[str, ...] = (JSON,)
    """The media types of its answers, beside events and lines."""
    answer: Any = None
    """The type of its JSON: a struct, where one is constructed, or a name of answers.json. None: any JSON, or
    none.
    """
    event: Any = None
    """The type of the data of an event, or of a line, of its streams."""


class Schemas:
    """The JSON schemas of all types of a table of routes, with texts."""

    def __init__(self, routes: Sequence[Route]) -> None:
        named = {each for route in routes for each in (route.body, route.answer, route.event, route.query) if each}
        types = [each for each in named if not isinstance(each, str)]
        schemas, self.components = msgspec.json.schema_components(
            types, schema_hook=lambda _: {"description": "Any JSON."}, ref_template="#/components/schemas/{name}"
        )
        self._schema_of: dict[Any, JsonObject] = dict(zip(types, schemas, strict=True)) | answers()["alternatives"]
        for struct in {struct for each in types for struct in _structs(msgspec.inspect.type_info(each))}:
            self._describe(struct)
        for name, schema in answers()["types"].items():
            self.components[name] = _component(name, schema)
            self._schema_of[name] = {"$ref": f"#/components/schemas/{name}"}

    def of(self, kind: Any) -> JsonObject:
        """The schema of a type; of None that of any JSON."""
        return {} if kind is None else self._schema_of[kind]

    def said(self, kind: Any) -> str:
        """The description of an answer."""
        component = self.components.get(self.of(kind).get("$ref", "").rpartition("/")[2], {})
        return str(component.get("description", "The answer."))

    def properties(self, struct: type[msgspec.Struct]) -> dict[str, JsonObject]:
        """The properties of a struct, by name."""
        name = self._schema_of[struct]["$ref"].rpartition("/")[2]
        return dict(self.components[name]["properties"])

    def _describe(self, struct: type[msgspec.Struct]) -> None:
        """Gives a text to each field of a struct, and to the struct itself the whole of its docstring."""
        encoded, texts = set(struct.__struct_encode_fields__), field_texts(struct)
        for component in self.components.values():
            if component.get("title") == struct.__name__ and encoded <= component.get("properties", {}).keys():
                component["description"] = " ".join((struct.__doc__ or "").split())
                for name, schema in component["properties"].items():
                    if text := texts.get(name):
                        schema["description"] = text


def _structs(info: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that a type is made of."""
    found: set[type[msgspec.Struct]] = set()
    todo = [info]
    while todo:
        each = todo.pop()
        if isinstance(each, msgspec.inspect.StructType):
            if each.cls in found:
                continue
            found.add(each.cls)
            todo += [field.type for field in each.fields]
        elif isinstance(each, msgspec.inspect.UnionType):
            todo += each.types
        else:
            parts = (getattr(each, name, None) for name in ("type", "item_type", "key_type", "value_type"))
            todo += [part for part in parts if isinstance(part, msgspec.inspect.Type)]
    return iter(found)


@cache
def _named_fields() -> dict[str, str]:
    return tomllib.loads(Path(__file__).with_name("fields.toml").read_text())


@cache
def answers() -> dict[str, dict[str, JsonObject]]:
    """The JSON schemas of answers. `types` are objects, which become components; `alternatives` are unions
    and lists of them, under the names that routes have for them.
    """
    read: dict[str, dict[str, JsonObject]] = json.loads(Path(__file__).with_name("answers.json").read_text())
    return read


def _component(name: str, schema: JsonObject) -> JsonObject:
    """A type of answers.json with its title and a text for each field. One without a default is required."""
    fields = schema["properties"]
    properties = {field: {"description": _named_fields().get(field, ""), **own} for field, own in fields.items()}
    required = [field for field, own in fields.items() if "default" not in own]
    return {"title": name, "type": "object", **schema, "properties": properties, "required": required}


@cache
def _texts() -> JsonObject:
    return tomllib.loads(Path(__file__).with_name("openapi.toml").read_text())


@cache
def examples() -> dict[str, JsonObject]:
    """Examples of bodies, by the path of their route."""
    return tomllib.loads(Path(__file__).with_name("examples.toml").read_text())


def field_texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The meanings of the fields of a struct, by their names in JSON."""
    own: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base.__module__.startswith("deltic"):
            own |= docstrings(base.__module__).get(base.__name__, {})
    names = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
    tag = struct.__struct_config__.tag_field
    texts = {name: own.get(field) or _named_fields().get(name, "") for name, field in names.items()}
    return texts if tag is None else {tag: "Says which of several forms it is."} | texts


def document(routes: Sequence[Route], root_path: str = "") -> JsonObject:
    """OpenAPI 3.1. root_path: the prefix under which a proxy offers them."""
    schemas = Schemas(routes)
    paths: JsonObject = {}
    for route in routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        operation = paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas)
        operation["operationId"] = _operation_id(route)
        if route.body is not None:
            kind = "multipart/form-data" if route.form else JSON
            required = any(field.required for field in msgspec.structs.fields(route.body))
            example = {"example": examples()[path]} if path in examples() else {}
            content = {kind: {"schema": schemas.of(route.body)} | example}
            operation["requestBody"] = {"required": required, "content": content}
    return {
        "openapi": "3.1.0",
        "info": _texts()["info"] | {"version": __version__},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "tags": [{"name": tag["name"], "description": tag["description"]} for tag in _texts()["tags"]],
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": _texts()["securitySchemes"]},
    }


def _module(route: Route) -> str:
    return route.endpoint.__module__.rpartition(".")[2]


def _operation_id(route: Route) -> str:
    """A name for programs that make clients of the document."""
    name, module = route.endpoint.__name__, _module(route)
    return f"{module}_{name}" if module in ("anthropic", "ollama") else name


def _tag(route: Route) -> str:
    tags: list[JsonObject] = _texts()["tags"]
    return str(next((tag for tag in tags if _module(route) in tag["modules"]), tags[-1])["name"])


def _operation(route: Route, path: str, schemas: Schemas) -> JsonObject:
    line, _, rest = (inspect.getdoc(route.endpoint) or "").partition("\n")
    summary = line.removeprefix(f"{route.method} {route.path}").lstrip(".: ") or path
    operation: JsonObject = {"tags": [_tag(route)], "summary": summary[0].upper() + summary[1:]}
    notes = [" ".join(part.split()) for part in rest.split("\n\n") if part.strip()]
    notes += ["For administrators: it reads or changes what all keys share."] if route.is_shared else []
    notes += ["It needs no key."] if route.open_ else []
    if notes:
        operation["description"] = "\n\n".join(notes)
    operation["responses"] = _responses(route, path, schemas)
    if parameters := _parameters(route, path, schemas):
        operation["parameters"] = parameters
    # A server may be without keys.
    operation["security"] = [] if route.open_ else [{"key": []}, {"header": []}, {}]
    return operation


def _responses(route: Route, path: str, schemas: Schemas) -> JsonObject:
    """The answers of a route, by status."""
    if path.startswith(OLLAMA):
        error = schemas.of("OllamaErrorAnswer")
    else:
        error = schemas.of("AnthropicError" if path.startswith(ANTHROPIC) else "ErrorAnswer")
    content: JsonObject = {kind: {} for kind in route.gives}
    if JSON in content:
        content[JSON] = {"schema": schemas.of(route.answer)}
    if route.event is not None:
        # An error after the first event is one, too; some APIs have it among their events.
        event = schemas.of(route.event)
        either = event if "discriminator" in event else {"anyOf": [event, error]}
        content[LINES if path.startswith(OLLAMA) else EVENTS] = {"schema": either}
    responses: JsonObject = {"200": {"description": schemas.said(route.answer), "content": content}}
    for status, text in _texts()["failures"].items():
        if not route.open_ or status in _OF_OPEN_ROUTES or (status == "404" and "{" in path):
            responses[status] = {"description": text, "content": {JSON: {"schema": error}}}
    if route.open_:
        status_body = {JSON: {"schema": schemas.of("ServerStatus")}}
        responses["503"] = {"description": "The engine is not ready.", "content": status_body}
    return responses


def _parameters(route: Route, path: str, schemas: Schemas) -> list[JsonObject]:
    parameters: list[JsonObject] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": "A name or an id.",
            "schema": {"type": "string", "minLength": 1},
        }
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if route.takes_model:
        text = "The model that is meant; without it the first that fits."
        parameters.append({"name": "model", "in": "query", "description": text, "schema": {"type": "string"}})
    for name, schema in schemas.properties(route.query).items() if route.query else ():
        plain = {key: value for key, value in schema.items() if key not in ("description", "default")}
        parameters.append({"name": name, "in": "query", "description": schema["description"], "schema": plain})
    return parameters
