"""What the tests share: pairs of engines, event loops, and a second process."""

import asyncio
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import immwire
import pytest
import uvloop

#: Long enough for a busy machine; no test waits so long unless it fails.
PATIENCE = 20.0

# Partners in other processes find their functions by importing the test modules.
sys.path.insert(0, str(Path(__file__).parent))


def stop(process: int) -> None:
    """Stops a child of this process; returns once all of its threads stand still."""
    os.kill(process, signal.SIGSTOP)
    until = time.monotonic() + PATIENCE
    while os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is None:
        assert time.monotonic() < until, "it goes on"
        time.sleep(0.001)


def join(*threads: threading.Thread) -> None:
    """Waits until the threads have ended; a thread that does not end is a failure."""
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread} goes on"


class Pair:
    """Two engines of this process, the sender knowing the receiver."""

    def __init__(self, **config: object) -> None:
        self.sender = immwire.TransferEngine(timeout=PATIENCE, **config)
        self.receiver = immwire.TransferEngine(timeout=PATIENCE, **config)
        self.peer = self.sender.add_peer(self.receiver.address)
        self.sender.wait_peer_blocking(self.peer)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable:
    """Runs a coroutine on a new event loop, in debug mode with asyncio's."""
    if request.param is asyncio.run:
        return lambda main: asyncio.run(main, debug=True)
    return request.param


@pytest.fixture
def partner() -> Iterator[Callable]:
    """Starts ``function(connection)`` in another process; returns the other end, and joins in the end."""
    context = multiprocessing.get_context("spawn")
    started = []

    def start(function: Callable) -> multiprocessing.connection.Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
        return ours

    yield start
    for process, ours in started:
        ours.close()
        process.join(PATIENCE)
        assert process.exitcode == 0
