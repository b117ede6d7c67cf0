"""A plain Ray Serve application: `serve run deltic.ray.app:build model=... replicas=2 num_cpus=4`.

Two deployments. `Front` reads a request's body, since Serve's proxies route by headers only, and `Replica`
answers it. Between them stands `AffinityRouter`. What Front sends on is bytes: it knows the prompt's
beginning and no more, so all APIs pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from ray import get_runtime_context, serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from deltic.config import ConfigError
from deltic.json_types import JsonObject
from deltic.ray.affinity import IMBALANCE, key_of, ranked
from deltic.ray.replica import Ask, Head, Hosted
from deltic.ray.settings import Settings, settings
from deltic.server.errors import ApiError
from deltic.server.transport import ANTHROPIC, in_form, read_body

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import AutoscalingContext
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
    from ray.serve.request_router import PendingRequest, RunningReplica

log = logging.getLogger("deltic.ray")

WHENCE = "deltic.ray"
"""Source of the settings, for complaints."""

MAX_ONGOING = 100_000
"""Requests that Serve may hand a deployment.

Replicas have a queue of their own, and say 429 when it is full.
"""

DRAIN_LEFT_S = 5.0
"""Seconds beyond --drain-s that Serve lets a replica take to stop."""

N_TRIES = 3
"""Replicas that may die over a request of which no answer has begun."""

AUTOSCALED = "deltic.ray.app:by_sequences"
ROUTER = "deltic.ray.app:AffinityRouter"

OF_ONE = {
    "/metrics": "Ray's own metrics count the requests of all replicas",
    "/load": "Ray's own metrics count the requests of all replicas",
    "/cache": "deploy the application again to empty the caches",
    "/live": "it shows one engine",
    "/v1/load_lora_adapter": "give the adapters at start, as lora",
    "/v1/unload_lora_adapter": "deploy the application again without it",
    "/v1/files": "deltic run --ray answers a file on a cluster",
    "/v1/batches": "deltic run --ray answers a file on a cluster",
}
"""Paths, and those below them, that read or change what one replica has; and what to do instead."""


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Sends a conversation to the replica that has its beginning cached, while that is not much busier."""

    def initialize_state(self, imbalance: int = IMBALANCE) -> None:
        self._imbalance = imbalance

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns one replica a rank: Serve takes the next where one is full."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        ask = pending_request.args[0] if pending_request is not None and pending_request.args else None
        key = ask.key if isinstance(ask, Ask) else b""
        return [[by_name[name]] for name in ranked(key, loads, self._imbalance)]


def by_sequences(context: AutoscalingContext) -> tuple[float, JsonObject]:
    """An autoscaling policy: as many replicas as hold the sequences that run or wait in all of them, each
    `target_ongoing_requests`. Serve applies its bounds and delays to it.
    """
    counted: Mapping[object, float] = (context.aggregated_metrics or {}).get("sequences", {})
    n_sequences = sum(counted.values()) + (context.total_queued_requests or 0.0)
    return math.ceil(n_sequences / context.config.get_target_ongoing_requests()), {}


class EngineDeployment:
    """Methods of all deployments with engines, for Serve to call."""

    hosted: Hosted

    async def check_health(self) -> None:
        """Raises RuntimeError when an engine is down for good: Serve replaces the replica then."""
        if (failure := self.hosted.failure) is not None:
            raise RuntimeError(failure)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the numbers for `by_sequences`."""
        return {"sequences": float(self.hosted.n_sequences)}

    async def __del__(self) -> None:
        """Serve awaits it, after the requests that run have ended."""
        await self.hosted.stop()


class Replica(EngineDeployment):
    """A replica with its engines."""

    async def __init__(self, given: Settings) -> None:  # type: ignore[misc]
        resources = get_runtime_context().get_assigned_resources()
        self.hosted = Hosted(given.placed(resources.get("CPU", 0.0), resources.get("GPU", 0.0)))
        await self.hosted.start()

    async def ask(self, ask: Ask) -> AsyncGenerator[Head | bytes, None]:
        """The answer: its head, then its body as it is made."""
        async for piece in self.hosted.stream(ask):
            yield piece


class Front:
    """Takes the requests, and sends each to a replica."""

    def __init__(self, replicas: DeploymentHandle, max_body_mb: float) -> None:
        self._ask = replicas.options(method_name="ask", stream=True)
        self._max_body_mb = max_body_mb

    async def __call__(self, request: Request) -> Response:
        """Answers any request but a WebSocket's."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        try:
            for start, instead in OF_ONE.items():
                if path == start or path.startswith(start + "/"):
                    raise ApiError(501, f"{path} is about one server, and here are several; {instead}", code="several")
            body = await read_body(request, self._max_body_mb, is_json=False)
            headers = [(name, value) for name, value in request.scope["headers"] if name not in HOPS]
            query = request.scope.get("query_string", b"")
            ask = Ask(request.method, path, body, headers, query, key_of(headers, body))
            (status, given), pieces = await self._begun(ask)
        except ApiError as error:
            return in_form(error, path, request.scope)
        is_events = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in given)
        response = StreamingResponse(_rest(pieces, path if is_events else None), status)
        # Serve adds the id of the request, and it is the same.
        response.raw_headers = [(name, value) for name, value in given if name != b"x-request-id"]
        return response

    async def _begun(self, ask: Ask) -> tuple[Head, DeploymentResponseGenerator]:
        """An answer's head, and what is to follow.

        Nothing has reached the client, so another replica is asked where one dies. Raises ApiError when that
        happens again and again.
        """
        for _ in range(N_TRIES):
            pieces = self._ask.remote(ask)
            try:
                return await anext(aiter(pieces)), pieces
            except RayActorError as error:
                log.warning("a replica died over %s %s: %s", ask.method, ask.path, error)
            except BaseException:
                pieces.cancel()
                raise
        message = f"{N_TRIES} replicas died over this request; send it again"
        raise ApiError(503, message, code="replica_died", headers={"retry-after": "5"})


