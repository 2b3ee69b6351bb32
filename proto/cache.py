"""How KV memory is divided between layers that attend to all positions and those behind a window.

Each kind of layers, a *cache group*, has pages of its own: a page holds K and V of `page_size` tokens in all layers
of its group. The division is fixed at start and assumes sequences of four windows. Others leave memory unused: shorter
ones pages of group 0 (without a window), longer ones pages of group 1.
"""

from dataclasses import dataclass

from proto.model import ModelConfig

_EXPECTED_WINDOWS = 4  # length of a sequence, in windows


def window_reach(window: int, page_size: int) -> int:
    """Return how many pages before its own an id at the beginning of a page sees."""
    return -(-(window - 1) // page_size)


def longest_sequence(num_pages: int, window: int, window_pages: int, page_size: int, wanted: int) -> int:
    """Return how many tokens one sequence can have in these pages, at most `wanted`.

    `num_pages` is 0 if all layers have a window.
    """
    longest = wanted
    if num_pages or not window:
        longest = min(longest, num_pages * page_size)
    if window and window_pages <= window_reach(window, page_size):
        longest = min(longest, window_pages * page_size)
    return longest


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The layers of a model by cache group, and the size of their pages."""

    full_layers: int
    windowed_layers: int
    window: int  # the largest of the windows; 0 = no group 1
    page_size: int
    layer_page: int  # bytes of one page in one layer
    max_len: int

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, bytes_per_token: int, max_len: int) -> "CacheGroups":
        """Divide the layers of a model. `bytes_per_token` is of all layers together.

        A window at least as long as the longest sequence counts as no window.
        """
        windowed = config.windowed_layers if config.window < max_len else 0
        return cls(
            full_layers=config.num_layers - windowed,
            windowed_layers=windowed,
            window=config.window if windowed else 0,
            page_size=page_size,
            layer_page=bytes_per_token * page_size // config.num_layers,
            max_len=max_len,
        )

    def pages(self, tokens: int) -> tuple[int, int]:
        """Return the pages of both groups that a sequence of so many tokens holds at most.

        Behind a window that is one more than its ids fill, since the newest page may hold a single id.
        """
        pages = -(-tokens // self.page_size)
        windowed = min(pages, window_reach(self.window, self.page_size) + 2) if self.window else 0
        return (pages if self.full_layers else 0), windowed

    def bytes(self, num_pages: int, window_pages: int) -> int:
        return (num_pages * self.full_layers + window_pages * self.windowed_layers) * self.layer_page

    def divide(self, memory: int) -> tuple[int, int]:
        """Return the pages of both groups that fit in so many bytes."""
        full, windowed = self._expected()
        each = self.bytes(full, windowed)
        return memory * full // each, memory * windowed // each

    def resolve_num_pages(self, num_pages: int) -> tuple[int, int]:
        """Return the pages of both groups for a given number: of group 0 if the model has it, else of group 1."""
        full, windowed = self._expected()
        if not full:
            return 0, num_pages
        return num_pages, min(max(-(-num_pages * windowed // full), self.pages(self.max_len)[1]), num_pages)

    def _expected(self) -> tuple[int, int]:
        return self.pages(min(_EXPECTED_WINDOWS * self.window or self.max_len, self.max_len))
