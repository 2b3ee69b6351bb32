"""Holds heartbeats to the tables of `proto.metrics`."""

from proto.ids import StageKind
from proto.messages import Heartbeat
from proto.metrics import METRICS, MetricKind


def assert_complete(kind: StageKind, beat: Heartbeat) -> None:
    """A stage reports every metric of its kind, and no other."""
    histograms = {metric.name: metric for metric in METRICS[kind] if metric.kind is MetricKind.HISTOGRAM}
    assert set(beat.counters) == {metric.name for metric in METRICS[kind]} - histograms.keys()
    assert beat.histograms.keys() == histograms.keys()
    for name, histogram in beat.histograms.items():
        assert len(histogram.counts) == len(histograms[name].buckets) + 1
