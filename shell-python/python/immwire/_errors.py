"""Exceptions: one root, and on each what was found, as values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ._immwire import PeerId


class PeerShare(NamedTuple):
    """What one peer had sent when a wait for a count timed out."""

    peer: PeerId
    #: Whole writes and pages of it that had arrived, but for those that waits for its share have consumed.
    arrived: int
    #: Writes and pages expected of it, if the wait said so, and all earlier waits on the counter did: else
    #: ``arrived`` is of those, too.
    expected: int | None
    #: Where it stood then, as ``TransferEngine.peer_state`` says it.
    state: str | None


class ImmwireError(Exception):
    """Whatever can go wrong here.

    Every error has all fields; those that do not apply are ``None``.
    """

    #: The peer it is about.
    peer: PeerId | None
    #: The number of this engine's NIC that it is about.
    nic: int | None
    #: Writes that had not arrived.
    missing: int | None
    #: Seconds that were given.
    deadline: float | None

    def __init__(
        self,
        message: str,
        *,
        peer: PeerId | None = None,
        nic: int | None = None,
        missing: int | None = None,
        deadline: float | None = None,
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.nic = nic
        self.missing = missing
        self.deadline = deadline


class ConfigError(ImmwireError, ValueError):
    """An engine, or an exchange, cannot be made of what was given."""


class RequestError(ImmwireError, ValueError):
    """A request contradicts itself or its regions; nothing was posted."""


class CapacityError(ImmwireError):
    """All transfers, peers, counters or regions are in use; some must end first.

    A transfer that has ended is in nobody's way, whoever keeps it; ``TransferEngine.wait_capacity`` waits for
    one to end.
    """

    #: How many there can be.
    capacity: int | None

    def __init__(self, message: str, *, capacity: int | None = None) -> None:
        super().__init__(message)
        self.capacity = capacity


class EngineClosed(ImmwireError):
    """The engine was closed, or the counter, flag, watcher or exchange that is used.

    A closed region raises ``RegionError``.
    """


class ForkedError(ImmwireError):
    """What another process made is used in its forked child."""


class PeerError(ImmwireError):
    """A peer cannot be reached, is down, or is not known."""


class TransferError(ImmwireError):
    """A transfer did not complete. Its memory is the caller's again.

    ``started`` tells whether some of it may have been written.
    """

    started: bool

    def __init__(
        self,
        message: str,
        *,
        started: bool = False,
        peer: PeerId | None = None,
        nic: int | None = None,
        deadline: float | None = None,
    ) -> None:
        super().__init__(message, peer=peer, nic=nic, deadline=deadline)
        self.started = started


class TransferCancelled(TransferError):
    """The transfer was cancelled."""


class DeadlineExceeded(TransferError):
    """The transfer's deadline passed, and it was stopped."""


class PeerDown(TransferError, PeerError):
    """A peer that the transfer goes to is gone, or a connection to it broke under the transfer.

    Of the latter it may be told before the peer is down, and where there is another way the peer stays up:
    ask ``TransferEngine.peer_state``, or wait with ``wait_peer``.
    """


class WaitTimeout(ImmwireError, TimeoutError):
    """A wait took longer than it was given; what was waited for goes on.

    A transfer's memory is still in use: wait again, or cancel it. Of a count nothing was consumed; ``peer``
    is who is late, if ``wait_from`` waits for just one.
    """

    #: Writes waited for.
    target: int | None
    #: Who had sent what.
    shares: list[PeerShare]

    def __init__(
        self,
        message: str,
        *,
        peer: PeerId | None = None,
        missing: int | None = None,
        deadline: float | None = None,
        target: int | None = None,
        shares: list[PeerShare] | None = None,
    ) -> None:
        super().__init__(message, peer=peer, missing=missing, deadline=deadline)
        self.target = target
        self.shares = [] if shares is None else shares


class CounterError(ImmwireError):
    """A counter cannot be used so: another wait on it is under way, or it is gone."""


class RegionError(ImmwireError):
    """Memory cannot be registered, or withdrawn."""


class RegionInUse(RegionError, BufferError):
    """A region cannot be closed: views, other handles or transfers under way use it.

    Or it cannot be used: another thread is closing it, and may not succeed.
    """


class UnsupportedMemory(RegionError, TypeError):
    """The provider cannot reach this kind of memory, or the object has none to offer."""


class MoeError(ImmwireError):
    """An exchange among ranks failed; it is over. Make a new one with those who are left.

    A call that is refused raises ``RequestError`` instead: it has changed nothing, and can be made again.
    """

    #: The ranks it is about: who is missing, or whose fault it is.
    ranks: tuple[int, ...]
    #: ``"set-up"``, ``"dispatch"`` or ``"combine"``.
    phase: str | None
    #: Which chunk of it.
    chunk: int | None

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...] = (),
        phase: str | None = None,
        chunk: int | None = None,
        peer: PeerId | None = None,
        deadline: float | None = None,
    ) -> None:
        super().__init__(message, peer=peer, deadline=deadline)
        self.ranks = ranks
        self.phase = phase
        self.chunk = chunk


class MoeTimeout(MoeError, TimeoutError):
    """Some ranks sent nothing in time: ``ranks`` says which."""


class RankError(MoeError, PeerError):
    """A rank is gone, or cannot be reached or written to: ``ranks`` says which."""
