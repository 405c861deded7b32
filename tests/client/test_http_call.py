"""How bodies are built and read: big ones never hold the event loop up for long."""

from __future__ import annotations

import asyncio

from tinkex.client.http_call import Pace


def test_between_two_big_bodies_everything_else_has_its_turn() -> None:
    happened: list[object] = []

    async def body(number: int, pace: Pace) -> None:
        await pace.turn()
        happened.append(number)
        asyncio.get_running_loop().call_soon(happened.append, "else")

    async def scenario() -> None:
        pace = Pace()
        await asyncio.gather(*(body(number, pace) for number in range(4)))

    asyncio.run(scenario())
    assert happened[:7] == [0, "else", 1, "else", 2, "else", 3]


def test_a_turn_that_is_given_up_holds_nobody_up() -> None:
    async def scenario() -> None:
        pace = Pace()
        turns = [asyncio.create_task(pace.turn()) for _ in range(3)]
        await asyncio.sleep(0)
        turns[0].cancel()
        turns[1].cancel()
        await asyncio.wait_for(turns[2], 5)

    asyncio.run(scenario())
