"""Files of requests and of results, one JSON object a line: `quintet batch`."""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from quintet_client import ChatMessage, GenerateOptions, Prompt
from quintet_client.requests import generate_request

RecordId = str | int

_DEFAULT_ID = re.compile(r"line-\d+")
_FIRST_BYTES = b'{"id":'  # every line that we write begins with these


class OutputError(RuntimeError):
    """This command must not append to the output file; the text says why."""


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


# Keys of a line besides its id and prompt: the client's options. The id takes the place of request_id.
_OPTIONS = {name: kind for name, kind in get_type_hints(GenerateOptions).items() if name != "request_id"}


class Line(msgspec.Struct):
    """One request: exactly one of prompt, token_ids and messages. `OptionLine` adds the options."""

    id: RecordId | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[Turn] | None = None

    def job(self, line: int, record_id: RecordId) -> "BatchJob":
        """Make the request for a server. Raises ValueError when a value does not fit its field."""
        prompts: list[Prompt] = []
        if self.prompt is not None:
            prompts.append(self.prompt)
        if self.token_ids is not None:
            prompts.append(self.token_ids)
        if self.messages is not None:
            prompts.append([ChatMessage(role=turn.role, content=turn.content) for turn in self.messages])
        if len(prompts) != 1:
            raise ValueError(f"needs exactly one of prompt, token_ids and messages, got {len(prompts)}")
        given = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        options = cast(GenerateOptions, {"work_class": "batch", **given})
        generate_request(prompts[0], options)
        return BatchJob(line, record_id, prompts[0], options)


OptionLine: Any = msgspec.defstruct(
    "OptionLine",
    [(name, kind | None, None) for name, kind in _OPTIONS.items()],
    bases=(Line,),
    forbid_unknown_fields=True,
)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A line of the input that can be sent."""

    line: int  # from 1
    id: RecordId
    prompt: Prompt
    options: GenerateOptions


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of the input that cannot be sent."""

    line: int
    id: RecordId
    message: str


def read_jobs(path: Path) -> Iterator[BatchJob | BadLine]:
    """Yield every line of the input that is not blank. One without an id, or with an earlier one's, gets "line-N"."""
    decode_id, decode_line = msgspec.json.Decoder(_Id).decode, msgspec.json.Decoder(OptionLine).decode
    lines_of: dict[RecordId, int] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            record_id: RecordId = f"line-{number}"
            try:
                given = decode_id(text).id
                if given is not None:
                    if _DEFAULT_ID.fullmatch(str(given)) and given != record_id:
                        raise ValueError(f"id {given!r} is reserved for a line without an id")
                    earlier = lines_of.setdefault(given, number)
                    if earlier != number:
                        raise ValueError(f"id {given!r} is already used by line {earlier}")
                    record_id = given
                job = decode_line(text).job(number, record_id)
            except (msgspec.DecodeError, ValueError) as error:
                yield BadLine(number, record_id, str(error))
            else:
                yield job


def count_lines(path: Path) -> int:
    """Count the lines of the input that are not blank. Raises OSError when it is missing or not a file."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file, and batch has to read it more than once", str(path))
    with path.open("rb") as file:
        return sum(1 for text in file if text.strip())


class Output:
    """The file of results: append-only, one whole line a record, on disk when `append_records` returns.

    It is also the only memory of what was done: `done` holds the ids of all records in it.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and cut off a last line that a crash left half-written.

        Raises OutputError when another run holds it, or when it is not an output file of `quintet batch`.
        """
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a regular file, so no run could continue from it")
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = 0  # bytes of whole lines
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
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not (line.startswith(_FIRST_BYTES) or _FIRST_BYTES.startswith(line)):
                        raise OutputError(
                            f"the last line of {self._path} is not a result of this command: name another file"
                        )
                    os.ftruncate(self._fd, self._size)
                    break
                try:
                    stub = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise OutputError(
                        f"line {number} of {self._path} is not a result of this command: {error}"
                    ) from error
                if stub.text is None and stub.error is None:
                    raise OutputError(
                        f"line {number} of {self._path} is not a result of this command: it has neither text nor error"
                    )
                self.done.add(stub.id)
                self.failed += stub.error is not None
                self._size += len(line)

    def append_records(self, records: list[dict[str, Any]]) -> None:
        """Write records, each a dictionary whose first key is "id", and wait until the disk has them."""
        data = memoryview(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)  # no half line in the middle of the file
            raise
        self._size += written
        for record in records:
            self.done.add(record["id"])
            self.failed += "error" in record

    def close(self) -> None:
        os.close(self._fd)


class _Id(msgspec.Struct):
    """The id alone of a line of the input."""

    id: RecordId | None = None


class _Stub(msgspec.Struct):
    """The fields by which a record is recognised."""

    id: RecordId
    text: str | None = None
    error: dict[str, str] | None = None
