"""When a call is tried again.

UNAVAILABLE before the server's first byte is retried inside gRPC by its service config. RESOURCE_EXHAUSTED is
retried here, because gRPC does not read RetryInfo: only when the server names a delay, and nothing of the
answer has arrived.
"""

import json
import random
import time
from collections.abc import Sequence

from quintet_client.errors import QuintetError

MAX_ATTEMPTS = 5  # gRPC's own ceiling for a retry policy

_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "quintet.v1.Inference"}, {"service": "quintet.v1.Control"}],
            "retryPolicy": {
                "maxAttempts": MAX_ATTEMPTS,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def channel_options(retry: bool) -> Sequence[tuple[str, int | str]]:
    """Channel arguments: retries, messages of any size, and a ping when the connection is silent for 30 s."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.enable_retries", int(retry)),
    ]
    if retry:
        options.append(("grpc.service_config", json.dumps(_SERVICE_CONFIG)))
    return options


class Attempts:
    """The tries of one call under one deadline. `timeout` is in seconds from now, None = no deadline."""

    def __init__(self, timeout: float | None, retry: bool) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout
        self._left = MAX_ATTEMPTS - 1 if retry else 0

    @property
    def timeout(self) -> float | None:
        """Seconds until the deadline, not below 0; None = no deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def pause_after(self, error: QuintetError) -> float:
        """Seconds to wait before the next try; raises `error` when there is to be none."""
        if error.retry_after is None or self._left == 0:
            raise error
        # Callers that were refused together must not come back together.
        pause = error.retry_after * random.uniform(1.0, 1.5)
        timeout = self.timeout
        if timeout is not None and pause >= timeout:
            raise error
        self._left -= 1
        return pause
