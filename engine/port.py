"""The service's TCP port: bound exclusively first, so that a taken one fails, then shared with our own servers."""

import errno
import socket

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 50051


class PortError(RuntimeError):
    """The address cannot be bound; the text names it and says why."""


class Port:
    """A bound socket that never listens. It holds the port while server processes come and go."""

    def __init__(self, host: str, port: int) -> None:
        """Claim host:port; 0 = any free one. Raises PortError."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
                0
            ]
        except socket.gaierror as error:
            raise PortError(f"--host {host}: {error.strerror}") from error
        try:
            if port:
                _refuse_taken(family, address)
            self._socket = _bind(family, address, socket.SO_REUSEPORT)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortError(
                    f"--port {port}: {host}:{port} is taken by another process; choose another, or 0 for any free one"
                ) from error
            raise PortError(f"--host {host} --port {port}: {error.strerror}") from error
        self.host = host
        self.number: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """host:port, as clients and gRPC want it."""
        return f"[{self.host}]:{self.number}" if ":" in self.host else f"{self.host}:{self.number}"

    def close(self) -> None:
        self._socket.close()


def _refuse_taken(family: int, address: tuple[object, ...]) -> None:
    """Raise OSError unless the port is free.

    A first bind with SO_REUSEPORT would silently share it with whoever is there, and its callers with us.
    SO_REUSEADDR passes over connections in TIME_WAIT; it does not pass over listeners, nor over another
    instance's placeholder, which does not set it.
    """
    _bind(family, address, socket.SO_REUSEADDR).close()


def _bind(family: int, address: tuple[object, ...], option: int) -> socket.socket:
    claim = socket.socket(family, socket.SOCK_STREAM)
    try:
        claim.setsockopt(socket.SOL_SOCKET, option, 1)
        claim.bind(address)
    except OSError:
        claim.close()
        raise
    return claim
