"""``P2PAllToAll``: ``GpuAllToAll`` under the argument names of an earlier library.

It translates, and enqueues nothing of its own: types to sizes, groups of ranks to bytes that they pass on,
two flags to halves of a round. It looks into no array, and imports no torch: where a program has done so, its
streams, groups and tensors are understood.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._errors import ConfigError, RequestError
from ._groups import dtype_name, gathered, number_of, place, seen, stream_of
from ._immwire import GpuAllToAll, TransferEngine

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._groups import _Group
    from ._immwire import Region, _GpuMemory, _SupportsCudaStream


#: Bytes of an element.
_ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}


class P2PAllToAll:
    """Dispatch and combine among the GPUs of one host: a ``GpuAllToAll`` by other names.

    All ranks of ``global_group`` make one with the same numbers, and call ``dispatch`` and ``combine`` in
    turn, those without tokens too. Everything is passed by name.

    - ``max_num_tokens``: the most tokens that any rank has. ``num_experts_per_token``: choices of a token.
    - ``num_experts``: so many in all, and each rank has as many as the others, rounded up; the last ones have
      what is left. Rows of an expert start on a multiple of ``expert_padding``.
    - ``hidden_dim``: values of a token, of ``in_dtype``. ``hidden_dim_scale``: scales, of ``scale_dtype``,
      if it has some: pad them to a multiple of 4 bytes. Both arrive as they are. A result has ``hidden_dim``
      values of ``out_dtype``, bfloat16 or float16. Types are torch's, or their names: ``"bfloat16"``.
    - ``device``: a number, ``"cuda:1"`` or a ``torch.device``.
    - ``global_group``: anything with ``rank``, ``size`` and ``all_gather_object(obj)``, which returns a list;
      or a ``torch.distributed.ProcessGroup``; or ``(store, rank, world)`` with a store of
      ``immwire.bootstrap``: what is made with the same store needs another ``name`` each time.
    - ``dp_group``: of one rank, or none: here each rank has tokens of its own.
    - ``nets_per_gpu``, ``max_private_tokens`` and ``node_group`` mean nothing here.

    ``engine`` has ``device`` among its GPUs; without, one is made, and closed by ``destroy``. ``sms`` and
    ``patience`` are those of ``GpuAllToAll.open``. ``timeout``: seconds for joining, and before that for
    meeting in a store.

    ``exchange`` has what there is no name for here: ``report``, ``active_ranks``, ``abort``, ``start_over``.
    """

    #: The exchange itself.
    exchange: GpuAllToAll
    #: Whose memory it uses.
    engine: TransferEngine
    #: What a dispatch writes beside its arguments: ``int32``, the first row of each of this rank's experts,
    #: and one entry more: all rows, padding included.
    offsets: Region

    def __init__(
        self,
        *,
        max_num_tokens: int,
        num_experts: int,
        expert_padding: int,
        hidden_dim: int,
        hidden_dim_scale: int | None = None,
        in_dtype: object,
        out_dtype: object,
        scale_dtype: object = None,
        num_experts_per_token: int,
        nets_per_gpu: int | None = None,
        max_private_tokens: int | None = None,
        device: object,
        dp_group: _Group | None = None,
        node_group: object = None,
        global_group: _Group,
        engine: TransferEngine | None = None,
        sms: int = 0,
        patience: float = 5.0,
        timeout: float = 60.0,
        name: str = "P2PAllToAll",
    ) -> None:
        rank, world = place("global_group", global_group)
        if dp_group is not None:
            _, sharing = place("dp_group", dp_group)
            if sharing > 1:
                message = f"dp_group has {sharing} ranks, to share tokens: here each rank has its own"
                raise ConfigError(message)
        if (hidden_dim_scale is None) != (scale_dtype is None):
            raise ConfigError("hidden_dim_scale and scale_dtype go together: give both, or none")
        scale_bytes = 0
        if hidden_dim_scale is not None:
            item = _item_bytes("scale_dtype", scale_dtype)
            scale_bytes = hidden_dim_scale * item
            if scale_bytes % 4 != 0:
                message = f"scales of {scale_bytes} bytes a token, no multiple of 4"
                padded = -(-scale_bytes // 4) * 4
                count = padded // item
                raise ConfigError(
                    f"{message}: pad each token's to {padded}, and say hidden_dim_scale={count}"
                )
        results = dtype_name(out_dtype)
        if results not in ("bfloat16", "float16"):
            raise ConfigError(f"out_dtype is {results}: bfloat16 and float16 can be")
        number = number_of(device)
        share = -(-num_experts // world)
        firsts = [min(share * each, num_experts) for each in range(world + 1)]
        with ExitStack() as stack:
            if engine is None:
                engine = stack.enter_context(TransferEngine(gpus=[number]))
            joining = GpuAllToAll.open(
                engine,
                rank=rank,
                device=number,
                top_k=num_experts_per_token,
                max_tokens=max_num_tokens,
                hidden=hidden_dim,
                firsts=firsts,
                dtype=results,
                token_bytes=hidden_dim * _item_bytes("in_dtype", in_dtype),
                scale_bytes=scale_bytes,
                padding=expert_padding,
                sms=sms,
                patience=patience,
            )
            entries = firsts[rank + 1] - firsts[rank] + 1
            self.offsets = stack.enter_context(engine.alloc(4 * entries, device=number))
            seats = gathered("global_group", global_group, joining.seat, name, timeout)
            self.exchange = stack.enter_context(joining.join(seats, timeout=timeout))
            self.engine = engine
            self._device = number
            # Where the routes of the dispatch before lie.
            self._routes: dict[str, object] | None = None
            # Where it was, still says so after `destroy`; then it is for the exchange to refuse the call.
            self._offsets = self.offsets.ptr, self.offsets.nbytes
            # From here on, `destroy` ends it all.
            self._held = stack.pop_all()

    def dispatch(
        self,
        *,
        out_expert_num_tokens: _GpuMemory,
        out_expert_x: _GpuMemory,
        out_expert_x_scale: _GpuMemory | None = None,
        dp_x: _GpuMemory,
        dp_x_scale: _GpuMemory | None = None,
        indices: _GpuMemory,
        weights: _GpuMemory,
        bound_m: _GpuMemory | None = None,
        do_send: bool = True,
        do_recv: bool = True,
        stream: _SupportsCudaStream | int | None = None,
    ) -> None:
        """Enqueue the way out: tokens to the ranks of the experts they chose, and here what others sent.

        - ``dp_x``, ``dp_x_scale``, ``indices``, ``weights``: a row for each token, C-contiguous. Indices have
          32 or 64 bits, and -1 is a choice that was dropped. Weights are ``float32``; ``combine`` uses them.
        - ``bound_m``: if given, the ``int32`` in it is the number of tokens when the stream comes here.
        - ``out_expert_x``, ``out_expert_x_scale``: whole rows; ``exchange.max_rows`` are always enough.
          ``out_expert_num_tokens``: ``int32``, tokens for each of this rank's experts.
        - ``do_send`` alone waits for nothing; ``do_recv`` alone comes later, with the same arguments.

        ``stream`` is torch's current one of the GPU, unless given; where torch is not imported, it has to be.
        """
        half = _half(do_send, do_recv)
        if half is None:
            return
        self.exchange.dispatch(
            seen(dp_x),
            seen(indices),
            seen(weights),
            None if dp_x_scale is None else seen(dp_x_scale),
            out=seen(out_expert_x),
            out_scales=None if out_expert_x_scale is None else seen(out_expert_x_scale),
            counts=seen(out_expert_num_tokens),
            offsets=self._offsets,
            count=None if bound_m is None else seen(bound_m),
            stream=stream_of(stream, self._device),
            half=half,
        )
        if do_send:
            routes = {"indices": indices, "weights": weights, "bound_m": bound_m}
            self._routes = {what: _whereabouts(array) for what, array in routes.items()}

    def combine(
        self,
        *,
        out_tokens: _GpuMemory,
        indices: _GpuMemory | None = None,
        weights: _GpuMemory | None = None,
        expert_y: _GpuMemory,
        bound_m: _GpuMemory | None = None,
        do_send: bool = True,
        do_recv: bool = True,
        accumulate: bool = False,
        stream: _SupportsCudaStream | int | None = None,
    ) -> None:
        """Enqueue the way back: for each token the sum of its choices' results, times their weights.

        ``expert_y`` has ``hidden_dim`` values in each row of the dispatch before, ``out_tokens`` in a row for
        each token that this had memory for. ``accumulate``: add to what is there. The rest is as there.

        ``indices``, ``weights`` and ``bound_m`` are what the dispatch before was given, and what they held
        then counts. They need not be given again. If they are, they begin where those do, the same tensors or
        such views of them; ``RequestError`` otherwise, for to compare contents would wait for the GPU. After
        graphs that were replayed, "before" is the call that was made last, not the dispatch in the graph:
        leave them out then.
        """
        half = _half(do_send, do_recv)
        if half is None:
            return
        for what, given in (("indices", indices), ("weights", weights), ("bound_m", bound_m)):
            if given is not None and self._routes is not None:
                _same(what, given, self._routes[what])
        self.exchange.combine(
            seen(expert_y),
            out=seen(out_tokens),
            accumulate=accumulate,
            stream=stream_of(stream, self._device),
            half=half,
        )

    def destroy(self) -> None:
        """End it, once the GPU has done all that it was given. Graphs of it must not be replayed any more."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()


