"""Rows of a step."""

import numpy as np
import numpy.typing as npt

from proto.messages import U32, U64, column
from scheduler.pages import I32Array

Mask = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]  # numpy gathers several times faster with its own index type


class RowView:
    """Rows of a step, in plan order, and what tells later whether they still hold their slots.

    What every result asks for is looked up once (`Rows.identify`) and kept: the view of a steady batch lives long.
    """

    __slots__ = (
        "attempts",
        "departures",
        "detokenizers",
        "generations",
        "identified",
        "index",
        "max_lens",
        "prompt_lens",
        "rids",
        "slots",
    )

    rids: bytes  # as they travel
    attempts: bytes
    detokenizers: I32Array
    prompt_lens: I32Array
    max_lens: I32Array

    def __init__(self, slots: I32Array, index: Index, generations: I32Array, departures: int) -> None:
        self.slots = slots
        self.index = index  # the slots
        self.generations = generations
        self.departures = departures  # `Rows.departures` then: unchanged means that all rows still stand
        self.identified = False

    def __len__(self) -> int:
        return self.slots.size

    def only(self, mask: Mask) -> "RowView":
        part = RowView(self.slots[mask], self.index[mask], self.generations[mask], self.departures)
        if self.identified:
            part.identified = True
            part.rids = column(self.rids, U64)[mask].tobytes()
            part.attempts = column(self.attempts, U32)[mask].tobytes()
            part.detokenizers = self.detokenizers[mask]
            part.prompt_lens = self.prompt_lens[mask]
            part.max_lens = self.max_lens[mask]
        return part
