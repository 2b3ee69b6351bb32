"""The worker between its inbox and its device: plans in, one after another; results out by their own thread."""

import logging
from collections import deque

from engine.runtime.stage import Stage
from proto.config import WorkerOptions
from proto.ids import Address, StageKind
from proto.messages import Heartbeat, Message, Reset, StepPlan, WorkerFacts, World
from worker.device import Device
from worker.output import OutputThread
from worker.ranks.followers import Followers, end_without_peers
from worker.ranks.group import PeerLostError

log = logging.getLogger(__name__)


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


def facts_of(device: Device, options: WorkerOptions) -> WorkerFacts:
    """What the worker found it can do, for Ready."""
    if options.max_model_len and device.max_model_len < options.max_model_len:
        log.warning(
            "--max-model-len %d is cut to %d: the KV cache holds no longer sequence",
            options.max_model_len,
            device.max_model_len,
        )
    return WorkerFacts(
        num_pages=device.num_pages,
        page_size=device.page_size,
        max_model_len=device.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        vocab_size=device.vocab_size,
        device=device.device,
        dtype=device.dtype,
        kv_bytes_per_token=device.kv_bytes_per_token,
        window=device.window,
        window_pages=device.window_pages,
        max_step_ids=device.max_step_ids,
    )
