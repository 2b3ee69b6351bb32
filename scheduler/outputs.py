"""The ids that rows have generated since they were placed, by slot, and how many ids of each row are known."""

import mmap

import numpy as np
import numpy.typing as npt

from proto.messages import ID_BYTES
from scheduler.pages import I32Array

Index = npt.NDArray[np.intp]  # numpy gathers several times faster with its own index type

_KEPT = 1 << 16  # bytes of a slot that stay resident between its requests
_COLLECTED = 16  # steps
# Linux's; Python names it from 3.13 on. Else the kernel refuses more than the machine has, though little is used.
_MAP_NORESERVE = 0x4000
_LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


class Outputs:
    """One array for all slots, each with room for the longest row; memory is committed only where it is written.

    Slots lie pages apart, so that writing one id to each of a thousand costs as much as all else in a step. So the ids
    of rows that stay together are collected for some steps and written at once, before they are read.
    """

    def __init__(self, capacity: int, longest: int) -> None:
        self._slot_bytes = -(-longest * ID_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, capacity * self._slot_bytes, _LAZY)
        self._ids = np.frombuffer(self._memory, np.int32)
        self._known = np.zeros(capacity, np.int32)
        self._known_cells = self._known.data
        self._origin = np.zeros(capacity, np.intp)  # where a row's ids would begin, did it generate its first
        self._origin_cells = self._origin.data
        self._index: Index = self._origin[:0]  # slots of the rows whose ids are collected
        self._version = 0  # of these rows: see `RowView`
        self._first = self._known[:0]  # known ids of these before those collected
        self._collected: list[I32Array] = []

    @property
    def known(self) -> I32Array:
        """Number of known ids by slot: those it was placed with and those results have brought (read-only)."""
        self.settle()
        return self._known

    def start_row(self, slot: int, tokens: int) -> None:
        self._known_cells[slot] = tokens
        self._origin_cells[slot] = slot * self._slot_bytes // ID_BYTES - tokens

    def clear_row(self, slot: int, longest: int) -> None:
        """Return the memory of a row that could generate `longest` ids; nothing may be collected for it any more."""
        if longest * ID_BYTES > _KEPT:
            self._memory.madvise(mmap.MADV_DONTNEED, slot * self._slot_bytes, self._slot_bytes)

    def append_ids(self, index: Index, version: int, ids: I32Array) -> I32Array:
        """Append one id to each row of a view with these slots and this version; returns the ids' positions."""
        if version != self._version or len(self._collected) == _COLLECTED:
            self.settle()
            self._index, self._version = index, version
            self._first = self._known.take(index)
        steps = len(self._collected)
        self._collected.append(ids)
        return self._first + np.int32(steps) if steps else self._first

    def append_runs(self, index: Index, counts: I32Array, ids: I32Array) -> None:
        """Append `counts` ids to the row in each slot; `ids` holds them row after row."""
        self.settle()
        known = self._known.take(index)
        begins = counts.cumsum() - counts
        cells = (self._origin.take(index) + known - begins).repeat(counts)
        self._ids[cells + np.arange(len(ids))] = ids
        self._known[index] = known + counts

    def generated(self, slot: int) -> bytes:
        """Return the ids that a row has generated since it was placed."""
        self.settle()
        begin, end = slot * self._slot_bytes, (self._origin_cells[slot] + self._known_cells[slot]) * ID_BYTES
        return self._memory[begin:end]

    def settle(self) -> None:
        """Write the collected ids."""
        steps, index = len(self._collected), self._index
        if not steps:
            return
        cells: Index = self._origin.take(index) + self._first
        if steps == 1:
            self._ids[cells] = self._collected[0]
        else:
            self._ids[cells[:, None] + np.arange(steps)] = np.array(self._collected).T
        self._known[index] = self._first + np.int32(steps)
        self._version = 0
        self._collected.clear()
