"""Checks that plans follow one another: they are deltas, so a missed one spoils all that come after."""

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
        """Accept the plan's number if it is the next; otherwise the sequence is broken and nothing else changes."""
        if self._broken or plan.epoch != self.epoch or plan.previous != self.previous:
            return False
        self.previous = plan.step
        return True

    def refuse(self, plan: StepPlan) -> Desync | None:
        """Return the answer to a plan that does not follow: a Desync for the first, nothing for those after it."""
        if self._broken:
            return None
        self._broken = True
        return Desync(epoch=plan.epoch, step=plan.step, expected_epoch=self.epoch, expected_previous=self.previous)
