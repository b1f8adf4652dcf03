"""Transfer engine for LLM systems: one-sided writes with immediate, and counters that say when all
of them have arrived.

A write goes from memory here to memory of a peer without the peer's doing; the immediate that comes
with it counts at one of the peer's counters. No order is assumed between writes.

>>> import asyncio, immwire
>>> async def main():
...     with immwire.TransferEngine() as sender, immwire.TransferEngine() as receiver:
...         there, counter = receiver.alloc(4096), receiver.counter()
...         here = sender.register(bytearray(b"hello"))
...         peer = sender.add_peer(receiver.address)
...         transfer = sender.submit_single_write(
...             peer=peer, src=here, dst=there.desc, dst_offset=8, imm=counter.tag)
...         await counter.wait(1, timeout=5)
...         await transfer
...         return there.read(8, 5)
>>> asyncio.run(main())
b'hello'

What takes time can be awaited, on asyncio's event loop or uvloop's; the method of the same name with
``_blocking`` behind waits without a loop, and lets other threads run. Errors are exceptions with
fields, below ``ImmwireError``. ``immwire.bootstrap`` helps peers find each other;
``immwire.moe`` is dispatch and combine of a mixture of experts.
"""

import atexit as _atexit

from . import moe
from ._errors import (
    CapacityError,
    ConfigError,
    CounterError,
    DeadlineExceeded,
    EngineClosed,
    ForkedError,
    ImmwireError,
    MoeError,
    MoeTimeout,
    PeerDown,
    PeerError,
    PeerShare,
    RankError,
    RegionError,
    RegionInUse,
    RequestError,
    TransferCancelled,
    TransferError,
    UnsupportedMemory,
    WaitTimeout,
)
from ._immwire import (
    Following,
    GpuFlag,
    ImmCounter,
    Message,
    MrDesc,
    NetAddr,
    Nic,
    PageIndices,
    PeerGroup,
    PeerId,
    Region,
    Stats,
    StreamWait,
    Target,
    Transfer,
    TransferEngine,
    UvmWatcher,
    Waiting,
    __version__,
    _close_all,
)

# Engines that are still there at the end are stopped while Python can run their callbacks.
_atexit.register(_close_all)

__all__ = [
    "CapacityError",
    "ConfigError",
    "CounterError",
    "DeadlineExceeded",
    "EngineClosed",
    "ForkedError",
    "Following",
    "GpuFlag",
    "ImmCounter",
    "ImmwireError",
    "Message",
    "MoeError",
    "MoeTimeout",
    "MrDesc",
    "NetAddr",
    "Nic",
    "PageIndices",
    "PeerDown",
    "PeerError",
    "PeerGroup",
    "PeerId",
    "PeerShare",
    "RankError",
    "Region",
    "RegionError",
    "RegionInUse",
    "RequestError",
    "Stats",
    "StreamWait",
    "Target",
    "Transfer",
    "TransferCancelled",
    "TransferEngine",
    "TransferError",
    "UnsupportedMemory",
    "UvmWatcher",
    "WaitTimeout",
    "Waiting",
    "__version__",
    "moe",
]
