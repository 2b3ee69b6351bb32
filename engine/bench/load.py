"""Clients that send requests and record when the tokens arrive, on one event loop and one connection."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from engine.bench.clock import TokenClock
from engine.bench.work import Job
from quintet_client import AsyncClient, GenerateOptions, QuintetError
from quintet_client.options import WorkClassName
from quintet_client.v1 import inference_pb2 as pb

_SHORT = "SHORT_OUTPUT"  # no error, but not as many tokens as asked for


@dataclass(slots=True)
class Call:
    """The outcome of one request. Times in seconds of CLOCK_MONOTONIC."""

    work_class: WorkClassName
    prompt_tokens: int
    clock: TokenClock  # started when the request was due, not when a late client got to send it
    sent: float
    ended: float = 0.0
    cached_tokens: int = 0
    error: str = ""  # name of the status code, or SHORT_OUTPUT; "" = all tokens came

    @property
    def seconds(self) -> float:
        """Time from end to end."""
        return self.ended - self.clock.started


class Load:
    """Sends jobs to one server and keeps their outcomes in `calls`."""

    def __init__(self, client: AsyncClient, *, timeout: float, stream: bool = True) -> None:
        """`timeout` is each call's deadline in seconds; without `stream` each answer comes whole."""
        self.calls: list[Call] = []
        self.tokens = 0  # received so far
        self.messages: dict[str, str] = {}  # by code, the first error's
        self._client = client
        self._timeout = timeout
        self._run = self._streamed if stream else self._whole

    async def open_loop(self, jobs: Iterable[Job], offsets: list[float]) -> None:
        """Send each job at its offset in seconds from now, whether or not earlier ones have ended."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for job, offset in zip(jobs, offsets, strict=False):
                due = start + offset
                await asyncio.sleep(due - time.monotonic())
                group.create_task(self._call(job, due))

    async def closed_loop(self, jobs: Iterator[Job], concurrency: int) -> None:
        """Let so many clients each send the next job once their last one has ended, until there is none left."""

        async def client() -> None:
            for job in jobs:
                await self._call(job, time.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())

    async def _call(self, job: Job, due: float) -> None:
        call = Call(job.work_class, len(job.prompt), TokenClock(due), time.monotonic())
        options = GenerateOptions(
            max_new_tokens=job.output_tokens, ignore_eos=True, temperature=0.0, work_class=job.work_class
        )
        try:
            await self._run(job, options, call)
            if call.clock.tokens != job.output_tokens:
                call.error = _SHORT
        except QuintetError as error:
            call.error = error.code.name
            self.messages.setdefault(call.error, str(error))
        call.ended = time.monotonic()
        self.calls.append(call)

    async def _streamed(self, job: Job, options: GenerateOptions, call: Call) -> None:
        chunk = pb.GenerateChunk()
        chunks: AsyncGenerator[pb.GenerateChunk, None]
        async with aclosing(self._client.generate_stream(job.prompt, timeout=self._timeout, **options)) as chunks:
            async for chunk in chunks:
                call.clock.count(len(chunk.token_ids), time.monotonic())
                self.tokens += len(chunk.token_ids)
        call.cached_tokens = chunk.usage.cached_tokens

    async def _whole(self, job: Job, options: GenerateOptions, call: Call) -> None:
        answer = await self._client.generate(job.prompt, timeout=self._timeout, **options)
        call.clock.tokens = answer.usage.completion_tokens
        call.cached_tokens = answer.usage.cached_tokens
        self.tokens += call.clock.tokens


@dataclass(frozen=True, slots=True)
class Watched:
    """How long a run of clients took, and the share of one CPU that they used (above 1: of several)."""

    seconds: float
    cpu_share: float
    interrupted: bool  # by ^C: what had ended by then counts


async def watched(run: Callable[[], Coroutine[Any, Any, None]]) -> Watched:
    """Await a run of clients in this process, until it ends or ^C stops it."""
    began, cpu = time.monotonic(), time.process_time()
    loop, clients = asyncio.get_running_loop(), asyncio.create_task(run())
    loop.add_signal_handler(signal.SIGINT, clients.cancel)
    try:
        await asyncio.wait([clients])
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        clients.cancel()
    if not clients.cancelled():
        clients.result()
    seconds = time.monotonic() - began
    return Watched(seconds, (time.process_time() - cpu) / seconds, clients.cancelled())
