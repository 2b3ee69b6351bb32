"""The worker between its inbox and its device: plans in, one after another; results out by their own thread."""

from collections import deque

from engine.runtime.stage import Stage
from proto.ids import Address, StageKind
from proto.messages import Heartbeat, Message, Reset, StepPlan, World
from worker.device import Device
from worker.output import OutputThread
from worker.ranks.followers import Followers, end_without_peers
from worker.ranks.group import PeerLostError


class WorkerLoop:
    """Implements `engine.runtime.stage.Handler`."""

    def __init__(self, stage: Stage, device: Device, followers: Followers) -> None:
        self._stage = stage
        self._device = device
        self._followers = followers
        self._plans: deque[StepPlan] = deque()
        self._scheduler = Address(StageKind.SCHEDULER, stage.address.replica)
        self._output = OutputThread(
            stage.config.run_dir,
            stage.address,
            stage.config.incarnation,
            self._scheduler,
        )

    def on_message(self, message: Message) -> None:
        match message:
            case StepPlan():
                self._plans.append(message)
            case Reset():
                self._plans.clear()
                self._followers.tell(message)
                self._device.reset(message.epoch)
            case World():
                scheduler = self._stage.find(self._scheduler)
                if scheduler is not None:
                    self._output.aim(scheduler.incarnation)

    def step(self, now: int) -> float | None:
        if not self._plans:
            return None
        plan = self._plans.popleft()
        self._followers.tell(plan)
        try:
            completion = self._device.launch(plan)
        except PeerLostError as error:
            end_without_peers(self._stage, error)
        if completion is not None:
            self._output.put(completion)
        return 0.0 if self._plans else None

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self._device.clock.counters())
