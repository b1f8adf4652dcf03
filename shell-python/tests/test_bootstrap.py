"""Stores, and engines that meet through them."""

import base64
import http.server
import json
import os
import socketserver
import threading
import time
from datetime import timedelta

import immwire
import pytest
from conftest import PATIENCE, join
from immwire import bootstrap


class RedisHandler(socketserver.StreamRequestHandler):
    """As much of Redis as a store needs, by its protocol's specification."""

    def handle(self):
        allowed = self.server.password is None
        while count := self.rfile.readline():
            assert count[:1] == b"*"
            words = []
            for _ in range(int(count[1:])):
                size = self.rfile.readline()
                assert size[:1] == b"$"
                words.append(self.rfile.read(int(size[1:]) + 2)[:-2])
            if words[0] == b"AUTH":
                allowed = words[-1].decode() == self.server.password
                self.wfile.write(b"+OK\r\n" if allowed else b"-WRONGPASS no\r\n")
            elif not allowed:
                self.wfile.write(b"-NOAUTH Authentication required.\r\n")
            elif words[0] == b"SET":
                assert words[3] == b"PX"
                assert int(words[4]) > 0
                self.server.values[words[1]] = words[2]
                self.wfile.write(b"+OK\r\n")
            elif words[0] == b"GET":
                value = self.server.values.get(words[1])
                answer = b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
                self.wfile.write(answer)


class EtcdHandler(http.server.BaseHTTPRequestHandler):
    """As much of etcd's gateway as a store needs, by its documentation."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"header": {}}
        if self.path == "/v3/kv/put":
            self.server.values[request["key"]] = request["value"]
        elif request["key"] in self.server.values:
            value = self.server.values[request["key"]]
            answer |= {"kvs": [{"key": request["key"]} | ({"value": value} if value else {})], "count": "1"}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_words):
        pass


class GuardedEtcdHandler(EtcdHandler):
    """With a password, and tokens that are forgotten when ``server.valid`` is cleared."""

    def do_POST(self):
        self.server.asked.append(self.path)
        if self.path == "/v3/auth/authenticate":
            assert self.headers["Authorization"] is None
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if request != {"name": "root", "password": self.server.password}:
                return self.refuse(400, "authentication failed, invalid user ID or password")
            token = f"token.{len(self.server.asked)}"
            self.server.valid.add(token)
            return self.answer(200, {"header": {}, "token": token})
        if self.headers["Authorization"] not in self.server.valid:
            self.rfile.read(int(self.headers["Content-Length"]))
            return self.refuse(self.server.code, "invalid auth token")
        return super().do_POST()

    def refuse(self, code, why):
        self.answer(code, {"error": f"etcdserver: {why}", "code": 16, "message": f"etcdserver: {why}"})

    def answer(self, code, content):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class TorchLike:
    """The methods of torch.distributed's stores that are used, as they are documented."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def set(self, key, value):
        assert isinstance(value, str)
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def wait(self, keys, timeout):
        assert isinstance(timeout, timedelta)
        # In whole milliseconds; none is no limit.
        limit = timeout // timedelta(milliseconds=1) / 1000
        with self.changed:
            there = self.changed.wait_for(lambda: all(key in self.values for key in keys), limit or PATIENCE)
        assert there or limit, "nobody ends a wait for ever"
        if not there:
            raise RuntimeError("Socket Timeout")

    def get(self, key):
        return self.values[key]


