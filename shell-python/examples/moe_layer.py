"""A layer of a mixture of experts, split over processes: its output is that of one process, bit for bit.

python moe_layer.py
"""

import multiprocessing
import sys

import immwire
import numpy as np

WORLD, EXPERTS, TOP_K, TOKENS, HIDDEN, LAYERS = 3, 8, 2, 64, 32, 4


def parameters():
    """The same at every rank: a router, and of each expert a matrix. Every one keeps only its own experts."""
    rng = np.random.default_rng(1)
    router = rng.standard_normal((HIDDEN, EXPERTS)).astype(np.float32)
    experts = rng.standard_normal((EXPERTS, HIDDEN, HIDDEN)).astype(np.float32) / HIDDEN**0.5
    return router, experts


def tokens(rank):
    return np.random.default_rng([2, rank]).standard_normal((TOKENS, HIDDEN)).astype(np.float16)


def route(router, x):
    """The experts that a token chooses, and how much it trusts each."""
    scores = np.stack([token.astype(np.float32) @ router for token in x])
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K].astype(np.int32)
    weights = np.exp(np.take_along_axis(scores, chosen, axis=1))
    return chosen, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def expert(matrix, row):
    """One row at a time: what it becomes does not depend on how many there are."""
    return np.tanh(row.astype(np.float32) @ matrix).astype(np.float16)


def work(connection, rank, firsts):
    """One rank: its tokens go to their experts and come back, layer after layer."""
    shape = dict(firsts=firsts, top_k=TOP_K, max_tokens=TOKENS, hidden=HIDDEN, dtype="float16", padding=8)
    with immwire.TransferEngine() as engine:
        joining = immwire.moe.HostAllToAll.open(engine, rank=rank, **shape)
        connection.send(joining.seat)
        with joining.join(connection.recv()) as exchange:
            router, experts = parameters()
            mine = experts[firsts[rank] : firsts[rank + 1]]
            x, rows = tokens(rank), np.empty((exchange.max_rows, HIDDEN), np.float16)
            for _ in range(LAYERS):
                received = exchange.dispatch(x, *route(router, x), out=rows)
                for matrix, first, count in zip(mine, received.offsets, received.counts, strict=False):
                    for row in range(first, first + count):
                        rows[row] = expert(matrix, rows[row])
                exchange.combine(rows, out=x)
            connection.send(x)
            connection.recv()  # Nobody leaves before all have their results.


def split(firsts):
    """All ranks' outputs, from a process each."""
    context = multiprocessing.get_context("spawn")
    ranks, processes = [], []
    for rank in range(len(firsts) - 1):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(theirs, rank, firsts)))
        processes[-1].start()
        ranks.append(ours)
    seats = [connection.recv() for connection in ranks]
    for connection in ranks:
        connection.send(seats)
    outputs = [connection.recv() for connection in ranks]
    for connection in ranks:
        connection.send("done")
    for process in processes:
        process.join()
    return outputs


def whole(firsts):
    """The same in this process. Each rank's experts are summed in float32 and rounded, then the ranks."""
    router, experts = parameters()
    outputs = [tokens(rank) for rank in range(WORLD)]
    for _ in range(LAYERS):
        for x in outputs:
            for token, chosen, weights in zip(x, *route(router, x), strict=True):
                parts = {}
                for number, weight in zip(chosen, weights, strict=True):
                    rank = rank_of(firsts, number)
                    result = weight * expert(experts[number], token).astype(np.float32)
                    parts[rank] = parts.get(rank, np.float32(0)) + result
                token[:] = sum(parts[rank].astype(np.float16).astype(np.float32) for rank in sorted(parts))
    return outputs


def rank_of(firsts, number):
    return int(np.searchsorted(firsts, number, side="right")) - 1


if __name__ == "__main__":
    firsts = [0, 3, 6, EXPERTS]
    same = all((a == b).all() for a, b in zip(split(firsts), whole(firsts), strict=True))
    print(f"{LAYERS} layers over {WORLD} processes: {'the same as' if same else 'other than'} in one")
    sys.exit(not same)
