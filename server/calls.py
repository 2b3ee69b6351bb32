"""Questions to an inner stage that have one answer: tokenize, detokenize, flush."""

import asyncio

from proto.messages import DetokenizeReply, FlushReply, Reject, TokenizeReply
from server.errors import CallError, error_of

Reply = TokenizeReply | DetokenizeReply | FlushReply


class Calls:
    """Calls that wait for an answer. A late answer is dropped."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, rid: int) -> asyncio.Future[Reply]:
        """Return a future of the answer, which may raise CallError. The caller must call `forget` at the end."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[rid] = future
        return future

    def forget(self, rid: int) -> None:
        self._waiting.pop(rid, None)

    def on_reply(self, reply: Reply) -> None:
        future = self._waiting.get(reply.rid)
        if future is not None and not future.done():
            future.set_result(reply)

    def on_reject(self, reject: Reject) -> bool:
        """Pass on a refusal; returns whether it was meant for one of these calls."""
        future = self._waiting.get(reject.rid)
        if future is None:
            return False
        if not future.done():
            future.set_exception(error_of(reject))
        return True

    def fail_all(self, error: CallError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
