"""Files of requests and of results, one JSON object a line: `quintet batch`."""

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from quintet_client.v1 import inference_pb2 as pb

RecordId = str | int

_WORK_CLASSES = {
    "chat": pb.WORK_CLASS_CHAT,
    "agent": pb.WORK_CLASS_AGENT,
    "batch": pb.WORK_CLASS_BATCH,
}
_FIRST_BYTES = b'{"id":'  # of each line that we write


class OutputError(RuntimeError):
    """The output file is not one that this command may append to."""


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One request. Exactly one of prompt, token_ids and messages; the rest as in inference.proto."""

    id: RecordId | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[Turn] | None = None
    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    skip_special_tokens: bool | None = None
    work_class: Literal["chat", "agent", "batch"] = "batch"
    priority: int | None = None
    cache_salt: str | None = None

    def request(self) -> pb.GenerateRequest:
        """The same as a protobuf. Raises ValueError when a value does not fit its field."""
        if sum(prompt is not None for prompt in (self.prompt, self.token_ids, self.messages)) != 1:
            raise ValueError("exactly one of prompt, token_ids and messages is needed")
        request = pb.GenerateRequest(work_class=_WORK_CLASSES[self.work_class])
        if self.prompt is not None:
            request.text = self.prompt
        elif self.token_ids is not None:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(self.token_ids)
        else:
            request.chat.SetInParent()
            for turn in self.messages or []:
                request.chat.messages.add(role=turn.role, content=turn.content)
        self._set_all(request, ("model", "logprobs", "skip_special_tokens", "priority", "cache_salt"))
        self._set_all(request.sampling, ("temperature", "top_k", "top_p", "min_p", "seed"))
        self._set_all(
            request.stopping, ("max_new_tokens", "min_new_tokens", "include_stop_str_in_output", "ignore_eos")
        )
        request.stopping.stop_strings.extend([self.stop] if isinstance(self.stop, str) else self.stop)
        request.stopping.stop_token_ids.extend(self.stop_token_ids)
        return request

    def _set_all(self, message: Any, fields: tuple[str, ...]) -> None:
        for field in fields:
            value = getattr(self, field)
            if value is not None:
                try:
                    setattr(message, field, value)
                except ValueError as error:
                    raise ValueError(f"{field}: {error}") from error


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input that can be sent."""

    line: int  # from 1
    id: RecordId
    request: pb.GenerateRequest


@dataclass(frozen=True, slots=True)
class BadLine:
    """One line of the input that cannot."""

    line: int
    id: RecordId
    message: str


def read_jobs(path: Path) -> Iterator[Job | BadLine]:
    """Every line of the input but blank ones. A line without an id, or with an earlier line's, is called "line-N"."""
    decode_id, decode_line = msgspec.json.Decoder(_Id).decode, msgspec.json.Decoder(Line).decode
    lines_of: dict[RecordId, int] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            record_id: RecordId = f"line-{number}"
            try:
                given = decode_id(text).id
                if given is not None:
                    earlier = lines_of.setdefault(given, number)
                    if earlier != number:
                        raise ValueError(f"id {given!r} is that of line {earlier} already")
                    record_id = given
                job = Job(number, record_id, decode_line(text).request())
            except (msgspec.DecodeError, ValueError) as error:
                yield BadLine(number, record_id, str(error))
            else:
                yield job


def count_lines(path: Path) -> int:
    """Lines of the input that are not blank."""
    with path.open("rb") as file:
        return sum(1 for text in file if text.strip())


class Output:
    """The file of results: append-only, one whole line a record, on disk when `append` returns.

    It is also the only memory of what was done: `done` holds the ids of all records in it.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file, and cut off a last line that a crash left half-written.

        Raises OutputError when another run holds it, or when it is not a file of ours.
        """
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.done: set[RecordId] = set()
        self.failed = 0  # records of errors
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_stock()
        except BlockingIOError as error:
            os.close(self._fd)
            raise OutputError(f"{path} is being written by another run") from error
        except OutputError:
            os.close(self._fd)
            raise

    def _take_stock(self) -> None:
        decoder = msgspec.json.Decoder(_Stub)
        whole = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not (line.startswith(_FIRST_BYTES) or _FIRST_BYTES.startswith(line)):
                        raise OutputError(f"{self._path} ends in a line that is no result of ours; name another file")
                    os.ftruncate(self._fd, whole)
                    break
                try:
                    stub = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise OutputError(f"{self._path} line {number} is no result of ours: {error}") from error
                self.done.add(stub.id)
                self.failed += stub.error is not None
                whole += len(line)

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write records, each a dictionary whose first key is "id", and wait until the disk has them."""
        data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)
        for record in records:
            self.done.add(record["id"])
            self.failed += "error" in record

    def close(self) -> None:
        os.close(self._fd)


class _Id(msgspec.Struct):
    """Of a line of the input, its id alone."""

    id: RecordId | None = None


class _Stub(msgspec.Struct):
    """Of a record, what tells that it is there."""

    id: RecordId
    error: msgspec.Raw | None = None
