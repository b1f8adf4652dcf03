"""The compiled part. What each thing is for, its own documentation says; here are the types."""

from asyncio import Future
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import GenericAlias, TracebackType
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, TypeVar, final, overload

from typing_extensions import Buffer, CapsuleType, Self

_T = TypeVar("_T")

class _SupportsArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class _SupportsCudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class _SupportsDLPack(Protocol):
    def __dlpack__(self) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...

class _SupportsCudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

_Memory: TypeAlias = (
    Buffer | _SupportsArrayInterface | _SupportsCudaArrayInterface | _SupportsDLPack | tuple[int, int]
)
_HostMemory: TypeAlias = Buffer | _SupportsArrayInterface | _SupportsDLPack | tuple[int, int]
_GpuMemory: TypeAlias = _SupportsCudaArrayInterface | _SupportsDLPack | tuple[int, int]
_Pages: TypeAlias = PageIndices | Buffer | Sequence[int]

__version__: str
__all__ = [
    "_run_cli",
    "Following",
    "GpuFlag",
    "ImmCounter",
    "TransferEngine",
    "_close_all",
    "HostAllToAll",
    "GpuAllToAll",
    "GpuJoining",
    "Joining",
    "MoeReport",
    "Received",
    "PageIndices",
    "Transfer",
    "Message",
    "MrDesc",
    "NetAddr",
    "Nic",
    "PeerGroup",
    "PeerId",
    "Stats",
    "StreamWait",
    "Target",
    "Waiting",
    "UvmWatcher",
    "__version__",
    "Region",
]

def _close_all() -> None: ...
def _run_cli(args: Sequence[str], program: Sequence[str], /) -> int: ...

