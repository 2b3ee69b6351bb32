"""What `generate` takes beside its prompt."""

# Generated from inference.proto by scripts/generate_client. DO NOT EDIT
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

WorkClassName = Literal["chat", "agent", "batch"]


class GenerateOptions(TypedDict, total=False):
    """Fields of GenerateRequest and its messages; inference.proto says what each means and its default."""

    request_id: str
    model: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    n: int
    best_of: int
    beam_width: int
    repetition: float
    presence: float
    frequency: float
    logit_bias: Mapping[int, float]
    max_new_tokens: int
    min_new_tokens: int
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    json_schema: str
    regex: str
    grammar: str
    work_class: WorkClassName
    priority: int
    cache_salt: str
    prefix_id: str
    partial_at_deadline: bool
    skip_special_tokens: bool


# Where each option stands in GenerateRequest.
PATHS = {
    "request_id": "request_id",
    "model": "model",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "seed": "sampling.seed",
    "n": "sampling.n",
    "best_of": "sampling.best_of",
    "beam_width": "sampling.beam_width",
    "repetition": "penalties.repetition",
    "presence": "penalties.presence",
    "frequency": "penalties.frequency",
    "logit_bias": "logit_bias",
    "max_new_tokens": "stopping.max_new_tokens",
    "min_new_tokens": "stopping.min_new_tokens",
    "stop_strings": "stopping.stop_strings",
    "stop_token_ids": "stopping.stop_token_ids",
    "include_stop_str_in_output": "stopping.include_stop_str_in_output",
    "ignore_eos": "stopping.ignore_eos",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "json_schema": "constraint.json_schema",
    "regex": "constraint.regex",
    "grammar": "constraint.grammar",
    "work_class": "work_class",
    "priority": "priority",
    "cache_salt": "cache_salt",
    "prefix_id": "prefix_id",
    "partial_at_deadline": "partial_at_deadline",
    "skip_special_tokens": "skip_special_tokens",
}
