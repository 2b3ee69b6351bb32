"""Which requests may run: what never can, what would be too late, and what fits now."""

from dataclasses import dataclass

from proto.config import SchedulerOptions
from proto.messages import ID_BYTES, Admit, RejectCode, WorkerFacts
from scheduler.kv_cache import KvCache
from scheduler.policy import Obstacle, OutputLengths, PrefillSpeed, Thrash
from scheduler.request import Request
from scheduler.running import Running

_MIN_RETRY_MS, _MAX_RETRY_MS = 100, 30_000


@dataclass(frozen=True, slots=True)
class Refusal:
    code: RejectCode
    field: str
    message: str
    retry_after_ms: int = 0


class Admission:
    """Decides which requests may run. It matches the paths of those it looks at, and estimates their pages."""

    def __init__(
        self, options: SchedulerOptions, facts: WorkerFacts, cache: KvCache, running: Running, budget: int
    ) -> None:
        self._options = options
        self._facts = facts
        self._cache = cache
        self._running = running
        self._budget = budget
        self._long_tokens = max(budget // 2, 1)
        self.lengths = OutputLengths()
        self.speed = PrefillSpeed()
        self.thrash = Thrash()

    def never(self, admit: Admit) -> Refusal | None:
        """Refuse a request that could not run even on an empty machine. Its ids and lengths have been checked."""
        prompt = len(admit.prompt_ids) // ID_BYTES
        longest = prompt + admit.max_new_tokens
        # The last id is never fed back, so its K/V need no room.
        lacking = self._cache.lacking(max(longest - 1, prompt))
        if lacking is not None:
            return Refusal(
                RejectCode.INVALID,
                "stopping.max_new_tokens",
                f"{prompt} prompt tokens and max_new_tokens ({admit.max_new_tokens}) need {lacking[0]} KV pages of "
                f"{self._facts.page_size} tokens; the worker has {lacking[1]}",
            )
        if not self._options.chunked_prefill and prompt > self._budget:
            return Refusal(
                RejectCode.INVALID,
                "prompt",
                f"must have at most {self._budget} tokens, not {prompt}: without chunked prefill, "
                "max_num_batched_tokens is the limit",
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
        """Refuse a request whose deadline has passed or comes before its prefill could end at the measured speed."""
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
        """Refuse a request that finds too few pages although nothing runs: only pins can hold them."""
        needed, pool = self._cache.pinned_shortage(request)
        return Refusal(
            RejectCode.EXHAUSTED,
            "",
            f"the prompt needs {needed} KV pages; pinned prefixes leave {pool.available} of {pool.num_pages}",
            retry_after_ms=_MAX_RETRY_MS,
        )

    def is_long(self, tokens: int) -> bool:
        """Return whether a prefill of so many uncached tokens takes more than half a step."""
        return tokens > self._long_tokens

    def obstacle(self, request: Request, budget: int, now: int) -> Obstacle | None:
        """Return what keeps a waiting request out of this step, which has room for `budget` more tokens."""
        uncached = self._cache.match(request)
        if request.deadline and self.late(request, now) is not None:
            return Obstacle.LATE
        if uncached > self._long_tokens and any(
            other.long and other.work_class is request.work_class for other in self._running.prefills
        ):
            return Obstacle.LONG
        if not self._options.chunked_prefill and budget < uncached <= self._budget:
            return Obstacle.BUDGET
        prompt_len, tokens = request.prompt_len, request.tokens
        output = self.lengths.expect(request.work_class, tokens - prompt_len, request.max_len - prompt_len)
        # At its end, shared ones included; the last id's K/V need no room.
        request.expect_pages(-(-max(prompt_len + output - 1, tokens) // self._facts.page_size))
        return self._cache.obstacle(request, self.thrash.headroom)
