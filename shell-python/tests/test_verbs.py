"""The same engine on RDMA NICs, by libibverbs.

What needs a NIC is run where `IMMWIRE_WITH_RDMA=1` says that there is one: in a virtual machine with
Soft-RoCE, by `platform-linux/tests/in-guest`.
"""

import asyncio
import os
from array import array
from collections.abc import Callable

import immwire
import pytest

with_rdma = pytest.mark.skipif(
    os.environ.get("IMMWIRE_WITH_RDMA") != "1", reason="IMMWIRE_WITH_RDMA=1 does not say that there is a NIC"
)


@with_rdma
def test_a_write_and_pages_arrive(run: Callable) -> None:
    async def main() -> None:
        def engine() -> immwire.TransferEngine:
            return immwire.TransferEngine(
                provider="verbs", traffic_class=104, service_level=3, ack_timeout=17, retry_count=2
            )

        with engine() as sender, engine() as receiver:
            memory, counter = receiver.alloc(1 << 18), receiver.counter()
            data = os.urandom(1 << 18)
            source = sender.register(bytearray(data))
            peer = sender.add_peer(receiver.address)
            await sender.wait_peer(peer)
            to = dict(peer=peer, src=source, dst=memory.desc, imm=counter.tag)
            transfer = sender.submit_single_write(**to)
            await asyncio.gather(counter.wait(1, timeout=60), transfer)
            assert memory.read(0, 1 << 18) == data
            pages = array("I", range(64))
            backwards = sender.submit_paged_writes(
                **to, src_pages=pages[::-1], dst_pages=pages, page_bytes=4096
            )
            await asyncio.gather(counter.wait(64, timeout=60), backwards)
            assert memory.read(0, 4096) == data[63 * 4096 :]

    run(main())


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(immwire.ImmwireError, match=r"no-such-device|libibverbs"):
        immwire.TransferEngine(provider="verbs", devices=["no-such-device"])


def test_its_options_are_for_it_alone() -> None:
    numbers = ("gid_index", "traffic_class", "service_level", "ack_timeout", "retry_count")
    of_ports = (dict(devices=["mlx5_0"]), *({number: 1} for number in numbers))
    for options in (*of_ports, dict(on_demand=True), dict(classic=True)):
        with pytest.raises(immwire.ConfigError, match='provider="verbs"'):
            immwire.TransferEngine(**options)
        with pytest.raises(immwire.ConfigError, match='provider="verbs"'):
            immwire.TransferEngine(provider="libfabric", **options)
