"""``AllToAll``: one exchange for programs that run on GPUs and without.

It is a ``HostAllToAll`` or a ``GpuAllToAll``, as ``device`` says, called by the same arguments. It knows
where arrays are, and what torch calls things, and moves no bytes of tokens itself. torch is not imported:
where a program has done so, its streams, groups and tensors are understood.
"""

from __future__ import annotations

import array
import ctypes
import re
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._errors import ConfigError, RequestError
from ._groups import dtype_name, gathered, number_of, place, seen, stream_of, torch_here
from ._immwire import GpuAllToAll, HostAllToAll, TransferEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from ._groups import _Group
    from ._immwire import MoeReport, _SupportsCudaStream


class AllToAll:
    """Dispatch and combine among ranks on GPUs of this host, or in host memory: the same calls and results.

    All ranks of ``group`` make one with the same numbers, and call ``dispatch`` and ``combine`` in turn,
    those without tokens too.

    - ``group``: anything with ``rank``, ``size`` and ``all_gather_object(obj)``, which returns a list; or a
      ``torch.distributed.ProcessGroup``; or ``(store, rank, world)`` with a store of ``immwire.bootstrap``:
      what is made with the same store needs another ``name`` each time.
    - ``experts``: of all ranks, spread evenly unless ``firsts`` is given: the first expert of each rank, and
      the number of experts; then ``experts`` is that, too, or None. ``top_k``: choices of a token.
      ``hidden``: values of a token. ``max_tokens``: the most that any rank has.
    - ``device``: ``"cpu"``, or a GPU: a number, ``"cuda:1"`` or a ``torch.device``.
    - ``dtype``: of results, ``"bfloat16"`` or ``"float16"``, or torch's own; of tokens, too, unless
      ``token_bytes`` and ``scale_bytes`` say how long others and their scales are: a multiple of 16 and, on
      GPUs, one of 4, to which you pad each token's. ``quantize``: GPUs make e4m3 of tokens on the way, with
      scales: ``"float32"`` or ``"ue8m0"``.
    - ``padding``: rows of an expert start on a multiple of it. ``exact``: each expert's result comes back
      by itself.
    - ``chunk_tokens`` is for host memory, ``sms`` for GPUs.

    ``engine`` has ``device`` among its GPUs, or any transport for host memory; without, one is made for
    ranks of this host, and closed by ``close``. ``patience``: how many seconds others are waited for: 30 on
    the CPU (the engine's ``timeout``) and 5 on a GPU, unless told; who has not come by then is left out from
    then on. ``timeout``: seconds for joining, and before that for meeting in a store.

    ``exchange`` has what only one of the two has. On GPUs: ``start_over``, ``nbytes``, ``token_bytes``,
    ``scale_bytes``, and ``clear_padding`` of a ``dispatch``. In host memory: ``rounds``, and a ``timeout`` of
    each call; rows that only pad are always cleared there, and to take everybody in again a new exchange is
    made.
    """

    #: The exchange itself.
    exchange: HostAllToAll | GpuAllToAll
    #: Whose memory it uses.
    engine: TransferEngine
    #: Which rank this is, and of how many.
    rank: int
    world: int

    def __init__(
        self,
        group: _Group,
        /,
        experts: int | None,
        top_k: int,
        hidden: int,
        max_tokens: int,
        *,
        firsts: Sequence[int] | None = None,
        device: object = "cpu",
        dtype: object = "bfloat16",
        quantize: str | None = None,
        token_bytes: int | None = None,
        scale_bytes: int = 0,
        padding: int = 1,
        exact: bool = False,
        chunk_tokens: int | None = None,
        sms: int = 0,
        engine: TransferEngine | None = None,
        patience: float | None = None,
        timeout: float = 60.0,
        name: str = "AllToAll",
    ) -> None:
        self.rank, self.world = place("group", group)
        results = dtype_name(dtype)
        self._patience = patience
        starts = _starts(experts, firsts, self.world)
        self._own = starts[self.rank + 1] - starts[self.rank]
        self._hidden = hidden
        self._numbers = results
        self._quantizes = quantize is not None
        self._tokens = 0
        self._device = 0
        with ExitStack() as stack:
            if str(device).partition(":")[0] == "cpu":
                if quantize is not None:
                    raise ConfigError("quantize is for GPUs: on the CPU give tokens as they are to arrive")
                if sms != 0:
                    raise ConfigError("sms is for GPUs: leave it out")
                if engine is None:
                    engine = stack.enter_context(TransferEngine())
                on_host = HostAllToAll.open(
                    engine,
                    rank=self.rank,
                    firsts=starts,
                    top_k=top_k,
                    max_tokens=max_tokens,
                    hidden=hidden,
                    dtype=results,
                    token_bytes=token_bytes,
                    scale_bytes=scale_bytes,
                    padding=padding,
                    exact=exact,
                    chunk_tokens=chunk_tokens,
                )
                seats = gathered("group", group, on_host.seat, name, timeout)
                self.exchange = stack.enter_context(on_host.join(seats, timeout=timeout))
            else:
                if chunk_tokens is not None:
                    raise ConfigError("chunk_tokens is for host memory: leave it out")
                self._device = number_of(device)
                if engine is None:
                    engine = stack.enter_context(TransferEngine(gpus=[self._device]))
                on_gpu = GpuAllToAll.open(
                    engine,
                    rank=self.rank,
                    device=self._device,
                    firsts=starts,
                    top_k=top_k,
                    max_tokens=max_tokens,
                    hidden=hidden,
                    dtype=results,
                    quantize=quantize,
                    token_bytes=token_bytes,
                    scale_bytes=scale_bytes,
                    padding=padding,
                    exact=exact,
                    sms=sms,
                    patience=5.0 if patience is None else patience,
                )
                seats = gathered("group", group, on_gpu.seat, name, timeout)
                self.exchange = stack.enter_context(on_gpu.join(seats, timeout=timeout))
            self.engine = engine
            # From here on, `close` ends it all.
            self._held = stack.pop_all()

    def dispatch(
        self,
        x: Any,
        indices: Any,
        weights: Any,
        scales: Any = None,
        *,
        out: Any,
        out_scales: Any = None,
        slots: Any = None,
        counts: Any,
        offsets: Any,
        count: Any = None,
        stream: _SupportsCudaStream | int | None = None,
        half: str = "both",
    ) -> None:
        """Send tokens to the ranks of the experts they chose, and receive what others sent.

        Arrays are C-contiguous, where ``device`` is.

        - ``x``, ``scales``: a row for each token. ``indices``: ``[tokens][top_k]``, ``int32`` or ``int64``;
          -1 is a choice that was dropped. ``weights``: ``float32`` of the same shape; ``combine`` uses
          them.
        - ``count``: if given, the ``int32`` in it is the number of tokens; on a GPU, when the stream comes
          there, and of a negative one none is sent, and ``report()`` says so.
        - ``out``, ``out_scales``: whole rows; ``max_rows`` are always enough. ``slots``: if given,
          ``int32``, each token arrives once, in one of ``max_slots`` of ``out``, and this says of each row
          which it is, or -1 where it only pads.
        - ``counts``: ``int32``, written: tokens for each of this rank's experts. ``offsets``: where the
          rows of each begin, and one entry more: all rows, padding included.
        - ``half``: ``"both"``, or ``"send"``, which waits for nothing (on the CPU, for room to send), and
          later ``"receive"`` with the same arguments.

        Experts that there are not, or that a token names twice, raise an error on the CPU; kernels leave them
        out, and ``report`` says so.

        On a GPU this is enqueued: ``stream`` is torch's current one, unless given; where torch is not
        imported, it has to be. On the CPU it is done when the call returns, and there is no stream.
        """
        exchange = self.exchange
        if self._quantizes:
            _of_numbers("x", x, self._numbers)
        if isinstance(exchange, GpuAllToAll):
            exchange.dispatch(
                seen(x),
                seen(indices),
                seen(weights),
                None if scales is None else seen(scales),
                out=seen(out),
                out_scales=None if out_scales is None else seen(out_scales),
                slots=None if slots is None else seen(slots),
                counts=seen(counts),
                offsets=seen(offsets),
                count=None if count is None else seen(count),
                stream=stream_of(stream, self._device),
                half=half,
            )
            return
        _no_stream(stream)
        # All that can be refused is, before anybody has part in a round.
        table = _Table(indices)
        tokens = table.rows
        if count is not None:
            (tokens,) = _words("count", count, 1)
            if not 0 <= tokens <= table.rows:
                raise RequestError(f"count is {tokens}, of {table.rows} tokens that were given")
        written = [_words_to("counts", counts, self._own), _words_to("offsets", offsets, self._own + 1)]
        lent: dict[str, Any] = {
            "out": _memory(out),
            "out_scales": None if out_scales is None else _memory(out_scales),
            "slots": None if slots is None else _buffer(slots),
        }
        sent = [_first(array, tokens, table.rows) for array in (x, scales)]
        call: Any = exchange.dispatch
        received = call(
            sent[0],
            table.int32(tokens),
            _Table(weights).first(tokens),
            sent[1],
            **lent,
            half=half,
            timeout=self._patience,
        )
        if half != "receive":
            self._tokens = tokens
        if received is not None:
            for to, values in zip(written, (received.counts, received.offsets), strict=True):
                if values:
                    to[: 4 * len(values)] = memoryview(array.array("i", values)).cast("B")

    def combine(
        self,
        y: Any,
        *,
        out: Any,
        accumulate: bool = False,
        stream: _SupportsCudaStream | int | None = None,
        half: str = "both",
    ) -> None:
        """Send the results of the tokens received, and receive those of this rank's own.

        That is for each the sum of its choices' results, times their weights.

        ``y`` has ``hidden`` values of ``dtype`` in each row of the dispatch before, ``out`` in a row for
        each token that was sent, or in more; what says that it has others is refused. ``accumulate``: add to
        what is there. The rest is as there.
        """
        exchange = self.exchange
        _of_numbers("y", y, self._numbers)
        _of_numbers("out", out, self._numbers)
        if isinstance(exchange, GpuAllToAll):
            exchange.combine(
                seen(y),
                out=seen(out),
                accumulate=accumulate,
                stream=stream_of(stream, self._device),
                half=half,
            )
            return
        _no_stream(stream)
        # There may be memory for more tokens than were sent.
        room = _at_most(out, self._tokens * self._hidden * 2)
        call: Any = exchange.combine
        call(_memory(y), out=room, accumulate=accumulate, half=half, timeout=self._patience)

    def report(self) -> MoeReport:
        """What went wrong until now: who is left out, since when, and why. Waits for nothing."""
        return self.exchange.report()

    @property
    def active_ranks(self) -> list[int]:
        """The ranks that are not left out, this one included."""
        return self.exchange.active_ranks

    def abort(self) -> None:
        """End all waits of this rank for others, those to come, too."""
        self.exchange.abort()

    @property
    def max_rows(self) -> int:
        """The most rows that a round can bring here."""
        return self.exchange.max_rows

    @property
    def max_slots(self) -> int:
        """Slots, for experts that gather."""
        return self.exchange.max_slots

    def close(self) -> None:
        """End it, once all has been done that was enqueued. Graphs of it must not be replayed any more.

        On a GPU it waits for all that the GPU has to do; threads that launch or copy by that GPU meanwhile
        wait, too. Graphs that are being captured do not mind.
        """
        self._held.close()

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self.exchange.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<AllToAll by {self.exchange!r}>"


