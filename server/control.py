"""Handlers of quintet.v1.Control."""

import asyncio
import platform
import time
from importlib import metadata

import google.protobuf
import grpc

from proto.ids import Address, StageKind
from proto.messages import SCHEMA_HASH, Flush, FlushReply, StageInfo, StageState
from proto.metrics import METRICS
from proto.parameters import MAX_LOGPROBS
from quintet_client.v1 import control_pb2 as pb
from server import limits, rpc
from server.edge import Edge
from server.errors import InvalidFieldError, UnavailableError
from server.limits import ModelFacts
from server.rpc import Context
from server.validate import check_model

SERVICE = "quintet.v1.Control"

_KINDS = {
    StageKind.SUPERVISOR: pb.PROCESS_KIND_SUPERVISOR,
    StageKind.SERVER: pb.PROCESS_KIND_SERVER,
    StageKind.TOKENIZER: pb.PROCESS_KIND_TOKENIZER,
    StageKind.SCHEDULER: pb.PROCESS_KIND_SCHEDULER,
    StageKind.WORKER: pb.PROCESS_KIND_WORKER,
    StageKind.DETOKENIZER: pb.PROCESS_KIND_DETOKENIZER,
}
# Of the scheduler's counters, those that GetLoad reads.
LOAD_COUNTERS = (
    "running",
    "waiting",
    "pages_total",
    "pages_free",
    "pages_cached",
    "prefix_query_tokens",
    "prefix_hit_tokens",
)
_STATES = {
    StageState.STARTING: pb.PROCESS_STATE_STARTING,
    StageState.READY: pb.PROCESS_STATE_READY,
    StageState.STOPPED: pb.PROCESS_STATE_STOPPED,
    StageState.DEAD: pb.PROCESS_STATE_DEAD,
}


