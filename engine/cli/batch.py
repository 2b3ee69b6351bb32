"""`quintet batch`: a file of requests in, a file of results out, resumable at any moment."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.arguments import whole
from engine.cli.batch_file import BadLine, BatchJob, Output, OutputError, count_lines, read_jobs
from engine.cli.errors import USED_WRONGLY, CommandError, complain
from engine.cli.printing import describe_error, finish_record
from engine.cli.target import add_target_arguments, open_target
from quintet_client import AsyncClient, QuintetError
from quintet_client.v1 import inference_pb2 as pb

# These say nothing about the request, which gets no result, so that the next run tries it again.
_NOT_ITS_FAULT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "batch",
        description="Run a file of requests, one JSON object per line: exactly one of prompt, token_ids and messages, "
        "an optional id, and fields of inference.proto such as max_new_tokens or temperature. Results are appended as "
        "they arrive, in any order. The same command run again skips the ids that the output already has.",
    )
    parser.add_argument("input", metavar="IN.jsonl", type=Path, help="file of requests")
    parser.add_argument(
        "-o", "--output", metavar="OUT.jsonl", type=Path, required=True, help="file that results are appended to"
    )
    parser.add_argument(
        "--concurrency", type=whole(1), default=64, metavar="N", help="requests in flight (default: %(default)s)"
    )
    add_target_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 every line has a result, 1 some failed, 2 it could not begin."""
    try:
        total = count_lines(args.input)
        output = Output(args.output)
    except (OSError, OutputError) as error:
        raise CommandError(str(error), USED_WRONGLY) from None
    with contextlib.closing(output):
        batch = Batch(args.input, total, output, args.concurrency)
        if batch.is_done():
            batch.show_summary()
            return batch.exit_code
        try:
            with open_target(args) as address:
                asyncio.run(batch.run(address))
        except CommandError as error:  # no server
            raise CommandError(str(error), USED_WRONGLY) from None
        except KeyboardInterrupt:
            complain("interrupted; run the same command again to continue")
            raise
        except OSError as error:
            raise CommandError(f"{args.output}: {error.strerror}", USED_WRONGLY) from None
    batch.show_summary()
    return batch.exit_code


