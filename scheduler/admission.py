"""Who may enter: what can never run, what would come too late, and what fits now."""

from dataclasses import dataclass
from enum import Enum

from proto.config import SchedulerOptions
from proto.messages import Admit, RejectCode, WorkerFacts, column
from scheduler.policy import OutputLengths, PrefillSpeed, Thrash
from scheduler.request import ID_BYTES, Request
from scheduler.running import Running
from scheduler.window import Window

_MIN_RETRY_MS, _MAX_RETRY_MS = 100, 30_000


class Obstacle(Enum):
    """Why a waiting request cannot be placed in this step."""

    LONG = 1  # waits for the long prefill of its class to end
    BUDGET = 2  # waits for a step with room for its whole prompt
    PAGES = 3  # waits for pages
    LATE = 4  # cannot finish its prefill before its deadline
    PINNED = 5  # nothing runs, and still too few pages: pins hold them


@dataclass(frozen=True, slots=True)
class Refusal:
    code: RejectCode
    field: str
    message: str
    retry_after_ms: int = 0


class Admission:
    """Decides; changes nothing but the paths of requests that it matches against the prefix tree."""

    def __init__(self, options: SchedulerOptions, facts: WorkerFacts, running: Running, budget: int) -> None:
        self._options = options
        self._facts = facts
        self._running = running
        self._tree = running.tree
        self._window = running.window
        self._budget = budget
        self._long_tokens = max(budget // 2, 1)
        self.lengths = OutputLengths()
        self.speed = PrefillSpeed()
        self.thrash = Thrash()

    def never(self, admit: Admit) -> Refusal | None:
        """Why this request could not run on an empty machine, if so."""
        prompt = len(admit.prompt_ids) // ID_BYTES
        longest = prompt + admit.max_new_tokens
        if prompt == 0:
            return Refusal(RejectCode.INVALID, "prompt", "the prompt has no token")
        ids = column(admit.prompt_ids + admit.output_ids)
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self._facts.vocab_size:
            bad = lowest if lowest < 0 else highest
            return Refusal(
                RejectCode.INVALID, "prompt", f"token id {bad} is outside 0..{self._facts.vocab_size - 1} (vocabulary)"
            )
        if longest > self._facts.max_model_len:
            return Refusal(
                RejectCode.INVALID,
                "max_new_tokens",
                f"prompt ({prompt} tokens) + max_new_tokens ({admit.max_new_tokens}) = {longest} exceeds "
                f"max_model_len ({self._facts.max_model_len})",
            )
        # The last id is never fed back, so its K/V need no room.
        pages, there = self._running.pool.pages_of(max(longest - 1, prompt)), self._running.pool.num_pages
        window = self._window
        if pages <= there and window is not None:
            pages, there = window.least(pages), window.pool.num_pages
        if pages > there:
            return Refusal(
                RejectCode.INVALID,
                "max_new_tokens",
                f"prompt ({prompt} tokens) + max_new_tokens ({admit.max_new_tokens}) needs {pages} KV pages of "
                f"{self._facts.page_size} tokens; the worker has {there}",
            )
        if not self._options.chunked_prefill and prompt > self._budget:
            return Refusal(
                RejectCode.INVALID,
                "prompt",
                f"the prompt has {prompt} tokens; without chunked prefill max_num_batched_tokens "
                f"({self._budget}) is the limit",
            )
        return None

    def queue_full(self, waiting: int, waiting_tokens: int) -> Refusal | None:
        if waiting < self._options.max_queue:
            return None
        wait_ms = self.speed.duration(waiting_tokens) // 1_000_000
        return Refusal(
            RejectCode.EXHAUSTED,
            "",
            f"{waiting} requests wait; max_queue is {self._options.max_queue}",
            retry_after_ms=min(max(wait_ms, _MIN_RETRY_MS), _MAX_RETRY_MS),
        )

    def late(self, request: Request, now: int) -> Refusal | None:
        """Refusal when the deadline has passed, or comes before a prefill at the measured speed could end."""
        if not request.deadline:
            return None
        left = request.deadline - now
        if left <= 0:
            return Refusal(
                RejectCode.DEADLINE, "", f"the deadline passed {-left / 1e6:.0f} ms ago, before it could run"
            )
        uncached = request.tokens - request.path.length * self._facts.page_size
        needed = self.speed.duration(uncached)
        if request.opened or needed <= left:
            return None
        return Refusal(
            RejectCode.DEADLINE,
            "",
            f"prefill of {uncached} tokens takes {needed / 1e6:.0f} ms; {left / 1e6:.0f} ms are left",
        )

    def pinned(self, request: Request) -> Refusal:
        """Nothing runs, and yet the request finds too few pages: only pins can hold them."""
        pool, window = self._running.pool, self._window
        needed = pool.pages_of(request.tokens)
        if window is not None and needed <= pool.available:
            pool, needed = window.pool, window.least(needed)
        return Refusal(
            RejectCode.EXHAUSTED,
            "",
            f"the prompt needs {needed} KV pages; pinned prefixes leave {pool.available} of {pool.num_pages}",
            retry_after_ms=_MAX_RETRY_MS,
        )

    def is_long(self, tokens: int) -> bool:
        """Whether a prefill of so many uncached tokens takes more than half a step."""
        return tokens > self._long_tokens

    def match(self, request: Request) -> int:
        """Look the request up in the prefix tree as it is now; returns the tokens left to prefill.

        At least the last id is always computed, since its logits are wanted. Layers behind a window must have what
        the first computed id sees.
        """
        tokens, path = request.tokens, request.path
        self._tree.match(path, request.ids, tokens - 1)
        if self._window is not None and path.length:
            self._tree.match(path, request.ids, self._window.usable(path.pages) * self._facts.page_size)
        return tokens - request.path.length * self._facts.page_size

    def obstacle(self, request: Request, budget: int, now: int) -> Obstacle | None:
        """What keeps a waiting request out of this step, which has room for `budget` more tokens."""
        uncached = self.match(request)
        if request.deadline and self.late(request, now) is not None:
            return Obstacle.LATE
        if uncached > self._long_tokens and any(
            other.long and other.work_class is request.work_class for other in self._running.prefills
        ):
            return Obstacle.LONG
        if not self._options.chunked_prefill and budget < uncached <= self._budget:
            return Obstacle.BUDGET
        short = self._pages(request)
        return short if short is not None or self._window is None else self._window_pages(request, self._window)

    def _pages(self, request: Request) -> Obstacle | None:
        """Whether pages are there now, and are expected to last."""
        running, pool, path = self._running, self._running.pool, request.path
        prompt_len, tokens, page_size = request.prompt_len, request.tokens, pool.page_size
        output = self.lengths.expect(request.work_class, tokens - prompt_len, request.max_len - prompt_len)
        # At its end, shared ones included; the last id's K/V need no room.
        request.expected_pages = expected = -(-max(prompt_len + output - 1, tokens) // page_size)
        left = pool.free + pool.idle - -(-tokens // page_size)
        if path.length:
            left += path.length - path.idle_pages
        headroom = self.thrash.headroom(pool.num_pages)
        if left < headroom:
            if running.count:
                return Obstacle.PAGES
            return None if left >= 0 else Obstacle.PINNED
        if running.committed + expected <= pool.num_pages or not running.count:
            return None
        return None if running.peak_with(request) <= pool.num_pages - headroom else Obstacle.PAGES

    def _window_pages(self, request: Request, window: Window) -> Obstacle | None:
        """As `_pages`, for the layers behind windows. A chunk takes what pages there are, so few must be there."""
        running, pool, path = self._running, window.pool, request.path
        used, idle = window.hit_pages(path.pages)
        held_from = path.length - used - idle
        needed = window.least(pool.pages_of(request.tokens) - held_from) - used
        if not running.count:
            return None if needed <= pool.available else Obstacle.PINNED
        headroom = self.thrash.headroom(pool.num_pages)
        if pool.available - needed - running.owed() < headroom:
            return Obstacle.PAGES
        if window.committed + window.plateau(request.expected_pages) <= pool.num_pages:
            return None
        return None if running.window_peak_with(request) <= pool.num_pages - headroom else Obstacle.PAGES
