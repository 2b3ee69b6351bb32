"""A real server in this process, with scripted peers on the other inboxes of its ring."""

import asyncio
import gc
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import msgspec
import pytest
import uvloop

from engine.runtime.stage import Stage
from proto.channel import Context, Inbox, Outbox
from proto.config import ServerOptions, StageConfig
from proto.ids import Address, StageKind
from proto.messages import (
    U64,
    Abort,
    Accepted,
    Delta,
    Deltas,
    DetokenizeCall,
    DetokenizeReply,
    Facts,
    Finish,
    Flush,
    FlushReply,
    Message,
    Ready,
    Reject,
    RejectCode,
    ServerFacts,
    Serving,
    StageState,
    Stop,
    Submit,
    Timing,
    TokenizeCall,
    TokenizeReply,
    TokenizerFacts,
    TokenLogprobs,
    World,
    column,
)
from quintet_client import AsyncClient, QuintetError
from quintet_client.v1 import inference_pb2
from server.app import serve
from tests.builders import i32, make_facts, make_stage, make_stage_config

MODEL_NAME = "tiny"
VOCAB = 100
MAX_MODEL_LEN = 512
EOS = 2
WORKER = make_facts(page_size=16, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, kv_bytes_per_token=64)
TOKENIZER = TokenizerFacts(vocab_size=90, eos_ids=(EOS,), has_chat_template=True)
SCHEDULER_COUNTERS = {
    "running": 3.0,
    "waiting": 4.0,
    "pages_total": 64.0,
    "pages_free": 40.0,
    "pages_cached": 8.0,
    "prefix_hit_tokens": 30.0,
    "prefix_query_tokens": 120.0,
}
GENERATE = "/quintet.v1.Inference/Generate"
STREAM = "/quintet.v1.Inference/GenerateStream"
T = TypeVar("T")
SERVER = Address(StageKind.SERVER, 0)
_PEERS = (StageKind.SUPERVISOR, StageKind.TOKENIZER, StageKind.SCHEDULER, StageKind.DETOKENIZER)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test's body on the server's own kind of loop."""
    return uvloop.run(asyncio.wait_for(main, 30))


async def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until it holds."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it never came"
        await asyncio.sleep(0.005)


def make_options(**changes: Any) -> ServerOptions:
    """Options of a server on a free port."""
    options = ServerOptions(
        host="127.0.0.1",
        port=0,
        reuse_port=False,
        served_model_names=(MODEL_NAME, "alias"),
        num_tokenizers=1,
        num_schedulers=1,
        num_detokenizers=1,
        max_in_flight_requests=100,
        max_in_flight_bytes=1 << 20,
        max_message_bytes=4 << 20,
        max_stream_buffer_bytes=1 << 16,
        log_requests=True,
    )
    return msgspec.structs.replace(options, **changes)


def make_world(
    state: StageState = StageState.READY,
    *,
    draining: bool = False,
    failure: str = "",
    incarnation: int = 1,
    dead: StageKind | None = None,
) -> World:
    """A snapshot of a whole ring, all of one state but for a dead kind."""
    facts: dict[StageKind, Facts] = {}
    if state is StageState.READY:
        facts = {StageKind.WORKER: WORKER, StageKind.TOKENIZER: TOKENIZER}
    return World(
        stages=tuple(
            make_stage(
                kind,
                incarnation=1 if kind is StageKind.SERVER else incarnation,
                state=StageState.DEAD if kind is dead else state,
                pid=1000 + kind,
                facts=facts.get(kind),
                rss_bytes=1 << 20,
                cpu_seconds=0.5,
                counters=SCHEDULER_COUNTERS if kind is StageKind.SCHEDULER else {},
            )
            for kind in list(StageKind)[1:]
        ),
        draining=draining,
        failure=failure,
    )


def make_delta(submit: Submit, start: int, output: str, **changes: Any) -> Delta:
    """One token for each character of `output`, from position `start` on."""
    delta = Delta(
        rid=submit.rid,
        attempt=submit.attempt,
        start=start,
        ids=i32(*(ord(c) % VOCAB for c in output)),
        text=output,
        text_start=start,
        prompt_tokens=4,
        timing=Timing(cached_tokens=1, queue=2_000_000, prefill=3_000_000) if start == 0 else None,
        logprobs=make_logprobs(len(output), submit.params.sampling.logprobs),
    )
    return msgspec.structs.replace(delta, **changes)


def make_logprobs(count: int, alternatives: int) -> TokenLogprobs | None:
    if alternatives < 0:
        return None
    return TokenLogprobs(
        chosen=(-0.5,) * count,
        top_ids=(i32(*range(alternatives)),) * count,
        top_logprobs=((-0.25,) * alternatives,) * count,
    )


class FakeRing:
    """The peers. Each message that they get is kept, then `behave` may answer it."""

    def __init__(self, run_dir: str) -> None:
        self._context = Context()
        self._inboxes = [Inbox(self._context, run_dir, Address(kind, 0), 1) for kind in _PEERS]
        self._outboxes = {kind: Outbox(self._context, run_dir, Address(kind, 0), 1, SERVER) for kind in _PEERS}
        self.got: list[Message] = []
        self.behave: Callable[[Message], None] = self.play
        self.text = "hello"  # what `play` answers a prompt with, a character at a time
        self.address = ""
        self.server: asyncio.Task[int]

    def of(self, kind: type[T]) -> list[T]:
        """Messages of one kind that came, oldest first."""
        return [message for message in self.got if isinstance(message, kind)]

    @property
    def submits(self) -> list[Submit]:
        """Submits of callers: without those that pass a token round before any call is taken."""
        return [submit for submit in self.of(Submit) if submit.params.max_new_tokens != 1]

    @property
    def aborted(self) -> list[int]:
        """Rids of all aborts."""
        return [rid for abort in self.of(Abort) for rid in column(abort.rids, U64).tolist()]

    async def submitted(self, count: int = 1) -> list[Submit]:
        """The callers' submits once there are so many."""
        await eventually(lambda: len(self.submits) >= count)
        return self.submits

    async def take_address(self) -> None:
        """From the server's Ready."""
        await eventually(lambda: self.of(Ready))
        facts = self.of(Ready)[0].facts
        assert isinstance(facts, ServerFacts)
        self.address = facts.address

    def tell_world(self, world: World) -> None:
        self._outboxes[StageKind.SUPERVISOR].send(world)

    def stop(self) -> None:
        self._outboxes[StageKind.SUPERVISOR].send(Stop())

    def send(self, *messages: Message) -> None:
        """From whichever stage sends that kind."""
        for message in messages:
            sender = StageKind.TOKENIZER
            if isinstance(message, Deltas | DetokenizeReply):
                sender = StageKind.DETOKENIZER
            elif isinstance(message, FlushReply) or hasattr(message, "rids"):
                sender = StageKind.SCHEDULER
            self._outboxes[sender].send(message)

    def deltas(self, *rows: Delta) -> None:
        self.send(Deltas(rows=rows))

    def accept(self, submit: Submit) -> None:
        self.send(Accepted(rid=submit.rid, attempt=submit.attempt, replica=0, prompt_tokens=4))

    def play(self, message: Message) -> None:
        """A ring that works: each prompt gets `text`, one character a message, and a stop id."""
        match message:
            case Submit():
                self.accept(message)
                last = len(self.text) - 1
                for start, character in enumerate(self.text):
                    finish = {"finish": Finish.STOP, "matched_id": EOS, "matched_is_eos": True} if start == last else {}
                    self.deltas(make_delta(message, start, character, **finish))
            case TokenizeCall():
                pieces = tuple(message.text or "chat")
                self.send(TokenizeReply(rid=message.rid, ids=i32(*range(len(pieces))), pieces=pieces))
            case DetokenizeCall():
                self.send(DetokenizeReply(rid=message.rid, text=str(column(message.ids).tolist())))
            case Flush():
                self.send(FlushReply(rid=message.rid, pages=7))

    def only_warm_up(self, message: Message) -> None:
        """Let the server become ready, and answer nobody else."""
        if isinstance(message, Submit) and message.params.max_new_tokens == 1:
            self.play(message)

    def reject(self, refused: Submit | TokenizeCall, code: RejectCode, text: str) -> None:
        """Refuse a submit or call."""
        attempt = refused.attempt if isinstance(refused, Submit) else 0
        self.send(Reject(refused.rid, attempt, code, "text", text, retry_after_ms=1500))

    async def pump(self) -> None:
        """Take what comes, until cancelled."""
        while True:
            for inbox in self._inboxes:
                for message in inbox.drain():
                    self.got.append(message)
                    self.behave(message)
            for outbox in self._outboxes.values():
                outbox.flush()
            await asyncio.sleep(0.001)

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()
        for inbox in self._inboxes:
            inbox.close()
        self._context.close()


