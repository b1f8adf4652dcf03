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


def test_shared_memory_on_the_own_host_and_tcp_to_another(run: Callable) -> None:
    """One scatter to both, and one counter for what both write back."""

    async def main() -> None:
        hosts = ("here", "here", "there")
        engines = [engine(shm_on_host=True, host=host, nics=2) for host in hosts]
        me, near, far = engines
        assert me.nics[0].name == "shm0" and len(me.nics) == 3
        assert [me.transport_to(other.address) for other in (near, far)] == ["shm", "libfabric"]
        data = os.urandom(200_000)
        src = me.register(bytearray(data))
        counter, back = me.counter(slot=9), me.alloc(2 * len(data))
        targets, places, counters = [], [], []
        for other in (near, far):
            peer = me.add_peer(other.address)
            await me.wait_peer(peer)
            place, count = other.alloc(len(data)), other.counter(slot=9)
            targets.append(immwire.Target(peer=peer, dst=place.desc, len=len(data)))
            places.append(place)
            counters.append(count)
        tag = counters[0].tag
        transfer = me.submit_scatter(src=src, targets=targets, imm=tag)
        await asyncio.gather(transfer, *(count.wait(1, timeout=20) for count in counters))
        assert all(place.read(0, len(data)) == data for place in places)
        for n, (other, place) in enumerate(zip((near, far), places, strict=True)):
            (peer,) = other.peers
            await other.submit_single_write(
                peer=peer, src=place, dst=back.desc, dst_offset=n * len(data), imm=counter.tag
            )
        await counter.wait(2, timeout=20)
        assert back.read(0, 2 * len(data)) == 2 * data
        for one in engines:
            one.close()

    run(main())


def test_engines_with_shared_memory_beside_are_of_a_kind(run: Callable) -> None:
    with engine(shm_on_host=True) as both, engine() as plain, immwire.TransferEngine() as shm:
        for other in (plain, shm):
            assert both.transport_to(other.address) is None
            with pytest.raises(immwire.ImmwireError, match="this engine uses shm-libfabric"):
                both.add_peer(other.address)
        assert both.transport_to(both.address) == "shm"
    with pytest.raises(immwire.ConfigError, match="shm_on_host"):
        immwire.TransferEngine(host="here")
    with pytest.raises(immwire.ConfigError, match="1 to 7"):
        engine(shm_on_host=True, nics=8)


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(immwire.ImmwireError, match="no-such-library"):
        immwire.TransferEngine(provider="libfabric", library="/no-such-library.so")


def test_its_options_are_for_it_alone() -> None:
    with pytest.raises(immwire.ImmwireError, match="libfabric"):
        immwire.TransferEngine(interface="lo")