@dataclass
class Tally:
    """Counts of this run, in lines of the input."""

    skipped: int = 0  # already in the output
    completed: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Batch:
    """One run over an input file."""

    def __init__(self, path: Path, total: int, output: Output, concurrency: int) -> None:
        self._path = path
        self._total = total
        self._output = output
        self._concurrency = concurrency
        self._records: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._trouble = ""  # why the rest of the input is not tried
        self.tally = Tally()

    def is_done(self) -> bool:
        """True when the output already has a result for every line of the input, so that no server is needed."""
        done = self._output.done
        if len(done) < self._total or not all(job.id in done for job in read_jobs(self._path)):
            return False
        self.tally.skipped = self._total
        return True

    @property
    def unanswered(self) -> int:
        """Lines that have no record yet."""
        return self._total - self.tally.skipped - self.tally.completed - self.tally.failed

    @property
    def exit_code(self) -> int:
        return 1 if self._output.failed or self.unanswered else 0

    async def run(self, address: str) -> None:
        """Send the requests without a result. Raises OSError when a result cannot be written."""
        started = time.monotonic()
        jobs = self._jobs()
        try:
            with _progress_bar() as progress:
                self._progress, self._bar = progress, progress.add_task("", total=self._total, rate="")
                async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
                    writer = group.create_task(self._write_always(started))
                    async with asyncio.TaskGroup() as senders:
                        for _ in range(self._concurrency):
                            senders.create_task(self._send(client, address, jobs))
                    writer.cancel()
        except ExceptionGroup as group:
            raise _first_of(group) from None
        finally:
            self._write_finished()
            self.tally.seconds = time.monotonic() - started

    def _jobs(self) -> Iterator[BatchJob | BadLine]:
        """Yield the lines that have no result in the output."""
        for job in read_jobs(self._path):
            if job.id in self._output.done:
                self.tally.skipped += 1
            else:
                yield job

    async def _send(self, client: AsyncClient, address: str, jobs: Iterator[BatchJob | BadLine]) -> None:
        """Send jobs one after another, beside other senders that share `jobs`."""
        for job in jobs:
            if isinstance(job, BadLine):
                error = {"code": "INVALID_ARGUMENT", "field": "", "message": job.message}
                self._records.put_nowait({"id": job.id, "line": job.line, "error": error})
                await asyncio.sleep(0)  # a file of bad lines must not keep the others waiting
                continue
            record = await self._answer(client, address, job)
            if record is not None:
                self._records.put_nowait(record)
            if self._trouble:
                return

    async def _answer(self, client: AsyncClient, address: str, job: BatchJob) -> dict[str, Any] | None:
        """Return the record of a job, or None when another run should try it again."""
        while True:
            try:
                return _record(job, await client.generate(job.prompt, **job.options))
            except QuintetError as error:
                if error.code in _NOT_ITS_FAULT:
                    self._trouble = self._trouble or describe_error(error, address)
                    return None
                if error.retry_after is None:
                    return _error_record(job, error)
                await asyncio.sleep(error.retry_after)  # the server is full: a batch can wait

    async def _write_always(self, started: float) -> None:
        while True:
            self._records.put_nowait(await self._records.get())  # wait for one, then write all that are there
            self._write_finished()
            rate = f"{self.tally.tokens / (time.monotonic() - started):.0f} tokens/s"
            done = self._total - self.unanswered
            self._progress.update(self._bar, completed=done, rate=rate)

    def _write_finished(self) -> None:
        """Write all finished records to disk, with one wait for the disk whatever their number."""
        records = [self._records.get_nowait() for _ in range(self._records.qsize())]
        if records:
            self._output.append_records(records)
        for record in records:
            failed = "error" in record
            self.tally.failed += failed
            self.tally.completed += not failed
            self.tally.tokens += len(record.get("token_ids", ()))

    def show_summary(self) -> None:
        """Print one line on stderr, and a second one about what is missing."""
        tally = self.tally
        parts = [f"{self._total} lines", f"{tally.completed} completed", f"{tally.failed} failed"]
        if tally.skipped:
            parts.append(f"{tally.skipped} already done")
        if tally.tokens:
            parts.append(
                f"{tally.tokens} tokens in {tally.seconds:.1f} s ({tally.tokens / tally.seconds:.0f} a second)"
            )
        complain(", ".join(parts))
        if self.unanswered:
            complain(f"{self.unanswered} lines have no result: run the same command again. {self._trouble}")


def _first_of(group: "ExceptionGroup[Exception]") -> Exception:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, ExceptionGroup) else first


def _progress_bar() -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )


def _record(job: BatchJob, answer: pb.GenerateResponse) -> dict[str, Any]:
    output = answer.outputs[0]
    record: dict[str, Any] = {
        "id": job.id,
        "line": job.line,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish": finish_record(output.finish),
        "prompt_tokens": answer.usage.prompt_tokens,
        "cached_tokens": answer.usage.cached_tokens,
        "completion_tokens": answer.usage.completion_tokens,
        "seed": answer.prompt.seed,
    }
    if output.HasField("logprobs"):
        record["logprobs"] = {
            "token_logprobs": list(output.logprobs.token_logprobs),
            "top": [{"token_ids": list(top.token_ids), "logprobs": list(top.logprobs)} for top in output.logprobs.top],
        }
    if output.finish.reason in (pb.FINISH_REASON_ABORT, pb.FINISH_REASON_ERROR):
        code = "ABORTED" if output.finish.reason == pb.FINISH_REASON_ABORT else "INTERNAL"
        record["error"] = {"code": code, "field": "", "message": "generation was aborted before it finished"}
    return record


def _error_record(job: BatchJob, error: QuintetError) -> dict[str, Any]:
    field = next((violation.field for violation in error.violations), "")
    return {
        "id": job.id,
        "line": job.line,
        "error": {"code": error.code.name, "field": field, "message": error.message},
    }
