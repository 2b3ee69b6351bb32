"""What the device itself remembers of every slot, by deltas: pages, newest token, sampling parameters."""

import torch

from worker.cuda.sampling import SamplingTable


class SlotState:
    """Device memory, indexed by slot. One slot more than requests can have is of padding: it holds the dummy page."""

    def __init__(
        self, slots: int, pages_per_slot: int, page_size: int, dummy_page: int, page_ids: int, device: torch.device
    ) -> None:
        """`page_ids`: of a step, at most."""
        self.padding_slot = slots
        self.page_size = page_size
        self.pages = torch.full((slots + 1, pages_per_slot), dummy_page, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.sampling = SamplingTable(slots, device)
        self._count = torch.arange(page_ids, dtype=torch.int32, device=device)

    def place_pages(self, at: torch.Tensor, pages: torch.Tensor) -> None:
        """Enter `pages` [n] at slot × pages_per_slot + index `at` [n], int32, no two alike."""
        self.pages.view(-1).index_copy_(0, at.long(), pages)

    def set_sampling(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Sampling parameters of slots [n]: rows [n × SamplingTable.WORDS] int32."""
        self.sampling.words.index_copy_(0, slots.long(), rows.view(-1, SamplingTable.WORDS))

    def kv_slots(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where K and V of tokens at `positions` [T] of `slots` [T] go: int32 [T], page × page_size + offset."""
        pages = self.pages[slots, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def page_ids(self, slots: torch.Tensor, indptr: torch.Tensor, count: int) -> torch.Tensor:
        """The first pages of each of `slots` [R], as many as `indptr` [R + 1] says: int32 [count], row after row."""
        place = self._count[:count]
        row = torch.searchsorted(indptr[1:], place, right=True)
        return self.pages[slots[row], place - indptr[row]]
