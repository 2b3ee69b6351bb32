"""The simulated device: its roofline against numbers worked out by hand, its clock against a hand-moved one."""

import math
import time

import msgspec
import numpy as np
import pytest

from proto.channel import decode_as
from proto.messages import Desync, StepResult, TokenLogprobs, column
from proto.model import ModelConfig
from tests.builders import i32, make_model, make_plan, make_row, make_worker_options
from worker.device import Completion, DeviceError
from worker.output import sleep_until
from worker.sim.device import SimulatedDevice
from worker.sim.roofline import Gpu, Roofline, parse_gpu
from worker.start import warn_if_shortened
from worker.steps.batch import StepBatch

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    max_position_embeddings=131072,
)
# 32 layers × (4096 × 128 × (2·32 + 2·8) + 3 × 4096 × 14336), and 128256 × 4096
LAYER_PARAMS = 32 * (41_943_040 + 176_160_768)
HEAD_PARAMS = 525_336_576
KV_BYTES = 131_072  # 32 layers × 8 heads × 128 × 2 × 2 bytes
PLAIN = Gpu(bandwidth=1e12, flops=1e14, memory=24e9, launch=0.0)


def make_batch(rows: list[tuple[int, int]], sampled: int) -> StepBatch:
    """Rows as (context before, new tokens); decode rows are those with one token. Pages do not matter here."""
    positions = np.concatenate([np.arange(c, c + n, dtype=np.int32) for c, n in rows])
    indptr = np.concatenate([[0], np.cumsum([n for _, n in rows])]).astype(np.int32)
    nothing = np.zeros(0, np.int32)
    return StepBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        kv_slots=nothing,
        qo_indptr=indptr,
        kv_indptr=nothing,
        kv_indices=nothing,
        last_page_len=nothing,
        slots=np.zeros(len(rows), np.int32),
        decode_rows=sum(n == 1 for _, n in rows),
        logit_tokens=np.zeros(sampled, np.int32),
    )


# --------------------------------------------------------------------------- roofline


def test_weights_of_llama_8b() -> None:
    """8 030 261 248 parameters, as its model card counts them."""
    assert Roofline(LLAMA_8B, PLAIN, 2).weight_bytes == 2 * 8_030_261_248


def test_decode_alone_takes_the_time_to_read_the_weights() -> None:
    seconds = Roofline(LLAMA_8B, PLAIN, 2).seconds(make_batch([(999, 1)], 1))
    assert seconds == pytest.approx((2 * (LAYER_PARAMS + HEAD_PARAMS) + 1001 * KV_BYTES) / 1e12, rel=1e-12)
    assert seconds == pytest.approx(15.0e-3, rel=0.02)


def test_decode_of_many_rows_adds_their_kv_and_stays_bound_by_memory() -> None:
    seconds = Roofline(LLAMA_8B, PLAIN, 2).seconds(make_batch([(999, 1)] * 64, 64))
    assert seconds == pytest.approx((2 * (LAYER_PARAMS + HEAD_PARAMS) + 64 * 1001 * KV_BYTES) / 1e12, rel=1e-12)


def test_prefill_is_bound_by_arithmetic() -> None:
    """2 FLOPs a parameter and token, the head for one token, and 4 × 4096 a layer for each pair of tokens."""
    seconds = Roofline(LLAMA_8B, PLAIN, 2).seconds(make_batch([(0, 2048)], 1))
    pairs = 2048 * 2049 // 2
    flops = 2 * 2048 * LAYER_PARAMS + 2 * HEAD_PARAMS + 32 * 4 * 4096 * pairs
    assert seconds == pytest.approx(flops / 1e14, rel=1e-12)


def test_a_chunk_without_a_sample_does_not_read_the_head() -> None:
    roofline = Roofline(LLAMA_8B, PLAIN, 2)
    with_head, without = (roofline.seconds(make_batch([(0, 16)], sampled)) for sampled in (1, 0))
    assert with_head - without == pytest.approx(2 * HEAD_PARAMS / 1e12, rel=1e-9)


