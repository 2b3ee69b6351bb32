"""When the plan after the running step should leave: late enough to know the newest requests and aborts, early
enough that the device never waits for it (docs/architecture.md, 'The step protocol')."""

_LEARN = 1 / 8
_MIN_MARGIN = 2_000_000  # ns: a plan's way to the worker, and a late wake-up of ours
_MARGIN_PART = 4  # of the predicted step time: predictions err


class Pacer:
    """Predicts step times as base + tokens × slope, learned from results. All times are ns."""

    def __init__(self) -> None:
        self._base = 0.0  # of a step without prefill
        self._per_token = 0.0  # what a prefilled token adds
        self._started = 0  # when the running step began
        self._predicted = 0

    def measured(self, prefill_tokens: int, device_ns: int) -> None:
        """A step with so many prefilled tokens took so long."""
        if not prefill_tokens:
            self._base += (device_ns - self._base) * (_LEARN if self._base else 1)
        else:
            per_token = max(device_ns - self._base, 0.0) / prefill_tokens
            self._per_token += (per_token - self._per_token) * (_LEARN if self._per_token else 1)

    def started(self, prefill_tokens: int, now: int) -> None:
        """A step began to run: the one before has ended, or there was none."""
        self._started = now
        self._predicted = int(self._base + self._per_token * prefill_tokens)

    @property
    def due(self) -> int:
        """When the plan that follows the queued ones should leave."""
        return self._started + self._predicted - max(_MIN_MARGIN, self._predicted // _MARGIN_PART)
