"""How engines find each other: addresses and descriptors, as bytes, through a store that all can reach.

A store has two operations, ``set`` and ``get`` with a deadline. Here are stores on a directory, on Redis, on
etcd and on torch.distributed; anything else with these two methods will do. Nothing is pickled: what is
read from a store is checked like any other bytes from outside, and whoever can write to the store can do no
more than keep engines from meeting, or send them to other engines of the same group (a ``group_key`` that
only they know keeps others out).

>>> import tempfile
>>> from immwire import bootstrap
>>> store = bootstrap.DirectoryStore(tempfile.mkdtemp())
>>> store.set("answer", b"42")
>>> store.get("answer", timeout=1)
b'42'

Keys of an earlier run are not told from those of this one: give each run a directory or ``prefix`` of its
own.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ._errors import ImmwireError, RequestError, WaitTimeout
from ._immwire import NetAddr, PeerId, TransferEngine

__all__ = [
    "DirectoryStore",
    "EtcdStore",
    "Member",
    "RedisStore",
    "Store",
    "StoreError",
    "TorchStore",
    "exchange",
    "join",
    "pack",
    "unpack",
]

#: The longest value that a store of this module takes.
MAX_VALUE_BYTES = 1 << 20
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
#: What a look is given when no time is left.
_LAST_LOOK = 0.1


class StoreError(ImmwireError):
    """A store cannot be reached, or answers nonsense."""


class _Unauthorized(StoreError):
    """etcd does not know the token, or wants one."""


class Store(Protocol):
    """What engines find each other through."""

    def set(self, key: str, value: bytes, /) -> None:
        """Leave ``value`` under ``key``, for everybody."""

    def get(self, key: str, /, *, timeout: float) -> bytes:
        """Return what lies under ``key``; wait for it up to ``timeout`` seconds.

        Raises ``WaitTimeout`` if it has not come by then.
        """


def _await(key: str, timeout: float, look: Callable[[float], bytes | None]) -> bytes:
    """Look until there is something. ``look`` is given the time that is left, at least a little."""
    end = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while True:
        found = look(max(end - time.monotonic(), _LAST_LOOK))
        if found is not None:
            return found
        left = end - time.monotonic()
        if left <= 0:
            raise WaitTimeout(f"nothing under {key!r} after {timeout} s", deadline=timeout)
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _checked(value: bytes) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        raise RequestError(f"a value of {len(value)} bytes is longer than {MAX_VALUE_BYTES}")
    return value


class DirectoryStore:
    """A directory that all processes see, one file for each key, with the mode that the umask leaves it.

    Where users differ, all must be let read there, and those who set, write: a umask of 027 or 077 keeps
    others out.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self._path}: {error}") from error

    def _file(self, key: str) -> Path:
        # No key reaches outside the directory, nor meets a file that is being written, which has a dot.
        return self._path / ("key-" + urllib.parse.quote(key, safe="").replace(".", "%2E"))

    def set(self, key: str, value: bytes, /) -> None:
        """Leave ``value``; whoever looks sees all of it or nothing."""
        new = self._path / f"new.{secrets.token_hex(8)}"
        try:
            try:
                with new.open("xb") as out:
                    out.write(_checked(value))
                new.replace(self._file(key))
            except BaseException:
                new.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise StoreError(f"{self._path}: {error}") from error

    def get(self, key: str, /, *, timeout: float) -> bytes:
        """Return the value, once it is there."""

        def look(_left: float) -> bytes | None:
            try:
                with self._file(key).open("rb") as file:
                    return _checked(file.read(MAX_VALUE_BYTES + 1))
            except FileNotFoundError:
                return None
            except OSError as error:
                raise StoreError(f"{self._path}: {error}") from error

        return _await(key, timeout, look)

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self._path)!r})"


class TorchStore:
    """A store of torch.distributed: ``TCPStore``, ``FileStore``, ...; torch itself is not imported."""

    def __init__(self, store: Any, *, prefix: str = "immwire/") -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes, /) -> None:
        """Leave ``value``."""
        # As text: some of torch's bindings take nothing else.
        self._store.set(self._prefix + key, base64.b64encode(_checked(value)).decode())

    def get(self, key: str, /, *, timeout: float) -> bytes:
        """Return the value, once it is there."""
        name = self._prefix + key
        end = time.monotonic() + timeout
        while True:
            start = time.monotonic()
            # torch counts whole milliseconds, and waits for ever if there are none.
            limit = max(int((end - start) * 1000), 1)
            try:
                self._store.wait([name], timedelta(milliseconds=limit))
                return base64.b64decode(self._store.get(name), validate=True)
            except ValueError as error:
                raise StoreError(f"what lies under {key!r} is not ours") from error
            except RuntimeError as error:
                # torch has no type of its own for a wait that timed out in every version.
                now = time.monotonic()
                if now - start < limit / 1000:
                    raise StoreError(f"torch's store: {error}") from error
                # Some stores come back late, and none is waited for again then.
                if now >= end:
                    message = f"nothing under {key!r} after {timeout} s"
                    raise WaitTimeout(message, deadline=timeout) from error

    def __repr__(self) -> str:
        return f"TorchStore({self._store!r})"