def _starts(experts: int | None, firsts: Sequence[int] | None, world: int) -> list[int]:
    """The first expert of each rank, and the number of experts: as given, or an even spread."""
    if firsts is None:
        if experts is None:
            raise ConfigError(
                "experts is None: say how many there are, or with firsts which ones each rank has"
            )
        share, more = divmod(experts, world)
        return [share * rank + min(rank, more) for rank in range(world + 1)]
    starts = list(firsts)
    if len(starts) != world + 1:
        message = f"firsts has {len(starts)} entries instead of {world + 1}"
        raise ConfigError(f"{message}: the first expert of each rank, and the number of experts")
    if experts is not None and experts != starts[-1]:
        raise ConfigError(f"experts is {experts}, and firsts says {starts[-1]}: they are to be the same")
    return starts


_NUMBERS = {"bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"}


def _of_numbers(what: str, of: Any, wanted: str) -> None:
    """Refuse what says that it has other numbers. Integers as wide, or bytes, may be anything."""
    name = re.findall(r"\w+", str(getattr(of, "dtype", "")))[-1:]
    # Of none it has none of a wrong type. What else a type may be called, the exchange tells by how wide
    # it is.
    if name and name[0] in _NUMBERS - {wanted} and 0 not in getattr(of, "shape", ()):
        hint = "convert it, or pass a view of its bytes if that is what they are"
        raise RequestError(f"{what} has {name[0]} instead of {wanted}: {hint}")


