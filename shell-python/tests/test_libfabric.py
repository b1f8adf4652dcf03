"""The same engine over TCP, by whatever libfabric the machine has."""

import asyncio
import os
from collections.abc import Callable

import immwire
import pytest


def engine(**config: object) -> immwire.TransferEngine:
    """On loopback. No libfabric is a failure, unless it is wanted so."""
    try:
        return immwire.TransferEngine(provider="libfabric", interface="lo", **config)
    except immwire.ImmwireError as error:
        if os.environ.get("IMMWIRE_WITHOUT_LIBFABRIC") == "1":
            pytest.skip(f"no libfabric, as was said: {error}")
        raise


def test_a_write_arrives(run: Callable) -> None:
    async def main() -> None:
        with engine(nics=2) as sender, engine() as receiver:
            memory, counter = receiver.alloc(1 << 20), receiver.counter()
            data = os.urandom(1 << 20)
            peer = sender.add_peer(receiver.address)
            await sender.wait_peer(peer)
            transfer = sender.submit_single_write(
                peer=peer, src=sender.register(bytearray(data)), dst=memory.desc, imm=counter.tag
            )
            await asyncio.gather(counter.wait(1, timeout=20), transfer)
            assert memory.read(0, 1 << 20) == data

    run(main())


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(immwire.ImmwireError, match="no-such-library"):
        immwire.TransferEngine(provider="libfabric", library="/no-such-library.so")


def test_its_options_are_for_it_alone() -> None:
    with pytest.raises(immwire.ImmwireError, match="libfabric"):
        immwire.TransferEngine(interface="lo")
