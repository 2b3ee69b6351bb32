"""Every place that knows a parameter agrees with its one declaration in `proto.parameters`."""

import argparse
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from google.protobuf.descriptor import FieldDescriptor

from engine.cli.asking import add_request_arguments, options_of
from engine.cli.batch_file import OptionLine
from proto.messages import RequestParams, Sampling, column
from proto.parameters import MAX_INT32, MAX_UINT64, Parameter, parameters_of
from quintet_client.requests import generate_request
from quintet_client.v1 import inference_pb2 as pb
from server.errors import InvalidFieldError
from server.validate import _NOT_BUILT
from tests.builders import make_row
from tests.test_server_validate import ask
from tests.test_worker_tables import make_tables
from worker.cuda.sampling import SamplingTable
from worker.steps.sampling import SAMPLING, sampling_records

PROTO = Path(__file__).resolve().parent.parent / "proto" / "quintet" / "v1" / "inference.proto"
SAMPLING_PARAMETERS = parameters_of(Sampling)
PARAMETERS = SAMPLING_PARAMETERS + parameters_of(RequestParams)
RANGED = [p for p in PARAMETERS if p.spec.high is not None]
# Fields of GenerateRequest that are not one parameter of a generation: prompts, names, and what is told apart by hand.
OTHERS = {"request_id", "model", "text", "work_class", "logit_bias", "prefix_id", "partial_at_deadline"}
UNBUILT_KINDS = {"constraint.json_schema", "constraint.regex", "constraint.grammar"}
NUMBERS = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}
CPP_TYPES: dict[Any, set[int]] = {
    float: {FieldDescriptor.CPPTYPE_DOUBLE},
    int: NUMBERS,
    bool: {FieldDescriptor.CPPTYPE_BOOL},
    str: {FieldDescriptor.CPPTYPE_STRING},
    tuple[str, ...]: {FieldDescriptor.CPPTYPE_STRING},
    bytes: NUMBERS,
}


def field_at(path: str) -> FieldDescriptor:
    message: Any = pb.GenerateRequest.DESCRIPTOR
    *parents, name = path.split(".")
    for parent in parents:
        message = message.fields_by_name[parent].message_type
    field: FieldDescriptor = message.fields_by_name[name]
    return field


def comment_of(field: FieldDescriptor) -> str:
    """What stands above a field in inference.proto, in one line, with hyphens for minus signs."""
    assert field.containing_type is not None
    message = re.search(rf"^message {field.containing_type.name} {{\n(.*?)^}}", PROTO.read_text(), re.S | re.M)
    assert message is not None
    above = re.search(rf"((?: *//[^\n]*\n)+)[^\n/]* {field.name} = {field.number};", message[1])
    assert above is not None, f"{field.full_name} has no comment"
    return re.sub(r"\s*//\s*", " ", above[1]).replace("−", "-")


def by_path(parameter: Parameter) -> str:
    return parameter.spec.path


@pytest.mark.parametrize("parameter", PARAMETERS, ids=by_path)
def test_the_proto_has_its_field_of_that_type(parameter: Parameter) -> None:
    field = field_at(parameter.spec.path)
    assert field.cpp_type in CPP_TYPES[parameter.kind]
    assert field.is_repeated == (parameter.kind in (tuple[str, ...], bytes))


def test_every_field_of_a_request_is_declared_or_refused() -> None:
    known = {p.spec.path for p in PARAMETERS} | {spec.path for spec in _NOT_BUILT} | OTHERS | UNBUILT_KINDS
    found = set()
    for field in pb.GenerateRequest.DESCRIPTOR.fields:
        nested = field.message_type.fields if field.message_type and not field.containing_oneof else None
        if nested is None or field.is_repeated:
            found.add(field.name)
        else:
            found |= {f"{field.name}.{inner.name}" for inner in nested}
    assert found - {"token_ids", "chat"} == known


@pytest.mark.parametrize("parameter", [p for p in RANGED if p.spec.high != MAX_UINT64], ids=by_path)
def test_the_proto_tells_its_range(parameter: Parameter) -> None:
    assert parameter.spec.range in comment_of(field_at(parameter.spec.path))


def request_with(path: str, value: float) -> dict[str, Any]:
    parent, _, name = path.rpartition(".")
    return {parent: {name: value}} if parent else {name: value}


