"""The clients against a scripted server: what they send, when they try again, what they raise."""

import ast
import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, get_type_hints

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

import quintet_client
from quintet_client import AsyncClient, ChatMessage, Client, FieldViolation, GenerateOptions, Prompt, QuintetError
from quintet_client.errors import from_rpc_error
from quintet_client.options import PATHS, WorkClassName
from quintet_client.requests import generate_request
from quintet_client.v1 import control_pb2, inference_pb2, inference_pb2_grpc

Refusal = tuple[grpc.StatusCode, float | None]  # with seconds of RetryInfo


class Script(inference_pb2_grpc.InferenceServicer):
    """Refuses the first calls as told, then answers; streams hold after `chunks` when `hold` is set."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.chunks = 3
        self.fail_after_chunks: Refusal | None = None
        self.hold = False
        self.calls: list[tuple[float, Any]] = []
        self.cancelled = threading.Event()
        self.address = ""

    def Generate(self, request: Any, context: Any) -> Any:
        self._begin(request, context)
        if self.hold:
            time.sleep(0.5)
        return inference_pb2.GenerateResponse(outputs=[inference_pb2.Output(text="done")])

    def GenerateStream(self, request: Any, context: Any) -> Any:
        self._begin(request, context)
        context.add_callback(self.cancelled.set)
        for i in range(self.chunks):
            yield inference_pb2.GenerateChunk(text=str(i))
        if self.fail_after_chunks:
            refuse(context, self.fail_after_chunks)
        while self.hold and context.is_active():
            time.sleep(0.01)

    def _begin(self, request: Any, context: Any) -> None:
        self.calls.append((time.monotonic(), request))
        if self.refusals:
            refuse(context, self.refusals.pop(0))


def refuse(context: Any, refusal: Refusal) -> None:
    code, retry_after = refusal
    if retry_after is not None:
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=int(retry_after * 1e9))))
        status = status_pb2.Status(code=code.value[0], details=[detail])
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, "refused")


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(script, server)  # type: ignore[no-untyped-call]  # generated
    script.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield script
    server.stop(0).wait()


class Both:
    """One call through the client for threads or through the one for asyncio."""

    def __init__(self, aio: bool) -> None:
        self.aio = aio

    def unary(self, address: str, *, retry: bool = True, timeout: float = 10) -> str:
        async def call() -> str:
            async with AsyncClient(address, timeout=timeout, retry=retry) as client:
                return (await client.generate("hi")).outputs[0].text

        if self.aio:
            return asyncio.run(call())
        with Client(address, timeout=timeout, retry=retry) as client:
            return client.generate("hi").outputs[0].text

    def stream(self, address: str, *, retry: bool = True, stop_after: int = 99) -> list[str]:
        async def call() -> None:
            async with AsyncClient(address, timeout=10, retry=retry) as client:
                async with aclosing(client.generate_stream("hi")) as chunks:
                    async for chunk in chunks:
                        texts.append(chunk.text)
                        if len(texts) == stop_after:
                            break
                await asyncio.to_thread(time.sleep, 0.05)

        texts: list[str] = []
        if self.aio:
            asyncio.run(call())
            return texts
        with Client(address, timeout=10, retry=retry) as client, closing(client.generate_stream("hi")) as chunks:
            for chunk in chunks:
                texts.append(chunk.text)
                if len(texts) == stop_after:
                    break
        return texts


@pytest.fixture(params=[False, True], ids=["threads", "asyncio"])
def both(request: pytest.FixtureRequest) -> Both:
    return Both(request.param)


UNAVAILABLE: Refusal = (grpc.StatusCode.UNAVAILABLE, None)


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(QuintetError) as caught:
        call()
    return caught.value.code


def test_unavailable_is_tried_again(script: Script, both: Both) -> None:
    script.refusals = [UNAVAILABLE] * 2
    assert both.unary(script.address) == "done"
    script.refusals = [UNAVAILABLE] * 2
    assert both.stream(script.address) == ["0", "1", "2"]
    assert len(script.calls) == 6


def test_but_not_for_ever_and_not_without_retry(script: Script, both: Both) -> None:
    script.refusals = [UNAVAILABLE] * 9
    assert code_of(lambda: both.unary(script.address, retry=False)) is grpc.StatusCode.UNAVAILABLE
    assert len(script.calls) == 1
    assert code_of(lambda: both.unary(script.address)) is grpc.StatusCode.UNAVAILABLE
    assert len(script.calls) == 6


def test_nothing_is_tried_again_after_the_first_chunk(script: Script, both: Both) -> None:
    for refusal in (UNAVAILABLE, (grpc.StatusCode.RESOURCE_EXHAUSTED, 0.01)):
        script.calls.clear()
        script.fail_after_chunks = refusal
        assert code_of(lambda: both.stream(script.address)) is refusal[0]
        assert len(script.calls) == 1


def test_retry_info_is_honoured(script: Script, both: Both) -> None:
    for call in (both.unary, both.stream):
        script.calls.clear()
        script.refusals = [(grpc.StatusCode.RESOURCE_EXHAUSTED, 0.2)]
        call(script.address)
        (first, _), (second, _) = script.calls
        assert 0.2 <= second - first < 1.0


def test_exhausted_without_retry_info_is_final(script: Script, both: Both) -> None:
    script.refusals = [(grpc.StatusCode.RESOURCE_EXHAUSTED, None)]
    assert code_of(lambda: both.unary(script.address)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(script.calls) == 1


def test_no_wait_goes_beyond_the_deadline(script: Script, both: Both) -> None:
    script.refusals = [(grpc.StatusCode.RESOURCE_EXHAUSTED, 0.9)]
    started = time.monotonic()
    assert code_of(lambda: both.unary(script.address, timeout=0.5)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert time.monotonic() - started < 0.5


def test_the_deadline_is_the_servers_too(script: Script, both: Both) -> None:
    script.hold = True
    assert code_of(lambda: both.unary(script.address, timeout=0.2)) is grpc.StatusCode.DEADLINE_EXCEEDED


def test_leaving_a_stream_cancels_it(script: Script, both: Both) -> None:
    script.hold = True
    assert both.stream(script.address, stop_after=2) == ["0", "1"]
    assert script.cancelled.wait(5)


def test_no_server_is_unavailable(both: Both) -> None:
    assert code_of(lambda: both.unary("127.0.0.1:1", retry=False)) is grpc.StatusCode.UNAVAILABLE


def test_several_threads_share_a_client(script: Script) -> None:
    with Client(script.address) as client, futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.generate("hi").outputs[0].text, range(12)))
    assert answers == ["done"] * 12


# ------------------------------------------------------------------ requests


def test_options_reach_their_fields() -> None:
    options: GenerateOptions = {
        "request_id": "me",
        "temperature": 0.0,
        "seed": 0,
        "max_new_tokens": 0,
        "stop_strings": ["a"],
        "stop_token_ids": [1, 2],
        "logprobs": 0,
        "work_class": "agent",
    }
    request = generate_request("hi", options)
    assert (request.text, request.request_id, list(request.stopping.stop_strings)) == ("hi", "me", ["a"])
    assert list(request.stopping.stop_token_ids) == [1, 2]
    assert request.work_class == inference_pb2.WORK_CLASS_AGENT
    for message, names in (
        (request, ("logprobs",)),
        (request.sampling, ("temperature", "seed")),
        (request.stopping, ("max_new_tokens",)),
    ):
        assert all(message.HasField(name) and getattr(message, name) == 0 for name in names)
    assert not request.HasField("model")
    assert not request.sampling.HasField("top_p")


def test_every_option_has_a_field() -> None:
    values: dict[Any, Any] = {float: 0.5, int: 1, bool: True, str: "x", Sequence[str]: ["a"], Sequence[int]: [1]}
    values |= {WorkClassName: "chat", Mapping[int, float]: {1: 0.5}}
    for name, kind in get_type_hints(GenerateOptions).items():
        options: Any = {name: values[kind]}
        field: Any = generate_request("", options)
        for part in PATHS[name].split("."):
            field = getattr(field, part)
        assert field == (inference_pb2.WORK_CLASS_CHAT if kind is WorkClassName else values[kind])


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("", "text"),
        ([], "token_ids"),
        ([1, 2], "token_ids"),
        ((1,), "token_ids"),
        ([ChatMessage(role="user", content="x")], "chat"),
    ],
)
def test_kinds_of_prompt(prompt: Prompt, kind: str) -> None:
    assert generate_request(prompt, {}).WhichOneof("prompt") == kind


def test_wrong_options_are_refused_here() -> None:
    unknown: Any = {"temprature": 1}
    with pytest.raises(TypeError, match="temprature"):
        generate_request("hi", unknown)
    wrong: Any = {"work_class": "fast"}
    with pytest.raises(ValueError, match="work_class: must be one of chat, agent, batch, not 'fast'"):
        generate_request("hi", wrong)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("hi", {"seed": -1}, "seed"),
        ("hi", {"max_new_tokens": 1 << 31}, "max_new_tokens"),
        ("hi", {"stop_strings": ["a", "\ud800"]}, "stop_strings"),
        ("hi", {"cache_salt": "\ud800"}, "cache_salt"),
        ("\ud800", {}, "prompt"),
        ([1 << 63], {}, "prompt"),
        ([ChatMessage(role="user", content="\ud800")], {}, "prompt"),
    ],
)
def test_what_no_message_can_hold_is_named(prompt: Prompt, options: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        generate_request(prompt, options)


# ------------------------------------------------------------------ errors


def test_details_are_typed() -> None:
    status = status_pb2.Status(code=3, message="m")
    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="d")
    for detail in (
        error_details_pb2.ErrorInfo(reason="INVALID_FIELD", domain="quintet"),
        error_details_pb2.BadRequest(field_violations=[violation]),
        error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2, nanos=500_000_000)),
    ):
        status.details.add().Pack(detail)
    trailing = [("other", "x"), ("grpc-status-details-bin", status.SerializeToString())]
    error = from_rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "m", trailing)
    assert (error.reason, error.retry_after) == ("INVALID_FIELD", 2.5)
    assert error.violations == (FieldViolation("sampling.top_p", "d"),)
    assert str(error) == "INVALID_ARGUMENT: m"


def test_broken_details_do_no_harm() -> None:
    error = from_rpc_error(grpc.StatusCode.INTERNAL, None, [("grpc-status-details-bin", b"\xff\xff")])
    assert (error.code, error.message, error.reason, error.violations) == (grpc.StatusCode.INTERNAL, "", "", ())


def test_the_client_needs_grpc_and_protobuf_only() -> None:
    names = set()
    for path in Path(quintet_client.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
    assert names - sys.stdlib_module_names == {"grpc", "google", "quintet_client"}
    assert control_pb2.DESCRIPTOR.package == inference_pb2.DESCRIPTOR.package == "quintet.v1"