@pytest.fixture
def serve(monkeypatch):
    servers = []
    # They are threads of this process: how long one takes to answer is the machine's, whatever time is left.
    monkeypatch.setattr(bootstrap, "_LAST_LOOK", PATIENCE)

    def start(kind, handler):
        server = kind(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        server.values, server.password = {}, None
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(params=["directory", "torch", "redis", "etcd"])
def store(request, tmp_path, serve):
    if request.param == "directory":
        return bootstrap.DirectoryStore(tmp_path / "store")
    if request.param == "torch":
        return bootstrap.TorchStore(TorchLike())
    if request.param == "redis":
        server = serve(socketserver.ThreadingTCPServer, RedisHandler)
        server.password = "secret"
        return bootstrap.RedisStore(*server.server_address, password="secret")
    server = serve(http.server.ThreadingHTTPServer, EtcdHandler)
    return bootstrap.EtcdStore("http://{}:{}/".format(*server.server_address))


def test_what_is_set_can_be_got(store):
    every_byte = bytes(range(256)) * 20
    for key, value in {"a": b"", "a/b c?.%\n": every_byte, "..": b"x", "ü": b"\0"}.items():
        store.set(key, value)
        assert store.get(key, timeout=1) == value
    store.set("a", b"new")
    assert store.get("a", timeout=0) == b"new"
    assert repr(store).startswith(type(store).__name__)


@pytest.mark.parametrize("code", [401, 400])
def test_a_token_that_etcd_has_forgotten_is_fetched_again(serve, code):
    server = serve(http.server.ThreadingHTTPServer, GuardedEtcdHandler)
    server.password, server.valid, server.asked, server.code = "secret", set(), [], code
    url = "http://{}:{}".format(*server.server_address)
    store = bootstrap.EtcdStore(url, username="root", password="secret")
    store.set("key", b"value")
    server.valid.clear()
    assert store.get("key", timeout=1) == b"value"
    server.valid.clear()
    store.set("key", b"new")
    assert store.get("key", timeout=1) == b"new"
    tokens = [path for path in server.asked if path == "/v3/auth/authenticate"]
    assert (len(tokens), len(server.asked)) == (3, 9)
    # Once, and no more often.
    server.valid.clear()
    server.password = "changed"
    server.asked.clear()
    with pytest.raises(bootstrap.StoreError, match="400"):
        store.get("key", timeout=1)
    assert server.asked == ["/v3/kv/range", "/v3/auth/authenticate"]
    # Who has no name has no token.
    server.asked.clear()
    with pytest.raises(bootstrap.StoreError, match=str(code)):
        bootstrap.EtcdStore(url).set("key", b"value")
    assert server.asked == ["/v3/kv/put"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_of_a_directory_have_the_mode_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        bootstrap.DirectoryStore(tmp_path).set("key", b"value")
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_the_system_refuses_is_an_error_of_the_directory(tmp_path, monkeypatch):
    store = bootstrap.DirectoryStore(tmp_path / "store")
    store.set("key", b"value")
    (file,) = (tmp_path / "store").iterdir()
    file.unlink()
    file.mkdir()
    with pytest.raises(bootstrap.StoreError, match="directory"):
        store.get("key", timeout=1)
    with pytest.raises(bootstrap.StoreError, match="directory"):
        store.set("key", b"value")
    assert list((tmp_path / "store").iterdir()) == [file], "what was being written is left"
    with pytest.raises(bootstrap.StoreError, match="store"):
        bootstrap.DirectoryStore(tmp_path / "store" / ("x" * 300))

    # Whoever runs the tests may be let do anything.
    def refuse(*_arguments, **_keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    for attempt in (lambda: store.get("other", timeout=1), lambda: store.set("other", b"")):
        with pytest.raises(bootstrap.StoreError, match="Permission denied"):
            attempt()


def test_getting_waits_until_the_deadline(store):
    start = time.monotonic()
    with pytest.raises(immwire.WaitTimeout) as caught:
        store.get("nothing", timeout=0.1)
    assert 0.1 <= time.monotonic() - start < PATIENCE
    assert caught.value.deadline == 0.1
    timer = threading.Timer(0.1, store.set, ["later", b"here"])
    timer.start()
    assert store.get("later", timeout=PATIENCE) == b"here"
    timer.join()


def test_torch_is_never_told_to_wait_for_ever():
    store = bootstrap.TorchStore(TorchLike())
    for timeout in (0, 1e-6, 0.0015):
        with pytest.raises(immwire.WaitTimeout):
            store.get("nothing", timeout=timeout)
    with pytest.raises(immwire.WaitTimeout, match="rank 1 is missing"):
        bootstrap.exchange(store, rank=0, world=2, value=b"", name="round", timeout=0)


def test_engines_meet(store):
    world, met, failures = 3, {}, []

    def member(rank):
        try:
            with immwire.TransferEngine(counters=4) as engine:
                memory, counter = engine.alloc(64), engine.counter(slot=0)
                mine = dict(rank=rank, world=world, timeout=PATIENCE)
                offers = [bytes(memory.desc)]
                members = bootstrap.join(engine, store, **mine, offers=offers)
                src = engine.register(bytes([rank]))
                others = [member for member in members if member.peer is not None]
                for other in others:
                    there = immwire.MrDesc.from_bytes(other.offers[0])
                    write = dict(peer=other.peer, src=src, dst=there, dst_offset=rank, imm=counter.tag)
                    engine.submit_single_write(**write).wait_blocking()
                counter.wait_blocking(world - 1)
                met[rank] = memory.read(0, world)
                assert [member.rank for member in members] == list(range(world))
                assert members[rank].address == engine.address
                bootstrap.exchange(store, **mine, value=b"", name="end")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    join(*threads)
    assert not failures
    assert met == {0: b"\0\1\2", 1: b"\0\0\2", 2: b"\0\1\0"}


def test_a_missing_rank_is_named(tmp_path):
    store = bootstrap.DirectoryStore(tmp_path)
    store.set("round/1", b"")
    with pytest.raises(immwire.WaitTimeout, match="rank 2 is missing") as caught:
        bootstrap.exchange(store, rank=0, world=4, value=b"", name="round", timeout=0.05)
    assert caught.value.missing == 2
    with pytest.raises(immwire.RequestError):
        bootstrap.exchange(store, rank=4, world=4, value=b"", name="round", timeout=1)


def test_parts_are_taken_apart_or_refused():
    parts = [b"", b"a", bytes(1000)]
    packed = bootstrap.pack(*parts)
    assert bootstrap.unpack(packed) == parts
    assert bootstrap.unpack(b"") == []
    for end in set(range(1, len(packed))) - {4, 9}:
        with pytest.raises(immwire.RequestError):
            bootstrap.unpack(packed[:end])


def test_servers_that_answer_nonsense_are_an_error(serve, tmp_path):
    class Nonsense(socketserver.StreamRequestHandler):
        def handle(self):
            self.connection.recv(1000)
            self.wfile.write(b"$99999999999\r\n")

    server = serve(socketserver.ThreadingTCPServer, Nonsense)
    host, port = server.server_address
    for store in (bootstrap.RedisStore(host, port), bootstrap.EtcdStore(f"http://{host}:{port}")):
        with pytest.raises(bootstrap.StoreError):
            store.set("key", b"value")
        with pytest.raises(bootstrap.StoreError):
            store.get("key", timeout=1)
    with pytest.raises(bootstrap.StoreError):
        bootstrap.RedisStore(host, 1, connect_timeout=0.5).get("key", timeout=1)
    refused = serve(socketserver.ThreadingTCPServer, RedisHandler)
    refused.password = "secret"
    with pytest.raises(bootstrap.StoreError, match="NOAUTH"):
        bootstrap.RedisStore(*refused.server_address).get("key", timeout=1)
    directory = bootstrap.DirectoryStore(tmp_path)
    with pytest.raises(immwire.RequestError):
        directory.set("key", bytes(bootstrap.MAX_VALUE_BYTES + 1))
    assert not list(tmp_path.iterdir())
    other = TorchLike()
    other.set("immwire/key", base64.b64encode(b"x").decode() + "!")
    with pytest.raises(bootstrap.StoreError):
        bootstrap.TorchStore(other).get("key", timeout=1)
