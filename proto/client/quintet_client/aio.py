"""The client for asyncio, from which the one for threads is generated.

A `timeout` is a gRPC deadline, which travels to the server; asyncio's would stay here.
"""
# ruff: noqa: ASYNC109

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self, Unpack

import grpc.aio

from quintet_client import methods, requests
from quintet_client.errors import QuintetError, from_rpc_error
from quintet_client.methods import Method, Request, Response
from quintet_client.options import GenerateOptions
from quintet_client.requests import ChatMessage, Prompt
from quintet_client.retries import Attempts, channel_options
from quintet_client.v1 import control_pb2, inference_pb2


class AsyncClient:
    """Calls a Quintet server from one event loop.

    `timeout` (seconds, None = none) is the deadline of every call that names no other; when it passes, the
    server stops the work. With `retry` off each call is tried once. Every method raises QuintetError.
    """

    def __init__(self, address: str, *, timeout: float | None = None, retry: bool = True) -> None:
        self._timeout = timeout
        self._retry = retry
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(retry))

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> inference_pb2.GenerateResponse:
        """Generate and return everything at the end."""
        return await self._unary(methods.GENERATE, requests.generate_request(prompt, options), timeout)

    def generate_stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[inference_pb2.GenerateChunk, None]:
        """Generate and yield deltas as they come. The call starts with the first; to leave early, close the
        generator (`contextlib.aclosing`), which cancels it."""
        request = requests.generate_request(prompt, options)
        return self._stream(methods.GENERATE_STREAM, request, timeout)

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> inference_pb2.TokenizeResponse:
        """Ids of a text or chat, and their spelling."""
        request = requests.tokenize_request(prompt, add_special_tokens, model)
        return await self._unary(methods.TOKENIZE, request, timeout)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Text of ids."""
        request = inference_pb2.DetokenizeRequest(
            token_ids=token_ids, skip_special_tokens=skip_special_tokens, model=model
        )
        reply = await self._unary(methods.DETOKENIZE, request, timeout)
        return reply.text

    async def get_model_info(
        self, model: str | None = None, *, timeout: float | None = None
    ) -> control_pb2.GetModelInfoResponse:
        """The model that is served and its limits."""
        return await self._unary(methods.GET_MODEL_INFO, control_pb2.GetModelInfoRequest(model=model), timeout)

    async def get_server_info(self, *, timeout: float | None = None) -> control_pb2.GetServerInfoResponse:
        """Limits, versions and processes."""
        return await self._unary(methods.GET_SERVER_INFO, control_pb2.GetServerInfoRequest(), timeout)

    async def get_load(self, *, timeout: float | None = None) -> control_pb2.GetLoadResponse:
        """How busy the instance is."""
        return await self._unary(methods.GET_LOAD, control_pb2.GetLoadRequest(), timeout)

    async def abort(self, request_ids: Sequence[str], *, timeout: float | None = None) -> control_pb2.AbortResponse:
        """End live requests by their ids."""
        return await self._unary(methods.ABORT, control_pb2.AbortRequest(request_ids=request_ids), timeout)

    async def flush_cache(self, *, timeout: float | None = None) -> int:
        """Drop cached prefixes; returns the pages that became free."""
        reply = await self._unary(methods.FLUSH_CACHE, control_pb2.FlushCacheRequest(), timeout)
        return reply.pages

    async def drain(self, *, timeout: float | None = None) -> None:
        """Ask the instance to finish running calls and end."""
        await self._unary(methods.DRAIN, control_pb2.DrainRequest(), timeout)

    async def close(self) -> None:
        """End every call of this client."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _unary(self, method: Method[Request, Response], request: Request, timeout: float | None) -> Response:
        invoke = self._channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        attempts = Attempts(self._timeout if timeout is None else timeout, self._retry)
        while True:
            try:
                return await invoke(request, timeout=attempts.timeout)
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(attempts.pause_after(_typed(error)))

    async def _stream(
        self, method: Method[Request, Response], request: Request, timeout: float | None
    ) -> AsyncGenerator[Response, None]:
        invoke = self._channel.unary_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        attempts = Attempts(self._timeout if timeout is None else timeout, self._retry)
        answered = False
        while True:
            call = invoke(request, timeout=attempts.timeout)
            try:
                async for chunk in call:
                    answered = True
                    yield chunk
                return
            except grpc.aio.AioRpcError as error:
                typed = _typed(error)
                if answered:
                    raise typed from error
                await asyncio.sleep(attempts.pause_after(typed))
            finally:
                call.cancel()


def _typed(error: Any) -> QuintetError:  # grpc.RpcError declares none of what is read here
    return from_rpc_error(error.code(), error.details(), error.trailing_metadata())