@final
class PeerId:
    def __new__(cls, index: int, generation: int, /) -> Self: ...
    @property
    def index(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __lt__(self, other: PeerId, /) -> bool: ...
    def __le__(self, other: PeerId, /) -> bool: ...
    def __gt__(self, other: PeerId, /) -> bool: ...
    def __ge__(self, other: PeerId, /) -> bool: ...

@final
class NetAddr:
    def __new__(cls, text: str, /) -> Self: ...
    @classmethod
    def from_bytes(cls, data: bytes, /) -> NetAddr: ...
    def __bytes__(self) -> bytes: ...
    @property
    def provider(self) -> str: ...
    @property
    def nics(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class MrDesc:
    @classmethod
    def from_bytes(cls, data: bytes, /) -> MrDesc: ...
    def __bytes__(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def remote_write(self) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Message:
    @property
    def peer(self) -> PeerId: ...
    @property
    def data(self) -> bytes: ...

@final
class Target:
    def __new__(
        cls,
        *,
        peer: PeerId,
        dst: MrDesc,
        len: int,
        src_offset: int = 0,
        dst_offset: int = 0,
    ) -> Self: ...

@final
class PeerGroup:
    @property
    def peers(self) -> list[PeerId]: ...
    def __len__(self) -> int: ...

@final
class Nic:
    @property
    def name(self) -> str: ...
    @property
    def speed_gbps(self) -> int: ...
    @property
    def max_message_bytes(self) -> int: ...

@final
class Stats:
    @property
    def posted(self) -> int: ...
    @property
    def completed(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def immediates(self) -> int: ...
    @property
    def refused_immediates(self) -> int: ...
    @property
    def stale_immediates(self) -> int: ...
    @property
    def sleeps(self) -> int: ...

@final
class PageIndices:
    def __new__(cls, pages: _Pages, /) -> Self: ...
    def __len__(self) -> int: ...

@final
class Waiting(Coroutine[Future[None], object, _T]):
    @classmethod
    def __class_getitem__(cls, item: Any) -> GenericAlias: ...
    def __await__(self) -> Generator[Future[None], None, _T]: ...
    def __iter__(self) -> Iterator[Future[None]]: ...
    def __next__(self) -> Future[None]: ...
    def send(self, _value: object, /) -> Future[None]: ...
    def throw(self, *error: Any) -> NoReturn: ...
    def close(self) -> None: ...

@final
class StreamWait:
    def done(self) -> bool: ...
    def result(self, *, timeout: float | None = None) -> None: ...

@final
class Following:
    @property
    def active(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class GpuFlag:
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def place(self) -> str: ...
    @property
    def value(self) -> int: ...
    def set(self, value: int, /) -> None: ...
    def follow(self, counter: ImmCounter, *, writes: int) -> Following: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class UvmWatcher:
    @property
    def address(self) -> int: ...
    @property
    def value(self) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class Region:
    @property
    def desc(self) -> MrDesc: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def ptr(self) -> int: ...
    @property
    def device(self) -> int | None: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    @property
    def closed(self) -> bool: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def slice(self, offset: int, length: int, /) -> Region: ...
    def read(self, offset: int = 0, length: int | None = None, /) -> bytes: ...
    def write(self, offset: int, data: Buffer, /) -> None: ...
    def close(self, *, timeout: float | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class ImmCounter:
    @property
    def tag(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def available(self) -> int: ...
    def try_take(self, writes: int, /) -> bool: ...
    def wait(self, writes: int, /, *, timeout: float | None = None) -> Waiting[None]: ...
    def wait_from(
        self, expected: Mapping[PeerId, int], /, *, timeout: float | None = None
    ) -> Waiting[None]: ...
    def wait_blocking(self, writes: int, /, *, timeout: float | None = None) -> None: ...
    def wait_from_blocking(
        self, expected: Mapping[PeerId, int], /, *, timeout: float | None = None
    ) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class Transfer:
    def __await__(self) -> Generator[Future[None]]: ...
    def wait(self, *, timeout: float | None = None) -> Waiting[None]: ...
    def wait_blocking(self, *, timeout: float | None = None) -> None: ...
    def done(self) -> bool: ...
    @property
    def end(self) -> str | None: ...
    def exception(self) -> BaseException | None: ...
    def cancel(self) -> None: ...
    def add_done_callback(self, call: Callable[[Transfer], object], /) -> None: ...

@final
class TransferEngine:
    def __new__(
        cls,
        *,
        provider: str = "shm",
        fabric: str | None = None,
        interface: str | None = None,
        library: str | PathLike[str] | None = None,
        devices: Sequence[str] | None = None,
        gid_index: int | None = None,
        traffic_class: int | None = None,
        service_level: int | None = None,
        ack_timeout: int | None = None,
        retry_count: int | None = None,
        on_demand: bool = False,
        classic: bool = False,
        gpus: Sequence[int] | None = None,
        pairing: str | None = None,
        topology: str | PathLike[str] | None = None,
        sms: int | None = None,
        stand_by: bool = True,
        shm_on_host: bool = False,
        host: str | None = None,
        staging: int | None = None,
        nics: int = 1,
        transfers: int = 1024,
        peers: int = 256,
        counters: int = 1024,
        group_key: bytes | None = None,
        idle_spin: float = 50e-6,
        pin_cpu: int | None = None,
        timeout: float = 30.0,
        spin: float | None = None,
        drain: float = 1.0,
        heartbeat: float | None = None,
        suspect_after: float | None = None,
        down_after: float | None = None,
        connect_deadline: float | None = None,
        idle_after: float | None = None,
        mailbox_slots: int = 8,
        mailbox_slot_bytes: int = 65536,
        latency_bytes: int = 8192,
        foreign_path: str = "auto",
    ) -> Self: ...
    @property
    def address(self) -> NetAddr: ...
    def transport_to(self, address: NetAddr | str | bytes, /) -> str | None: ...
    @property
    def nics(self) -> list[Nic]: ...
    def stats(self) -> Stats: ...
    def alloc(self, nbytes: int, /, *, device: int | None = None) -> Region: ...
    def register(self, memory: _Memory, /, *, remote_write: bool | None = None) -> Region: ...
    def after_stream(self, stream: _SupportsCudaStream | int, /, *, device: int) -> None: ...
    def wait_on_stream(
        self,
        stream: _SupportsCudaStream | int,
        /,
        *,
        device: int,
        counter: ImmCounter,
        writes: int,
        timeout: float | None = None,
    ) -> StreamWait: ...
    def alloc_uvm_watcher(self, callback: Callable[[int, int], object], /) -> UvmWatcher: ...
    def alloc_gpu_flag(self, *, device: int) -> GpuFlag: ...
    def add_peer(self, address: NetAddr | str | bytes, /) -> PeerId: ...
    def wait_peer(self, peer: PeerId, /, *, timeout: float | None = None) -> Waiting[None]: ...
    def wait_peer_blocking(self, peer: PeerId, /, *, timeout: float | None = None) -> None: ...
    def peer_state(self, peer: PeerId, /) -> str | None: ...
    @property
    def peers(self) -> list[PeerId]: ...
    def remove_peer(self, peer: PeerId, /) -> None: ...
    def add_peer_group(self, peers: Sequence[PeerId], /) -> PeerGroup: ...
    def set_nic_health(self, nic: int, /, *, healthy: bool) -> None: ...
    def counter(self, *, slot: int | None = None) -> ImmCounter: ...
    def expect_imm_count(
        self,
        *,
        counter: ImmCounter,
        writes: int,
        callback: Callable[[BaseException | None], object],
    ) -> None: ...
    def submit_single_write(
        self,
        *,
        peer: PeerId,
        src: Region,
        dst: MrDesc,
        len: int | None = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        imm: int | None = None,
        deadline: float | None = None,
    ) -> Transfer: ...
    def submit_paged_writes(
        self,
        *,
        peer: PeerId,
        page_bytes: int,
        src: Region,
        src_pages: _Pages,
        dst: MrDesc,
        dst_pages: _Pages,
        src_stride: int | None = None,
        src_offset: int = 0,
        dst_stride: int | None = None,
        dst_offset: int = 0,
        imm: int | None = None,
        deadline: float | None = None,
    ) -> Transfer: ...
    def submit_scatter(
        self,
        *,
        src: Region,
        targets: Sequence[Target],
        imm: int | None = None,
        deadline: float | None = None,
    ) -> Transfer: ...
    def submit_barrier(self, *, group: PeerGroup, imm: int, deadline: float | None = None) -> Transfer: ...
    def submit_imm(
        self, *, peer: PeerId, imm: int, writes: int = 1, deadline: float | None = None
    ) -> Transfer: ...
    def submit_send(self, *, peer: PeerId, data: Buffer, deadline: float | None = None) -> Transfer: ...
    def submit_recvs(self, *, count: int, callback: Callable[[Message], object]) -> None: ...
    def recv(self, *, timeout: float | None = None) -> Waiting[Message]: ...
    def recv_blocking(self, *, timeout: float | None = None) -> Message: ...
    def wait_capacity(self, *, timeout: float | None = None) -> Waiting[bool]: ...
    def wait_capacity_blocking(self, *, timeout: float | None = None) -> bool: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class Received:
    @property
    def counts(self) -> list[int]: ...
    @property
    def offsets(self) -> list[int]: ...

@final
class Joining:
    @property
    def seat(self) -> bytes: ...
    def join(self, seats: Iterable[Buffer], /, *, timeout: float | None = None) -> HostAllToAll: ...

@final
class HostAllToAll:
    @overload
    @staticmethod
    def open(
        engine: TransferEngine,
        /,
        *,
        rank: int,
        top_k: int,
        max_tokens: int,
        hidden: int,
        experts: int,
        world: int,
        firsts: None = None,
        token_bytes: int | None = None,
        scale_bytes: int = 0,
        dtype: str = "bfloat16",
        padding: int = 1,
        chunk_tokens: int | None = None,
        exact: bool = False,
    ) -> Joining: ...
    @overload
    @staticmethod
    def open(
        engine: TransferEngine,
        /,
        *,
        rank: int,
        top_k: int,
        max_tokens: int,
        hidden: int,
        experts: None = None,
        world: None = None,
        firsts: Sequence[int],
        token_bytes: int | None = None,
        scale_bytes: int = 0,
        dtype: str = "bfloat16",
        padding: int = 1,
        chunk_tokens: int | None = None,
        exact: bool = False,
    ) -> Joining: ...
    @overload
    def dispatch(
        self,
        x: _HostMemory,
        indices: Buffer,
        weights: Buffer,
        scales: _HostMemory | None = None,
        *,
        out: _HostMemory,
        out_scales: _HostMemory | None = None,
        slots: Buffer | None = None,
        half: Literal["both", "receive"] = "both",
        timeout: float | None = None,
    ) -> Received: ...
    @overload
    def dispatch(
        self,
        x: _HostMemory,
        indices: Buffer,
        weights: Buffer,
        scales: _HostMemory | None = None,
        *,
        out: _HostMemory,
        out_scales: _HostMemory | None = None,
        slots: Buffer | None = None,
        half: Literal["send"],
        timeout: float | None = None,
    ) -> None: ...
    def combine(
        self,
        y: _HostMemory,
        *,
        out: _HostMemory,
        accumulate: bool = False,
        half: Literal["both", "send", "receive"] = "both",
        timeout: float | None = None,
    ) -> None: ...
    def report(self) -> MoeReport: ...
    @property
    def active_ranks(self) -> list[int]: ...
    def abort(self) -> None: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_slots(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class MoeReport:
    @property
    def late_tables(self) -> dict[int, int]: ...
    @property
    def late_tokens(self) -> dict[int, int]: ...
    @property
    def late_results(self) -> dict[int, int]: ...
    @property
    def left_by(self) -> dict[int, int]: ...
    @property
    def reasons(self) -> dict[int, str]: ...
    @property
    def refused(self) -> tuple[int, int, int, int] | None: ...
    @property
    def rows_left_out(self) -> int | None: ...
    @property
    def tokens_left_out(self) -> int | None: ...
    def __bool__(self) -> bool: ...

@final
class GpuJoining:
    @property
    def seat(self) -> bytes: ...
    def join(self, seats: Iterable[Buffer], /, *, timeout: float | None = None) -> GpuAllToAll: ...

@final
class GpuAllToAll:
    @overload
    @staticmethod
    def open(
        engine: TransferEngine,
        /,
        *,
        rank: int,
        device: int,
        top_k: int,
        max_tokens: int,
        hidden: int,
        experts: int,
        world: int,
        firsts: None = None,
        dtype: str = "bfloat16",
        quantize: str | None = None,
        token_bytes: int | None = None,
        scale_bytes: int = 0,
        padding: int = 1,
        exact: bool = False,
        sms: int = 0,
        patience: float = 5.0,
    ) -> GpuJoining: ...
    @overload
    @staticmethod
    def open(
        engine: TransferEngine,
        /,
        *,
        rank: int,
        device: int,
        top_k: int,
        max_tokens: int,
        hidden: int,
        experts: None = None,
        world: None = None,
        firsts: Sequence[int],
        dtype: str = "bfloat16",
        quantize: str | None = None,
        token_bytes: int | None = None,
        scale_bytes: int = 0,
        padding: int = 1,
        exact: bool = False,
        sms: int = 0,
        patience: float = 5.0,
    ) -> GpuJoining: ...
    def dispatch(
        self,
        x: _GpuMemory,
        indices: _GpuMemory,
        weights: _GpuMemory,
        scales: _GpuMemory | None = None,
        *,
        out: _GpuMemory,
        out_scales: _GpuMemory | None = None,
        slots: _GpuMemory | None = None,
        counts: _GpuMemory,
        offsets: _GpuMemory,
        count: _GpuMemory | None = None,
        clear_padding: bool = True,
        stream: _SupportsCudaStream | int,
        half: str = "both",
    ) -> None: ...
    def combine(
        self,
        y: _GpuMemory,
        *,
        out: _GpuMemory,
        accumulate: bool = False,
        stream: _SupportsCudaStream | int,
        half: str = "both",
    ) -> None: ...
    def report(self) -> MoeReport: ...
    @property
    def active_ranks(self) -> list[int]: ...
    def abort(self) -> None: ...
    def start_over(self, *, timeout: float | None = None) -> None: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_slots(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    @property
    def scale_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