def _whereabouts(array: _GpuMemory | None) -> object:
    """Its address; itself, where only the exchange finds that. Then it is held until the next dispatch."""
    if array is None or isinstance(array, tuple):
        return array and array[0]
    # torch has its address at hand, and takes its time for the interface.
    ask: Any = getattr(array, "data_ptr", None)
    if callable(ask):
        return ask()
    interface: Any = getattr(array, "__cuda_array_interface__", None)
    return array if interface is None else interface["data"][0]


def _same(what: str, given: _GpuMemory, before: object) -> None:
    """Refuses what lies elsewhere than what dispatch was given."""
    here = _whereabouts(given)
    if here is before or (isinstance(here, int) and isinstance(before, int) and here == before):
        return
    was = ", which was None" if before is None else ""
    message = f"{what} is not the one that dispatch was given{was}: that is what combine uses"
    raise RequestError(f"{message}. Pass the same tensors to both, or None here")


def _half(send: bool, receive: bool) -> str | None:
    if send and receive:
        return "both"
    if send:
        return "send"
    return "receive" if receive else None


def _item_bytes(what: str, dtype: object) -> int:
    name = dtype_name(dtype)
    try:
        return _ITEM_BYTES[name]
    except KeyError:
        raise ConfigError(f"{what} is {name}: it can be {', '.join(sorted(_ITEM_BYTES))}") from None
