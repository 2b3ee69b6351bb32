"""The requests of bench_scheduler.py. Standard library only: the peer's interpreter reads it too."""

import random

PAGE_SIZE = 16
MAX_MODEL_LEN = 8192
VOCAB = 49152
WARM_STEPS = 250  # until, with churn, each free page has been used and allocations evict


def num_pages(rows: int) -> int:
    return rows * 80 + 1000


class Trace:
    """Request n is the same for every scheduler, whenever that asks for it.

    The first `rows` are there at the start; with churn, each that ends is replaced by the next.
    """

    def __init__(self, rows: int, churn: bool) -> None:
        self._rows = rows
        self._churn = churn
        self.asked = 0

    def next(self) -> tuple[list[int], int]:
        """Prompt ids and output tokens."""
        self.asked += 1
        draw = random.Random(self.asked)
        first = self.asked <= self._rows
        prompt = draw.choices(range(1, VOCAB), k=256 if first else 64)
        if not self._churn:
            return prompt, MAX_MODEL_LEN - 256 - 1
        return prompt, draw.randrange(20, 200) if first else draw.randrange(5, 15)