def make_config(run_dir: str, **options: Any) -> StageConfig:
    """What a supervisor would write for server 0."""
    return make_stage_config(StageKind.SERVER, run_dir, make_options(**({"port": free_port()} | options)))


@asynccontextmanager
async def serving(ring_world: World | None = None, **options: Any) -> AsyncIterator[FakeRing]:
    """A server that is SERVING, or that was told another world. Stopped in the end; it must end with 0."""
    run_dir = tempfile.mkdtemp(prefix="quintet-")
    ring = FakeRing(run_dir)
    stage = Stage(make_config(run_dir, **options))
    pump = asyncio.create_task(ring.pump())
    ring.server = asyncio.create_task(serve(stage))
    try:
        await eventually(lambda: ring.got or ring.server.done())
        if ring.server.done():
            raise RuntimeError(f"the server ended with {ring.server.result()}")
        await ring.take_address()
        ring.tell_world(make_world() if ring_world is None else ring_world)
        if ring_world is None:
            await eventually(lambda: ring.of(Serving))
        yield ring
        ring.stop()
        assert await ring.server == 0
    finally:
        ring.server.cancel()
        pump.cancel()
        await asyncio.gather(ring.server, pump, return_exceptions=True)
        del ring.server  # grpc's objects must go before their loop does
        gc.collect()
        stage.inbox.close()
        stage._context.close()
        ring.close()
        shutil.rmtree(run_dir)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def calling(ring: FakeRing, *options: tuple[str, int]) -> AsyncIterator[Any]:
    """A grpc.aio channel of its own, without types, so that closing it is a client that vanishes."""
    arguments = (("grpc.use_local_subchannel_pool", 1), *options)
    async with grpc.aio.insecure_channel(ring.address, options=arguments) as channel:
        yield channel


@asynccontextmanager
async def ring_and_client(**options: Any) -> AsyncIterator[tuple[FakeRing, AsyncClient]]:
    """A server that serves, and a client that tries each call once."""
    async with serving(**options) as ring, AsyncClient(ring.address, timeout=10, retry=False) as client:
        yield ring, client


async def error_of(call: Awaitable[object]) -> QuintetError:
    """What a call that must fail raises."""
    with pytest.raises(QuintetError) as caught:
        await call
    return caught.value


async def read(client: AsyncClient, prompt: str = "hi", **options: Any) -> list[inference_pb2.GenerateChunk]:
    """All chunks of a stream."""
    return [chunk async for chunk in client.generate_stream(prompt, **options)]


async def is_idle(client: AsyncClient) -> bool:
    """Whether the server knows of no request."""
    load = await client.get_load()
    return (load.in_flight_requests, load.in_flight_bytes) == (0, 0)
