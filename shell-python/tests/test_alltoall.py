"""``AllToAll``: the same calls on the CPU and, on the stand-in for the CUDA driver, on GPUs.

Cases are processes of their own, as in test_gpu_moe.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import immwire
import numpy as np
import pytest
from conftest import PATIENCE
from immwire import bootstrap, moe
from test_gpu import driver, on_the_stand_in
from test_gpu_moe import Array
from test_moe import FORMATS, HIDDEN, MAX_TOKENS, TOP_K, expected_results, made_up
from test_p2p import Group

EXPERTS, PADDING = 6, 4


class OnHost:
    """An array where a rank in host memory has it."""

    def __init__(self, content):
        self.there = np.ascontiguousarray(content).copy()

    def read(self):
        return self.there


class Ranks:
    """Ranks of this process, each with a thread of its own: on the CPU, or on a GPU each."""

    def __init__(self, stack, world, on_gpus=False, groups=None, engines=(None, None, None), **more):
        self.on_gpus = on_gpus
        # Whether 16-bit values are handed over as arrays of a type of which numpy says no format.
        self.formatless = False
        share, odd = divmod(EXPERTS, world)
        even = [share * rank + min(rank, odd) for rank in range(world + 1)]
        self.firsts = more.get("firsts", even)
        shape = dict(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MAX_TOKENS, padding=PADDING)
        shape |= dict(patience=PATIENCE, timeout=PATIENCE) | (dict(sms=2) if on_gpus else {}) | more
        groups = groups or Group.all(world)
        self.pool = stack.enter_context(ThreadPoolExecutor(world))

        def make(rank):
            device = f"cuda:{rank % 2}" if on_gpus else "cpu"
            return moe.AllToAll(groups[rank], device=device, engine=engines[rank], **shape)

        self.all = list(self.pool.map(make, range(world)))
        for one in self.all:
            stack.callback(one.close)

    def each(self, function):
        """``function(rank, exchange)`` at every rank."""
        return list(self.pool.map(function, range(len(self.all)), self.all))

    def array(self, rank, content):
        return Array(self.all[rank].engine, rank % 2, content) if self.on_gpus else OnHost(content)

    def given(self, array):
        if array is None or self.on_gpus:
            return array
        return (
            array.there.view("M8[s]") if self.formatless and array.there.dtype == np.uint16 else array.there
        )

    def settle(self, rank):
        if self.on_gpus:
            driver(rank % 2, [("cuCtxSynchronize",)])

    def round(self, seed, tokens, wide=False, counted=False, slots=False, halves=False, onto=False):
        """One round, compared; returns all that was received and came back."""
        to, back = FORMATS["bfloat16"]
        stream = dict(stream=0) if self.on_gpus else {}
        step = [dict(half="send"), dict(half="receive")] if halves else [{}]

        def rank(number, exchange):
            experts = self.firsts[-1]
            x, indices, weights, _ = made_up(seed + number, tokens[number], experts)
            room = tokens[number] + counted  # There is memory for one more, of which nothing is to be seen.
            grown = [
                np.resize(part, (room, *part.shape[1:])) if len(part) else part
                for part in (x, indices, weights)
            ]
            if counted and not tokens[number]:
                grown = made_up(seed, 1, experts)[:3]
            to_send, choices, factors = grown
            first, end = self.firsts[number : number + 2]
            own = end - first
            places = exchange.max_slots if slots else exchange.max_rows
            lent = dict(
                out=self.array(number, np.full((places, HIDDEN), 77, np.uint16)),
                counts=self.array(number, np.full(own, 55, np.int32)),
                offsets=self.array(number, np.full(own + 1, 55, np.int32)),
            )
            if slots:
                lent["slots"] = self.array(number, np.full(exchange.max_rows, 55, np.int32))
            if counted:
                lent["count"] = self.array(number, np.array([tokens[number]], np.int32))
            routes = [
                self.array(number, choices.astype(np.int64 if wide else np.int32)),
                self.array(number, factors.astype(np.float32)),
            ]
            sent = self.array(number, to(to_send))
            keywords = {name: self.given(array) for name, array in lent.items()}
            for half in step:
                exchange.dispatch(self.given(sent), *map(self.given, routes), **keywords, **stream, **half)
            self.settle(number)
            counts, offsets = lent["counts"].read(), lent["offsets"].read()
            rows = lent["out"].read()
            if slots:
                named = lent["slots"].read()[: offsets[-1]]
                rows = np.where(named[:, None] < 0, np.zeros_like(rows[:1]), rows[named])
            y = np.zeros((exchange.max_rows, HIDDEN), np.uint16)
            for expert in range(own):
                assert offsets[expert] % PADDING == 0
                part = slice(offsets[expert], offsets[expert] + counts[expert])
                y[part] = to(back(rows[part]) * (first + expert + 1))
            results = np.full((room, HIDDEN), 77, np.uint16)
            if onto:
                results[:] = to(np.full((room, HIDDEN), 4.0))
            before = results.copy()
            out, answers = self.array(number, results), self.array(number, y)
            for half in step:
                exchange.combine(self.given(answers), out=self.given(out), accumulate=onto, **stream, **half)
            self.settle(number)
            found = out.read()
            expected = expected_results(x, indices, weights) + (4.0 if onto else 0.0)
            assert (back(found[: tokens[number]]) == expected).all()
            assert (found[tokens[number] :] == before[tokens[number] :]).all(), "results of no token"
            assert not exchange.report()
            assert exchange.active_ranks == list(range(exchange.world))
            return counts.tolist(), offsets.tolist(), found.tolist()

        return self.each(rank)


ROUNDS = [
    dict(tokens=(5, 0, 2)),
    dict(tokens=(1, MAX_TOKENS, 7), wide=True),
    dict(tokens=(3, 4, 0), counted=True, wide=True),
    dict(tokens=(6, 2, 5), slots=True),
    dict(tokens=(MAX_TOKENS, 1, 1), halves=True, onto=True),
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rounds_on_the_cpu(world):
    with ExitStack() as stack:
        ranks = Ranks(stack, world)
        assert repr(ranks.all[0]).startswith(f"<AllToAll by <HostAllToAll rank 0 of {world}, ")
        for seed, given in enumerate(ROUNDS):
            ranks.round(100 * seed, **given)
        engines = [one.engine for one in ranks.all]
    assert all(engine.closed for engine in engines)


#: Of three ranks the second has no expert, of two the last.
UNEVEN = [[0, 5, 5, 7], [0, 6, 6]]


@pytest.mark.parametrize("firsts", UNEVEN)
def test_uneven_experts_on_the_cpu(firsts):
    with ExitStack() as stack:
        ranks = Ranks(stack, len(firsts) - 1, experts=firsts[-1], firsts=firsts)
        for seed, given in enumerate(ROUNDS):
            received = ranks.round(100 * seed, **given)
            assert [len(counts) for counts, _, _ in received] == np.diff(firsts).tolist()
        # An array says it, too, and then nobody need say how many there are.
        others = Ranks(stack, len(firsts) - 1, experts=None, firsts=np.array(firsts))
        others.round(3, **ROUNDS[0])


def test_arrays_without_a_format_on_the_cpu():
    with pytest.raises(ValueError):
        memoryview(np.zeros(1, np.uint64).view("M8[s]"))
    with ExitStack() as stack:
        ranks = Ranks(stack, 2)
        ranks.formatless = True
        ranks.round(1, [5, 3])
        ranks.round(2, [5, 3], counted=True)
        ranks.round(3, [5, 3], onto=True)


def test_more_experts_than_can_be_even_on_the_cpu():
    with ExitStack() as stack:
        ranks = Ranks(stack, 3, experts=7, firsts=[0, 3, 5, 7])
        even = Ranks(stack, 3, experts=7)
        even.firsts = ranks.firsts
        assert ranks.round(1, (5, 0, 2)) == even.round(1, (5, 0, 2))


#: Bytes of a token, and of its scales, in formats that the exchange does not know.
OPAQUE = {
    "nvfp4": lambda hidden: (hidden // 2, hidden // 16),
    "mxfp4": lambda hidden: (hidden // 2, hidden // 32),
    "mxfp8": lambda hidden: (hidden, hidden // 32),
}


def opaque(kind, hidden, on_gpus):
    """Tokens of a format with block scales, of which every byte is compared."""
    token_bytes, scale_bytes = OPAQUE[kind](hidden)
    # To whole words, with bytes that arrive as they are, too.
    scale_bytes = -(-scale_bytes // 4) * 4
    world, most, top_k, experts = 2, 3, 2, 5
    firsts, tokens = [0, 4, 5], (most, 1)
    shape = dict(experts=experts, firsts=firsts, top_k=top_k, hidden=hidden, max_tokens=most)
    with ExitStack() as stack:
        ranks = Ranks(stack, world, on_gpus, token_bytes=token_bytes, scale_bytes=scale_bytes, **shape)
        for turn, slots in enumerate((False, True)):
            rng = np.random.default_rng(turn)
            inputs = [
                (
                    rng.integers(0, 256, (count, token_bytes), np.uint8),
                    rng.integers(0, 256, (count, scale_bytes), np.uint8),
                    np.array([rng.permutation(experts)[:top_k] for _ in range(count)], np.int32),
                )
                for count in tokens
            ]

            def rank(number, exchange, inputs=inputs, slots=slots):
                def space(*shape, dtype=np.uint8):
                    return ranks.array(number, np.full(shape, 77, dtype))

                stream = dict(stream=0) if on_gpus else {}
                x, scales, indices = (ranks.array(number, part) for part in inputs[number])
                weights = ranks.array(number, np.ones(inputs[number][2].shape, np.float32))
                places = exchange.max_slots if slots else exchange.max_rows
                out, out_scales = space(places, token_bytes), space(places, scale_bytes)
                own = range(firsts[number], firsts[number + 1])
                counts, offsets = space(len(own), dtype=np.int32), space(len(own) + 1, dtype=np.int32)
                named = space(exchange.max_rows, dtype=np.int32) if slots else None
                exchange.dispatch(
                    *map(ranks.given, (x, indices, weights, scales)),
                    out=ranks.given(out),
                    out_scales=ranks.given(out_scales),
                    slots=ranks.given(named),
                    counts=ranks.given(counts),
                    offsets=ranks.given(offsets),
                    **stream,
                )
                ranks.settle(number)
                rows, row_scales, starts = out.read(), out_scales.read(), offsets.read()
                for expert, count, start in zip(own, counts.read(), starts, strict=False):
                    chosen = [(choices == expert).any(axis=1) for _, _, choices in inputs]
                    at = np.arange(start, start + count)
                    if slots:
                        at = named.read()[at]
                    for i, found in enumerate((rows, row_scales)):
                        sent = np.concatenate(
                            [each[i][mask] for each, mask in zip(inputs, chosen, strict=True)]
                        )
                        assert found[at].tobytes() == sent.tobytes()
                # Results are numbers, whatever tokens are.
                y = ranks.array(number, np.full((max(starts[-1], 1), hidden), 0x3F80, np.uint16))
                results = space(tokens[number], hidden, dtype=np.uint16)
                exchange.combine(ranks.given(y), out=ranks.given(results), **stream)
                ranks.settle(number)
                # Twice 1.
                assert (results.read() == 0x4000).all()
                assert not exchange.report()

            ranks.each(rank)


@pytest.mark.parametrize("hidden", [7168, 2880])
@pytest.mark.parametrize("kind", OPAQUE)
def test_tokens_with_block_scales_on_the_cpu(kind, hidden):
    opaque(kind, hidden, on_gpus=False)


def test_scales_need_no_padding_on_the_cpu():
    """There the exchange copies bytes."""
    with ExitStack() as stack:
        (alone,) = Ranks(stack, 1, token_bytes=16, scale_bytes=5).all
        x, scales = np.arange(16, dtype=np.uint8), np.arange(5, dtype=np.uint8)
        rows, row_scales = np.zeros((alone.max_rows, 16), np.uint8), np.zeros((alone.max_rows, 5), np.uint8)
        routes = np.array([[2, -1, -1, -1]]), np.ones((1, TOP_K), np.float32)
        places = dict(counts=np.zeros(EXPERTS, np.int32), offsets=np.zeros(EXPERTS + 1, np.int32))
        alone.dispatch(x, *routes, scales, out=rows, out_scales=row_scales, **places)
        assert (rows[0] == x).all() and (row_scales[0] == scales).all()


def test_it_has_all_that_both_exchanges_have():
    def names(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    on_host, on_gpus = names(moe.HostAllToAll), names(moe.GpuAllToAll)
    assert (on_host & on_gpus) - names(moe.AllToAll) == {"open"}
    # What is said of the others is true.
    assert on_host - on_gpus == {"rounds"}
    assert on_gpus - on_host == {"start_over", "nbytes", "token_bytes", "scale_bytes"}
    with moe.AllToAll(Group.all(1)[0], experts=2, top_k=1, hidden=8, max_tokens=4) as alone:
        assert alone.exchange.rounds == 0


def test_ranks_meet_in_a_store_on_engines_that_are_there(tmp_path):
    store = bootstrap.DirectoryStore(tmp_path)
    with ExitStack() as stack:
        engines = [stack.enter_context(immwire.TransferEngine()) for _ in range(2)]
        groups = [(store, rank, 2) for rank in range(2)]
        ranks = Ranks(stack, 2, groups=groups, engines=engines, exact=True, chunk_tokens=3)
        ranks.round(1, tokens=(4, 5))
        for one in ranks.all:
            one.close()
            one.close()
            assert one.closed
        assert not any(engine.closed for engine in engines)


def test_tensors_without_a_buffer_are_asked_for_one(monkeypatch):
    class Tensor:
        def __init__(self, content):
            self.content = content

        def detach(self):
            return self

        def numpy(self):
            return self.content

        def view(self, kind):
            return Tensor(self.content.view(kind))

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, uint8=np.uint8))
    monkeypatch.setattr(Ranks, "given", lambda _, array: None if array is None else Tensor(array.there))

    with ExitStack() as stack:
        Ranks(stack, 2).round(3, tokens=(4, 1), wide=True, counted=True, slots=True)


def test_what_cannot_be_is_refused():
    def refused(words, **more):
        shape = dict(experts=2, top_k=1, hidden=8, max_tokens=4) | more
        group = shape.pop("group", Group.all(1)[0])
        with pytest.raises(immwire.ConfigError, match=words):
            moe.AllToAll(group, **shape)

    refused("quantize is for GPUs", quantize="float32")
    refused("chunk_tokens is for host memory", device=0, chunk_tokens=4)
    refused("sms is for GPUs", sms=4)
    refused("experts is None: .* firsts", experts=None)
    refused("firsts has 3 entries instead of 2: the first expert", firsts=[0, 1, 2])
    refused("firsts has 0 entries instead of 2", firsts=[])
    refused("experts is 2, and firsts says 3", firsts=[0, 3])
    refused("rank 0 starts with expert 1", firsts=[1, 2])
    refused("1 to 1024", experts=0)
    refused("1 to 1024", experts=None, firsts=[0, 0])
    refused("expert 4, the next one with 2", group=SimpleNamespace(rank=0, size=2), firsts=[0, 4, 2])
    refused("which GPU is it", device="tpu")
    refused("group has rank None of None", group=None)
    refused("group has no all_gather_object", group=SimpleNamespace(rank=0, size=1))
    with moe.AllToAll(Group.all(1)[0], experts=2, top_k=1, hidden=8, max_tokens=4, dtype="float16") as alone:
        x, weights = np.ones((1, 8), np.float16), np.ones((1, 1), np.float32)
        arrays = dict(out=np.zeros((alone.max_rows, 8), np.float16))
        arrays |= dict(counts=np.zeros(2, np.int32), offsets=np.zeros(3, np.int32))
        one = np.array([[1]])
        read_only = np.zeros(3, np.int32)
        read_only.flags.writeable = False
        calls = [
            ("stream is for GPUs", dict(stream=0)),
            ("indices: ", dict(indices=one << 40)),
            ("count has 8 bytes of format 'l' instead of 1 int32", dict(count=np.array([1]))),
            ("count is 2, of 1 tokens", dict(count=np.array([2], np.int32))),
            ("count is -1, of 1 tokens", dict(count=np.array([-1], np.int32))),
            ("counts has 8 bytes of format 'f' instead of 2 int32", dict(counts=np.zeros(2, np.float32))),
            ("offsets has 8 bytes of format 'i' instead of 3 int32", dict(offsets=np.zeros(2, np.int32))),
            ("offsets cannot be written to", dict(offsets=read_only)),
        ]
        for words, wrong in calls:
            given = dict(x=x, indices=one, weights=weights) | arrays | wrong
            with pytest.raises(immwire.RequestError, match=words):
                alone.dispatch(**given)
        with pytest.raises(TypeError):
            alone.dispatch(x, one, weights, **arrays | dict(counts=[0, 0]))
        # Nobody had part in a round by then.
        alone.dispatch(x, one, weights, **arrays)
        assert (arrays["counts"].tolist(), arrays["offsets"].tolist()) == ([0, 1], [0, 0, 1])
        with pytest.raises(immwire.RequestError, match="stream is for GPUs"):
            alone.combine(arrays["out"], out=x, stream=0)
        # Other numbers than the exchange's.
        for wrong in (np.ones((1, 8), np.float32), np.ones((1, 8), np.int32), np.ones((2, 4), np.float64)):
            for given in (dict(y=wrong, out=x), dict(y=arrays["out"], out=wrong)):
                if wrong.dtype != np.int32:
                    with pytest.raises(
                        immwire.RequestError, match=f"(y|out) has {wrong.dtype} instead of float16"
                    ):
                        alone.combine(**given)
                with pytest.raises(
                    immwire.RequestError, match=r"(y|out) has items of \d bytes instead of float16"
                ):
                    alone.exchange.combine(**given)

        # A type by its class.
        class Typed:
            dtype = np.float16

            def __init__(self, array):
                self.__array_interface__ = array.__array_interface__

        same = np.zeros((1, 8), np.float16)
        alone.combine(Typed(arrays["out"]), out=Typed(same))
        assert (same == 1).all()
        # Of none it is all the same.
        alone.dispatch(x[:0], one[:0], weights[:0], **arrays)
        alone.combine(np.zeros((0, 8)), out=np.zeros((0, 8)))
        alone.dispatch(x, one, weights, **arrays)
        # Memory for more tokens than were sent; memory that has no type.
        results = np.full((3, 8), 7, np.float16)
        alone.combine(arrays["out"], out=results)
        assert results[:, 0].tolist() == [1, 7, 7]
        regions = [alone.engine.alloc(nbytes) for nbytes in (8, 12)]
        addresses = [(region.ptr, region.nbytes) for region in regions]
        for counts, offsets in (regions, addresses):
            alone.dispatch(x, one, weights, out=arrays["out"], counts=counts, offsets=offsets)
            alone.combine(arrays["out"], out=x)
            assert np.frombuffer(regions[1].read(), np.int32).tolist() == [0, 0, 1]
            regions[1].write(0, bytes(12))
        few = np.array([1], np.int32)
        alone.dispatch(
            np.repeat(x, 2, 0).tobytes(), np.repeat(one, 2, 0), np.repeat(weights, 2, 0), **arrays, count=few
        )
        assert arrays["counts"].tolist() == [0, 1]
        alone.combine(arrays["out"], out=x)
        # What lies behind that is not looked at.
        beyond = np.array([[1], [1 << 40]])
        alone.dispatch(np.repeat(x, 2, 0), beyond, np.repeat(weights, 2, 0), **arrays, count=few)
        assert arrays["counts"].tolist() == [0, 1]
        alone.combine(arrays["out"], out=x)
        alone.abort()
    assert alone.closed


def case_gpus_and_the_cpu_give_the_same():
    with ExitStack() as stack:
        both = [Ranks(stack, 2, on_gpus) for on_gpus in (False, True)]
        assert repr(both[1].all[1]).startswith("<AllToAll by <GpuAllToAll rank 1 of 2, ")
        for seed, given in enumerate(ROUNDS):
            on_cpu, on_gpus = (ranks.round(100 * seed, **given) for ranks in both)
            assert on_cpu == on_gpus
        with pytest.raises(immwire.RequestError, match="stream is missing"):
            both[1].all[0].combine((0, 0), out=(0, 0))


def case_uneven_experts():
    # Ranks that share a GPU would wait for each other: there are two.
    for firsts in ([0, 5, 6], [0, 0, 6], [0, 7, 7]):
        with ExitStack() as stack:
            shape = dict(experts=None, firsts=firsts)
            both = [Ranks(stack, 2, on_gpus, **shape) for on_gpus in (False, True)]
            for seed, given in enumerate(ROUNDS):
                on_cpu, on_gpus = (ranks.round(100 * seed, **given) for ranks in both)
                assert on_cpu == on_gpus


def case_tokens_with_block_scales():
    for kind in OPAQUE:
        for hidden in (7168, 2880):
            opaque(kind, hidden, on_gpus=True)
    with pytest.raises(immwire.ConfigError, match="to 92 bytes, and say scale_bytes=92"):
        moe.AllToAll(Group.all(1)[0], 2, 1, 2880, 4, device=0, token_bytes=2880, scale_bytes=90)


def case_what_is_of_gpus_alone():
    with ExitStack() as stack:
        (alone,) = Ranks(stack, 1, True, token_bytes=32, scale_bytes=4).all
        exchange = alone.exchange
        assert (exchange.token_bytes, exchange.scale_bytes) == (32, 4)
        assert exchange.nbytes > 0
        exchange.start_over()
        assert alone.active_ranks == [0]


CASES = [name for name in dir() if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES)
def test_on_the_stand_in(case, tmp_path):
    on_the_stand_in(__file__, case, tmp_path)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1], "holds")
