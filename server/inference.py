"""Handlers of quintet.v1.Inference."""

import asyncio
import time
from contextlib import AbstractContextManager

import grpc

from proto.messages import (
    DetokenizeCall,
    DetokenizeReply,
    TokenizeCall,
    TokenizeReply,
    column,
)
from quintet_client.v1 import inference_pb2 as pb
from server import rpc
from server.answers import chunk_of, response_of
from server.edge import Edge
from server.errors import InvalidFieldError
from server.generation import Generation, OutputPiece
from server.rpc import Context
from server.validate import check_chat, check_generate, check_ids, check_model, check_text

SERVICE = "quintet.v1.Inference"


class InferenceService:
    """Each handler checks, asks the edge, and turns what comes back into messages."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def handlers(self) -> grpc.GenericRpcHandler:
        """For registration with a grpc.aio server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": rpc.unary(pb.GenerateRequest, self.generate),
                "GenerateStream": rpc.streaming(pb.GenerateRequest, self.generate_stream),
                "Tokenize": rpc.unary(pb.TokenizeRequest, self.tokenize),
                "Detokenize": rpc.unary(pb.DetokenizeRequest, self.detokenize),
                "PinPrefix": rpc.unary(pb.PinPrefixRequest, rpc.not_built(pb.PinPrefixRequest)),
                "UnpinPrefix": rpc.unary(pb.UnpinPrefixRequest, rpc.not_built(pb.UnpinPrefixRequest)),
            },
        )

    async def generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        pieces: list[OutputPiece] = []
        with self._running(request, context) as generation:
            await _tell_id(generation, context)
            while not pieces or pieces[-1].ending is None:
                pieces.append(await self._edge.next_piece(generation))
            return response_of(generation, pieces, self._edge.model_name)

    async def generate_stream(self, request: pb.GenerateRequest, context: Context) -> None:
        with self._running(request, context) as generation:
            await _tell_id(generation, context)
            task = asyncio.current_task()
            assert task is not None
            generation.limit_buffer(self._edge.options.max_stream_buffer_bytes, task.cancel)
            try:
                await self._write_all(generation, context)
            except asyncio.CancelledError:
                if generation.error is None:
                    raise
                # It was `Generation.cut` that ended this write, not the caller.
                task.uncancel()
                raise generation.error from None

    async def _write_all(self, generation: Generation, context: Context) -> None:
        ending = None
        while ending is None:
            piece = await self._edge.next_piece(generation)
            ending = piece.ending
            # The write waits for flow control; what comes meanwhile is joined into the next piece.
            generation.begin_write(time.monotonic_ns())
            await context.write(chunk_of(generation, piece, self._edge.model_name))
            generation.end_write()

    def _running(self, request: pb.GenerateRequest, context: Context) -> AbstractContextManager[Generation]:
        arrival = time.monotonic_ns()
        facts = self._edge.readiness.require_serving()
        remaining = context.time_remaining()
        deadline = 0 if remaining is None else arrival + int(remaining * 1e9)
        ask = check_generate(request, facts, self._edge.options.served_model_names, deadline)
        return self._edge.running(ask, request.ByteSize(), arrival)

    async def tokenize(self, request: pb.TokenizeRequest, _context: Context) -> pb.TokenizeResponse:
        facts = self._edge.readiness.require_serving()
        check_model(request.model, self._edge.options.served_model_names)
        if request.WhichOneof("input") is None:
            raise InvalidFieldError("input", "one of text, chat must be set")
        is_text = request.HasField("text")
        rid = self._edge.record.next_rid()
        call = TokenizeCall(
            rid=rid,
            text=check_text("text", request.text, facts) if is_text else None,
            chat=None if is_text else check_chat("chat", request.chat, facts),
            now=time.time(),
            add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
        )
        reply = await self._edge.ask(self._edge.record.tokenizer_for(rid), call, request.ByteSize())
        assert isinstance(reply, TokenizeReply)
        return pb.TokenizeResponse(token_ids=column(reply.ids).tolist(), pieces=reply.pieces)

    async def detokenize(self, request: pb.DetokenizeRequest, _context: Context) -> pb.DetokenizeResponse:
        facts = self._edge.readiness.require_serving()
        check_model(request.model, self._edge.options.served_model_names)
        rid = self._edge.record.next_rid()
        call = DetokenizeCall(
            rid=rid,
            ids=check_ids("token_ids", request.token_ids, facts.worker.max_model_len, facts),
            skip_special_tokens=request.skip_special_tokens,
        )
        reply = await self._edge.ask(self._edge.record.detokenizer_for(rid), call, request.ByteSize())
        assert isinstance(reply, DetokenizeReply)
        return pb.DetokenizeResponse(text=reply.text)


async def _tell_id(generation: Generation, context: Context) -> None:
    await context.send_initial_metadata((("x-request-id", generation.client_id),))
