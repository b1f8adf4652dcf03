"""Groups of ranks, and devices, streams and types by the names that programs have for them.

No torch is imported here: where a program has done so, its streams, groups and tensors are understood.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ._errors import ConfigError, RequestError

if TYPE_CHECKING:
    from ._immwire import _GpuMemory, _SupportsCudaStream
    from .bootstrap import Store

    _Group: TypeAlias = "OtherGroup | ProcessGroup | tuple[Store, int, int]"


class OtherGroup(Protocol):
    """Ranks that can tell each other something."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather_object(self, obj: Any, /) -> list[Any]: ...


class ProcessGroup(Protocol):
    """What is asked of a group of torch.distributed."""

    def rank(self) -> int: ...
    def size(self) -> int: ...


def torch_here() -> Any:
    """torch, if the program uses it."""
    return sys.modules.get("torch")


def seen(array: _GpuMemory) -> _GpuMemory:
    """``array``, or a view of its bytes where torch has no interface for its type."""
    torch = torch_here()
    if torch is None or not isinstance(array, torch.Tensor):
        return array
    tensor: Any = array
    try:
        _ = tensor.__cuda_array_interface__
    except Exception:  # Which one, differs among its versions. What is wrong otherwise, the exchange says.
        tensor = tensor.view(torch.uint8)
    bytes_of: _GpuMemory = tensor
    return bytes_of


def number_of(device: object) -> int:
    """Which GPU: 1 for 1, "cuda:1" and torch.device("cuda", 1); for "cuda" torch's current one."""
    if isinstance(device, int):
        return device
    kind, _, number = str(device).partition(":")
    if kind == "cuda" and number.isdecimal():
        return int(number)
    torch = torch_here()
    if str(device) == "cuda" and torch is not None:
        return int(torch.cuda.current_device())
    raise ConfigError(f'device is {str(device)!r}: which GPU is it? A number or "cuda:0" says so')


def stream_of(stream: _SupportsCudaStream | int | None, device: int) -> _SupportsCudaStream | int:
    """``stream``, or torch's current one of this GPU."""
    if stream is not None:
        return stream
    torch = torch_here()
    if torch is None:
        raise RequestError("stream is missing: torch, whose current one it would be, is not imported")
    return int(torch.cuda.current_stream(device).cuda_stream)


def dtype_name(dtype: object) -> str:
    """A type's name, be it torch's own."""
    return str(dtype).removeprefix("torch.")


def place(what: str, group: _Group) -> tuple[int, int]:
    """Its rank here, and how many there are."""
    if isinstance(group, tuple):
        _, rank, world = group
    else:
        # Numbers, or methods as torch has them.
        found: list[Any] = [getattr(group, name, None) for name in ("rank", "size")]
        rank, world = (each() if callable(each) else each for each in found)
    if not (isinstance(rank, int) and isinstance(world, int) and 0 <= rank < world):
        raise ConfigError(f"{what} has rank {rank!r} of {world!r}: it is a group, or (store, rank, world)")
    return rank, world


def gathered(what: str, group: _Group, value: bytes, name: str, timeout: float) -> list[bytes]:
    """The values of all ranks."""
    if isinstance(group, tuple):
        # It brings modules with it that not everybody needs.
        from . import bootstrap

        store, rank, world = group
        return bootstrap.exchange(store, rank=rank, world=world, value=value, name=name, timeout=timeout)
    # torch's groups have no method for it, but a function.
    gather: Any = getattr(group, "all_gather_object", None)
    if gather is not None:
        return list(gather(value))
    torch = torch_here()
    if torch is None or not isinstance(group, torch.distributed.ProcessGroup):
        raise ConfigError(f"{what} has no all_gather_object, and is no group of torch.distributed")
    _, world = place(what, group)
    values: list[Any] = [None] * world
    torch.distributed.all_gather_object(values, value, group=group)
    return values