class RedisStore:
    """A Redis server, or one that speaks as it does. One connection for each operation.

    ``expire``: seconds after which what was set is forgotten.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 6379,
        *,
        prefix: str = "immwire/",
        username: str | None = None,
        password: str | None = None,
        expire: float = 3600.0,
        connect_timeout: float = 5.0,
    ) -> None:
        self._where = (host, port)
        self._prefix = prefix
        self._login = [name for name in (username, password) if name is not None]
        self._expire_ms = int(expire * 1000)
        self._connect_timeout = connect_timeout

    def _ask(self, *words: bytes | str, timeout: float) -> bytes | None:
        limit = min(timeout, self._connect_timeout)
        try:
            with socket.create_connection(self._where, timeout=limit) as connection:
                # Also for what comes after: a server that hangs is no reason to.
                connection.settimeout(limit)
                with connection.makefile("rb") as answers:
                    if self._login:
                        connection.sendall(_redis_command("AUTH", *self._login))
                        _redis_answer(answers)
                    connection.sendall(_redis_command(*words))
                    return _redis_answer(answers)
        except OSError as error:
            raise StoreError(f"Redis at {self._where[0]}:{self._where[1]}: {error}") from error

    def set(self, key: str, value: bytes, /) -> None:
        """Leave ``value``."""
        name, limit = self._prefix + key, str(self._expire_ms)
        answer = self._ask("SET", name, _checked(value), "PX", limit, timeout=self._connect_timeout)
        if answer != b"OK":
            raise StoreError(f"Redis answered {answer!r} to SET")

    def get(self, key: str, /, *, timeout: float) -> bytes:
        """Return the value, once it is there."""
        name = self._prefix + key
        return _await(key, timeout, lambda left: self._ask("GET", name, timeout=left))

    def __repr__(self) -> str:
        return f"RedisStore({self._where[0]!r}, {self._where[1]})"


def _redis_command(*words: bytes | str) -> bytes:
    """A command in RESP, the protocol of Redis: an array of strings, each with its length."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word.encode() if isinstance(word, str) else word
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def _redis_answer(answers: Any) -> bytes | None:
    line: bytes = answers.readline(4096)
    kind, rest = line[:1], line[1:].rstrip(b"\r\n")
    if kind == b"+":
        return rest
    if kind == b"-":
        raise StoreError(f"Redis: {rest.decode(errors='replace')}")
    if kind == b"$" and rest == b"-1":
        return None
    if kind == b"$" and rest.isdigit() and int(rest) <= MAX_VALUE_BYTES:
        data: bytes = answers.read(int(rest) + 2)
        if len(data) == int(rest) + 2:
            return data[:-2]
    raise StoreError(f"Redis answered {line[:40]!r}")


