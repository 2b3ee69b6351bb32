"""Collects what a histogram of `proto.metrics` shows."""

from bisect import bisect_left

from proto.messages import Histogram
from proto.metrics import Metric


class HistogramRecorder:
    """Counts values by bucket; a fraction of a microsecond each."""

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.buckets
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0

    def record(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> Histogram:
        return Histogram(tuple(self._counts), self._sum)
