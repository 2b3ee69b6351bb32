"""What the commands print: errors in one line, and how fast an answer came."""

import grpc

from engine.bench.clock import TokenClock
from quintet_client import FieldViolation, QuintetError
from quintet_client.v1 import inference_pb2 as pb


def describe_error(error: QuintetError, address: str = "") -> str:
    """Write code, field and text of a failed call in one line; `address` tells where no server answered."""
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason and address:
        return f"UNAVAILABLE: no server answers at {address}: start one with `quintet serve`, or give another --address"
    told = "; ".join(_describe(violation) for violation in error.violations)
    text = " ".join((told or error.message).split())
    again = "" if error.retry_after is None else f" (try again in {error.retry_after:g} s)"
    return f"{error.code.name}: {text}{again}"


def _describe(violation: FieldViolation) -> str:
    field, text = violation.field, violation.description
    return text if text.startswith(field) else f"{field}: {text}"


def finish_record(finish: pb.Finish) -> dict[str, str | int]:
    """Make a plain object such as {"reason": "stop", "eos_token_id": 2}."""
    reason = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    record: dict[str, str | int] = {"reason": reason}
    matched = finish.WhichOneof("matched")
    if matched is not None:
        record[matched] = getattr(finish, matched)
    return record


def stats_lines(clock: TokenClock, last: pb.GenerateChunk) -> list[str]:
    """Write latencies and usage for people; `last` is the stream's last chunk, with usage, timings and finish."""
    numbers, usage, timings = clock.numbers(), last.usage, last.timings
    lines = []
    if "ttft_ms" in numbers:
        lines.append(
            f"TTFT {numbers['ttft_ms']:.1f} ms (queue {timings.queue_ms:.1f}, prefill {timings.prefill_ms:.1f})"
        )
    if "itl_mean_ms" in numbers:
        mean, p50, p99 = (numbers[f"itl_{name}_ms"] for name in ("mean", "p50", "p99"))
        lines.append(f"ITL mean {mean:.1f} ms, p50 {p50:.1f}, p99 {p99:.1f}")
    if "tokens_per_second" in numbers:
        lines.append(f"{numbers['tokens_per_second']:.1f} tokens a second")
    lines.append(
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} from cache), {usage.completion_tokens} generated"
    )
    finish = [f"{name.replace('_', ' ')} {value!r}" for name, value in finish_record(last.finish).items()]
    lines.append(f"finish: {', '.join(finish)}")
    return lines
