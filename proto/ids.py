"""Names of stages and of requests inside the ring."""

from enum import IntEnum

import msgspec


class StageKind(IntEnum):
    """The kinds of process. The values travel in every frame's header."""

    SUPERVISOR = 0
    SERVER = 1
    TOKENIZER = 2
    SCHEDULER = 3
    WORKER = 4
    DETOKENIZER = 5

    @property
    def label(self) -> str:
        """Lower-case name, as in inbox names and process titles."""
        return self.name.lower()


class Address(msgspec.Struct, frozen=True, array_like=True):
    """One process of an instance.

    A replica is one scheduler and its worker, and a worker is one process per rank.
    """

    kind: StageKind
    index: int  # among its kind; of a scheduler or worker, the replica
    rank: int = 0  # of a worker's process

    @property
    def replica(self) -> int:
        """The replica that a scheduler or worker belongs to."""
        return self.index

    @property
    def title(self) -> str:
        """Name of the process in ps, top and profilers."""
        match self.kind:
            case StageKind.SUPERVISOR:
                return "quintet supervisor"
            case StageKind.WORKER:
                return f"quintet worker {self.index} rank {self.rank}"
            case _:
                return f"quintet {self.kind.label} {self.index}"

    def __str__(self) -> str:
        """Name of its inbox."""
        name = f"{self.kind.label}-{self.index}"
        return f"{name}-{self.rank}" if self.kind is StageKind.WORKER else name


SUPERVISOR = Address(StageKind.SUPERVISOR, 0)


# A rid is server index (8 bits) | server incarnation (24 bits) | counter (32 bits), so that a
# restarted server never reuses one that may still travel in the ring.
_INDEX_SHIFT = 56
_INCARNATION_SHIFT = 32
MAX_SERVERS = 1 << 8
MAX_INCARNATION = (1 << 24) - 1
MAX_COUNTER = (1 << 32) - 1


def make_rid(server_index: int, incarnation: int, counter: int) -> int:
    """Pack a 64-bit request id. Raises ValueError when a part does not fit."""
    if not 0 <= server_index < MAX_SERVERS:
        raise ValueError(f"server index {server_index} is outside 0..{MAX_SERVERS - 1}")
    if not 0 <= incarnation <= MAX_INCARNATION:
        raise ValueError(f"incarnation {incarnation} is outside 0..{MAX_INCARNATION}")
    if not 0 <= counter <= MAX_COUNTER:
        raise ValueError(f"counter {counter} is outside 0..{MAX_COUNTER}")
    return server_index << _INDEX_SHIFT | incarnation << _INCARNATION_SHIFT | counter


def server_of(rid: int) -> int:
    """Index of the server that made this rid."""
    return rid >> _INDEX_SHIFT


def server_incarnation_of(rid: int) -> int:
    """Incarnation of the server that made this rid."""
    return rid >> _INCARNATION_SHIFT & MAX_INCARNATION
