"""``P2PAllToAll``, on the stand-in for the CUDA driver, with stand-ins for what it knows of torch.

Cases are processes of their own, as in test_gpu_moe.
"""

import multiprocessing.pool
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import immwire
import numpy as np
import pytest
from conftest import PATIENCE
from immwire import bootstrap, moe
from test_gpu import dlpack, driver, on_the_stand_in
from test_gpu_moe import Array
from test_moe import FORMATS, HIDDEN, MAX_TOKENS, TOP_K, expected_results, made_up

EXPERTS, PADDING = 5, 4
#: Rank 0 has one more.
FIRSTS = [0, 3, 5]
SHAPE = dict(
    max_num_tokens=MAX_TOKENS,
    num_experts=EXPERTS,
    expert_padding=PADDING,
    hidden_dim=HIDDEN,
    hidden_dim_scale=None,
    in_dtype="bfloat16",
    out_dtype="bfloat16",
    scale_dtype=None,
    num_experts_per_token=TOP_K,
    nets_per_gpu=2,
    max_private_tokens=256,
    dp_group=None,
    node_group=None,
    sms=2,
    patience=PATIENCE,
    timeout=PATIENCE,
)


class Group:
    """One rank's view of a group of this process's threads."""

    def __init__(self, rank, shared):
        self.rank, self.shared, self.size = rank, shared, shared.barrier.parties

    @classmethod
    def all(cls, size):
        shared = SimpleNamespace(barrier=threading.Barrier(size), values=[None] * size)
        return [cls(rank, shared) for rank in range(size)]

    def all_gather_object(self, value):
        self.shared.values[self.rank] = value
        self.shared.barrier.wait(PATIENCE)
        return list(self.shared.values)


def start(stack, groups, devices=(0, 1, 0), engines=(None, None, None), **more):
    """The ranks of these groups, made in threads of their own."""

    def make(rank):
        own = dict(device=devices[rank], engine=engines[rank], global_group=groups[rank])
        return moe.P2PAllToAll(**SHAPE | own | more)

    with multiprocessing.pool.ThreadPool(len(groups)) as pool:
        ranks = pool.map(make, range(len(groups)))
    for rank in ranks:
        stack.callback(rank.destroy)
    return ranks


class Round:
    """One rank's part of a round, by the names of the arguments."""

    def __init__(self, p2p, rank, seed, tokens, bound=False, dtype="bfloat16", firsts=FIRSTS):
        self.p2p, self.device, self.first = p2p, rank % 2, firsts[rank]
        self.experts = firsts[rank + 1] - self.first
        self.to, self.back = FORMATS[dtype]
        self.inputs = x, indices, weights, _ = made_up(seed, tokens, EXPERTS)
        self.tokens = tokens
        if bound:  # There is memory for one more, of which nothing is to be seen.
            x, indices, weights, _ = made_up(seed + 1, tokens + 1, EXPERTS)
            for array, content in zip((x, indices, weights), self.inputs, strict=False):
                array[:tokens] = content
        self.bound = dict(bound_m=self.array(np.array([tokens], np.int32))) if bound else {}
        self.routes = dict(indices=self.array(indices), weights=self.array(weights))
        self.x = self.array(self.to(x))
        self.rows = self.space(p2p.exchange.max_rows, HIDDEN, dtype=np.uint16)
        self.counts = self.space(self.experts, dtype=np.int32)
        self.results = self.space(len(x), HIDDEN, dtype=np.uint16)
        self.y = None

    def array(self, content):
        return Array(self.p2p.engine, self.device, content)

    def space(self, *shape, dtype):
        return self.array(np.full(shape, 77, dtype))

    def settle(self):
        driver(self.device, [("cuCtxSynchronize",)])

    def dispatch(self, **halves):
        self.p2p.dispatch(
            out_expert_num_tokens=self.counts,
            out_expert_x=self.rows,
            out_expert_x_scale=None,
            dp_x=self.x,
            dp_x_scale=None,
            **self.routes,
            **self.bound,
            **halves,
            stream=0,
        )

    def work(self):
        """What the experts do: they multiply by their number and one more."""
        self.settle()
        rows, counts = self.rows.read(), self.counts.read()
        offsets = np.frombuffer(self.p2p.offsets.read(), np.int32)
        assert len(offsets) == self.experts + 1
        stored = self.to(np.zeros(0)).dtype
        y = rows.view(stored).copy()
        for expert, (row, count) in enumerate(zip(offsets, counts, strict=False), self.first):
            assert row % PADDING == 0
            y[row : row + count] = self.to(self.back(y[row : row + count]) * (expert + 1))
        self.y = self.array(y)

    def combine(self, **more):
        routes = dict(indices=None, weights=None) if self.bound else self.routes
        call = dict(out_tokens=self.results, expert_y=self.y) | routes | self.bound | more
        self.p2p.combine(**call, stream=0)

    def check(self, times=1):
        self.settle()
        assert not self.p2p.exchange.report(), self.p2p.exchange.report()
        found = self.results.read()
        stored = self.to(np.zeros(0)).dtype
        expected = times * expected_results(*self.inputs[:3])
        assert (self.back(found[: self.tokens].view(stored)) == expected).all()
        assert (found[self.tokens :] == 77).all(), "results of no token"


