"""Random events against the scheduler: `python -m tests.scheduler_fuzz --events 1000000`.

A fake worker checks every read and write of every page, a model of each request checks ids, positions and ends, and
every thousand events the accounting is counted anew.
"""

import argparse
import hashlib
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from proto.ids import StageKind, server_of
from proto.messages import ID_BYTES, U32, U64, Admit, Census, Finish, Flush, StageState, StepPlan, WorkClass
from scheduler.prefix import Path
from scheduler.request import State
from tests.builders import i32, make_facts, make_scheduler_options, make_stage, make_world
from tests.scheduler_fakes import Ring, expected_output, make_abort, make_admit, rid_of

_VOCAB = 40
_SALTS = ["", "a", "b"]
_CHECK_EVERY = 1000
_MAX_LIVE = 24
_SERVERS = 2


@dataclass
class Setting:
    """One configuration to fuzz."""

    depth: int
    pages: int
    prefix_caching: bool = True
    chunked: bool = True
    preempt_every: int = 0
    optimistic: bool = False  # admission expects no output at all, so that rows run out of pages
    window: int = 0  # of some layers, of all if there are no `pages`
    window_pages: int = 0
    step_ids: int = 1  # that a row may gain in a step


class Fuzz:
    """One scheduler under random events. Equal seeds give equal events."""

    def __init__(self, seed: int, setting: Setting) -> None:
        self.random = random.Random(seed)
        self.setting = setting
        facts = make_facts(
            num_pages=setting.pages,
            vocab_size=_VOCAB,
            max_model_len=96,
            max_num_batched_tokens=64,
            max_num_seqs=10,
            window=setting.window,
            window_pages=setting.window_pages,
            max_step_ids=setting.step_ids,
        )
        options = make_scheduler_options(
            pipeline_depth=setting.depth,
            prefix_caching=setting.prefix_caching,
            chunked_prefill=setting.chunked,
            max_num_batched_tokens=self.random.choice([12, 32, 64]) if setting.chunked else 64,
            max_num_seqs=10,
            max_queue=20,
            debug_preempt_every=setting.preempt_every,
        )
        self.ring = Ring(options, facts)
        if setting.optimistic:
            lengths = self.ring.scheduler._admission.lengths
            lengths.expect = lambda work_class, generated, limit: generated  # type: ignore[method-assign]
        self.digest = hashlib.sha256()
        self.events = 0
        self.finished = 0
        self.live: dict[tuple[int, int], Admit] = {}
        self._wanted: dict[tuple[int, int], tuple[list[int], Finish, int]] = {}
        self.gone: set[tuple[int, int]] = set()  # aborted or superseded: no end is due
        self.incarnations = [1] * _SERVERS
        self._numbers = 0
        self._pins: list[Path] = []
        stems = [[self.random.randrange(_VOCAB) for _ in range(40)] for _ in range(4)]
        self._stems = stems
        self._send_world()

    # ---------------------------------------------------------------- events

    def event(self) -> None:
        self.events += 1
        draw = self.random.random()
        if draw < 0.42:
            self._plan()
        elif draw < 0.80:
            self.ring.result()
        elif draw < 0.92:
            self._admit()
        elif draw < 0.95:
            self._abort()
        elif draw < 0.96:
            self._supersede()
        elif draw < 0.975:
            self._preempt()
        elif draw < 0.98:
            self._pin()
        elif draw < 0.985:
            self._unpin()
        elif draw < 0.988:
            self.ring.send(Flush(rid=rid_of(1)))
        elif draw < 0.993:
            self._census()
        elif draw < 0.9935:
            self._kill_server()
        else:
            self.ring.collect()
        if self.events % 16 == 0:
            self.ring.collect()
            self._settle()
        if self.events % _CHECK_EVERY == 0:
            self.check()

    def _plan(self) -> None:
        plan = self.ring.scheduler.plan(self.ring.now)
        if plan is not None:
            self._note(plan)
            self.ring.worker.run(plan)

    def _note(self, plan: StepPlan) -> None:
        self.digest.update(msgspec.msgpack.encode(plan))

    def _prompt(self) -> list[int]:
        stem = self.random.choice(self._stems)[: self.random.randrange(1, 41)]
        return stem + [self.random.randrange(_VOCAB) for _ in range(self.random.choice([0, 0, 1, 3, 8, 20]))]

    def _admit(self) -> None:
        if len(self.live) >= _MAX_LIVE:
            return
        self._numbers += 1
        server = self.random.randrange(_SERVERS)
        rid = rid_of(self._numbers, server, self.incarnations[server])
        prompt = self._prompt()
        max_new = self.random.choice([0, 1, 2, 5, 17, 30])
        output: list[int] = []
        if self.random.random() < 0.1:
            output = [self.random.randrange(_VOCAB) for _ in range(self.random.randrange(max_new + 1))]
        stops = self.random.sample(range(_VOCAB), self.random.choice([0, 0, 1, 2]))
        deadline = self.ring.now + self.random.choice([2, 30, 300]) * 1_000_000 if self.random.random() < 0.05 else 0
        admit = make_admit(
            rid,
            prompt,
            max_new,
            output=[token for token in output if token not in stops],
            min_new=self.random.randrange(max_new + 1) if self.random.random() < 0.3 else 0,
            stop_ids=stops,
            num_eos=self.random.randrange(len(stops) + 1),
            work_class=self.random.choice(list(WorkClass)),
            priority=self.random.choice([0, 0, 1]),
            salt=self.random.choice(_SALTS),
            deadline=deadline,
            arrival=self.ring.now,
        )
        self._want(rid, admit)

    def _want(self, rid: int, admit: Admit) -> None:
        self.live[rid, admit.attempt] = admit
        self._wanted[rid, admit.attempt] = expected_output(admit, _VOCAB)
        self.ring.send(admit)

    def _abort(self) -> None:
        if self.live and self.random.random() < 0.8:
            rid, attempt = self.random.choice(list(self.live))
            self._disown(rid, attempt)
        else:  # one that overtakes its Admit, or comes late
            self._numbers += 1
            rid, attempt = rid_of(self._numbers), 1
            self.ring.send(make_abort((rid, attempt)))
            self.ring.send(make_admit(rid, [1, 2, 3], 4))
            self.gone.add((rid, attempt))
            return
        self.ring.send(make_abort((rid, attempt)))

    def _supersede(self) -> None:
        if not self.live:
            return
        rid, attempt = self.random.choice(list(self.live))
        admit = self.live[rid, attempt]
        self.ring.collect()
        self._settle()
        if (rid, attempt) not in self.live:
            return
        ids = self.ring.received[rid, attempt].ids if (rid, attempt) in self.ring.received else []
        self._disown(rid, attempt)
        again = msgspec.structs.replace(
            admit,
            attempt=attempt + 1,
            output_ids=admit.output_ids + i32(*ids),
            opening=f"opening {rid} {attempt + 1}".encode(),
        )
        self._want(rid, again)
        self.ring.send(admit)  # a lower attempt that comes late is ignored

    def _disown(self, rid: int, attempt: int) -> None:
        self._strike(rid, attempt)
        self.gone.add((rid, attempt))

    def _strike(self, rid: int, attempt: int) -> None:
        del self.live[rid, attempt]
        del self._wanted[rid, attempt]

    def _preempt(self) -> None:
        eligible = self.ring.scheduler._running.preemptible()
        # Forced ones look like thrashing, which throttles admission: no row would ever run out of pages.
        if eligible and not self.setting.optimistic:
            self.ring.scheduler._lifecycle.preempt(self.random.choice(eligible))

    def _pin(self) -> None:
        if len(self._pins) >= 2:
            return
        tree = self.ring.scheduler._cache.tree
        prompt = i32(*self.random.choice(self._stems))
        path = Path(self.random.choice(_SALTS))
        tree.match(path, prompt, 12)
        tree.hold(path)
        self._pins.append(path)

    def _unpin(self) -> None:
        if self._pins:
            path = self._pins.pop(self.random.randrange(len(self._pins)))
            self.ring.scheduler._cache.tree.unpin(path)

    def _census(self) -> None:
        server = self.random.randrange(_SERVERS)
        listed = [key for key in self.live if server_of(key[0]) == server]
        rids, attempts = [rid for rid, _ in listed], [attempt for _, attempt in listed]
        census = Census(server=server, rids=np.array(rids, U64).tobytes(), attempts=np.array(attempts, U32).tobytes())
        self.ring.send(census)

    def _kill_server(self) -> None:
        server = self.random.randrange(_SERVERS)
        for rid, attempt in list(self.live):
            if server_of(rid) == server:
                self._disown(rid, attempt)
        self.incarnations[server] += 1
        self._send_world()

    def _send_world(self) -> None:
        servers = [make_stage(StageKind.SERVER, i, incarnation) for i, incarnation in enumerate(self.incarnations)]
        self.ring.send(make_world(*servers, make_stage(StageKind.WORKER, 0, 1, StageState.READY)))

    # ---------------------------------------------------------------- checks

    def _settle(self) -> None:
        """Compare requests that ended with what an undisturbed run gives."""
        for key, record in list(self.ring.received.items()):
            if key in self.gone:
                self.gone.discard(key)
                del self.ring.received[key]
                continue
            admit = self.live.get(key)
            if admit is None:
                assert record.closed or not record.ids, f"{key} got a token and nobody wants it"
                del self.ring.received[key]
                continue
            self._compare(key, admit)

    def _compare(self, key: tuple[int, int], admit: Admit) -> None:
        record = self.ring.received[key]
        want, finish, matched = self._wanted[key]
        resumed = len(admit.output_ids) // 4
        assert record.ids == want[: len(record.ids)], f"{key}: {record.ids} is no prefix of {want}"
        assert not record.ids or record.starts[0] == resumed
        if record.finish is not Finish.NONE:
            assert (record.ids, record.finish, record.matched) == (want, finish, matched)
            self.finished += 1
        if record.ended:
            self._strike(*key)
            del self.ring.received[key]

    def check(self) -> None:
        """Count everything anew."""
        scheduler = self.ring.scheduler
        cache, rows = scheduler._cache, scheduler._rows
        users = Counter(node for path in self._pins for node in path.nodes)
        requests = [request for request in rows.requests if request is not None]
        own = b""
        for request in requests:
            path, table = request.path, rows.table(request.slot)
            shared = len(path.pages)
            assert len(path) * ID_BYTES == shared
            assert table[:shared] == path.pages
            own += table[shared:]
            users.update(path.nodes)
            assert request.state in (State.PREFILL, State.DECODE)
            assert rows.planned[request.slot] <= rows.room[request.slot]
        cache.check(own)
        for node in cache.tree.nodes():
            assert users.pop(node, 0) == node.users, "users of a page are miscounted"
        assert not users, "a page is used that is not in the tree"
        assert rows.count == len(requests)
        assert cache.committed == sum(request.expected_pages for request in requests)
        queued = [r for r in scheduler._registry.requests.values() if r.state is State.QUEUED]
        assert len(queued) == scheduler._queues.count
        assert sum(request.tokens for request in queued) == scheduler._queues.tokens
        assert len(queued) + len(requests) == len(scheduler._registry.requests)

    def finish(self) -> None:
        """Let everything end, and find nothing left."""
        while self._pins:
            self._unpin()
        for _ in range(100_000):
            self._plan()
            worked = self.ring.result()
            self.ring.collect()
            self._settle()
            if not worked:
                break
        assert not self.live, f"{len(self.live)} requests never ended"
        self.check()
        assert self.ring.scheduler.counters()["running"] == 0
        self.ring.send(Flush(rid=rid_of(1)))
        self.ring.scheduler._cache.check_empty()
        counters = self.ring.scheduler.counters()
        assert counters["pages_free"] == counters["pages_total"]
        assert counters["window_pages_free"] == counters["window_pages_total"]
        assert not self.ring.scheduler._lifecycle.stops.watched.any()


