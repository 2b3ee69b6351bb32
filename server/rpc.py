"""Between grpc.aio and plain handlers: parsing, and one place where errors become statuses.

Requests are parsed here and not by grpc, which answers INTERNAL to bytes that are no message.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from server.status import BugError, CallError, InvalidFieldError, NotBuiltError, abort

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request", bound=Message)


def unary(
    kind: type[Request], handler: Callable[[Request, Context], Awaitable[Message]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """One request, one response, which the handler returns."""

    async def serve(raw: bytes, context: Context) -> Message:
        return await _guard(kind, handler, raw, context)

    return grpc.unary_unary_rpc_method_handler(serve, None, _serialize)


def streaming(
    kind: type[Request], handler: Callable[[Request, Context], Awaitable[None]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """One request, many responses, which the handler writes to the context."""

    async def serve(raw: bytes, context: Context) -> None:
        await _guard(kind, handler, raw, context)

    return grpc.unary_stream_rpc_method_handler(serve, None, _serialize)


def not_built(kind: type[Request]) -> Callable[[Request, Context], Awaitable[NoReturn]]:
    """Handler of a call that this build knows but does not support."""

    async def refuse(_request: Request, _context: Context) -> NoReturn:
        raise NotBuiltError(f"this build does not support {kind.__name__.removesuffix('Request')}")

    return refuse


Result = TypeVar("Result")


async def _guard(
    kind: type[Request], handler: Callable[[Request, Context], Awaitable[Result]], raw: bytes, context: Context
) -> Result:
    try:
        return await handler(_parse(kind, raw), context)
    except CallError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError as error:
        # The caller left while a write waited; grpc tells the write before it cancels the handler.
        raise asyncio.CancelledError from error
    except Exception:
        error_id = secrets.token_hex(4)
        log.exception("error %s: a call ends by a bug", error_id)
        await abort(context, BugError(f"a bug; the server's log knows it as error {error_id}"))


def _parse(kind: type[Request], raw: bytes) -> Request:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidFieldError("", f"the request is no {kind.DESCRIPTOR.full_name}: {error}") from error


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
