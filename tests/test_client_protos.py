"""The promises of the .proto files, read from their descriptors, and the stubs that are generated from them."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from quintet_client import methods
from quintet_client.v1 import control_pb2, inference_pb2

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ("inference", "control", "errors")
Field = descriptor_pb2.FieldDescriptorProto


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    out = tmp_path_factory.mktemp("protos") / "set"
    arguments = [f"-I{ROOT / 'proto' / 'client'}", "--include_source_info", f"--descriptor_set_out={out}"]
    well_known = Path(protoc.__file__).parent / "_proto"
    paths = [f"quintet_client/v1/{name}.proto" for name in PROTOS]
    assert protoc.main(["protoc", f"-I{well_known}", *arguments, *paths]) == 0
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def elements(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Path (as in SourceCodeInfo) and name of every rpc, message, field, enum and enum value."""
    for i, message in enumerate(file.message_type):
        yield from inside(message, (4, i))
    for i, enum in enumerate(file.enum_type):
        yield (5, i), enum.name
        for k, value in enumerate(enum.value):
            yield (5, i, 2, k), value.name
    for i, service in enumerate(file.service):
        for k, rpc in enumerate(service.method):
            yield (6, i, 2, k), rpc.name


def inside(message: descriptor_pb2.DescriptorProto, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    if message.options.map_entry:
        return
    yield path, message.name
    for k, field in enumerate(message.field):
        yield (*path, 2, k), f"{message.name}.{field.name}"
    for k, oneof in enumerate(message.oneof_decl):
        if not oneof.name.startswith("_"):  # of `optional`
            yield (*path, 8, k), f"{message.name}.{oneof.name}"
    for k, nested in enumerate(message.nested_type):
        yield from inside(nested, (*path, 3, k))


def test_everything_has_a_comment(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    for file in files:
        comments = {tuple(place.path): place.leading_comments.strip() for place in file.source_code_info.location}
        missing = [name for path, name in elements(file) if not comments.get(path)]
        assert missing == []


def test_enums_start_unspecified(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    enums = [enum for file in files for enum in file.enum_type]
    assert {enum.name for enum in enums} == {"WorkClass", "FinishReason", "ProcessKind", "ProcessState"}
    for enum in enums:
        assert enum.value[0].number == 0
        assert enum.value[0].name.endswith("_UNSPECIFIED")


def test_scalars_of_requests_are_optional(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    """So that unset and zero differ."""
    asked = {"Chat", "ChatMessage", "TokenIds", "Sampling", "Penalties", "Stopping", "Constraint"}
    wrong = [
        f"{message.name}.{field.name}"
        for file in files
        for message in file.message_type
        if message.name.endswith("Request") or message.name in asked
        for field in message.field
        if field.label != Field.LABEL_REPEATED
        and field.type != Field.TYPE_MESSAGE
        and not field.proto3_optional
        and not field.HasField("oneof_index")
    ]
    assert wrong == []


def test_the_clients_know_every_rpc_that_is_built() -> None:
    services = [
        pb.DESCRIPTOR.services_by_name[name] for pb, name in ((inference_pb2, "Inference"), (control_pb2, "Control"))
    ]
    rpcs = {
        f"{service.name}/{rpc.name}": (rpc.input_type.full_name, rpc.output_type.full_name)
        for service in services
        for rpc in service.methods
    }
    known = {
        method.name: (method.request.DESCRIPTOR.full_name, method.response.DESCRIPTOR.full_name)
        for method in vars(methods).values()
        if isinstance(method, methods.Method)
    }
    not_built = {"Inference/PinPrefix", "Inference/UnpinPrefix"}
    not_built |= {f"Control/{name}" for name in ("StartProfile", "StopProfile", "WatchMetrics")}
    assert known == {name: types for name, types in rpcs.items() if name not in not_built}


@pytest.mark.slow
def test_stubs_are_up_to_date_and_a_change_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto" / "client", tmp_path / "proto" / "client")
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "generate_stubs", tmp_path / "scripts")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)

    assert run("--check").returncode == 0, "scripts/generate_stubs repairs this"
    proto = tmp_path / "proto" / "client" / "quintet_client" / "v1" / "control.proto"
    proto.write_text(proto.read_text().replace("message DrainRequest {}", "message DrainRequest { bool now = 1; }"))
    stale = run("--check")
    assert stale.returncode == 1
    assert "scripts/generate_stubs" in stale.stderr
    assert "control_pb2.pyi" in stale.stdout
    assert run().returncode == 0
    assert run("--check").returncode == 0
