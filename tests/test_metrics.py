"""The tables of metrics, and histograms. That stages keep to the tables is shown where their processes are tested."""

import re

import pytest

from engine.runtime.metrics import HistogramRecorder
from proto.ids import Address, StageKind
from proto.messages import Histogram, StageInfo, StageState
from proto.metrics import METRICS, PLAN_SECONDS, Metric, MetricKind
from quintet_client.v1 import control_pb2 as pb
from server.control import LOAD_COUNTERS, describe_process, replica_load
from tests.builders import make_stage

UNITS = {"", "bytes", "messages", "pages", "requests", "rows", "seconds", "steps", "tokens", "tokens/second"}


@pytest.mark.parametrize("kind", METRICS, ids=lambda kind: kind.label)
def test_a_table_says_everything_once(kind: StageKind) -> None:
    metrics = METRICS[kind]
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names))
    for metric in metrics:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert metric.unit in UNITS
        assert metric.name.endswith("seconds") == (metric.unit == "seconds")
        assert metric.help
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_every_kind_but_the_supervisor_has_a_table() -> None:
    assert set(METRICS) == set(StageKind) - {StageKind.SUPERVISOR}


def test_a_histogram_counts_values_by_bucket() -> None:
    recorder = HistogramRecorder(Metric("x", MetricKind.HISTOGRAM, "seconds", "for a test", (1.0, 2.0, 5.0)))
    for value in (0.5, 1.0, 1.5, 5.0, 7.0, 9.0):
        recorder.record(value)
    assert recorder.snapshot() == Histogram((2, 1, 1, 2), 24.0)


def test_a_load_is_read_from_counters_that_exist() -> None:
    assert set(LOAD_COUNTERS) <= {metric.name for metric in METRICS[StageKind.SCHEDULER]}
    info: StageInfo = make_stage(StageKind.SCHEDULER, 3, 1, StageState.STARTING)
    assert replica_load(info).index == 3
    assert replica_load(info).cache_hit_rate == 0.0


def test_callers_get_histograms_with_their_bounds_and_the_rank_of_a_worker() -> None:
    counts = tuple(range(len(PLAN_SECONDS.buckets) + 1))
    histograms = {PLAN_SECONDS.name: Histogram(counts, 0.5), "of_another_version": Histogram((1,), 1.0)}
    told = describe_process(StageInfo(Address(StageKind.SCHEDULER, 1), 2, counters={"x": 3.0}, histograms=histograms))
    spread = pb.Histogram(bounds=PLAN_SECONDS.buckets, counts=counts, sum=0.5)
    assert (dict(told.histograms), dict(told.counters)) == ({PLAN_SECONDS.name: spread}, {"x": 3.0})
    worker = describe_process(StageInfo(Address(StageKind.WORKER, 1, rank=2), 2))
    assert (worker.index, worker.rank, worker.title) == (1, 2, "quintet worker 1 rank 2")
