"""Calls as the README has them, for mypy alone: nothing of this is run."""

import asyncio
from collections.abc import Coroutine

import immwire


async def wait(
    engine: immwire.TransferEngine, transfer: immwire.Transfer, counter: immwire.ImmCounter
) -> bytes:
    await transfer
    await counter.wait(1, timeout=5)
    message = asyncio.create_task(engine.recv())
    room, _ = await asyncio.gather(engine.wait_capacity(), transfer.wait())
    if room:
        return (await engine.recv()).data
    coroutine: Coroutine[asyncio.Future[None], object, immwire.Message] = engine.recv()
    coroutine.close()
    return (await message).data