def _no_stream(stream: object) -> None:
    if stream is not None:
        raise RequestError("stream is for GPUs: on the CPU a call has ended when it returns")


def _buffer(of: Any) -> Any:
    """``of``, as something that has a buffer: torch's tensors have none, nor have addresses."""
    if isinstance(of, tuple):
        address, nbytes = of
        return (ctypes.c_uint8 * nbytes).from_address(address)
    torch = torch_here()
    if torch is not None and isinstance(of, torch.Tensor):
        return of.detach().numpy()
    return of


def _memory(of: Any) -> Any:
    """``of``, whatever its type is: of some of torch's there is no array elsewhere."""
    torch = torch_here()
    if torch is not None and isinstance(of, torch.Tensor):
        return of.detach().view(torch.uint8).numpy()
    if hasattr(of, "dtype") and hasattr(of, "view"):
        try:
            memoryview(of).release()
        except ValueError:  # numpy says no format of it, as of bfloat16's from ml_dtypes.
            return of.view("u1")
        except TypeError:
            pass  # It has no buffer at all, but an interface of another kind.
    return of


def _at_most(of: Any, nbytes: int) -> Any:
    """The first bytes of ``of``, if it has more."""
    of = _memory(of)
    if isinstance(of, tuple):
        return of[0], min(of[1], nbytes)
    try:
        view = memoryview(of)
    except TypeError:
        return of  # It has no buffer: then it is taken as it is.
    if view.nbytes <= nbytes or not view.c_contiguous:
        return of
    return view.cast("B")[:nbytes]


