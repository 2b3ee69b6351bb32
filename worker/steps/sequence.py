"""Do plans follow one another? Plans are deltas, so one that is missed spoils all that come after."""

from proto.messages import Desync, StepPlan


class PlanError(RuntimeError):
    """A plan that contradicts what came before it: a bug in the scheduler or here."""


class PlanSequence:
    """The worker's place in the scheduler's numbering. After a break it refuses all plans until `reset`."""

    def __init__(self) -> None:
        self.epoch = 0
        self.previous = 0
        self._broken = False

    def reset(self, epoch: int) -> None:
        self.epoch = epoch
        self.previous = 0
        self._broken = False

    def follows(self, plan: StepPlan) -> bool:
        """Take the plan's number if it is the next; otherwise nothing changes but that the sequence is broken."""
        if self._broken or plan.epoch != self.epoch or plan.previous != self.previous:
            return False
        self.previous = plan.step
        return True

    def refuse(self, plan: StepPlan) -> Desync | None:
        """What to answer to a plan that does not follow: a Desync to the first, nothing to those behind it."""
        if self._broken:
            return None
        self._broken = True
        return Desync(epoch=plan.epoch, step=plan.step, expected_epoch=self.epoch, expected_previous=self.previous)
