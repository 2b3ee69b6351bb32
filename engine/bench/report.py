"""Statistics over the calls of a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.bench.clock import percentiles
from engine.bench.load import Call

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good answer keeps, in ms; None = no limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None  # limits the request's mean inter-token latency

    def keeps(self, call: Call) -> bool:
        """True when a call succeeded and was in time."""
        if call.error:
            return False
        numbers = call.clock.numbers()
        ttft, itl = numbers.get("ttft_ms"), numbers.get("itl_mean_ms", 0.0)
        late = self.ttft_ms is not None and (ttft is None or ttft > self.ttft_ms)
        slow = self.itl_ms is not None and itl > self.itl_ms
        return not (late or slow)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Compute mean, p50, p90, p99 (by nearest rank) and max; empty without values."""
    if not values:
        return {}
    names = (*(f"p{percent}" for percent in PERCENTS), "max")
    ranks = percentiles(values, (*PERCENTS, 100))
    return {"mean": sum(values) / len(values), **dict(zip(names, ranks, strict=True))}


def summary(calls: Sequence[Call], seconds: float, slo: Slo) -> dict[str, Any]:
    """Summarise a run of so many seconds. Latencies are in ms, of calls that succeeded."""
    good = [call for call in calls if not call.error]
    output = sum(call.clock.tokens for call in calls)
    prompt = sum(call.prompt_tokens for call in good)
    keeping = sum(slo.keeps(call) for call in calls)
    return {
        "requests": len(calls),
        "completed": len(good),
        "errors": dict(Counter(call.error for call in calls if call.error)),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens": output,
        "output_tokens_per_second": output / seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(call.cached_tokens for call in good),
        "prompt_tokens_per_second": prompt / seconds,
        "ttft_ms": distribution(
            [numbers["ttft_ms"] for call in good if "ttft_ms" in (numbers := call.clock.numbers())]
        ),
        "itl_ms": distribution([gap * 1e3 for call in good for gap in call.clock.gaps]),
        "e2e_ms": distribution([call.seconds * 1e3 for call in good]),
        "sent_late_ms": distribution([(call.sent - call.clock.started) * 1e3 for call in calls]),
        "goodput": {
            "slo_ttft_ms": slo.ttft_ms,
            "slo_itl_ms": slo.itl_ms,
            "requests_per_second": keeping / seconds,
            "share": keeping / len(calls) if calls else 0.0,
        },
    }


def by_class(calls: Sequence[Call], seconds: float, slo: Slo) -> dict[str, dict[str, Any]]:
    """Summarise each class of work, if there are several."""
    classes = dict.fromkeys(call.work_class for call in calls)
    if len(classes) < 2:
        return {}
    return {name: summary([call for call in calls if call.work_class == name], seconds, slo) for name in classes}


def records(calls: Sequence[Call], start: float) -> list[dict[str, Any]]:
    """List every call as a plain object, in the order in which they were due; times in seconds from `start`."""
    return [
        {
            "work_class": call.work_class,
            "due": call.clock.started - start,
            "sent": call.sent - start,
            "ended": call.ended - start,
            "prompt_tokens": call.prompt_tokens,
            "cached_tokens": call.cached_tokens,
            "output_tokens": call.clock.tokens,
            "error": call.error,
            **call.clock.numbers(),
        }
        for call in sorted(calls, key=lambda call: call.clock.started)
    ]
