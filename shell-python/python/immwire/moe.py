"""Dispatch and combine of a mixture of experts: tokens to the ranks of their experts, and results back.

Dispatch gives each rank the tokens that chose one of its experts, by expert and padded for a grouped GEMM,
or each once with a list of which row is which; combine brings the results back, weighted and summed.
``HostAllToAll`` is in host memory, over any transport: it needs neither GPU nor NIC, and is made to be
right, not fast. ``GpuAllToAll`` is among GPUs of one host, by kernels in the order of the caller's streams,
with the same results. ``AllToAll`` is either, as ``device`` says, for a group of ranks, and called alike.
``P2PAllToAll`` is ``GpuAllToAll`` under the argument names of an earlier library.

>>> import numpy, threading
>>> import immwire
>>> def rank(rank, engine, joining, seats):
...     with joining.join(seats) as exchange:
...         rows = numpy.zeros((exchange.max_rows, 8), numpy.float16)
...         x, out = numpy.ones((1, 8), numpy.float16), numpy.empty((1, 8), numpy.float16)
...         # One token, to an expert of each rank.
...         choices = numpy.array([[1, 2]], numpy.int32), numpy.array([[0.5, 0.25]], numpy.float32)
...         received = exchange.dispatch(x, *choices, out=rows)
...         exchange.combine(rows, out=out)  # The experts do nothing.
...         results[rank] = received.counts, out[0, 0].item()
>>> engines, results = [immwire.TransferEngine() for _ in range(2)], {}
>>> shape = dict(experts=4, world=2, top_k=2, max_tokens=4, hidden=8, dtype="float16")
>>> joining = [immwire.moe.HostAllToAll.open(engine, rank=i, **shape) for i, engine in enumerate(engines)]
>>> seats = [each.seat for each in joining]  # Bytes: they travel by whatever the ranks find each other with.
>>> both = [threading.Thread(target=rank, args=(i, engines[i], joining[i], seats)) for i in range(2)]
>>> for thread in both: thread.start()
>>> for thread in both: thread.join()
>>> for engine in engines: engine.close()
>>> results == {0: ([0, 2], 0.75), 1: ([2, 0], 0.75)}
True
"""

from ._alltoall import AllToAll
from ._errors import MoeError, MoeTimeout, RankError
from ._immwire import GpuAllToAll, GpuJoining, HostAllToAll, Joining, MoeReport, Received
from ._p2p import P2PAllToAll

__all__ = [
    "AllToAll",
    "GpuAllToAll",
    "GpuJoining",
    "HostAllToAll",
    "Joining",
    "MoeError",
    "MoeReport",
    "MoeTimeout",
    "P2PAllToAll",
    "RankError",
    "Received",
]
