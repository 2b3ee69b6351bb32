"""The parameters of a generation, each declared once.

A field of `Sampling` or `RequestParams` gives a parameter's type and default; the `Spec` in its annotation gives the
rest: its path in GenerateRequest, its range, and the flag of `quintet generate`. From this follow

- the server's checks and their error texts (`server/validate.py`),
- the record that a worker keeps of each slot, in host and in device memory (`worker/steps/sampling.py`),
- the flags of `quintet generate` and `quintet chat` (`engine/cli/asking.py`).

Public names, types and comments are those of inference.proto, from which the keyword arguments of the client and the
keys of batch files follow. `tests/test_parameters.py` holds the two against each other.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Any, get_args, get_origin

import msgspec

from proto.message import Message

# Below it a temperature means greedy: dividing logits by less would only amplify their rounding.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20
MAX_INT32 = 2**31 - 1
MAX_UINT64 = 2**64 - 1


@dataclass(frozen=True)
class Spec:
    """Facts about a parameter that its field's type and default do not give."""

    path: str  # of the field in GenerateRequest
    low: float | None = None  # None = the type's own limits
    high: float | None = None
    above_low: bool = False  # `low` itself is out of range
    help: str = ""  # of the command-line flag; "" = there is none
    metavar: str = ""
    flag: str = ""  # "" = the name's, with dashes

    @cached_property
    def name(self) -> str:
        """The field's own name in the .proto, which is also the client's keyword argument."""
        return self.path.rpartition(".")[2]

    @cached_property
    def parent(self) -> str:
        """The field of GenerateRequest whose message holds it; "" = GenerateRequest itself."""
        return self.path.rpartition(".")[0]

    @property
    def range(self) -> str:
        """The range in words, as errors and the comments of inference.proto have it."""
        if self.above_low:
            return f"above {self.low} and at most {self.high}"
        return f"{self.low} or more" if self.high in (MAX_INT32, MAX_UINT64) else f"{self.low} to {self.high}"

    def accepts(self, value: float) -> bool:
        """Return whether the value is in range; NaN and infinities never are."""
        if self.low is None or self.high is None:
            return True
        return math.isfinite(value) and self.low <= value <= self.high and not (self.above_low and value == self.low)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field that has a `Spec`: its name and type in the struct."""

    field: str
    kind: Any
    spec: Spec


def parameters_of(struct: type[msgspec.Struct]) -> tuple[Parameter, ...]:
    """The parameters that a struct declares, in the order of its fields."""
    found = []
    for field in msgspec.structs.fields(struct):
        if get_origin(field.type) is Annotated:
            kind, spec = get_args(field.type)
            found.append(Parameter(field.name, kind, spec))
    return tuple(found)


class WorkClass(IntEnum):
    """Classes of work with latency budgets of their own."""

    CHAT = 0
    AGENT = 1
    BATCH = 2


class Sampling(Message, frozen=True, tag="sampling"):
    """Parameters of drawing one token from its logits, which the worker's samplers read.

    Filters apply to the distribution after temperature, in the order top_k, top_p, min_p.
    """

    temperature: Annotated[
        float,
        Spec("sampling.temperature", 0, 100, help="divide the logits by T; 0 takes the most likely token", metavar="T"),
    ] = 1.0
    top_k: Annotated[  # 0 and -1 = off
        int, Spec("sampling.top_k", -1, MAX_INT32, help="keep the K most likely tokens", metavar="K")
    ] = 0
    top_p: Annotated[  # 1 = off
        float,
        Spec(
            "sampling.top_p", 0, 1, above_low=True, help="keep the likeliest tokens that together reach P", metavar="P"
        ),
    ] = 1.0
    min_p: Annotated[  # 0 = off
        float,
        Spec("sampling.min_p", 0, 1, help="keep tokens at least P times as likely as the likeliest", metavar="P"),
    ] = 0.0
    # Random numbers depend on (seed, index, position, purpose) only. The server draws one where the caller sets none.
    seed: Annotated[int, Spec("sampling.seed", 0, MAX_UINT64, help="equal seeds give equal answers", metavar="N")] = 0
    # -1 = none, 0 = the chosen token's, k = and the k most likely
    logprobs: Annotated[int, Spec("logprobs", 0, MAX_LOGPROBS)] = -1


class RequestParams(Message, frozen=True, tag="params"):
    """Parameters of a generation, checked by the server."""

    sampling: Sampling = Sampling()
    # When to end. Lengths are the tokenizer's to resolve, ids the scheduler's to watch, strings the detokenizer's.
    max_new_tokens: Annotated[  # -1 = up to the context; 0 = prefill only
        int,
        Spec("stopping.max_new_tokens", 0, MAX_INT32, help="generate at most N tokens", metavar="N"),
    ] = -1
    min_new_tokens: Annotated[
        int,
        Spec("stopping.min_new_tokens", 0, MAX_INT32, help="let nothing end the answer before N tokens", metavar="N"),
    ] = 0
    stop_strings: Annotated[
        tuple[str, ...],
        Spec("stopping.stop_strings", flag="--stop", help="end before this text; may be repeated", metavar="TEXT"),
    ] = ()
    stop_token_ids: Annotated[bytes, Spec("stopping.stop_token_ids")] = b""  # i32
    include_stop: Annotated[  # keep a matched stop string in the text
        bool, Spec("stopping.include_stop_str_in_output")
    ] = False
    ignore_eos: Annotated[bool, Spec("stopping.ignore_eos", help="go on after the model's end of text")] = False
    # Text.
    skip_special_tokens: Annotated[bool, Spec("skip_special_tokens")] = True
    # Scheduling.
    work_class: WorkClass = WorkClass.CHAT
    priority: Annotated[int, Spec("priority", -1000, 1000)] = 0  # higher first within a class
    cache_salt: Annotated[str, Spec("cache_salt")] = ""  # pages are shared only between equal salts
    deadline: int = 0  # monotonic ns