SETTINGS = [
    Setting(depth=1, pages=40),
    Setting(depth=2, pages=40, optimistic=True),
    Setting(depth=3, pages=40, optimistic=True),
    Setting(depth=2, pages=28, optimistic=True),
    Setting(depth=3, pages=300),
    Setting(depth=2, pages=60, prefix_caching=False),
    Setting(depth=2, pages=40, chunked=False),
    Setting(depth=2, pages=60, preempt_every=3),
    Setting(depth=2, pages=60, window=13, window_pages=24),
    Setting(depth=3, pages=60, window=13, window_pages=12, optimistic=True),
    Setting(depth=2, pages=0, window=9, window_pages=5, optimistic=True),
    Setting(depth=3, pages=0, window=14, window_pages=24, preempt_every=5),
    Setting(depth=1, pages=40, window=1, window_pages=16, prefix_caching=False),
    Setting(depth=3, pages=0, window=200, window_pages=40),
    Setting(depth=1, pages=40, step_ids=5),
    Setting(depth=2, pages=28, step_ids=5, optimistic=True),
    Setting(depth=3, pages=40, step_ids=2, preempt_every=5),
    Setting(depth=2, pages=60, step_ids=5, window=13, window_pages=24),
    Setting(depth=3, pages=0, step_ids=9, window=14, window_pages=12, optimistic=True),
]


def fuzz(events: int, seed: int, setting: Setting) -> Fuzz:
    """Run so many events and finish. Raises AssertionError or PageError where something is wrong."""
    run = Fuzz(seed, setting)
    try:
        for _ in range(events):
            run.event()
        run.finish()
    except Exception:
        print(f"fuzz failed: seed {seed}, {setting}, event {run.events}", file=sys.stderr)  # noqa: T201
        raise
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    finished = 0
    for number, setting in enumerate(SETTINGS):
        run = fuzz(arguments.events // len(SETTINGS), arguments.seed + number, setting)
        finished += run.finished
        counters = run.ring.scheduler.counters()
        sys.stdout.write(
            f"{setting}: {run.finished} finished, {counters['preemptions']:.0f} preemptions, "
            f"{counters['evictions']:.0f} evictions, {counters['prefix_hit_tokens']:.0f} hit tokens, "
            f"{counters['dropped_rows']:.0f} dropped rows, {counters['stalled_steps']:.0f} stalled steps\n"
        )
    sys.stdout.write(f"{arguments.events} events, {finished} requests, {time.perf_counter() - begin:.0f} s\n")


if __name__ == "__main__":
    main()
