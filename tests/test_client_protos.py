"""The .proto files' promises that buf does not know, and the stubs generated from them."""

import importlib.resources
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quintet_client import methods
from quintet_client.v1 import control_pb2, inference_pb2

ROOT = Path(__file__).resolve().parent.parent


def test_scalars_of_requests_are_optional() -> None:
    """So that unset and zero differ."""
    asked = {"Chat", "ChatMessage", "TokenIds", "Sampling", "Penalties", "Stopping", "Constraint"}
    messages = [
        message for pb in (inference_pb2, control_pb2) for message in pb.DESCRIPTOR.message_types_by_name.values()
    ]
    fields = [
        field
        for message in messages
        if message.name.endswith("Request") or message.name in asked
        for field in message.fields
    ]
    assert len(fields) > 40
    assert [field.full_name for field in fields if not field.is_repeated and not field.has_presence] == []


def test_python_names_the_stubs_package_and_the_wire_its_own() -> None:
    """No package `quintet` is needed: only descriptors and paths of rpcs say so."""
    request = inference_pb2.GenerateRequest
    assert request.__module__ == "quintet_client.v1.inference_pb2"
    assert request.DESCRIPTOR.full_name == "quintet.v1.GenerateRequest"
    assert request.DESCRIPTOR.file.name == "quintet/v1/inference.proto"
    assert importlib.util.find_spec("quintet") is None


def test_the_client_ships_the_protos_it_was_generated_from() -> None:
    shipped = importlib.resources.files("quintet_client") / "protos" / "quintet" / "v1"
    protos = {path.name: path.read_text() for path in (ROOT / "proto" / "quintet" / "v1").iterdir()}
    assert set(protos) == {"inference.proto", "control.proto", "errors.proto"}
    assert {path.name: path.read_text() for path in shipped.iterdir()} == protos


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
def test_generated_files_are_up_to_date_and_a_change_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = shutil.copy(ROOT / "scripts" / "generate_client", tmp_path / "scripts")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)

    assert run("--check").returncode == 0, "scripts/generate_client repairs this"
    proto = tmp_path / "proto" / "quintet" / "v1" / "control.proto"
    proto.write_text(proto.read_text().replace("message DrainRequest {}", "message DrainRequest { bool now = 1; }"))
    stale = run("--check")
    assert stale.returncode == 1
    assert "scripts/generate_client" in stale.stderr
    assert "control_pb2.pyi" in stale.stdout
    assert "client.py" not in stale.stdout
    client = tmp_path / "proto" / "client" / "quintet_client" / "aio.py"
    client.write_text(client.read_text().replace("_retry", "_again"))
    assert "new/client.py" in run("--check").stdout
    assert run().returncode == 0
    assert run("--check").returncode == 0
