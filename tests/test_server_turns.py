"""Handlers that all have news at once get their turns a few at a time, in order."""

import asyncio

from server.turns import Place, Turns


async def wait_for_news(place: Place, name: int, done: list[int]) -> None:
    await place.news()
    done.append(name)


def test_others_come_between() -> None:
    async def main() -> None:
        turns, done = Turns(), list[int]()
        places = [turns.place() for _ in range(100)]
        tasks = [asyncio.create_task(wait_for_news(place, i, done)) for i, place in enumerate(places)]
        await asyncio.sleep(0)
        for place in places:
            place.tell()
            place.tell()  # is nothing more
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
        turns, done = Turns(), list[int]()
        places = [turns.place() for _ in range(3)]
        tasks = [asyncio.create_task(wait_for_news(place, i, done)) for i, place in enumerate(places)]
        await asyncio.sleep(0)
        for place in places:
            place.tell()
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert done == [0, 2]
        await asyncio.wait_for(places[1].turn(), 1)

    asyncio.run(main())
