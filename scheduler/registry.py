"""The live requests, the aborted ones that have yet to arrive, and the servers that are alive."""

from dataclasses import dataclass

from proto.ids import StageKind, server_incarnation_of, server_of
from proto.messages import U32, U64, Census, StageState, World, column
from scheduler.request import Request

_MAX_TOMBSTONES = 16_384
_LEAK_MISSES = 3


@dataclass(frozen=True, slots=True)
class ServerLife:
    incarnation: int
    dead: bool

    def disowns(self, rid: int) -> bool:
        """Return whether the server process that sent the request has ended."""
        made_by = server_incarnation_of(rid)
        return made_by < self.incarnation or (self.dead and made_by == self.incarnation)


class Registry:
    """Live requests by rid. Everything is ordered, so that equal inputs give equal plans."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self._tombstones: dict[int, int] = {}  # rid → highest attempt that was aborted, oldest first
        self._servers: dict[int, ServerLife] = {}
        self._census_times: dict[int, int] = {}  # server → ns of the census before

    def add_tombstone(self, rid: int, attempt: int) -> None:
        """Remember that attempts up to this one must not run when they arrive."""
        attempt = max(attempt, self._tombstones.pop(rid, -1))
        self._tombstones[rid] = attempt
        if len(self._tombstones) > _MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def has_tombstone(self, rid: int, attempt: int) -> bool:
        return attempt <= self._tombstones.get(rid, -1)

    def is_disowned(self, rid: int) -> bool:
        life = self._servers.get(server_of(rid))
        return life is not None and life.disowns(rid)

    def adopt_world(self, world: World) -> list[Request]:
        """Record which servers are alive; returns the requests whose server has died."""
        changed = False
        for info in world.stages:
            if info.address.kind is not StageKind.SERVER:
                continue
            life = ServerLife(info.incarnation, info.state is StageState.DEAD)
            if self._servers.get(info.address.index) != life:
                self._servers[info.address.index] = life
                changed = True
        if not changed:
            return []
        return [request for request in self.requests.values() if self.is_disowned(request.rid)]

    def census(self, census: Census, now: int) -> tuple[list[tuple[int, int]], list[Request]]:
        """Compare the live requests with those that a server believes to be here.

        Returns the listed (rid, attempt) that are unknown here, and the requests that have been missing from
        three of its censuses in a row. One that came after the census before does not count as missing: the
        census may have been written before its Admit.
        """
        listed = dict(zip(column(census.rids, U64).tolist(), column(census.attempts, U32).tolist(), strict=True))
        unknown = []
        for rid, attempt in listed.items():
            request = self.requests.get(rid)
            if request is None or request.attempt < attempt:
                unknown.append((rid, attempt))
        return unknown, self._leaked(listed, census.server, now)

    def _leaked(self, listed: dict[int, int], server: int, now: int) -> list[Request]:
        before = self._census_times.get(server)
        self._census_times[server] = now
        leaked = []
        for request in self.requests.values():
            if server_of(request.rid) != server:
                continue
            if request.rid in listed:
                request.clear_misses()
            elif before is not None and request.seen < before:
                request.count_miss()
                if request.misses >= _LEAK_MISSES:
                    leaked.append(request)
        return leaked
