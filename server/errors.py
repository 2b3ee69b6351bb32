"""Errors that end a call: each class has a gRPC code and a stable reason, and one function makes the status.

Details follow google.rpc.Status in `grpc-status-details-bin` (https://google.aip.dev/193).
"""

import asyncio
from typing import Any, ClassVar, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from proto.messages import Reject, RejectCode

DOMAIN = "quintet"
# The text travels twice in trailers, which peers limit to 8 KiB.
_MAX_TEXT = 1000


class CallError(Exception):
    """Base of the errors that end a call."""

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]

    def details(self) -> list[Any]:
        """Return messages of google.rpc to send beside ErrorInfo."""
        return []


class InvalidFieldError(CallError):
    """A field of the request is wrong; the description names the limit and the value."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}" if field else description)
        self.field = field
        self.description = description

    def details(self) -> list[Any]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=shorten(self.description))
        return [error_details_pb2.BadRequest(field_violations=[violation])]


class NotBuiltError(CallError):
    """A field or call that this build knows but does not support."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NOT_BUILT"


class UnknownModelError(CallError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_MODEL"


class DuplicateIdError(CallError):
    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "DUPLICATE_REQUEST_ID"


class OverloadedError(CallError):
    """Too much is in flight; the same call may succeed after `retry_after_ms`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms

    def details(self) -> list[Any]:
        seconds, milliseconds = divmod(self.retry_after_ms, 1000)
        delay = duration_pb2.Duration(seconds=seconds, nanos=milliseconds * 1_000_000)
        return [error_details_pb2.RetryInfo(retry_delay=delay)]


class SlowReaderError(CallError):
    """The client does not read its stream."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SLOW_READER"


class DeadlineError(CallError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE"


class UnavailableError(CallError):
    """The instance cannot serve now: it is starting, draining or failing, or it lost this request."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class BugError(CallError):
    """An internal error; the text says where to look."""

    code = grpc.StatusCode.INTERNAL
    reason = "BUG"


def error_of(reject: Reject) -> CallError:
    """Return the error that tells the caller of an inner stage's refusal."""
    match reject.code:
        case RejectCode.INVALID:
            return InvalidFieldError(reject.field, reject.message)
        case RejectCode.EXHAUSTED:
            return OverloadedError(reject.message, reject.retry_after_ms)
        case RejectCode.DEADLINE:
            return DeadlineError(reject.message)
        case RejectCode.UNAVAILABLE:
            return UnavailableError(reject.message)
        case RejectCode.INTERNAL:
            return BugError(f"{reject.message} (rid {reject.rid:016x} in the log)")


def status_of(error: CallError) -> status_pb2.Status:
    """Return a google.rpc.Status with ErrorInfo and the error's own details."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    packed = []
    for detail in (info, *error.details()):
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    code, _ = error.code.value
    return status_pb2.Status(code=code, message=shorten(str(error)), details=packed)


def shorten(text: str) -> str:
    """Cut a text to about a kilobyte: it may quote a caller's value of any length."""
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: CallError) -> NoReturn:
    """End the call with this error; raises what grpc.aio raises to leave a handler."""
    status = status_of(error)
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    try:
        await context.abort(error.code, status.message, trailing)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone  # so is the caller
    raise AssertionError("context.abort returned")