def test_a_window_bounds_what_is_read() -> None:
    """Half of the layers see 100 positions: a decode row at 999 reads 100 there, a chunk of 50 reads 149."""
    model = msgspec.structs.replace(LLAMA_8B, windows=(0, 100) * 16)
    roofline = Roofline(model, PLAIN, 2)
    full = Roofline(LLAMA_8B, PLAIN, 2)
    for rows, spared in (([(999, 1)], 900), ([(950, 50)], 851)):
        batch = make_batch(rows, 1)
        assert full.seconds(batch) - roofline.seconds(batch) == pytest.approx(spared * KV_BYTES / 2 / 1e12, rel=1e-6)


def test_launch_time_is_added_once() -> None:
    slow = Gpu(bandwidth=1e12, flops=1e14, memory=24e9, launch=5e-5)
    batch = make_batch([(10, 1)], 1)
    assert Roofline(LLAMA_8B, slow, 2).seconds(batch) == pytest.approx(
        Roofline(LLAMA_8B, PLAIN, 2).seconds(batch) + 5e-5
    )


def test_presets_and_settings_are_read() -> None:
    h200 = parse_gpu("sim:h200")
    assert h200.memory == 141e9
    assert 0.5 < h200.bandwidth / 4.8e12 < 1
    assert parse_gpu("sim:h100,launch=1e-3").launch == 1e-3
    custom = parse_gpu("sim:custom,bandwidth=1e12,flops=1e14,memory=24e9,launch=2e-5")
    assert custom == Gpu(1e12, 1e14, 24e9, 2e-5)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("sim:h300", "no such GPU"),
        ("sim:custom,bandwidth=1e12", "needs flops, memory"),
        ("sim:h200,speed=3", "'speed' is not one of bandwidth"),
        ("sim:h200,launch=soon", "launch is 'soon', not a number"),
        ("sim:h200,bandwidth=0", "out of range"),
        ("sim:h200,launch=nan", "out of range"),
        ("sim:h200,eos=2", "out of range"),
        ("sim:h200,max_step_ids=0", "out of range"),
        ("sim:h200,max_step_ids=1.5", "not a whole number"),
        ("sim:h200,max_step_ids=65", "1 to 64"),
    ],
)
def test_a_device_that_cannot_be_is_named(device: str, text: str) -> None:
    with pytest.raises(DeviceError, match=text) as caught:
        parse_gpu(device)
    assert device in str(caught.value)


def test_the_pool_is_what_the_weights_leave() -> None:
    device = SimulatedDevice(make_worker_options(LLAMA_8B, device="sim:h200", page_size=16))
    assert device.facts.num_pages == (int(141e9 * 0.9) - 2 * 8_030_261_248) // (16 * KV_BYTES)
    assert device.facts.max_model_len == 131072
    small = SimulatedDevice(make_worker_options(LLAMA_8B, device="sim:h200", page_size=16, num_pages=10))
    assert small.facts.max_model_len == 160
    with pytest.raises(DeviceError, match="leave no page"):
        SimulatedDevice(make_worker_options(LLAMA_8B, device="sim:custom,bandwidth=1e12,flops=1e14,memory=16e9"))


# --------------------------------------------------------------------------- the clock


class Bench:
    """A device of 1 ms steps (launch time alone counts for a model this small) on a clock moved by hand."""

    def __init__(self, device: str = "sim:h200,launch=1e-3") -> None:
        self.now = 10_000_000
        self.device = SimulatedDevice(make_worker_options(device=device), clock_ns=lambda: self.now)
        self.device.reset(1)
        self.step = 0

    def launch(self, **fields: object) -> Completion:
        self.step += 1
        completion = self.device.launch(make_plan(step=self.step, **fields))
        assert completion is not None
        return completion

    def start(self) -> Completion:
        return self.launch(admits=(make_row(0, [1], list(range(8))),), chunks=i32(0, 1, 1))