def case_rounds():
    with ExitStack() as stack:
        ranks = start(stack, Group.all(2))
        described = [repr(rank.exchange) for rank in ranks]
        assert described[1] == "<GpuAllToAll rank 1 of 2, 2 of 5 experts from 3 on, GPU 1>"
        for turn, (tokens, bound) in enumerate([((5, 0), False), ((1, MAX_TOKENS - 1), True)]):
            both = [Round(p2p, i, 2 * turn + i, tokens[i], bound) for i, p2p in enumerate(ranks)]
            for one in both:
                one.dispatch()
            for one in both:
                one.work()
                one.combine()
            for one in both:
                one.check()
        # In halves, and onto what is there. A call of neither half is none.
        for step in ("dispatch", "combine"):
            more = dict(accumulate=True) if step == "combine" else {}
            for halves in ((True, False), (False, False), (False, True)):
                for one in both:
                    getattr(one, step)(do_send=halves[0], do_recv=halves[1], **more)
            if step == "dispatch":
                for one in both:
                    one.work()
        for one in both:
            one.check(times=2)


def case_routes_of_combine_are_those_of_dispatch():
    class View:
        """Another object of the same memory."""

        def __init__(self, of):
            self.__cuda_array_interface__ = dict(of.__cuda_array_interface__)

    class OfTorch:
        """Asked for its address alone."""

        def __init__(self, of):
            self.data_ptr = lambda: of.region.ptr

    def lent(of):
        """Without an address that Python can see."""
        return dlpack(of.region.ptr, 0, of.region.nbytes)

    def pair(of):
        return of.region.ptr, of.region.nbytes

    with ExitStack() as stack:
        (alone,), firsts = start(stack, Group.all(1)), [0, EXPERTS]
        for bound in (False, True):
            one = Round(alone, 0, 5, 6, bound=bound, firsts=firsts)
            one.dispatch()
            one.work()
            copies = {name: one.array(array.read()) for name, array in one.routes.items()}
            copies["bound_m"] = one.array(np.array([6], np.int32))
            given = one.routes | one.bound
            refused = [dict([item]) for item in copies.items()]
            refused += [{name: OfTorch(array)} for name, array in copies.items()]
            refused += [dict(indices=given["weights"]), dict(weights=np.zeros(2)), dict(indices=(0, 0))]
            for wrong in refused:
                (name,) = wrong
                was = ", which was None" if name not in given else ""
                words = (
                    f"{name} is not the one that dispatch was given{was}: .* same tensors to both, or None"
                )
                for half in (dict(), dict(do_recv=False)):
                    with pytest.raises(ValueError, match=words):
                        one.combine(**wrong, **half)
            # Nothing was enqueued by that. Neither half looks at anything.
            one.combine(**copies, do_send=False, do_recv=False)
            for seen_as in (View, OfTorch, pair):
                one.combine(**{name: seen_as(array) for name, array in given.items()})
                one.check()
                one.dispatch()
            one.combine(**dict.fromkeys(copies))
            one.check()
        # An object without an address is known again as itself.
        one = Round(alone, 0, 5, 6, firsts=firsts)
        own = one.routes
        one.routes = {name: lent(array) for name, array in own.items()}
        for half in (dict(do_recv=False), dict(do_send=False)):
            one.dispatch(**half)
        one.work()
        with pytest.raises(immwire.RequestError, match="weights is not the one"):
            one.combine(weights=lent(own["weights"]))
        one.combine()
        one.check()
        # A call that is refused has given nothing.
        with pytest.raises(immwire.RequestError, match="weights has 0 bytes"):
            alone.dispatch(
                out_expert_num_tokens=one.counts,
                out_expert_x=one.rows,
                dp_x=one.x,
                indices=own["indices"],
                weights=(0, 0),
                stream=0,
            )
        one.dispatch()
        one.combine()
        one.check()