class ControlService:
    """Answers from the supervisor's last snapshot, and passes orders on."""

    def __init__(self, edge: Edge, address: str) -> None:
        self._edge = edge
        self._address = address
        self._started = time.monotonic()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers, for registration with a grpc.aio server."""
        watch_metrics = rpc.not_built(pb.WatchMetricsRequest)
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetModelInfo": rpc.unary(pb.GetModelInfoRequest, self.get_model_info),
                "GetServerInfo": rpc.unary(pb.GetServerInfoRequest, self.get_server_info),
                "GetLoad": rpc.unary(pb.GetLoadRequest, self.get_load),
                "Abort": rpc.unary(pb.AbortRequest, self.abort),
                "FlushCache": rpc.unary(pb.FlushCacheRequest, self.flush_cache),
                "Drain": rpc.unary(pb.DrainRequest, self.drain),
                "StartProfile": rpc.unary(pb.StartProfileRequest, rpc.not_built(pb.StartProfileRequest)),
                "StopProfile": rpc.unary(pb.StopProfileRequest, rpc.not_built(pb.StopProfileRequest)),
                "WatchMetrics": rpc.streaming(pb.WatchMetricsRequest, watch_metrics),
            },
        )

    async def get_model_info(self, request: pb.GetModelInfoRequest, _context: Context) -> pb.GetModelInfoResponse:
        names = self._edge.options.served_model_names
        check_model(request.model, names)
        facts = self._edge.readiness.facts
        if facts is None:
            raise UnavailableError(self._edge.readiness.phase.value)
        worker, tokenizer = facts.worker, facts.tokenizer
        return pb.GetModelInfoResponse(
            model=self._edge.model_name,
            served_names=names,
            max_model_len=worker.max_model_len,
            vocab_size=worker.vocab_size,
            tokenizer_vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_ids,
            has_chat_template=tokenizer.has_chat_template,
            dtype=worker.dtype,
            device=worker.device,
            kv_bytes_per_token=worker.kv_bytes_per_token,
            num_pages=worker.num_pages or worker.window_pages,
            page_size=worker.page_size,
            max_num_seqs=worker.max_num_seqs,
            max_num_batched_tokens=worker.max_num_batched_tokens,
        )

    async def get_server_info(self, _request: pb.GetServerInfoRequest, _context: Context) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            address=self._address,
            limits=self._limits(self._edge.readiness.facts),
            versions={
                "quintet": metadata.version("quintet-llm"),
                "python": platform.python_version(),
                "grpcio": grpc.__version__,
                "protobuf": google.protobuf.__version__,
                "schema": SCHEMA_HASH,
            },
            processes=[describe_process(info) for info in self._edge.stage.world.stages],
            uptime_seconds=time.monotonic() - self._started,
            draining=self._edge.readiness.draining,
        )

    def _limits(self, facts: ModelFacts | None) -> pb.Limits:
        """Return the limits; those that depend on the model are 0 until it is known."""
        options = self._edge.options
        return pb.Limits(
            max_message_bytes=options.max_message_bytes,
            max_in_flight_requests=options.max_in_flight_requests,
            max_in_flight_bytes=options.max_in_flight_bytes,
            max_stream_buffer_bytes=options.max_stream_buffer_bytes,
            max_prompt_bytes=facts.max_prompt_bytes if facts else 0,
            max_chat_messages=limits.MAX_CHAT_MESSAGES,
            max_model_len=facts.worker.max_model_len if facts else 0,
            max_stop_strings=limits.MAX_STOP_STRINGS,
            max_stop_string_bytes=limits.MAX_STOP_STRING_BYTES,
            max_stop_token_ids=limits.MAX_STOP_TOKEN_IDS,
            max_logprobs=MAX_LOGPROBS,
            max_logit_bias=limits.MAX_LOGIT_BIAS,
            max_request_id_bytes=limits.MAX_REQUEST_ID_BYTES,
            max_cache_salt_bytes=limits.MAX_CACHE_SALT_BYTES,
        )

    async def get_load(self, _request: pb.GetLoadRequest, _context: Context) -> pb.GetLoadResponse:
        in_flight = self._edge.record.in_flight
        schedulers = [info for info in self._edge.stage.world.stages if info.address.kind is StageKind.SCHEDULER]
        return pb.GetLoadResponse(
            in_flight_requests=in_flight.requests,
            in_flight_bytes=in_flight.bytes,
            replicas=[replica_load(info) for info in schedulers],
        )

    async def abort(self, request: pb.AbortRequest, _context: Context) -> pb.AbortResponse:
        if not request.request_ids:
            raise InvalidFieldError("request_ids", "must hold at least 1 id, not 0")
        response = pb.AbortResponse()
        for request_id in dict.fromkeys(request.request_ids):
            found = self._edge.abort(request_id)
            (response.aborted if found else response.unknown).append(request_id)
        return response

    async def flush_cache(self, _request: pb.FlushCacheRequest, _context: Context) -> pb.FlushCacheResponse:
        self._edge.readiness.require_serving()
        replicas = range(self._edge.options.num_schedulers)
        return pb.FlushCacheResponse(pages=sum(await asyncio.gather(*map(self._flush, replicas))))

    async def _flush(self, replica: int) -> int:
        rid = self._edge.record.next_rid()
        reply = await self._edge.ask(Address(StageKind.SCHEDULER, replica), Flush(rid=rid), 0)
        assert isinstance(reply, FlushReply)
        return reply.pages

    async def drain(self, _request: pb.DrainRequest, _context: Context) -> pb.DrainResponse:
        self._edge.request_drain()
        return pb.DrainResponse()


def describe_process(info: StageInfo) -> pb.Process:
    """Return a process as callers see it; histograms get their buckets' bounds."""
    return pb.Process(
        kind=_KINDS[info.address.kind],
        index=info.address.index,
        rank=info.address.rank,
        pid=info.pid,
        title=info.address.title,
        state=_STATES[info.state],
        rss_bytes=info.rss_bytes,
        cpu_seconds=info.cpu_seconds,
        restarts=info.restarts,
        counters=info.counters,
        histograms={
            metric.name: pb.Histogram(bounds=metric.buckets, counts=histogram.counts, sum=histogram.sum)
            for metric in METRICS.get(info.address.kind, ())
            if (histogram := info.histograms.get(metric.name)) is not None
        },
    )


def replica_load(info: StageInfo) -> pb.ReplicaLoad:
    """A scheduler's load, from its last heartbeat; zeros until the first."""
    counters = dict.fromkeys(LOAD_COUNTERS, 0.0) | info.counters
    asked = counters["prefix_query_tokens"]
    return pb.ReplicaLoad(
        index=info.address.replica,
        running=int(counters["running"]),
        waiting=int(counters["waiting"]),
        pages_total=int(counters["pages_total"]),
        pages_free=int(counters["pages_free"]),
        pages_cached=int(counters["pages_cached"]),
        cache_hit_rate=counters["prefix_hit_tokens"] / asked if asked else 0.0,
    )
