"""What the commands say: errors in one line, and how fast an answer came."""

import math
import sys
from dataclasses import dataclass, field

import grpc

from quintet_client import FieldViolation, QuintetError
from quintet_client.v1 import inference_pb2 as pb


def complain(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"quintet: {text}\n")


def describe_error(error: QuintetError, address: str = "") -> str:
    """Code, field and text of a failed call in one line; `address` helps where no server answered."""
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason and address:
        return (
            f"UNAVAILABLE: no server answers at {address}: start one with `quintet serve`, or name one with --address"
        )
    told = "; ".join(_describe(violation) for violation in error.violations)
    text = " ".join((told or error.message).split())
    again = "" if error.retry_after is None else f" (try again in {error.retry_after:g} s)"
    return f"{error.code.name}: {text}{again}"


def _describe(violation: FieldViolation) -> str:
    field, text = violation.field, violation.description
    return text if text.startswith(field) else f"{field}: {text}"


def finish_record(finish: pb.Finish) -> dict[str, str | int]:
    """As {"reason": "stop", "eos_token_id": 2}."""
    reason = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    record: dict[str, str | int] = {"reason": reason}
    matched = finish.WhichOneof("matched")
    if matched is not None:
        record[matched] = getattr(finish, matched)
    return record


def percentile(values: list[float], percent: float) -> float:
    """By nearest rank; `values` must not be empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


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

    def take(self, tokens: int, now: float) -> None:
        """A chunk with this many tokens came."""
        if tokens == 0:
            return
        if self.first is None:
            self.first = now
        else:
            self.gaps += [(now - self.last) / tokens] * tokens
        self.last = now
        self.tokens += tokens

    def numbers(self) -> dict[str, float]:
        """In ms, and tokens a second over all but the first token; what cannot be known yet is left out."""
        numbers: dict[str, float] = {}
        if self.first is not None:
            numbers["ttft_ms"] = (self.first - self.started) * 1e3
        if self.gaps:
            numbers["itl_mean_ms"] = sum(self.gaps) / len(self.gaps) * 1e3
            numbers["itl_p50_ms"] = percentile(self.gaps, 50) * 1e3
            numbers["itl_p99_ms"] = percentile(self.gaps, 99) * 1e3
            if self.last > (self.first or 0.0):
                numbers["tokens_per_second"] = len(self.gaps) / (self.last - (self.first or 0.0))
        return numbers


def stats_lines(clock: TokenClock, last: pb.GenerateChunk) -> list[str]:
    """For people; `last` is the stream's last chunk, with usage, timings and finish."""
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