def _first(of: Any, tokens: int, rows: int) -> Any:
    """The first ``tokens`` of so many rows."""
    if of is None or tokens == rows:
        return None if of is None else _memory(of)
    of = _memory(of)
    if isinstance(of, tuple):
        return of[0], of[1] // rows * tokens
    try:
        nbytes = memoryview(of).nbytes
    except TypeError:
        return of[:tokens]
    return _at_most(of, nbytes // rows * tokens)


class _Table:
    """``[tokens][top_k]`` of four bytes each, or indices of eight.

    What is wrong otherwise, the exchange says.
    """

    def __init__(self, of: Any) -> None:
        self._view = memoryview(_buffer(of))
        self._shape = self._view.shape or ()
        self.rows = self._shape[0] if self._shape else 0

    def first(self, tokens: int) -> Any:
        """As many rows."""
        if tokens == self.rows or len(self._shape) != 2 or not self._view.c_contiguous:
            return self._view
        return self._cut(self._view, tokens)

    def int32(self, tokens: int) -> Any:
        """As many rows, with 32 bits each: torch's ``topk`` has 64."""
        view = self._view
        if view.itemsize != 8 or view.format not in ("q", "l") or not view.c_contiguous or view.ndim != 2:
            return self.first(tokens)
        # What lies behind them is the caller's, whatever it is.
        used = view.cast("B")[: 8 * tokens * self._shape[1]] if view.nbytes else view
        try:
            words = array.array("i", used.cast("q").tolist() if used.nbytes else [])
        except OverflowError as error:
            raise RequestError(f"indices: {error}") from None
        return self._cut(memoryview(words), tokens)

    def _cut(self, words: memoryview, tokens: int) -> Any:
        choices = self._shape[1]
        letter = words.format.strip("<=@")
        if tokens * choices == 0:
            # A memoryview cannot be made that has none.
            kind = ctypes.c_float if letter == "f" else ctypes.c_int32
            return memoryview((kind * choices * tokens)())
        return words.cast("B")[: 4 * tokens * choices].cast(letter, (tokens, choices))  # type: ignore[call-overload]


def _bytes_of(what: str, of: Any, needed: int) -> memoryview:
    view = memoryview(_buffer(of))
    # Memory without a type will do, too.
    is_fit = view.itemsize == 1 or (view.itemsize == 4 and view.format.strip("<=@") in ("i", "l"))
    if not is_fit or not view.c_contiguous or view.nbytes < 4 * needed:
        kind = f"{view.nbytes} bytes of format {view.format!r}"
        raise RequestError(f"{what} has {kind} instead of {needed} int32")
    return view.cast("B") if view.nbytes else view


def _words(what: str, of: Any, needed: int) -> list[int]:
    return _bytes_of(what, of, needed)[: 4 * needed].cast("i").tolist()


def _words_to(what: str, to: Any, needed: int) -> memoryview:
    view = _bytes_of(what, to, needed)
    if view.readonly:
        raise RequestError(f"{what} cannot be written to")
    return view