def case_numbers_of_float16_on_an_engine_that_is_there():
    with ExitStack() as stack:
        engines = [stack.enter_context(immwire.TransferEngine(gpus=[0, 1])) for _ in range(2)]
        types = dict(in_dtype=np.dtype("float16"), out_dtype="torch.float16")
        ranks = start(stack, Group.all(2), engines=engines, **types)
        assert [rank.engine for rank in ranks] == engines
        both = [Round(p2p, i, i, 4, dtype="float16") for i, p2p in enumerate(ranks)]
        for one in both:
            one.dispatch()
        for one in both:
            one.work()
            one.combine()
        for one in both:
            one.check()
        for rank in ranks:
            rank.destroy()
            rank.destroy()
            assert rank.exchange.closed
            assert rank.offsets.closed
        assert not any(engine.closed for engine in engines)
        with pytest.raises(immwire.EngineClosed):
            both[0].dispatch()
        with moe.P2PAllToAll(**SHAPE | dict(device=0, global_group=Group.all(1)[0])) as alone:
            own = alone.engine
        assert own.closed


def stand_in():
    """What is used of torch."""

    class Dtype(str):
        pass

    class Tensor:
        """Of a type that the interface has no name for, if it has none."""

        def __init__(self, array, named=True):
            self.array, self.named = array, named

        @property
        def __cuda_array_interface__(self):
            return {True: self.array}[self.named].__cuda_array_interface__

        def view(self, dtype):
            assert dtype == "torch.uint8"
            return self.array

    class ProcessGroup:
        """With methods, and without all_gather_object."""

        def __init__(self, group):
            self.group = group

        def rank(self):
            return self.group.rank

        def size(self):
            return self.group.size

    def all_gather_object(values, value, group):
        values[:] = group.group.all_gather_object(value)

    asked = []

    def current_stream(device):
        asked.append(device)
        return SimpleNamespace(cuda_stream=0)

    return SimpleNamespace(
        Tensor=Tensor,
        uint8=Dtype("torch.uint8"),
        float8_e4m3fn=Dtype("torch.float8_e4m3fn"),
        float32=Dtype("torch.float32"),
        bfloat16=Dtype("torch.bfloat16"),
        cuda=SimpleNamespace(current_stream=current_stream, current_device=lambda: 1),
        distributed=SimpleNamespace(ProcessGroup=ProcessGroup, all_gather_object=all_gather_object),
        asked=asked,
    )


def case_tensors_of_torch():
    """Bytes and scales, of types without an interface, on torch's streams, among ranks of its groups."""
    torch = sys.modules["torch"] = stand_in()
    shape = dict(in_dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16)
    shape |= dict(hidden_dim=2 * HIDDEN, hidden_dim_scale=2, scale_dtype=torch.float32)
    tokens, rng = 3, np.random.default_rng(1)
    with ExitStack() as stack:
        groups = [torch.distributed.ProcessGroup(group) for group in Group.all(2)]
        ranks = start(stack, groups, ["cuda:0", "cuda"], **shape)
        assert [rank.exchange.token_bytes for rank in ranks] == [2 * HIDDEN] * 2
        assert [rank.exchange.scale_bytes for rank in ranks] == [8] * 2
        called = []
        for device, rank in enumerate(ranks):

            def array(content, named=True, rank=rank, device=device):
                return torch.Tensor(Array(rank.engine, device, content), named)

            # Every token to the first expert of each rank.
            indices = np.tile(np.array([0, 3, -1, -1], np.int32), (tokens, 1))
            x = rng.integers(0, 256, (tokens, 2 * HIDDEN), np.uint8)
            scales = rng.random((tokens, 2), np.float32)
            rows = rank.exchange.max_rows
            call = dict(
                dp_x=array(x, named=False),
                dp_x_scale=array(scales),
                indices=array(indices),
                weights=array(np.ones((tokens, TOP_K), np.float32)),
                out_expert_x=array(np.zeros((rows, 2 * HIDDEN), np.uint8), named=False),
                out_expert_x_scale=array(np.zeros((rows, 2), np.float32)),
                out_expert_num_tokens=array(np.zeros(3, np.int32)),
            )
            rank.dispatch(**call)
            y = array(np.full((2 * tokens, 2 * HIDDEN), 0x3F80, np.uint16))
            results = array(np.zeros((tokens, 2 * HIDDEN), np.uint16))
            called.append((x, scales, call, y, results))
        for rank, (_, _, call, y, results) in zip(ranks, called, strict=True):
            rank.combine(out_tokens=results, indices=call["indices"], weights=call["weights"], expert_y=y)
        for device in range(2):
            driver(device, [("cuCtxSynchronize",)])
        for rank, (_, _, call, _, results) in zip(ranks, called, strict=True):
            assert not rank.exchange.report()
            assert call["out_expert_num_tokens"].array.read()[:2].tolist() == [2 * tokens, 0]
            for i, name in enumerate(("out_expert_x", "out_expert_x_scale")):
                sent = np.concatenate([one[i] for one in called])
                assert (call[name].array.read()[: 2 * tokens] == sent).all()
            # Twice 1.
            assert (results.array.read() == 0x4000).all()
        assert torch.asked == [0, 1, 0, 1]


