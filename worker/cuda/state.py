"""The slots' pages, newest tokens and sampling parameters in device memory, updated by the plans' deltas."""

import torch

from worker.cuda.sampling import SamplingTable


class SlotPages:
    """Pages of every slot in one cache group. The last slot is for padding rows and holds the dummy page."""

    def __init__(
        self,
        slots: int,
        pages_per_slot: int,
        page_size: int,
        dummy_page: int,
        page_ids: int,
        device: torch.device,
        *,
        window: int = 0,
        stride: int = 1,
    ) -> None:
        """`page_ids`: of a step, at most. With a `window`, rows' lists begin where those of `PageTable` do."""
        self.pages = torch.full((slots + 1, pages_per_slot), dummy_page, dtype=torch.int32, device=device)
        self._page_size = page_size
        self._dummy_page = dummy_page
        self._window = window
        self._stride = stride
        self._count = torch.arange(page_ids, dtype=torch.int32, device=device)

    def place(self, at: torch.Tensor, pages: torch.Tensor) -> None:
        """Enter `pages` [n] at slot × pages_per_slot + index `at` [n], int32, no two alike."""
        self.pages.view(-1).index_copy_(0, at.long(), pages)

    def kv_slots(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where K and V of tokens at `positions` [T] of `slots` [T] go: int32 [T], page × page_size + offset."""
        pages = self.pages[slots, positions // self._page_size]
        return pages * self._page_size + positions % self._page_size

    def page_ids(self, slots: torch.Tensor, starts: torch.Tensor, indptr: torch.Tensor, count: int) -> torch.Tensor:
        """Return pages of rows [R] in `slots` from the first that an id at position `starts` sees, as many as `indptr`
        [R + 1] says: int32 [count], row after row."""
        place = self._count[:count]
        row = torch.searchsorted(indptr[1:], place, right=True)
        number = place - indptr[row]
        if not self._window:
            return self.pages[slots[row], number]
        seen = ((starts - (self._window - 1)) // self._page_size).clamp(min=0)
        if self._stride == 1:
            return self.pages[slots[row], number + seen[row]]
        number = number + (seen - seen % self._stride)[row]
        # Pages before the window may belong to other rows by now; and kernels multiply what they mask by 0.
        return self.pages[slots[row], number].masked_fill(number < seen[row], self._dummy_page)


class SlotState:
    """Device memory, indexed by slot."""

    def __init__(self, slots: int, groups: dict[int, SlotPages], device: torch.device) -> None:
        """`groups`: of pages, by the number of the cache group."""
        self.padding_slot = slots
        self.groups = groups
        self.last_tokens = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.sampling = SamplingTable(slots, device)

    def set_sampling(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Sampling parameters of slots [n]: rows [n × SamplingTable.WORDS] int32."""
        self.sampling.words.index_copy_(0, slots.long(), rows.view(-1, SamplingTable.WORDS))
