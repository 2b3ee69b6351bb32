"""Stop ids of all live requests, so that one gather tells which of a step's ids need a closer look."""

import numpy as np
import numpy.typing as npt

from proto.messages import column


class StopSet:
    """Stop ids that requests share. `ids[i]` says whether id i is an EOS id."""

    __slots__ = ("ids", "key", "requests")

    def __init__(self, key: tuple[bytes, int]) -> None:
        stop_ids, num_eos = key
        self.key = key
        self.requests = 0
        self.ids: dict[int, bool] = {}
        for place, stop_id in enumerate(column(stop_ids).tolist()):
            self.ids.setdefault(stop_id, place < num_eos)


class StopTable:
    """`watched[id]` is true while some live request stops at that id. Ids beyond the vocabulary never come."""

    def __init__(self, vocab_size: int) -> None:
        self.watched: npt.NDArray[np.bool_] = np.zeros(vocab_size, np.bool_)
        self._watchers = np.zeros(vocab_size, np.int32)
        self._sets: dict[tuple[bytes, int], StopSet] = {}

    def find(self, stop_ids: bytes, num_eos: int) -> StopSet:
        """Return the set of these ids (int32; the first num_eos are EOS ids), which is shared once acquired."""
        key = (stop_ids, num_eos)
        return self._sets.get(key) or StopSet(key)

    def acquire(self, stops: StopSet) -> None:
        """Count one more live request that stops at these."""
        if not stops.requests:
            self._sets[stops.key] = stops
            self._watch(stops, 1)
        stops.requests += 1

    def release(self, stops: StopSet) -> None:
        stops.requests -= 1
        if not stops.requests:
            del self._sets[stops.key]
            self._watch(stops, -1)

    def _watch(self, stops: StopSet, change: int) -> None:
        ids = [i for i in stops.ids if 0 <= i < self.watched.size]
        self._watchers[ids] += change
        self.watched[ids] = self._watchers[ids] > 0
