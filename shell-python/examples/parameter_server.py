"""A parameter server: workers write gradients into slots of it, and it writes new parameters back.

python parameter_server.py
"""

import asyncio
import multiprocessing
import sys
import tempfile

import immwire
import numpy as np
from immwire import bootstrap

WORKERS, SIZE, ROUNDS, RATE = 2, 10_000, 50, 0.5
GOAL = np.linspace(-1, 1, SIZE, dtype=np.float32)


async def serve(directory: str) -> float:
    """Average gradients into parameters, round by round; return how far from the goal they end."""
    with immwire.TransferEngine() as engine, engine.counter() as arrived:
        slots, parameters = engine.alloc(4 * SIZE * WORKERS), engine.alloc(4 * SIZE)
        offers = [bytes(slots.desc), arrived.tag.to_bytes(4, "little")]
        workers = await meet(engine, directory, 0, offers)
        gradients = np.frombuffer(slots, dtype=np.float32).reshape(WORKERS, SIZE)
        values = np.frombuffer(parameters, dtype=np.float32)
        for _ in range(ROUNDS):
            await arrived.wait_from({worker.peer: 1 for worker in workers[1:]})
            values -= RATE * gradients.mean(axis=0)
            await asyncio.gather(*(push(engine, parameters, worker) for worker in workers[1:]))
        for _ in workers[1:]:  # Each says that it has seen the last round.
            await engine.recv()
        return float(abs(values - GOAL).max())


async def work(directory: str, rank: int) -> None:
    """Compute gradients of the distance to the goal, each worker with an error of its own."""
    with immwire.TransferEngine() as engine, engine.counter() as arrived:
        parameters, gradient = engine.alloc(4 * SIZE), engine.alloc(4 * SIZE)
        offers = [bytes(parameters.desc), arrived.tag.to_bytes(4, "little")]
        server, *_ = await meet(engine, directory, rank, offers)
        values, slope = (np.frombuffer(region, dtype=np.float32) for region in (parameters, gradient))
        for _ in range(ROUNDS):
            slope[:] = values - GOAL + (0.1 if rank == 1 else -0.1)
            await push(engine, gradient, server, offset=4 * SIZE * (rank - 1))
            await arrived.wait(1)
        await engine.submit_send(peer=server.peer, data=b"done")


async def meet(engine, directory, rank, offers):
    store = bootstrap.DirectoryStore(directory)
    return await asyncio.to_thread(bootstrap.join, engine, store, rank=rank, world=WORKERS + 1, offers=offers)


async def push(engine, region, member, offset=0):
    desc, tag = immwire.MrDesc.from_bytes(member.offers[0]), int.from_bytes(member.offers[1], "little")
    await engine.submit_single_write(peer=member.peer, src=region, dst=desc, dst_offset=offset, imm=tag)


def worker(directory, rank):
    asyncio.run(work(directory, rank))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        start = multiprocessing.get_context("spawn").Process
        processes = [start(target=worker, args=(place, rank + 1)) for rank in range(WORKERS)]
        [process.start() for process in processes]
        distance = asyncio.run(serve(place))
        [process.join() for process in processes]
    print(f"after {ROUNDS} rounds, the parameters are within {distance:.1e} of the goal")
    sys.exit(distance > 1e-3)
