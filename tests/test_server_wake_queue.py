"""Handlers that are all notified at once are woken a few at a time, in order."""

import asyncio

from server.wake_queue import Waiter, WakeQueue


async def wait(waiter: Waiter, name: int, done: list[int]) -> None:
    await waiter.wait_notified()
    done.append(name)


def test_others_come_between() -> None:
    async def main() -> None:
        queue, done = WakeQueue(), list[int]()
        waiters = [queue.waiter() for _ in range(100)]
        tasks = [asyncio.create_task(wait(waiter, i, done)) for i, waiter in enumerate(waiters)]
        await asyncio.sleep(0)
        for waiter in waiters:
            waiter.notify()
            waiter.notify()  # changes nothing
        steps, before = [], 0
        while len(done) < 100:
            await asyncio.sleep(0)
            steps.append(len(done) - before)
            before = len(done)
        assert max(steps) <= 8
        assert done == sorted(done)
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_one_that_has_left_stops_nobody() -> None:
    async def main() -> None:
        queue, done = WakeQueue(), list[int]()
        waiters = [queue.waiter() for _ in range(3)]
        tasks = [asyncio.create_task(wait(waiter, i, done)) for i, waiter in enumerate(waiters)]
        await asyncio.sleep(0)
        for waiter in waiters:
            waiter.notify()
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert done == [0, 2]
        await asyncio.wait_for(waiters[1].wait_turn(), 1)

    asyncio.run(main())