class EtcdStore:
    """An etcd server, version 3, by its JSON gateway.

    With ``username``, a token is fetched once, and again whenever the server knows it no more.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:2379",
        *,
        prefix: str = "immwire/",
        username: str | None = None,
        password: str | None = None,
        connect_timeout: float = 5.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._prefix = prefix
        self._connect_timeout = connect_timeout
        self._login = None if username is None else {"name": username, "password": password or ""}
        self._token = None if self._login is None else self._fetched(self._login, connect_timeout)

    def _ask(self, path: str, request: Mapping[str, str], *, timeout: float) -> dict[str, Any]:
        end = time.monotonic() + min(timeout, self._connect_timeout)
        try:
            return self._post(path, request, self._token, timeout)
        except _Unauthorized:
            if self._login is None:
                raise
        # Tokens end when they were not used for a while (of 300 s, unless told), or with the server.
        self._token = self._fetched(self._login, max(end - time.monotonic(), _LAST_LOOK))
        return self._post(path, request, self._token, max(end - time.monotonic(), _LAST_LOOK))

    def _fetched(self, login: Mapping[str, str], timeout: float) -> str:
        return str(self._post("auth/authenticate", login, None, timeout).get("token", ""))

    def _post(
        self, path: str, request: Mapping[str, str], token: str | None, timeout: float
    ) -> dict[str, Any]:
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": token})
        ask = urllib.request.Request(f"{self._url}/v3/{path}", body, headers, method="POST")
        try:
            with urllib.request.urlopen(ask, timeout=min(timeout, self._connect_timeout)) as answer:
                found = json.loads(answer.read(4 * MAX_VALUE_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                is_unauthorized = error.code == 401 or b"invalid auth token" in error.read(4096)
            kind = _Unauthorized if is_unauthorized else StoreError
            raise kind(f"etcd at {self._url}: {error}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise StoreError(f"etcd at {self._url}: {error}") from error
        if not isinstance(found, dict):
            raise StoreError(f"etcd at {self._url} answered no object")
        return found

    def _name(self, key: str) -> str:
        return base64.b64encode((self._prefix + key).encode()).decode()

    def set(self, key: str, value: bytes, /) -> None:
        """Leave ``value``."""
        data = base64.b64encode(_checked(value)).decode()
        request = {"key": self._name(key), "value": data}
        self._ask("kv/put", request, timeout=self._connect_timeout)

    def get(self, key: str, /, *, timeout: float) -> bytes:
        """Return the value, once it is there."""

        def look(left: float) -> bytes | None:
            found = self._ask("kv/range", {"key": self._name(key)}, timeout=left).get("kvs")
            if not found:
                return None
            try:
                # An empty value is left out.
                return base64.b64decode(found[0].get("value", ""), validate=True)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                raise StoreError(f"etcd at {self._url} answered nonsense") from error

        return _await(key, timeout, look)

    def __repr__(self) -> str:
        return f"EtcdStore({self._url!r})"


def pack(*parts: bytes) -> bytes:
    """Put ``parts`` behind each other, each with its length: what ``unpack`` takes apart."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def unpack(data: bytes) -> list[bytes]:
    """Return the parts that ``pack`` put together. Raises ``RequestError`` for anything else."""
    parts, at = [], 0
    while at < len(data):
        start = at + 4
        end = start + int.from_bytes(data[at:start], "little")
        if start > len(data) or end > len(data):
            raise RequestError(f"the part at byte {at} of {len(data)} is cut off")
        parts.append(data[start:end])
        at = end
    return parts


def exchange(store: Store, *, rank: int, world: int, value: bytes, name: str, timeout: float) -> list[bytes]:
    """Leave ``value`` as that of ``rank``; return those of all ``world`` ranks, in order.

    All ranks call it with the same ``name``, each time with another. ``timeout`` is for all of it.
    """
    if not 0 <= rank < world:
        raise RequestError(f"there is no rank {rank} among {world}")
    end = time.monotonic() + timeout
    store.set(f"{name}/{rank}", value)
    values = []
    for other in range(world):
        if other == rank:
            values.append(value)
            continue
        try:
            left = max(end - time.monotonic(), 0.0)
            values.append(store.get(f"{name}/{other}", timeout=left))
        except WaitTimeout as error:
            late = [i for i in range(other, world) if i != rank]
            message = f"of {name!r}, rank {other} is missing after {timeout} s (not asked: {late[1:]})"
            raise WaitTimeout(message, deadline=timeout, missing=len(late)) from error
    return values


class Member(NamedTuple):
    """One of the engines that have met."""

    rank: int
    #: ``None`` for the engine itself.
    peer: PeerId | None
    #: Where it is reached.
    address: NetAddr
    #: What it offers, in the order in which it does: descriptors, tags, whatever was agreed on.
    offers: Sequence[bytes]


def join(
    engine: TransferEngine,
    store: Store,
    *,
    rank: int,
    world: int,
    offers: Sequence[bytes] = (),
    name: str = "engines",
    timeout: float = 60.0,
) -> list[Member]:
    """Meet ``world`` engines: tell them our address and ``offers``, add them as peers, wait until all are up.

    Returns them by rank, this one included.
    """
    end = time.monotonic() + timeout
    card = pack(bytes(engine.address), *offers)
    cards = exchange(store, rank=rank, world=world, value=card, name=name, timeout=timeout)
    members = []
    for other, data in enumerate(cards):
        parts = unpack(data)
        if not parts:
            raise RequestError(f"rank {other} left no address")
        address = NetAddr.from_bytes(parts[0])
        peer = None if other == rank else engine.add_peer(address)
        members.append(Member(other, peer, address, parts[1:]))
    for member in members:
        if member.peer is not None:
            left = max(end - time.monotonic(), 0.0)
            engine.wait_peer_blocking(member.peer, timeout=left)
    return members
