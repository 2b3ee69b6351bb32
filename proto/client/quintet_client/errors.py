"""What a failed call raises."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from quintet_client.v1 import errors_pb2

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class FieldViolation:
    """One field of the request that the server refused."""

    field: str  # path in the request, as "sampling.top_p"; "" = the request as a whole
    description: str  # the limit and the value


class QuintetError(Exception):
    """A call that failed, with the details that the server gave.

    code: the gRPC status. reason: why, for programs, such as "INVALID_FIELD"; "" when the failure was not the
    server's own word (no connection, say). retry_after: seconds after which the same call may succeed, or None.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: Sequence[FieldViolation] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = tuple(violations)
        self.retry_after = retry_after


def from_rpc_error(
    code: grpc.StatusCode, message: str | None, trailing: Iterable[tuple[str, str | bytes]] | None
) -> QuintetError:
    """The typed error of a call's status and trailing metadata. Unreadable details are left out."""
    status = errors_pb2.Status()
    for key, value in trailing or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except DecodeError:
                status.Clear()
    reason = ""
    violations: list[FieldViolation] = []
    retry_after: float | None = None
    for detail in status.details:
        kind = detail.type_url.rpartition("/")[2]
        if kind == "google.rpc.ErrorInfo":
            reason = errors_pb2.ErrorInfo.FromString(detail.value).reason
        elif kind == "google.rpc.BadRequest":
            found = errors_pb2.BadRequest.FromString(detail.value).field_violations
            violations += [FieldViolation(v.field, v.description) for v in found]
        elif kind == "google.rpc.RetryInfo":
            delay = errors_pb2.RetryInfo.FromString(detail.value).retry_delay
            retry_after = delay.seconds + delay.nanos / 1e9
    return QuintetError(code, message or "", reason=reason, violations=violations, retry_after=retry_after)
