"""Connects grpc.aio to plain handlers: parses requests and turns errors into statuses, in one place.

Requests are parsed here and not by grpc, which answers INTERNAL to bytes that are not a message.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from server.errors import BugError, CallError, InvalidFieldError, NotBuiltError, abort

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request", bound=Message)


def unary(
    kind: type[Request], handler: Callable[[Request, Context], Awaitable[Message]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Make the handler of a call whose one response the handler returns."""

    return grpc.unary_unary_rpc_method_handler(partial(_guard, kind, handler), None, _serialize)


def streaming(
    kind: type[Request], handler: Callable[[Request, Context], Awaitable[None]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Make the handler of a call whose responses the handler writes to the context."""

    return grpc.unary_stream_rpc_method_handler(partial(_guard, kind, handler), None, _serialize)


def not_built(kind: type[Request]) -> Callable[[Request, Context], Awaitable[NoReturn]]:
    """Make the handler of a call that this build knows but does not support."""

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
        failure = error
    except grpc.aio.InternalError as error:
        # The caller left while a write waited; grpc tells the write before it cancels the handler.
        raise asyncio.CancelledError from error
    except Exception:
        error_id = secrets.token_hex(4)
        log.exception("internal error %s in a call", error_id)
        failure = BugError(f"internal error in the server; its log has the details under {error_id}")
    # grpc's context keeps the exception that `abort` raises, and that this frame, which keeps the context: what
    # the frame holds lives until the cycle is collected, so it must not be a request of many megabytes.
    del raw
    failure.__traceback__ = failure.__context__ = failure.__cause__ = None
    return await abort(context, failure)


def _parse(kind: type[Request], raw: bytes) -> Request:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidFieldError("", f"the request is not a valid {kind.DESCRIPTOR.full_name}: {error}") from error


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