HOPS = (b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"te", b"upgrade")
"""Headers of a connection, which ends here, and of a body that is whole now."""


async def _rest(pieces: DeploymentResponseGenerator, path: str | None) -> AsyncIterator[bytes]:
    """The body. path: of a stream of events, which says so itself when its replica dies."""
    try:
        async for piece in pieces:
            yield piece
    except RayError as error:
        if path is None:
            raise  # the client finds less than it was promised
        log.warning("a replica died over a stream of %s: %s", path, error)
        died = ApiError(503, "the replica of this stream died. Send the request again.", code="replica_died")
        if path.startswith(ANTHROPIC):
            yield b"event: error\ndata: " + died.anthropic_body("") + b"\n\n"
        else:
            yield b"data: " + died.body() + b"\n\n"
    finally:
        pieces.cancel()


class AppConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of the application, beside those of `--config`."""

    replicas: Annotated[int, Meta(ge=1)] = 1
    num_cpus: Annotated[float, Meta(ge=0)] | None = None
    num_gpus: Annotated[float, Meta(gt=0)] | None = None
    """Number of GPUs of a replica, as Ray has them. One of both is needed."""
    autoscaling: JsonObject | None = None
    """Serve's autoscaling_config, in place of `replicas`. `target_ongoing_requests` counts sequences."""
    imbalance: Annotated[int, Meta(ge=0)] = IMBALANCE
    fronts: Annotated[int, Meta(ge=1)] = 1
    """Processes that take requests, without a CPU of their own."""
    ray_actor_options: JsonObject = {}
    """Further ones of a replica: resources, accelerator_type, runtime_env, ..."""


def build(args: JsonObject) -> Application:
    """The application, for `serve run` and for a file of `serve deploy`.

    args: fields of AppConfig, and settings of `deltic serve` by their names there. Raises ConfigError.
    """
    own = {name: value for name, value in args.items() if name in AppConfig.__struct_fields__}
    try:
        app = msgspec.convert(own, AppConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{WHENCE}: {error}") from None
    given = settings(WHENCE, {name: value for name, value in args.items() if name not in own})
    options = dict(app.ray_actor_options)
    if app.num_cpus is None and app.num_gpus is None:
        raise ConfigError(f"{WHENCE}: how large is a replica? Give num_cpus=4, say, or num_gpus=1")
    options["num_gpus"] = app.num_gpus or 0
    options["num_cpus"] = 1 if app.num_cpus is None else app.num_cpus
    given.placed(options["num_cpus"], options["num_gpus"])
    shared = {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": given.server.drain_s + DRAIN_LEFT_S,
    }
    replica = serve.deployment(
        Replica,
        name="Replica",
        **scaled(app),
        ray_actor_options=options,
        **shared,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"imbalance": app.imbalance}
        ),
    )
    front = serve.deployment(Front, name="Front", num_replicas=app.fronts, ray_actor_options={"num_cpus": 0}, **shared)
    return front.bind(replica.bind(given), given.server.body_mb(pictures=True))


def scaled(app: AppConfig) -> JsonObject:
    """The deployment's options that say how many replicas there are. Raises ConfigError."""
    if app.autoscaling is None:
        return {"num_replicas": app.replicas}
    if app.replicas != 1:
        raise ConfigError(f"{WHENCE}: replicas and autoscaling: give one of both")
    try:
        return {
            "autoscaling_config": AutoscalingConfig(**{"policy": {"policy_function": AUTOSCALED}, **app.autoscaling})
        }
    except ValueError as error:  # pydantic's
        raise ConfigError(f"{WHENCE}: autoscaling: {error}") from None