def test_a_length_that_the_pool_cannot_hold_is_cut_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    options = make_worker_options(LLAMA_8B, device="sim:h200", page_size=16, num_pages=10, max_model_len=1000)
    facts = SimulatedDevice(options).facts
    assert facts.max_model_len == 160
    warn_if_shortened(options, facts)
    assert "--max-model-len 1000 is cut to 160" in caplog.text
    caplog.clear()
    options = make_worker_options(LLAMA_8B, device="sim:h200", page_size=16, num_pages=10, max_model_len=160)
    warn_if_shortened(options, SimulatedDevice(options).facts)
    assert not caplog.text


def test_a_step_that_waits_in_the_queue_starts_when_the_device_is_free() -> None:
    bench = Bench()
    first = bench.start()
    assert first.due == pytest.approx(11_000_000, abs=1000)
    second = bench.launch(decode_slots=i32(0))
    assert second.due == pytest.approx(12_000_000, abs=2000)
    bench.now = 11_700_000  # the host comes late, but before the device runs dry: nothing is lost
    third = bench.launch()
    assert third.due == pytest.approx(13_000_000, abs=3000)
    assert bench.device.clock.idle_ns == 0
    assert bench.device.clock.counters()["device_busy_share"] == 1.0


def test_a_late_plan_leaves_the_device_idle() -> None:
    bench = Bench()
    bench.start()
    bench.now = 11_500_000
    late = bench.launch(decode_slots=i32(0))
    assert isinstance(late.message, StepResult)
    assert late.message.idle_ns == pytest.approx(500_000, abs=1000)
    assert late.message.device_ns == pytest.approx(1_000_000, abs=1000)
    assert bench.device.clock.counters()["device_busy_share"] == pytest.approx(2 / 2.5, rel=1e-3)


def test_a_quiet_hour_does_not_count_as_idle() -> None:
    bench = Bench()
    bench.start()
    bench.now += 3_600_000_000_000
    bench.launch(released=i32(0), admits=(make_row(0, [1], [0]),), chunks=i32(0, 1, 1))
    assert bench.device.clock.counters()["device_busy_share"] == 1.0


def test_the_simulated_device_refuses_as_a_real_one() -> None:
    bench = Bench()
    bench.start()
    bench.step += 1
    refusal = bench.launch()
    assert refusal == Completion(Desync(epoch=1, step=3, expected_epoch=1, expected_previous=1), due=0)
    assert bench.device.launch(make_plan(step=4)) is None


def generate(bench: Bench, seeds: list[int], prompt: int, count: int, temperature: float = 1.0) -> list[list[int]]:
    """`count` tokens for each seed, all in one batch."""
    admits = []
    for slot, seed in enumerate(seeds):
        row = make_row(slot, [1] * prompt, [slot * 8 + i for i in range(8)])
        sampling = msgspec.structs.replace(row.sampling, seed=seed, temperature=temperature)
        admits.append(msgspec.structs.replace(row, sampling=sampling))
    chunks = i32(*(value for slot in range(len(seeds)) for value in (slot, prompt, 1)))
    completions = [bench.launch(admits=tuple(admits), chunks=chunks)]
    completions.append(bench.launch(decode_slots=i32(*range(len(seeds)))))
    completions += [bench.launch() for _ in range(count - 2)]
    rows = [column(c.message.ids) for c in completions if isinstance(c.message, StepResult)]
    return [[int(i) for i in row] for row in zip(*rows, strict=True)]


