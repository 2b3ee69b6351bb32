"""Build response messages from what the ring delivered."""

import struct
from collections.abc import Iterable, Sequence

from proto.messages import ID_BYTES, Finish, TokenLogprobs
from quintet_client.v1 import inference_pb2 as pb
from server.generation import Ending, Generation, OutputPiece

_FINISH_REASONS = {
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORT: pb.FINISH_REASON_ABORT,
    Finish.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
    Finish.ERROR: pb.FINISH_REASON_ERROR,
}


def chunk_of(generation: Generation, piece: OutputPiece, model: str) -> pb.GenerateChunk:
    """One write of a stream. Counts are those at the time of the piece."""
    chunk = pb.GenerateChunk(text=piece.text, token_ids=_ids(piece.ids))
    _fill_usage(chunk.usage, generation)
    if piece.first:
        chunk.prompt.CopyFrom(prompt_facts_of(generation, model))
    if piece.logprobs is not None:
        chunk.logprobs.CopyFrom(logprobs_of([piece.logprobs]))
    if piece.ending is not None:
        chunk.finish.CopyFrom(finish_of(piece.ending))
        chunk.timings.CopyFrom(timings_of(generation))
    return chunk


def response_of(generation: Generation, pieces: list[OutputPiece], model: str) -> pb.GenerateResponse:
    """The unary answer: the pieces of a stream, joined. The last one has the ending."""
    output = pb.Output(
        text="".join(piece.text for piece in pieces),
        token_ids=_ids(b"".join(piece.ids for piece in pieces)),
    )
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    if logprobs:
        output.logprobs.CopyFrom(logprobs_of(logprobs))
    ending = pieces[-1].ending
    if ending is not None:
        output.finish.CopyFrom(finish_of(ending))
    response = pb.GenerateResponse(
        prompt=prompt_facts_of(generation, model), outputs=[output], timings=timings_of(generation)
    )
    _fill_usage(response.usage, generation)
    return response


def prompt_facts_of(generation: Generation, model: str) -> pb.PromptFacts:
    return pb.PromptFacts(
        request_id=generation.client_id,
        model=model,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=generation.cached_tokens,
        seed=generation.seed,
    )


def _fill_usage(usage: pb.Usage, generation: Generation) -> None:
    usage.prompt_tokens = generation.prompt_tokens
    usage.completion_tokens = generation.ids_received
    usage.cached_tokens = generation.cached_tokens


def timings_of(generation: Generation) -> pb.Timings:
    return pb.Timings(
        queue_ms=generation.queue / 1e6,
        prefill_ms=generation.prefill / 1e6,
        decode_ms=(generation.last_at - generation.first_at) / 1e6,
    )


def finish_of(ending: Ending) -> pb.Finish:
    finish = pb.Finish(reason=_FINISH_REASONS[ending.finish])
    if ending.matched_string:
        finish.stop_string = ending.matched_string
    elif ending.matched_id >= 0 and ending.matched_is_eos:
        finish.eos_token_id = ending.matched_id
    elif ending.matched_id >= 0:
        finish.stop_token_id = ending.matched_id
    return finish


def logprobs_of(parts: Iterable[TokenLogprobs]) -> pb.Logprobs:
    logprobs = pb.Logprobs()
    for part in parts:
        logprobs.token_logprobs.extend(part.chosen)
        if any(part.top_ids):
            for ids, values in zip(part.top_ids, part.top_logprobs, strict=True):
                logprobs.top.add(token_ids=_ids(ids), logprobs=values)
    return logprobs


def _ids(column: bytes) -> Sequence[int]:
    """An i32 column without numpy, which costs more than it saves on the few ids of a chunk."""
    return struct.unpack(f"<{len(column) // ID_BYTES}i", column)
