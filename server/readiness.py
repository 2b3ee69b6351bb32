"""Whether calls are taken, from what the supervisor tells. No I/O."""

from enum import Enum

from proto.channel import Address
from proto.config import ServerOptions
from proto.ids import StageKind
from proto.messages import StageInfo, StageState, World
from server.limits import ModelFacts, facts_of
from server.status import UnavailableError


class Phase(Enum):
    """Where the instance stands. Calls are taken while SERVING only."""

    STARTING = "starting: not all processes are ready"
    WARMING = "starting: the first token has not come yet"
    SERVING = "serving"
    DRAINING = "draining: running requests finish, new ones are refused"
    FAILED = "failing"


class Readiness:
    """Follows World snapshots; `warmed` is called when a token has gone round the ring."""

    def __init__(self, options: ServerOptions) -> None:
        self._ring = [
            Address(kind, index)
            for kind, count in (
                (StageKind.TOKENIZER, options.num_tokenizers),
                (StageKind.SCHEDULER, options.num_schedulers),
                (StageKind.WORKER, options.num_schedulers),
                (StageKind.DETOKENIZER, options.num_detokenizers),
            )
            for index in range(count)
        ]
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
        """Whether the instance is to end, be it in good order or not."""
        return self._draining

    def on_world(self, world: World) -> str:
        """Adopt a snapshot. Returns what broke since the last one, so that its requests are lost; "" = nothing."""
        infos = {Address(info.kind, info.index): info for info in world.stages}
        ring = {address: infos[address] for address in self._ring if address in infos}
        broken = self._find_broken(ring)
        news = broken or ("" if self.failure else world.failure)
        self.failure = world.failure or next((f"{a} is dead" for a in ring if _is(ring[a], StageState.DEAD)), "")
        if news or self.failure:
            self._warm = False
        self._draining = world.draining
        self._all_ready = len(ring) == len(self._ring) and all(_is(i, StageState.READY) for i in ring.values())
        self.facts = facts_of(world.stages) or self.facts
        return news

    def _find_broken(self, ring: dict[Address, StageInfo]) -> str:
        """What died, or died and was replaced between two snapshots."""
        broken = ""
        for address, info in ring.items():
            known = self._incarnations.get(address)
            dead = _is(info, StageState.DEAD)
            if known is not None and (dead or info.incarnation != known):
                broken = f"{address} died"
            if dead:
                self._incarnations.pop(address, None)
            else:
                self._incarnations[address] = info.incarnation
        return broken

    def warmed(self) -> None:
        """A real token has gone round the ring as it is now."""
        self._warm = True

    def require_serving(self) -> ModelFacts:
        """The model's facts. Raises UnavailableError when new calls are not taken."""
        if self.phase is not Phase.SERVING or self.facts is None:
            detail = f": {self.failure}" if self.failure else ""
            raise UnavailableError(f"{self.phase.value}{detail}")
        return self.facts


def _is(info: StageInfo, state: StageState) -> bool:
    return info.state is state