def test_ids_follow_from_seed_and_position_and_are_never_an_eos() -> None:
    together = generate(Bench(), [7, 8, 2**64 - 1], prompt=3, count=25)
    assert generate(Bench(), [8], prompt=3, count=25)[0] == together[1]
    assert generate(Bench(), [8], prompt=5, count=23)[0] == together[1][2:]
    assert together[0] != together[1] != together[2]
    greedy = generate(Bench(), [7, 8], prompt=3, count=25, temperature=0.0)
    assert greedy[0] == greedy[1]
    drawn = {i for row in together for i in row}
    assert 2 not in drawn
    assert len(drawn) > 25
    assert max(drawn) < make_model().vocab_size


def test_logprobs_are_those_of_equal_words_for_rows_that_want_them() -> None:
    bench = Bench()
    rows = []
    for slot, logprobs in enumerate((-1, 0, 3)):
        row = make_row(slot, [1], [slot])
        rows.append(msgspec.structs.replace(row, sampling=msgspec.structs.replace(row.sampling, logprobs=logprobs)))
    result = bench.launch(admits=tuple(rows), chunks=i32(0, 1, 1, 1, 1, 1, 2, 1, 1)).message
    assert isinstance(result, StepResult)
    assert [row for row, _ in result.logprobs] == [1, 2]
    chosen, three = (decode_as(payload, TokenLogprobs) for _, payload in result.logprobs)
    logprob = -math.log(len(bench.device._words))
    assert chosen == TokenLogprobs((logprob,), (b"",), ((),))
    assert (three.chosen, three.top_logprobs) == ((logprob,), ((logprob,) * 3,))
    top = column(three.top_ids[0]).tolist()
    assert top[0] == column(result.ids)[2]
    assert len({*top}) == 3
    assert max(top) < make_model().vocab_size


def test_a_row_with_a_limit_gains_ids_of_the_same_text_and_logprobs_of_each() -> None:
    """0 to 5 of them, and one where it is asked for no more."""
    wanted = generate(Bench(), [8], prompt=1, count=31)[0]
    bench = Bench("sim:h200,max_step_ids=5")
    row = make_row(0, [1], list(range(8)))
    sampling = msgspec.structs.replace(row.sampling, seed=8, temperature=1.0, logprobs=1)
    bench.launch(admits=(msgspec.structs.replace(row, sampling=sampling),), chunks=i32(0, 1, 1))
    got, gains, fields = wanted[:1], [], {"decode_slots": i32(0)}
    while len(got) < 26:
        result = bench.launch(limits=i32(5), **fields).message
        assert isinstance(result, StepResult)
        gains.append(int(column(result.counts)[0]))
        got += column(result.ids).tolist()
        ((_, payload),) = result.logprobs
        logprobs = decode_as(payload, TokenLogprobs)
        assert len(logprobs.chosen) == len(logprobs.top_ids) == gains[-1]
        assert [int(column(top)[0]) for top in logprobs.top_ids] == column(result.ids).tolist()
        # The one id of the prompt and all but the newest one are computed.
        fields = {"rewinds": i32(0, len(got))} if gains[-1] < 5 else {}
    assert {0, 5} <= set(gains) <= set(range(6))
    assert got == wanted[: len(got)]
    result = bench.launch(limits=i32(1), **fields).message
    assert isinstance(result, StepResult)
    assert column(result.counts).tolist() == [1]


def test_an_eos_comes_as_often_as_asked() -> None:
    rows = generate(Bench("sim:h200,eos=0.5"), [1, 2, 3, 4, 5, 6], prompt=2, count=30)
    ends = sum(i == 2 for row in rows for i in row)
    assert 60 < ends < 120


def test_sleep_until_is_never_early_and_rarely_late() -> None:
    """A wake-up that came early would hand over a result before the device had it."""
    lateness = []
    for delay in (0, 20_000, 200_000, 1_000_000) * 10:
        due = time.monotonic_ns() + delay
        sleep_until(due)
        lateness.append(time.monotonic_ns() - due)
    assert min(lateness) >= 0
    assert np.median(lateness) < 1_000_000  # a machine under load; quiet ones show microseconds
