"""The server process: a grpc.aio server around the edge, from its start to its exit."""

import asyncio
import logging
import time
from typing import NoReturn

import grpc
import uvloop
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from engine.runtime.stage import INTERNAL_ERROR, ExitCode, Stage
from proto.config import ServerOptions
from proto.ids import SUPERVISOR
from proto.messages import ID_BYTES, RequestParams, Sampling, ServerFacts, Serving
from server import control, inference
from server.edge import Edge, spare_full_collections
from server.errors import CallError
from server.health import Health
from server.limits import ModelFacts
from server.poller import draining_socket_pairs
from server.readiness import Phase
from server.validate import Ask

log = logging.getLogger(__name__)

# Statuses of streams that just ended must reach their clients before the sockets close.
_GOODBYE_SECONDS = 0.5
_WARM_UP_PAUSE = 1.0
# Gateways ping every 10 s and up, idle ones too; the rest is room for clocks that differ.
_LEAST_PING_MS = 9_000
_KEEPALIVE_MS = 30_000
# Calls that have come and wait for this process's loop. Beyond 1000, grpc's default, it drops some at random, with
# CANCELLED; the edge refuses in order, with RESOURCE_EXHAUSTED.
_MAX_PENDING_CALLS = 1 << 20
# Among server processes that share a port, so that long-lived connections spread over all of them.
_MAX_CONNECTION_AGE_MS = 30 * 60 * 1000


def run(stage: Stage) -> NoReturn:
    """Serve until told to stop, then leave the process."""
    try:
        # Not `uvloop.run`, which cancels the handlers that are left: their callers would see CANCELLED.
        code = uvloop.new_event_loop().run_until_complete(serve(stage))
    except Exception:
        log.critical(INTERNAL_ERROR, exc_info=True)
        code = ExitCode.BUG
    stage.exit(code)


async def serve(stage: Stage) -> int:
    """Serve until told to stop; returns the exit code."""
    options = stage.options
    assert isinstance(options, ServerOptions)
    edge = Edge(stage, options)
    with draining_socket_pairs():
        grpc.aio.init_grpc_aio()
    server = grpc.aio.server(options=channel_arguments(options))
    try:
        address = _bind(server, options)
    except RuntimeError as error:
        log.critical("cannot serve on %s: %s", _join(options.host, options.port), error)
        return ExitCode.REFUSED
    services = (inference.SERVICE, control.SERVICE)
    handlers = (inference.InferenceService(edge).handlers(), control.ControlService(edge, address).handlers())
    server.add_generic_rpc_handlers(handlers)
    readiness = Health(services)
    readiness.add_to(server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    await readiness.tell_live()
    await server.start()
    edge.start()
    spare_full_collections()
    stage.ready(ServerFacts(address=address))
    log.info("listening on %s", address)
    follower = asyncio.create_task(_follow(edge, readiness))
    follower.add_done_callback(edge.outlive)
    code = await edge.ended
    follower.cancel()
    edge.fail_all("the server stops")
    await _say_goodbye(server, edge)
    edge.detach()
    return code


async def _say_goodbye(server: grpc.aio.Server, edge: Edge) -> None:
    """Let the last answers out.

    When the instance has failed, calls still come, each refused at once. grpc ends those that its stop overtakes with
    CANCELLED; a connection that ends with the process is UNAVAILABLE to its callers, as it should be.
    """
    if edge.readiness.phase is not Phase.FAILED:
        await server.stop(_GOODBYE_SECONDS)
        return
    await asyncio.sleep(_GOODBYE_SECONDS)


def channel_arguments(options: ServerOptions) -> list[tuple[str, int]]:
    """Options of the grpc server."""
    arguments = [
        ("grpc.so_reuseport", int(options.reuse_port)),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_MS),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ]
    if options.reuse_port:
        arguments.append(("grpc.max_connection_age_ms", _MAX_CONNECTION_AGE_MS))
    return arguments


def _bind(server: grpc.aio.Server, options: ServerOptions) -> str:
    """The address that is served. Raises RuntimeError when the port is taken."""
    port = server.add_insecure_port(_join(options.host, options.port))
    return _join(options.host, port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _follow(edge: Edge, readiness: Health) -> None:
    """Keep health in step with the phase, and warm the ring up whenever it is ready but has generated no token."""
    told_serving = False
    while True:
        await edge.phase_changed.wait()
        edge.phase_changed.clear()
        serving = edge.readiness.phase is Phase.SERVING
        await readiness.tell_ready(serving)
        if serving and not told_serving:
            told_serving = True
            edge.stage.outbox(SUPERVISOR).send(Serving())
        await _warm_up(edge)


async def _warm_up(edge: Edge) -> None:
    """While the ring needs it, generate a token, until one comes through or the phase changes."""
    while edge.readiness.phase is Phase.WARMING and edge.readiness.facts is not None:
        try:
            await _pass_token(edge, edge.readiness.facts)
        except CallError as error:
            log.warning("warm-up generated no token: %s", error)
            await asyncio.sleep(_WARM_UP_PAUSE)
        else:
            edge.readiness.warmed()
            edge.note_phase()


async def _pass_token(edge: Edge, facts: ModelFacts) -> None:
    """Generate one token. Raises CallError."""
    prompt = next((number for number in facts.tokenizer.eos_ids if number < facts.worker.vocab_size), 0)
    with edge.running(_one_token_after(prompt), 0, time.monotonic_ns()) as generation:
        while (await edge.next_piece(generation)).ending is None:
            pass


def _one_token_after(prompt: int) -> Ask:
    params = RequestParams(sampling=Sampling(temperature=0), max_new_tokens=1, ignore_eos=True)
    return Ask("", None, prompt.to_bytes(ID_BYTES, "little"), None, params)
