"""A gRPC server that speaks quintet.v1 without a ring behind it: for tests of commands and clients."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from quintet_client.v1 import control_pb2, control_pb2_grpc, errors_pb2, inference_pb2, inference_pb2_grpc

Reply = list[str]


@dataclass
class Failure:
    """What a call ends with instead of an answer."""

    code: grpc.StatusCode
    message: str
    field: str = ""
    retry_after: float = 0.0


def echo(request: inference_pb2.GenerateRequest) -> Reply | Failure:
    """The prompt's own words, as tokens."""
    return prompt_text(request).split(" ")


def prompt_text(request: inference_pb2.GenerateRequest) -> str:
    """Text, or the last message of a chat, or ids with spaces."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "chat":
            return request.chat.messages[-1].content
        case _:
            return " ".join(str(token) for token in request.token_ids.ids)


class FakeServer(inference_pb2_grpc.InferenceServicer, control_pb2_grpc.ControlServicer):
    """`reply` gives the pieces of each answer, one token each; `hold` stops streams after their first piece."""

    def __init__(self, reply: Callable[[inference_pb2.GenerateRequest], Reply | Failure] = echo) -> None:
        self.reply = reply
        self.has_chat_template = True
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.hold: threading.Event | None = None
        self.address = ""
        self.processes = [
            control_pb2.Process(
                kind=control_pb2.PROCESS_KIND_WORKER,
                pid=4242,
                title="quintet worker 0 rank 0",
                state=control_pb2.PROCESS_STATE_READY,
                rss_bytes=500_000_000,
                cpu_seconds=12.5,
                counters={"steps": 7},
            )
        ]
        self._lock = threading.Lock()

    def _pieces(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Reply:
        with self._lock:
            self.requests.append(request)
        reply = self.reply(request)
        if isinstance(reply, Failure):
            fail(context, reply)
        return reply

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GenerateResponse:
        pieces = self._pieces(request, context)
        output = inference_pb2.Output(text=" ".join(pieces), token_ids=range(len(pieces)))
        output.finish.reason = inference_pb2.FINISH_REASON_LENGTH
        return inference_pb2.GenerateResponse(
            prompt=_facts(), outputs=[output], usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=len(pieces))
        )

    def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateChunk]:
        pieces = self._pieces(request, context)
        ended = threading.Event()
        context.add_callback(lambda: None if ended.is_set() else self.cancelled.set())
        for position, piece in enumerate(pieces):
            chunk = inference_pb2.GenerateChunk(text=piece if position == 0 else " " + piece, token_ids=[position])
            if position == 0:
                chunk.prompt.CopyFrom(_facts())
            yield chunk
            if self.hold is not None:
                self.hold.wait(10)
        ended.set()
        yield inference_pb2.GenerateChunk(
            finish=inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_STOP, eos_token_id=2),
            usage=inference_pb2.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=len(pieces)),
            timings=inference_pb2.Timings(queue_ms=1, prefill_ms=2, decode_ms=3),
        )

    def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetModelInfoResponse:
        return control_pb2.GetModelInfoResponse(
            model="fake", has_chat_template=self.has_chat_template, device="cpu", dtype="float32", page_size=16
        )

    def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetServerInfoResponse:
        return control_pb2.GetServerInfoResponse(address=self.address, processes=self.processes, uptime_seconds=125)

    def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetLoadResponse:
        replica = control_pb2.ReplicaLoad(
            running=2, waiting=5, pages_total=100, pages_free=60, pages_cached=30, cache_hit_rate=0.25
        )
        return control_pb2.GetLoadResponse(in_flight_requests=7, replicas=[replica])


def fail(context: grpc.ServicerContext, failure: Failure) -> NoReturn:
    """End a call as the real server does, with details."""
    status = errors_pb2.Status(code=failure.code.value[0], message=failure.message)
    _pack(status, "google.rpc.ErrorInfo", errors_pb2.ErrorInfo(reason="TEST", domain="quintet"))
    if failure.field:
        violation = errors_pb2.BadRequest.FieldViolation(field=failure.field, description=failure.message)
        _pack(status, "google.rpc.BadRequest", errors_pb2.BadRequest(field_violations=[violation]))
    if failure.retry_after:
        info = errors_pb2.RetryInfo()
        info.retry_delay.nanos = int(failure.retry_after * 1e9)
        _pack(status, "google.rpc.RetryInfo", info)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(failure.code, failure.message)


def _pack(status: errors_pb2.Status, name: str, detail: Any) -> None:
    status.details.add(type_url=f"type.googleapis.com/{name}", value=detail.SerializeToString())


def _facts() -> inference_pb2.PromptFacts:
    return inference_pb2.PromptFacts(request_id="r1", model="fake", prompt_tokens=3, cached_tokens=1, seed=99)


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Serve it on a free port of the loopback, under `fake.address`."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]
    control_pb2_grpc.add_ControlServicer_to_server(fake, server)  # type: ignore[no-untyped-call]
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fake
    finally:
        if fake.hold is not None:
            fake.hold.set()
        server.stop(grace=None).wait()