@pytest.mark.parametrize("parameter", RANGED, ids=by_path)
def test_the_server_holds_it_to_its_range(parameter: Parameter) -> None:
    spec = parameter.spec
    assert spec.low is not None
    assert spec.high is not None
    step: float = 1e-6 if parameter.kind is float else 1
    wrong = [value for value in (spec.low - step, spec.high + step) if -(2**31) <= value <= MAX_INT32]
    wrong += [float("nan"), float("inf"), float("-inf")] if parameter.kind is float else []
    wrong += [parameter.kind(spec.low)] if spec.above_low else []
    for value in wrong if spec.high != MAX_UINT64 else []:
        with pytest.raises(InvalidFieldError) as error:
            ask(**request_with(spec.path, value))
        assert (error.value.field, error.value.description) == (spec.path, f"must be {spec.range}, not {value}")
    for value in (spec.low + step if spec.above_low else spec.low, spec.high):
        params = ask(**request_with(spec.path, value)).params
        holder = params.sampling if parameter in SAMPLING_PARAMETERS else params
        assert getattr(holder, parameter.field) == value


def unlike_the_default() -> Sampling:
    """Each parameter at a value that no other has."""
    values = {p.field: p.kind(0.125 * n if p.kind is float else n) for n, p in enumerate(SAMPLING_PARAMETERS, 2)}
    return Sampling(**values | {"seed": MAX_UINT64 - 1})


def test_a_worker_keeps_every_parameter_of_a_slot() -> None:
    """On the host through a plan's row, and in the memory of a GPU, whose views are taken of a tensor on the CPU."""
    assert SAMPLING.names == (*[p.field for p in SAMPLING_PARAMETERS], "min_len")
    sampling = unlike_the_default()
    row = msgspec.structs.replace(make_row(2, [1, 2, 3], [0]), sampling=sampling, min_len=9)
    tables = make_tables()
    tables._admit(row)
    device = SamplingTable(4, torch.device("cpu"))
    device.words[2] = torch.from_numpy(sampling_records([row]).view(np.int32))
    for name, value in {**msgspec.structs.asdict(sampling), "min_len": 9}.items():
        assert tables._sampling[name][2] == value
        assert device[name][2].numpy().view(SAMPLING[name]) == value
        assert not device[name][[0, 1, 3, 4]].any()


def test_stop_ids_travel_as_a_column() -> None:
    params = ask(stopping=pb.Stopping(stop_token_ids=[3, 1], stop_strings=["a", "b"])).params
    assert (column(params.stop_token_ids).tolist(), params.stop_strings) == ([3, 1], ("a", "b"))


# ------------------------------------------------------------------ the callers' side

GIVEN: dict[Any, Any] = {float: 0.5, int: 3, bool: True, str: "x", tuple[str, ...]: ["a", "b"], bytes: [4, 5]}


def field_of(request: pb.GenerateRequest, path: str) -> Any:
    field: Any = request
    for part in path.split("."):
        field = getattr(field, part)
    return field


@pytest.mark.parametrize("parameter", PARAMETERS, ids=by_path)
def test_clients_and_batch_files_name_it_alike(parameter: Parameter) -> None:
    value = GIVEN[parameter.kind]
    options: Any = {parameter.spec.name: value}
    assert field_of(generate_request("hi", options), parameter.spec.path) == value
    line = msgspec.json.decode(msgspec.json.encode({"prompt": "hi", **options}), type=OptionLine)
    assert line.job(1, "line-1").options[parameter.spec.name] == value


@pytest.mark.parametrize("parameter", [p for p in PARAMETERS if p.spec.help], ids=by_path)
def test_its_flag_sets_it(parameter: Parameter) -> None:
    parser = argparse.ArgumentParser()
    add_request_arguments(parser)
    spec, value = parameter.spec, GIVEN[parameter.kind]
    flag = spec.flag or "--" + spec.name.replace("_", "-")
    values = value if isinstance(value, list) else [value]
    words = [flag] if parameter.kind is bool else [word for one in values for word in (flag, str(one))]
    request = generate_request("hi", options_of(parser.parse_args(words)))
    assert field_of(request, spec.path) == value
    set_fields = [field.name for part in (request.sampling, request.stopping) for field, _ in part.ListFields()]
    assert set(set_fields) == {spec.name, "max_new_tokens"}
