"""When the tokens of a stream arrive, and the latencies that follow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


def percentiles(values: Sequence[float], percents: Sequence[float]) -> list[float]:
    """The values at these percents, by nearest rank; `values` must not be empty."""
    ordered = sorted(values)
    return [ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] for percent in percents]


@dataclass
class TokenClock:
    """When the tokens of one stream arrived at the caller. Times in seconds of one monotonic clock.

    TTFT is from the call to the first chunk with a token. An inter-token latency (ITL) is the time between two
    such chunks, shared evenly by the tokens of the later one.
    """

    started: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    def count(self, tokens: int, now: float) -> None:
        """Note that a chunk with this many tokens came."""
        if tokens == 0:
            return
        if self.first is None:
            self.first = now
        else:
            self.gaps += [(now - self.last) / tokens] * tokens
        self.last = now
        self.tokens += tokens

    def numbers(self) -> dict[str, float]:
        """Latencies in ms, and tokens a second over all but the first token; what is not known yet is left out."""
        numbers: dict[str, float] = {}
        if self.first is not None:
            numbers["ttft_ms"] = (self.first - self.started) * 1e3
        if self.gaps:
            numbers["itl_mean_ms"] = sum(self.gaps) / len(self.gaps) * 1e3
            numbers["itl_p50_ms"], numbers["itl_p99_ms"] = (gap * 1e3 for gap in percentiles(self.gaps, (50, 99)))
            if self.last > (self.first or 0.0):
                numbers["tokens_per_second"] = len(self.gaps) / (self.last - (self.first or 0.0))
        return numbers
