"""Estimates that steer admission and preemption. All of them learn from what happened; none reads a clock."""

from enum import Enum

import numpy as np
import numpy.typing as npt

from proto.messages import WorkClass

_LEARN = 1 / 32  # weight of a new observation in running means
_PRIOR_LENGTH = 256.0  # output tokens expected of a class before any request has finished
_MAX_CAUTION = 4.0
_CAUTION_STEP = 0.5  # added by a preemption
_CAUTION_DECAY = 1 / 64  # taken back by a finished request
_MIN_SPEED_SAMPLE = 64  # tokens: smaller chunks measure the launch, not the prefill
_THRASH_DECAY = 1 - 1 / 512  # per step
_THRASH_FLOOR = 512.0  # tokens: a ratio of less work than this is noise
_MAX_HEADROOM = 0.5
_PACE_LEARN = 1 / 8  # weight of a new observation in predicted step times
_MIN_MARGIN = 2_000_000  # ns: a plan's way to the worker, and a late wake-up of ours
_MARGIN_PART = 4  # of the predicted step time: predictions err


class Obstacle(Enum):
    """Why a waiting request cannot be placed in this step."""

    LONG = 1  # waits for the long prefill of its class to end
    BUDGET = 2  # waits for a step with room for its whole prompt
    PAGES = 3  # waits for pages
    LATE = 4  # cannot finish its prefill before its deadline
    PINNED = 5  # nothing runs, and still too few pages: pins hold them


class OutputLengths:
    """Expected output of a request, by class of work: mean + caution × mean deviation of finished ones.

    A preemption says that the estimates were too low, and raises the caution; finished requests lower it.
    """

    def __init__(self) -> None:
        self._mean = [_PRIOR_LENGTH] * len(WorkClass)
        self._deviation = [_PRIOR_LENGTH / 2] * len(WorkClass)
        self.caution = 1.0

    def observe_finish(self, work_class: WorkClass, output: int) -> None:
        error = output - self._mean[work_class]
        self._mean[work_class] += _LEARN * error
        self._deviation[work_class] += _LEARN * (abs(error) - self._deviation[work_class])
        if self.caution:
            self.caution = max(0.0, self.caution - _CAUTION_DECAY)

    def observe_preemption(self) -> None:
        self.caution = min(_MAX_CAUTION, self.caution + _CAUTION_STEP)

    def expect(self, work_class: WorkClass, generated: int, limit: int) -> int:
        """Output tokens that a request which has `generated` of at most `limit` will have at its end."""
        expected = self._mean[work_class] + self.caution * self._deviation[work_class]
        if generated >= expected:
            expected = generated + max(generated / 4, 1)
        return min(limit, int(expected) + 1)


class PrefillSpeed:
    """Prefilled tokens per second of the device, from steps with chunks; 0 until measured."""

    def __init__(self) -> None:
        self.tokens_per_second = 0.0

    def observe(self, tokens: int, device_ns: int) -> None:
        if tokens < _MIN_SPEED_SAMPLE or device_ns <= 0:
            return
        speed = tokens * 1e9 / device_ns
        if self.tokens_per_second:
            speed = self.tokens_per_second + 4 * _LEARN * (speed - self.tokens_per_second)
        self.tokens_per_second = speed

    def duration(self, tokens: int) -> int:
        """ns that a prefill of so many tokens takes at least; 0 while nothing is known."""
        return int(tokens * 1e9 / self.tokens_per_second) if self.tokens_per_second else 0


class Thrash:
    """Recomputed tokens per useful token, over the last hundreds of steps."""

    def __init__(self) -> None:
        self.preempted_tokens = 0  # over all time
        self._preempted = 0.0
        self._useful = 0.0

    def observe_step(self, useful: int) -> None:
        self._preempted *= _THRASH_DECAY
        self._useful = self._useful * _THRASH_DECAY + useful

    def observe_recompute(self, tokens: int) -> None:
        self.preempted_tokens += tokens
        self._preempted += tokens

    @property
    def ratio(self) -> float:
        return self._preempted / max(self._useful, _THRASH_FLOOR)

    def headroom(self, num_pages: int) -> int:
        """Pages that admission leaves free: the more is recomputed, the fewer requests may run."""
        if not self._preempted:
            return 0
        return int(min(self.ratio, _MAX_HEADROOM) * num_pages)


class Pacer:
    """Predicts when the running step ends: step time = base + tokens × slope, learned from results. All times are ns.

    The plan that follows should leave late enough to know the newest requests and aborts, and early enough that the
    device never waits for it (docs/architecture.md, 'The step protocol').
    """

    def __init__(self) -> None:
        self._base = 0.0  # of a step without prefill
        self._per_token = 0.0  # what a prefilled token adds
        self._started = 0  # when the running step began
        self._predicted = 0

    def observe(self, prefill_tokens: int, device_ns: int) -> None:
        """A step with so many prefilled tokens took so long."""
        if not prefill_tokens:
            self._base += (device_ns - self._base) * (_PACE_LEARN if self._base else 1)
        else:
            per_token = max(device_ns - self._base, 0.0) / prefill_tokens
            self._per_token += (per_token - self._per_token) * (_PACE_LEARN if self._per_token else 1)

    def start_step(self, prefill_tokens: int, now: int) -> None:
        """A step began to run: the one before has ended, or there was none."""
        self._started = now
        self._predicted = int(self._base + self._per_token * prefill_tokens)

    @property
    def due(self) -> int:
        """When the plan that follows the queued ones should leave."""
        return self._started + self._predicted - max(_MIN_MARGIN, self._predicted // _MARGIN_PART)


def expected_peak(held: npt.NDArray[np.int64], growth: npt.NDArray[np.int64]) -> int:
    """Most pages that rows will hold at once, if each grows by `growth` pages at equal speed and then leaves.

    When the row with the k-th largest growth leaves, those before it still hold what they have, grown by as
    much as it grew: the peak is the largest of these sums (as in the past-future scheduler, Gong et al. 2025).
    """
    order = np.argsort(-growth, kind="stable")
    ranks = np.arange(1, growth.size + 1)
    return int((np.cumsum(held[order]) + ranks * growth[order]).max(initial=0))


def cheapest_victim(freed: npt.NDArray[np.int64], weights: npt.NDArray[np.int64]) -> int:
    """Index of the row to preempt: the least recomputation, weighted by its class.

    `freed` are the pages that nobody else uses: others survive the preemption, cost nothing and help nobody.
    Rows that would free nothing come last; of equals, the last one goes.
    """
    cost = np.where(freed > 0, freed * weights, np.iinfo(np.int64).max)
    return int(cost.size - 1 - np.argmin(cost[::-1]))