def case_ranks_that_meet_in_a_store():
    with ExitStack() as stack:
        store = bootstrap.DirectoryStore(stack.enter_context(tempfile.TemporaryDirectory()))
        # Each has as many experts as the others, rounded up: not 3, 2 and 2.
        for name in ("one", "two"):
            ranks = start(stack, [(store, rank, 3) for rank in range(3)], name=name, num_experts=7)
            assert "1 of 7 experts from 6 on" in repr(ranks[2].exchange)
        groups = [(store, 0, 2)]
        with pytest.raises(immwire.WaitTimeout, match="rank 1 is missing"):
            start(stack, groups, name="alone", timeout=0.1)


def case_what_cannot_be_is_refused():
    with ExitStack() as stack:
        (group,) = Group.all(1)

        def refused(match, error=immwire.ConfigError, **more):
            with pytest.raises(error, match=match):
                moe.P2PAllToAll(**SHAPE | dict(device=0, global_group=group) | more)

        refused("dp_group has 2 ranks", dp_group=Group.all(2)[0])
        refused("dp_group has 4 ranks", dp_group=SimpleNamespace(rank=lambda: 1, size=lambda: 4))
        refused("out_dtype is float32: bfloat16 and float16", out_dtype="float32")
        refused("in_dtype is int4: it can be bfloat16", in_dtype="torch.int4")
        refused("scale_dtype is half", hidden_dim_scale=1, scale_dtype="half")
        refused("go together", hidden_dim_scale=1)
        refused("scales of 90 bytes a token.* to 92, .*=92", hidden_dim_scale=90, scale_dtype="uint8")
        refused("scales of 6 bytes a token.* to 8, .*=4", hidden_dim_scale=3, scale_dtype="float16")
        refused("go together", scale_dtype="float32")
        refused("device is 'cpu'", device="cpu")
        refused("device is 'cuda'", device="cuda")
        refused("GPU 7", immwire.ImmwireError, device="cuda:7")
        refused("global_group has rank None of None", global_group=None)
        refused("global_group has rank 2 of 2", global_group=(None, 2, 2))
        refused("global_group has no all_gather_object", global_group=SimpleNamespace(rank=0, size=1))
        refused("8, not one or more times 16", hidden_dim=8, in_dtype="uint8")
        refused("1 to 1024", num_experts=0)
        (alone,) = start(stack, [group], dp_group=group, node_group=group, num_experts=EXPERTS)
        arrays = dict(dp_x=(0, 0), indices=(0, 0), weights=(0, 0))
        arrays |= dict(out_expert_x=(0, 0), out_expert_num_tokens=(0, 0))
        with pytest.raises(immwire.RequestError, match="stream is missing"):
            alone.dispatch(**arrays)
        with pytest.raises(immwire.RequestError, match="stream is missing"):
            alone.combine(out_tokens=(0, 0), expert_y=(0, 0))
        with pytest.raises(immwire.RequestError, match="counts has 0 bytes instead of 20"):
            alone.dispatch(**arrays, stream=0)
        with pytest.raises(immwire.RequestError, match="scales was given"):
            alone.dispatch(**arrays, dp_x_scale=(0, 0), stream=0)
        with pytest.raises(immwire.RequestError, match="count has 0 bytes instead of 4"):
            alone.dispatch(**arrays, bound_m=(0, 0), stream=0)


def test_torch_is_not_imported():
    program = "import sys; sys.modules['torch'] = None; import immwire.moe; immwire.moe.P2PAllToAll"
    subprocess.run([sys.executable, "-c", program], check=True)


CASES = [name for name in dir() if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES)
def test_on_the_stand_in(case, tmp_path):
    on_the_stand_in(__file__, case, tmp_path)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1], "holds")
