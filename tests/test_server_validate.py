"""Every field of a request has a range, a default, and an error that names field, limit and value."""

import math
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.messages import WorkClass, column
from quintet_client.v1 import inference_pb2 as pb
from server.errors import CallError, InvalidFieldError, NotBuiltError, UnknownModelError, status_of
from server.limits import ModelFacts
from server.validate import Ask, check_generate
from tests.server_ring import MAX_MODEL_LEN, TOKENIZER, VOCAB, WORKER

FACTS = ModelFacts(worker=WORKER, tokenizer=TOKENIZER)


def check(request: pb.GenerateRequest) -> Ask:
    return check_generate(request, FACTS, ("tiny", "alias"), deadline=7)


def ask(**fields: Any) -> Ask:
    if not fields.keys() & {"text", "token_ids", "chat"}:
        fields["text"] = "hi"
    return check(pb.GenerateRequest(**fields))


def refusal(**fields: Any) -> InvalidFieldError:
    with pytest.raises(InvalidFieldError) as error:
        ask(**fields)
    return error.value


def make_sampling(field: str, value: float) -> pb.Sampling:
    sampling = pb.Sampling()
    setattr(sampling, field, value)
    return sampling


def test_defaults() -> None:
    params = ask().params
    sampling = params.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.logprobs) == (1, 0, 1, 0, -1)
    assert (params.max_new_tokens, params.min_new_tokens, params.stop_strings, params.stop_token_ids) == (
        -1,
        0,
        (),
        b"",
    )
    assert (params.include_stop, params.ignore_eos, params.skip_special_tokens) == (False, False, True)
    assert (params.work_class, params.priority, params.cache_salt, params.deadline) == (WorkClass.CHAT, 0, "", 7)


def test_set_zeros_are_zeros() -> None:
    ids = pb.Stopping(max_new_tokens=0)
    params = ask(
        sampling=pb.Sampling(temperature=0, seed=0), stopping=ids, logprobs=0, skip_special_tokens=False
    ).params
    assert (params.sampling.temperature, params.sampling.seed, params.sampling.logprobs) == (0, 0, 0)
    assert (params.max_new_tokens, params.skip_special_tokens) == (0, False)


def test_a_missing_seed_is_drawn() -> None:
    seeds = {ask().params.sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert ask(sampling=pb.Sampling(seed=2**64 - 1)).params.sampling.seed == 2**64 - 1


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e30])
def test_sampling_takes_finite_numbers_in_range(field: str, value: float) -> None:
    error = refusal(sampling=make_sampling(field, value))
    assert error.field == f"sampling.{field}"
    assert str(value) in error.description


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_p", 0.0), ("top_p", 1.0001), ("min_p", 1.0001), ("temperature", 100.1), ("top_k", -2), ("n", 0), ("n", -1),
     ("best_of", 0), ("beam_width", -1)],
)  # fmt: skip
def test_sampling_edges(field: str, value: float) -> None:
    assert refusal(sampling=make_sampling(field, value)).field == f"sampling.{field}"


@pytest.mark.parametrize(("field", "value"), [("top_k", -1), ("top_k", 0), ("top_p", 1.0), ("min_p", 1.0)])
def test_sampling_edges_that_are_fine(field: str, value: float) -> None:
    sampling = ask(sampling=make_sampling(field, value)).params.sampling
    assert getattr(sampling, field) == value


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-6, 1e-4, 0.011])
def test_temperatures_are_the_samplers_to_judge(temperature: float) -> None:
    assert ask(sampling=pb.Sampling(temperature=temperature)).params.sampling.temperature == temperature


@pytest.mark.parametrize("field", ["repetition", "presence", "frequency"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0, 1e30])
def test_penalties_out_of_range(field: str, value: float) -> None:
    assert refusal(penalties=pb.Penalties(**{field: value})).field == f"penalties.{field}"


@pytest.mark.parametrize(
    ("bias", "field"),
    [
        ({VOCAB: 1.0}, f"logit_bias[{VOCAB}]"),
        ({-1: 1.0}, "logit_bias[-1]"),
        ({1: 1e30}, "logit_bias[1]"),
        ({1: math.nan}, "logit_bias[1]"),
        ({1: math.inf}, "logit_bias[1]"),
        (dict.fromkeys(range(100_000), 1.0), "logit_bias"),
    ],
)
def test_logit_bias_out_of_range(bias: dict[int, float], field: str) -> None:
    assert refusal(logit_bias=bias).field == field


@pytest.mark.parametrize("wrong", [VOCAB, VOCAB + 10**6, -1, 2**31, 2**62])
def test_ids_beyond_the_vocabulary(wrong: int) -> None:
    error = refusal(stopping=pb.Stopping(stop_token_ids=[1, wrong], min_new_tokens=1))
    assert (error.field, str(wrong) in error.description) == ("stopping.stop_token_ids[1]", True)
    assert refusal(token_ids=pb.TokenIds(ids=[1, 2, wrong])).field == "token_ids.ids[2]"


def test_ids_are_kept() -> None:
    result = ask(token_ids=pb.TokenIds(ids=[0, VOCAB - 1]), stopping=pb.Stopping(stop_token_ids=[5, 0]))
    assert column(result.token_ids or b"").tolist() == [0, VOCAB - 1]
    assert column(result.params.stop_token_ids).tolist() == [5, 0]


