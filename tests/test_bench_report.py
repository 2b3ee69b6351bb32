"""Percentiles, rates, goodput and warnings, against values worked out by hand."""

from typing import Any

import pytest

from engine.bench.clock import TokenClock
from engine.bench.load import Call
from engine.bench.report import Slo, by_class, distribution, records, summary
from engine.bench.served import warnings
from quintet_client.options import WorkClassName
from scripts.bench_ring import limit
from scripts.soak import memory


def call(
    started: float, first: float, gap: float, tokens: int, error: str = "", work_class: WorkClassName = "chat"
) -> Call:
    """A call of 10 prompt tokens, whose first token came `first` after its start and the others `gap` apart."""
    clock = TokenClock(started)
    for number in range(tokens):
        clock.count(1, started + first + number * gap)
    ended = started + first + max(tokens - 1, 0) * gap
    return Call(work_class, 10, clock, sent=started + 0.001, ended=ended, cached_tokens=4, error=error)


def test_percentiles_are_values_that_were_measured() -> None:
    assert distribution([4.0, 1.0, 3.0, 2.0]) == {"mean": 2.5, "p50": 2.0, "p90": 4.0, "p99": 4.0, "max": 4.0}
    assert distribution([float(n) for n in range(1, 101)])["p99"] == 99.0
    assert distribution([7.0]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 7.0)
    assert distribution([]) == {}


def test_summary_of_three_calls() -> None:
    calls = [
        call(0.0, 0.1, 0.01, 11),  # TTFT 100 ms, ITL 10 ms, end to end 200 ms
        call(1.0, 0.3, 0.02, 6),  # 300, 20, 400
        call(2.0, 0.2, 0.01, 3, error="UNAVAILABLE"),
    ]
    total = summary(calls, 4.0, Slo())
    assert (total["requests"], total["completed"], total["errors"]) == (3, 2, {"UNAVAILABLE": 1})
    assert total["output_tokens"] == 20
    assert total["output_tokens_per_second"] == 5.0
    assert total["requests_per_second"] == 0.5
    assert (total["prompt_tokens"], total["cached_tokens"]) == (20, 8)
    assert total["ttft_ms"]["p50"] == pytest.approx(100.0)
    assert total["ttft_ms"]["max"] == pytest.approx(300.0)
    assert total["itl_ms"]["mean"] == pytest.approx((10 * 10 + 5 * 20) / 15)
    assert total["e2e_ms"]["p90"] == pytest.approx(400.0)
    assert total["sent_late_ms"]["p99"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("slo", "keeping"),
    [
        (Slo(), 3),  # whoever ends well
        (Slo(ttft_ms=200.5), 2),
        (Slo(itl_ms=15.0), 2),
        (Slo(ttft_ms=200.5, itl_ms=15.0), 1),
        (Slo(ttft_ms=50.0), 0),
    ],
)
def test_goodput_counts_calls_that_keep_every_limit(slo: Slo, keeping: int) -> None:
    calls = [
        call(0.0, 0.1, 0.01, 11),
        call(0.0, 0.2, 0.02, 11),  # too slow for 15 ms
        call(0.0, 0.3, 0.01, 11),  # too late for 200 ms
        call(0.0, 0.1, 0.01, 11, error="SHORT_OUTPUT"),
    ]
    goodput = summary(calls, 2.0, slo)["goodput"]
    assert goodput["requests_per_second"] == keeping / 2.0
    assert goodput["share"] == keeping / 4


def test_a_single_token_keeps_any_itl() -> None:
    assert Slo(itl_ms=1.0).keeps(call(0.0, 0.1, 0.0, 1))
    assert not Slo(ttft_ms=1.0).keeps(call(0.0, 0.1, 0.0, 0))


def test_classes_are_told_apart_only_where_there_are_several() -> None:
    chat, batch = call(0.0, 0.1, 0.01, 5), call(0.0, 0.5, 0.01, 7, work_class="batch")
    assert by_class([chat, chat], 1.0, Slo()) == {}
    classes = by_class([chat, batch], 1.0, Slo())
    assert {name: its["output_tokens"] for name, its in classes.items()} == {"chat": 5, "batch": 7}


def test_records_stand_in_the_order_of_their_calls() -> None:
    later, earlier = call(3.0, 0.1, 0.01, 5), call(2.0, 0.9, 0.01, 5, error="CANCELLED")
    first, second = records([later, earlier], start=2.0)
    assert (first["due"], first["error"], first["ttft_ms"]) == (0.0, "CANCELLED", pytest.approx(900.0))
    assert (second["due"], second["output_tokens"]) == (1.0, 5)


def test_doubtful_numbers_carry_a_warning() -> None:
    total: dict[str, Any] = summary([call(0.0, 0.1, 0.01, 5)], 1.0, Slo())
    assert warnings({**total, "client_cpu_share": 0.5}) == []
    assert "92% of a CPU" in warnings({**total, "client_cpu_share": 0.92})[0]
    assert "11 ms" in warnings({**total, "client_cpu_share": 0.5, "sent_late_ms": {"p99": 11.0}})[0]
    failed = summary([call(0.0, 0.1, 0.01, 5, error="UNAVAILABLE")], 1.0, Slo())
    assert "1 of 1 requests ended with UNAVAILABLE" in warnings({**failed, "client_cpu_share": 0.5})[0]


def ring(device: float, **cpu_shares: float) -> dict[str, Any]:
    processes = {name: {"cpu_share": share, "us_per_token": 20.0} for name, share in cpu_shares.items()}
    return {"device_busy_share": device, "processes": processes}


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (ring(0.99, server=0.4, client=0.2), "the device: busy 99.0%"),
        (ring(0.5, server=0.97, client=0.2), "server: 97% of a CPU"),
        (ring(0.5, server=0.8, client=0.7, worker=0.4), "the machine: all 2 CPUs"),
        (ring(0.5, server=0.3, client=0.2), "no CPU"),
    ],
)
def test_the_limit_of_a_ring_is_what_is_used_up(result: dict[str, Any], named: str) -> None:
    assert limit(result, cpus=2).startswith(named)


def test_memory_is_flat_when_its_last_quarter_is_no_higher_than_its_second() -> None:
    assert memory([50 << 20, 100 << 20, 101 << 20, 103 << 20])["flat"]
    assert not memory([50 << 20, 100 << 20, 105 << 20, 111 << 20])["flat"]
    assert memory([50 << 20, 60 << 20, 61 << 20, 63 << 20])["flat"]  # 3 MiB are within the noise of a small process
