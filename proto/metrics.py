"""What each kind of process reports in its heartbeats: every counter's name, kind, unit and meaning.

A stage reports the names of its table, all of them and no others. Readers (`quintet status`, exporters) take units and
help from here.
"""

from dataclasses import dataclass
from enum import Enum

from proto.ids import StageKind


class MetricKind(Enum):
    COUNTER = "counter"  # a total since the process started; never falls
    GAUGE = "gauge"  # what is true now
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: MetricKind
    unit: str  # "" for shares
    help: str
    buckets: tuple[float, ...] = ()  # of a histogram: upper bounds, ascending, each within its bucket


def _counter(name: str, unit: str, text: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, unit, text)


def _gauge(name: str, unit: str, text: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, unit, text)


PLAN_SECONDS = Metric(
    "plan_seconds",
    MetricKind.HISTOGRAM,
    "seconds",
    "time to make a plan",
    (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 20e-3, 100e-3),
)
TURNAROUND_SECONDS = Metric(
    "turnaround_seconds",
    MetricKind.HISTOGRAM,
    "seconds",
    "time from sending a plan to receiving its result",
    (0.5e-3, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1.0, 2.0, 5.0),
)

_EVERY_STAGE = (
    _gauge("backlog", "messages", "messages that their receivers have not taken yet"),
    _counter("dropped_stale", "messages", "messages dropped because a dead process sent them, or was to get them"),
)
_INBOX_LOOP = _gauge("loop_busy_share", "", "share of the time in which the inbox loop did not wait")

_SERVER = (
    _gauge("in_flight_requests", "requests", "requests in flight"),
    _gauge("in_flight_bytes", "bytes", "memory that requests in flight count for"),
    _counter("finished", "requests", "generations that finished"),
    _counter("failed", "requests", "generations that ended with an error"),
    _counter("abandoned", "requests", "generations that were cancelled, timed out or lost their client"),
    _counter("repeated_deltas", "messages", "output dropped because it had been received before"),
    _counter("late_deltas", "messages", "output dropped because its generation or attempt was over"),
)
_TOKENIZER = (
    _counter("requests", "requests", "requests received"),
    _counter("prompt_tokens", "tokens", "tokens of the prompts encoded"),
    _gauge("long_texts", "requests", "long texts being encoded by the helper thread"),
)
_SCHEDULER = (
    _gauge("running", "requests", "requests in the batch"),
    _gauge("waiting", "requests", "requests in the queues"),
    _gauge("waiting_tokens", "tokens", "tokens to prefill of the requests in the queues"),
    _gauge("pages_total", "pages", "KV pages"),
    _gauge("pages_free", "pages", "KV pages that nothing uses"),
    _gauge("pages_cached", "pages", "KV pages that only the prefix cache holds"),
    _counter("evictions", "pages", "pages that the prefix cache gave up"),
    _gauge("window_pages_total", "pages", "KV pages of layers behind a window, where these have a pool of their own"),
    _gauge("window_pages_free", "pages", "pages of that pool that nothing uses"),
    _gauge("window_pages_cached", "pages", "pages of that pool that only the prefix cache holds"),
    _counter("window_evictions", "pages", "pages of that pool that the prefix cache gave up"),
    _counter("steps", "steps", "steps planned"),
    PLAN_SECONDS,
    TURNAROUND_SECONDS,
    _counter("prefill_tokens", "tokens", "tokens prefilled, those recomputed after a preemption included"),
    _gauge("prefill_tokens_per_second", "tokens/second", "smoothed speed of prefills"),
    _counter("generated_tokens", "tokens", "tokens generated"),
    _counter("prefix_query_tokens", "tokens", "tokens looked up in the prefix cache"),
    _counter("prefix_hit_tokens", "tokens", "tokens that the prefix cache spared"),
    _counter("finished", "requests", "requests that finished"),
    _counter("rejected", "requests", "requests that were refused"),
    _counter("aborted", "requests", "requests that were aborted"),
    _counter("superseded", "requests", "requests replaced by a later attempt"),
    _counter("ignored_admits", "requests", "requests of a past attempt, or aborted before they came"),
    _counter("leaked", "requests", "requests aborted because their server no longer listed them"),
    _counter("preemptions", "requests", "requests preempted to free their pages"),
    _counter("preempted_tokens", "tokens", "tokens to recompute because of preemptions"),
    _gauge("thrash", "", "tokens recomputed because of preemptions for each useful token, smoothed"),
    _gauge("throttled_pages", "pages", "pages that admission keeps free because of thrashing"),
    _counter("wasted_rows", "rows", "rows decoded past a stop id"),
    _counter("dropped_rows", "rows", "results of rows that had left their slot"),
    _counter("failed_rows", "rows", "rows whose logits were not finite"),
    _counter("stalled_steps", "steps", "steps in which a row got no page and nothing could be preempted"),
    _counter("stale_results", "messages", "results of an earlier epoch"),
)
_WORKER = (
    _counter("steps", "steps", "steps run"),
    _counter("tokens", "tokens", "tokens sampled"),
    _counter("device_busy_seconds", "seconds", "time in which the device ran steps"),
    _counter("device_idle_seconds", "seconds", "time in which the device waited for a plan while rows were running"),
    _gauge("device_busy_share", "", "busy time as a share of busy and idle time"),
    _gauge("step_seconds", "seconds", "duration of the last step"),
)
_DETOKENIZER = (
    _gauge("live_requests", "requests", "requests being decoded"),
    _counter("tokens", "tokens", "tokens received"),
    _counter("unknown_rows", "rows", "rows of requests that are not known here"),
)

METRICS: dict[StageKind, tuple[Metric, ...]] = {
    StageKind.SERVER: (*_SERVER, *_EVERY_STAGE),
    StageKind.TOKENIZER: (*_TOKENIZER, _INBOX_LOOP, *_EVERY_STAGE),
    StageKind.SCHEDULER: (*_SCHEDULER, _INBOX_LOOP, *_EVERY_STAGE),
    StageKind.WORKER: (*_WORKER, _INBOX_LOOP, *_EVERY_STAGE),
    StageKind.DETOKENIZER: (*_DETOKENIZER, _INBOX_LOOP, *_EVERY_STAGE),
}
