"""Between grpc.aio and handlers: what a call that failed leaves behind."""

import asyncio
import gc
import sys
from typing import Any, cast

import grpc
import pytest

from quintet_client.v1 import inference_pb2 as pb
from server import rpc
from server.errors import InvalidFieldError


class KeepingContext:
    """As grpc.aio's, keeps the exception that leaves the handler."""

    def __init__(self) -> None:
        self.kept: grpc.aio.AbortError | None = None

    async def abort(self, *_: object) -> None:
        self.kept = grpc.aio.AbortError("Locally aborted.")
        raise self.kept


def test_a_refused_call_holds_no_request() -> None:
    requests: list[pb.GenerateRequest] = []

    async def fail(request: pb.GenerateRequest, _context: rpc.Context) -> pb.GenerateResponse:
        requests.append(request)
        raise InvalidFieldError("text", "too long")

    raw, context = pb.GenerateRequest(text="a" * 1000).SerializeToString(), KeepingContext()
    handler = cast(Any, rpc.unary(pb.GenerateRequest, fail)).unary_unary
    alone = [object()]
    before = sys.getrefcount(raw)
    gc.disable()  # a collection would hide a cycle, and comes late
    try:
        with pytest.raises(grpc.aio.AbortError):
            asyncio.run(handler(raw, context))
        assert context.kept is not None
        assert sys.getrefcount(raw) == before
        assert sys.getrefcount(requests[0]) == sys.getrefcount(alone[0])
    finally:
        gc.enable()
