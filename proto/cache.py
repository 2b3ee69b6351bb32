"""How KV memory is divided between layers that attend to all positions and those behind a window.

Each kind of layers, a *cache group*, has pages of its own: a page holds K and V of `page_size` tokens in all layers
of its group. The division is fixed at start. It takes sequences to be four windows long; others leave memory unused:
shorter ones pages of group 0 (without a window), longer ones of group 1.
"""

from dataclasses import dataclass

from proto.model import ModelConfig

_EXPECTED_WINDOWS = 4  # length of a sequence, in windows


def window_reach(window: int, page_size: int) -> int:
    """Pages before its own that an id at the beginning of a page sees."""
    return -(-(window - 1) // page_size)


def longest_sequence(num_pages: int, window: int, window_pages: int, page_size: int, wanted: int) -> int:
    """Tokens that one sequence can have in so many pages, `wanted` at most. `num_pages` 0: no layer lacks a window."""
    longest = wanted
    if num_pages or not window:
        longest = min(longest, num_pages * page_size)
    if window and window_pages <= window_reach(window, page_size):
        longest = min(longest, window_pages * page_size)
    return longest


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """What a model's KV memory is made of. Sizes in bytes of `layer_page`: one page in one layer."""

    full_layers: int
    windowed_layers: int
    window: int  # the largest of the windows; 0 = no group 1
    page_size: int
    layer_page: int
    max_len: int

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, bytes_per_token: int, max_len: int) -> "CacheGroups":
        """`bytes_per_token`: of all layers. A window that holds the longest sequence is none."""
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
        """Pages of both groups that a sequence of so many tokens holds: behind a window, the newest may hold one id."""
        pages = -(-tokens // self.page_size)
        windowed = min(pages, window_reach(self.window, self.page_size) + 2) if self.window else 0
        return (pages if self.full_layers else 0), windowed

    def bytes(self, num_pages: int, window_pages: int) -> int:
        return (num_pages * self.full_layers + window_pages * self.windowed_layers) * self.layer_page

    def divide(self, memory: int) -> tuple[int, int]:
        """Pages of both groups that so many bytes hold."""
        full, windowed = self._expected()
        each = self.bytes(full, windowed)
        return memory * full // each, memory * windowed // each

    def beside(self, num_pages: int) -> tuple[int, int]:
        """Pages of both groups where `num_pages` are asked for: of group 0, if the model has it."""
        full, windowed = self._expected()
        if not full:
            return 0, num_pages
        return num_pages, min(max(-(-num_pages * windowed // full), self.pages(self.max_len)[1]), num_pages)

    def _expected(self) -> tuple[int, int]:
        return self.pages(min(_EXPECTED_WINDOWS * self.window or self.max_len, self.max_len))