def test_prompts_of_wrong_size() -> None:
    assert refusal(token_ids=pb.TokenIds()).field == "token_ids.ids"
    error = refusal(token_ids=pb.TokenIds(ids=[1] * (MAX_MODEL_LEN + 1)))
    assert error.description == f"must hold at most {MAX_MODEL_LEN} ids, not {MAX_MODEL_LEN + 1}"
    limit = FACTS.max_prompt_bytes
    assert ask(text="é" * (limit // 2)).text
    assert refusal(text="é" * (limit // 2) + "x").description == f"must have at most {limit} bytes, not {limit + 1}"
    with pytest.raises(InvalidFieldError, match="one of text, token_ids, chat must be set"):
        check(pb.GenerateRequest())


def test_empty_text_is_for_the_tokenizer_to_judge() -> None:
    assert ask(text="").text == ""


def test_chats() -> None:
    message = pb.ChatMessage(role="user", content="hi")
    result = ask(chat=pb.Chat(messages=[message]))
    assert [(m.role, m.content) for m in result.chat or ()] == [("user", "hi")]
    assert refusal(chat=pb.Chat()).field == "chat.messages"
    assert refusal(chat=pb.Chat(messages=[message] * 4097)).field == "chat.messages"
    assert refusal(chat=pb.Chat(messages=[message, pb.ChatMessage(content="hi")])).field == "chat.messages[1].role"
    assert refusal(chat=pb.Chat(messages=[pb.ChatMessage(role="r" * 65)])).field == "chat.messages[0].role"
    large = pb.ChatMessage(role="user", content="x" * FACTS.max_prompt_bytes)
    assert refusal(chat=pb.Chat(messages=[large])).field == "chat.messages"


@pytest.mark.parametrize(
    ("strings", "field"),
    [
        (["a", ""], "stopping.stop_strings[1]"),
        (["never"] * 100_000, "stopping.stop_strings"),
        (["x"] * 65, "stopping.stop_strings"),
        (["é" * 2049], "stopping.stop_strings"),
    ],
)
def test_stop_strings_beyond_their_caps(strings: list[str], field: str) -> None:
    assert refusal(stopping=pb.Stopping(stop_strings=strings)).field == field


def test_stop_strings_at_their_caps() -> None:
    strings = ["x" * 64] * 64
    assert ask(stopping=pb.Stopping(stop_strings=strings)).params.stop_strings == tuple(strings)


@pytest.mark.parametrize(
    ("stopping", "field"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ],
)
def test_lengths(stopping: dict[str, Any], field: str) -> None:
    assert refusal(stopping=pb.Stopping(**stopping)).field == f"stopping.{field}"


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": -1},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 21},
        {"priority": 1001},
        {"priority": -1001},
        {"work_class": 17},
        {"cache_salt": "s" * 257},
        {"request_id": ""},
        {"request_id": "i" * 257},
        {"request_id": "two words"},
        {"request_id": "línea"},
        {"request_id": "line\n"},
    ],
)
def test_other_fields_out_of_range(fields: dict[str, Any]) -> None:
    assert refusal(**fields).field == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling": pb.Sampling(n=2)}, "sampling.n"),
        ({"sampling": pb.Sampling(best_of=2)}, "sampling.best_of"),
        ({"sampling": pb.Sampling(beam_width=2)}, "sampling.beam_width"),
        ({"penalties": pb.Penalties(repetition=1.1)}, "penalties.repetition"),
        ({"penalties": pb.Penalties(presence=0.5)}, "penalties.presence"),
        ({"penalties": pb.Penalties(frequency=-0.5)}, "penalties.frequency"),
        ({"logit_bias": {1: 5.0}}, "logit_bias"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"constraint": pb.Constraint(regex="a+")}, "constraint.regex"),
        ({"prefix_id": "p"}, "prefix_id"),
        ({"partial_at_deadline": True}, "partial_at_deadline"),
    ],
)
def test_what_is_not_built_is_never_ignored(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(NotBuiltError, match=name):
        ask(**fields)


def test_neutral_values_of_what_is_not_built_are_fine() -> None:
    ask(
        sampling=pb.Sampling(n=1, best_of=1, beam_width=0),
        penalties=pb.Penalties(repetition=1, presence=0, frequency=0),
        constraint=pb.Constraint(),
        prefix_id="",
        partial_at_deadline=False,
    )


def test_models() -> None:
    ask(model="")
    ask(model="alias")
    with pytest.raises(UnknownModelError, match="'other' is not served here, only tiny, alias"):
        ask(model="other")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_check(raw: bytes) -> None:
    """Whatever parses is either fine or refused with a CallError."""
    try:
        request = pb.GenerateRequest.FromString(raw)
    except DecodeError:
        return
    with suppress(CallError):
        check(request)


def test_details_name_the_field_and_stay_small() -> None:
    error = InvalidFieldError("text", "x" * 100_000)
    status = status_of(error)
    assert len(status.SerializeToString()) < 8192
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.reason, info.domain, bad.field_violations[0].field) == ("INVALID_FIELD", "quintet", "text")
