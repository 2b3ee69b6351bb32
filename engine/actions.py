"""What the lifecycle asks of the supervisor."""

from dataclasses import dataclass

from proto.ids import Address
from proto.messages import Stop, World


@dataclass(frozen=True, slots=True)
class Start:
    """Start this stage's process."""

    address: Address
    incarnation: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a stage."""

    address: Address
    message: World | Stop


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to a stage's process group, and to its own pid should that be elsewhere."""

    address: Address


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class Announce:
    """The instance serves: publish its address."""


Action = Start | Tell | Kill | Say | Announce
