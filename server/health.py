"""grpc.health.v1: "" and the services' names report readiness, "live" that this process answers."""

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

LIVE = "live"


class Health:
    """The library's servicer, which answers Check and keeps Watch open."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._servicer: Any = health.aio.HealthServicer()
        self._readiness = ("", *services)

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def tell_live(self) -> None:
        """Report that this process answers but is not ready yet."""
        await self.tell_ready(False)
        await self._servicer.set(LIVE, health_pb2.HealthCheckResponse.SERVING)

    async def tell_ready(self, ready: bool) -> None:
        """Report whether calls are accepted."""
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._readiness:
            await self._servicer.set(name, serving if ready else not_serving)
