"""Decides whether calls are accepted, from the supervisor's snapshots. No I/O."""

from enum import Enum

from engine.runtime.stage import is_ready
from proto.ids import Address, StageKind
from proto.messages import StageInfo, StageState, World
from server.errors import UnavailableError
from server.limits import ModelFacts, facts_of


class Phase(Enum):
    """The state of the instance. Calls are accepted while SERVING only."""

    STARTING = "starting: not all processes are ready"
    WARMING = "starting: no token has been generated yet"
    SERVING = "serving"
    DRAINING = "draining: running requests finish, new ones are refused"
    FAILED = "failing"


# Kinds of process that a request passes through behind this one.
_RING = (StageKind.TOKENIZER, StageKind.SCHEDULER, StageKind.WORKER, StageKind.DETOKENIZER)


class Readiness:
    """Follows World snapshots; `warmed` is called when the ring has generated a token."""

    def __init__(self) -> None:
        self._incarnations: dict[Address, int] = {}
        self._all_ready = False
        self._warm = False
        self._draining = False
        self.failure = ""  # not empty: what broke
        self.facts: ModelFacts | None = None

    @property
    def phase(self) -> Phase:
        if self.failure:
            return Phase.FAILED
        if self._draining:
            return Phase.DRAINING
        if not self._all_ready:
            return Phase.STARTING
        return Phase.SERVING if self._warm else Phase.WARMING

    @property
    def draining(self) -> bool:
        """Whether the instance is about to end, in an orderly way or not."""
        return self._draining

    def on_world(self, world: World) -> str:
        """Adopt a snapshot. Returns what broke since the last one, which loses all requests; "" = nothing."""
        ring = [info for info in world.stages if info.address.kind in _RING]
        broken = self._find_broken(ring)
        news = broken or ("" if self.failure else world.failure)
        dead = [f"{info.address.title} is dead" for info in ring if info.state is StageState.DEAD]
        self.failure = world.failure or (dead[0] if dead else "")
        if news or self.failure:
            self._warm = False
        self._draining = world.draining
        self._all_ready = bool(ring) and all(is_ready(info) for info in ring)
        self.facts = facts_of(world.stages) or self.facts
        return news

    def _find_broken(self, ring: list[StageInfo]) -> str:
        """Return what died, or died and was replaced, between two snapshots."""
        broken = ""
        for info in ring:
            known = self._incarnations.get(info.address)
            dead = info.state is StageState.DEAD
            if known is not None and (dead or info.incarnation != known):
                broken = f"{info.address.title} died"
            if dead:
                self._incarnations.pop(info.address, None)
            else:
                self._incarnations[info.address] = info.incarnation
        return broken

    def warmed(self) -> None:
        """The ring as it is now has generated a token."""
        self._warm = True

    def require_serving(self) -> ModelFacts:
        """Return the model's facts. Raises UnavailableError when new calls are not accepted."""
        if self.phase is not Phase.SERVING or self.facts is None:
            detail = f": {self.failure}" if self.failure else ""
            raise UnavailableError(f"{self.phase.value}{detail}")
        return self.facts
