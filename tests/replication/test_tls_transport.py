"""Who gets in and who doesn't, over real sockets and real certificates."""

import contextlib
import os
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.replication.certificates import CertificateAuthority
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.errors import AddressRefused, CertificateTrouble, PeerNotTrusted, PeerRefused, PeerUnreachable
from ckptfs.replication.peer_answers import PeerServerLimits
from ckptfs.replication.peer_client import PeerClient
from ckptfs.replication.peer_server import PeerServer
from ckptfs.replication.tls_transport import TlsConnection, TlsFiles, TlsTransport, node_of_uri, node_uri

pytestmark = pytest.mark.slow

Certify = Callable[..., TlsFiles]
CLUSTER = b"c" * 16


def identity(node: str) -> PeerIdentity:
    return PeerIdentity(CLUSTER, StoreId(node.encode().ljust(16, b"-")[:16]), NodeId(node))


class Nothing:
    """Stands where a server's stores would be: no conversation here gets that far."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: 0


@contextlib.asynccontextmanager
async def answering(files: TlsFiles, limits: PeerServerLimits | None = None) -> AsyncIterator[tuple[PeerServer, str]]:
    nothing: Any = Nothing()
    server = PeerServer(nothing, nothing, nothing, nothing, identity("answering"), TlsTransport(files, stall_seconds=5), limits)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(server.serve, "127.0.0.1:0")
        yield server, address
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def pair(one: TlsFiles, two: TlsFiles, **options: Any) -> AsyncIterator[tuple[TlsConnection, TlsConnection]]:
    """Both ends of one connection: of who connected, and of who took it in."""
    listener = TlsTransport(two, **options).listen("127.0.0.1:0")
    taken: list[TlsConnection] = []

    async def take() -> None:
        taken.append(await listener.accept())
        await taken[0].shake_hands()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        connected = await TlsTransport(one, **options).connect(listener.address)
    yield connected, taken[0]
    connected.close()
    taken[0].close()
    listener.close()


async def greeted(files: TlsFiles, address: str, node: str = "asking") -> None:
    client = PeerClient(TlsTransport(files, stall_seconds=5), address, identity(node))
    try:
        await client.ping()
    finally:
        client.close()


@pytest.mark.parametrize("node", ["node-0", "a b", "ä/ö", "50%", "x" * 64])
def test_a_node_is_named_in_a_uri(node: str) -> None:
    assert node_of_uri(node_uri(node)) == node
    assert node_uri(node).isascii()
    assert node_of_uri("https://example.org/node-0") is None


async def test_each_side_knows_which_node_the_other_is(certify: Certify) -> None:
    async with pair(certify("one"), certify("zwei ü")) as (client, server):
        assert client.peer_node == "zwei ü"
        assert server.peer_node == "one"
        assert client._raw.version() == "TLSv1.3"


async def test_both_directions_at_once_carry_every_byte(certify: Certify) -> None:
    """In the event loop and in threads, in pieces of every size, while the other direction is full."""
    rng = random.Random(5)
    pieces = [rng.randbytes(rng.choice([1, 100, 16384, 16385, 300_000, 2_000_000])) for _ in range(30)]
    async with pair(certify("one"), certify("two")) as (client, server):

        async def send(connection: TlsConnection, in_thread: bool) -> None:
            for piece in pieces:
                if in_thread:
                    await trio.to_thread.run_sync(connection.send_in_thread, piece[:10], piece[10:])
                else:
                    await connection.send(piece[:10], piece[10:])

        async def receive(connection: TlsConnection, in_thread: bool) -> None:
            for piece in pieces:
                buffer = memoryview(bytearray(len(piece)))
                if in_thread:
                    assert await trio.to_thread.run_sync(connection.receive_in_thread, buffer)
                else:
                    assert await connection.receive(buffer)
                assert buffer == piece

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for connection, in_thread in ((client, True), (server, False)):
                    nursery.start_soon(send, connection, in_thread)
                    nursery.start_soon(receive, connection, not in_thread)
        assert not client.has_input()
        client.close()
        assert not await server.receive(memoryview(bytearray(1)))


async def test_an_idle_connection_has_no_input_until_it_ends(certify: Certify) -> None:
    async with pair(certify("one"), certify("two")) as (client, server):
        await server.send(b"x")
        with trio.fail_after(5):
            while not client.has_input():
                await trio.sleep(0.001)
        assert await client.receive(memoryview(bytearray(1)))
        assert not client.has_input()
        await server.finish()
        with trio.fail_after(5):
            while not client.has_input():
                await trio.sleep(0.001)


async def test_a_silent_peer_is_given_up(certify: Certify) -> None:
    async with pair(certify("one"), certify("two"), stall_seconds=0.2) as (client, _):
        with pytest.raises(PeerUnreachable, match=r"sent nothing whole for 0\.2 s"):
            await client.receive(memoryview(bytearray(1)))
        with pytest.raises(PeerUnreachable, match="takes in nothing more"):
            await client.send(bytes(64 << 20))


async def test_a_node_of_the_cluster_gets_in(certify: Certify) -> None:
    async with answering(certify("answering")) as (server, address):
        with contextlib.suppress(PeerRefused):
            await greeted(certify("asking"), address)
        assert server.statistics().violations == 0
        assert "not_trusted" not in server.statistics().refusals
        assert "wrong_peer" not in server.statistics().refusals


async def test_a_node_with_another_ones_certificate_is_refused_by_both(certify: Certify) -> None:
    async with answering(certify("answering")) as (server, address):
        with pytest.raises(PeerRefused, match="asking has the certificate of borrowed: each node needs its own"):
            await greeted(certify("borrowed"), address)
        assert server.statistics().refusals == {"wrong_peer": 1}
    async with answering(certify("somebody-else")) as (_, address):
        with pytest.raises(PeerRefused, match=r"answering at .* has the certificate of somebody-else"):
            await greeted(certify("asking"), address)


def expired(certify: Certify, other: CertificateAuthority) -> TlsFiles:
    return certify("asking", days=-0.01)


def foreign(certify: Certify, other: CertificateAuthority) -> TlsFiles:
    files = certify("asking", by=other)
    files.authority.write_bytes(certify("x").authority.read_bytes())  # it believes the right one
    return TlsFiles(files.authority, files.certificate, files.key)


def self_signed(certify: Certify, other: CertificateAuthority) -> TlsFiles:
    files = certify("asking")
    files.certificate.write_bytes((other.directory / "ca.pem").read_bytes())
    files.key.write_bytes((other.directory / "ca.key").read_bytes())
    return files


@pytest.mark.parametrize("kind", [expired, foreign, self_signed])
async def test_who_can_not_prove_to_belong_here_is_refused(certify: Certify, tmp_path: Path, kind: Any) -> None:
    other = CertificateAuthority.create(tmp_path / "other", "other")
    async with answering(certify("answering")) as (server, address):
        with pytest.raises(PeerUnreachable, match=r"refuses this node's certificate|went away|closed"):
            await greeted(kind(certify, other), address)
        with trio.fail_after(5):
            while not server.statistics().refusals:
                await trio.sleep(0.005)
        assert server.statistics().refusals == {"not_trusted": 1}
    files = kind(certify, other)
    async with answering(files) as (_, address):
        with pytest.raises(PeerNotTrusted, match="isn't accepted"):
            await greeted(certify("asker"), address, "asker")


async def test_a_revoked_node_is_refused_from_the_next_connection_on(certify: Certify, tmp_path: Path) -> None:
    own = CertificateAuthority.create(tmp_path / "own", "own")
    here, there = certify("answering", by=own), certify("asking", by=own)
    async with answering(here) as (server, address):
        await _let_in(there, address)
        assert own.revoke("asking") == 1
        assert own.revoke("asking") == 0
        assert here.revoked is not None
        here.revoked.write_bytes((own.directory / "crl.pem").read_bytes())
        with pytest.raises(PeerUnreachable):
            await greeted(there, address)
        with trio.fail_after(5):
            while "not_trusted" not in server.statistics().refusals:
                await trio.sleep(0.005)
        renewed = certify("asking", by=own)
        await _let_in(renewed, address)


async def _let_in(files: TlsFiles, address: str) -> None:
    with contextlib.suppress(PeerRefused):
        await greeted(files, address)


async def test_a_certificate_for_another_host_is_refused(certify: Certify) -> None:
    async with answering(certify("answering", ["node-7.example", "10.1.2.3"])) as (_, address):
        with pytest.raises(PeerNotTrusted, match=r"isn't accepted: .*mismatch"):
            await greeted(certify("asking"), address)


async def test_a_certificate_that_names_no_node_is_refused(certify: Certify, authority: CertificateAuthority) -> None:
    files = certify("asking")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.authority)
    listener = TlsTransport(certify("two")).listen("127.0.0.1:0")
    bare = certify("bare")
    bare.certificate.write_bytes((authority.directory / "ca.pem").read_bytes())
    bare.key.write_bytes((authority.directory / "ca.key").read_bytes())
    async with trio.open_nursery() as nursery:

        async def take() -> None:
            connection = await listener.accept()
            with pytest.raises(PeerUnreachable):
                await connection.shake_hands()
            connection.close()

        nursery.start_soon(take)
        with contextlib.suppress(PeerUnreachable):
            connection = await TlsTransport(bare).connect(listener.address)
            connection.close()
    listener.close()


@pytest.mark.parametrize("kind", ["no certificate", "TLS 1.2", "plain", "nothing"])
async def test_strangers_are_counted_and_cost_nothing(certify: Certify, kind: str) -> None:
    files = certify("answering")
    limits = PeerServerLimits(greeting_seconds=0.5)
    async with answering(files, limits) as (server, address):
        host, port = address.split(":")

        def knock() -> None:
            with socket.create_connection((host, int(port)), timeout=5) as raw, contextlib.suppress(OSError):
                if kind == "plain":
                    raw.sendall(os.urandom(300))
                    assert raw.recv(100) == b"" or True
                elif kind != "nothing":
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                    context.check_hostname = False
                    context.verify_mode = ssl.CERT_NONE
                    if kind == "TLS 1.2":
                        context.maximum_version = ssl.TLSVersion.TLSv1_2
                    with context.wrap_socket(raw) as secure:
                        secure.sendall(b"hello")
                        secure.recv(100)
                else:
                    raw.recv(1)

        for _ in range(5):
            await trio.to_thread.run_sync(knock)
        with trio.fail_after(10):
            while server.statistics().connections_current:
                await trio.sleep(0.005)
        if kind != "nothing":
            assert server.statistics().refusals == {"not_trusted": 5}
        assert server.statistics().connections == 5
        await _let_in(certify("asking"), address)


async def test_a_thousand_that_never_finish_their_handshake_keep_nobody_out(certify: Certify) -> None:
    """Slow strangers: taken in up to the limit, each ended by the deadline of the greeting."""
    async with answering(certify("answering"), PeerServerLimits(connections_max=16, greeting_seconds=1.0)) as (server, address):
        host, port = address.split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                raw = stack.enter_context(socket.socket())
                raw.setblocking(False)
                raw.connect_ex((host, int(port)))
                await trio.sleep(0)
            started = time.monotonic()
            while True:
                try:
                    await _let_in(certify("asking"), address)
                    break
                except PeerUnreachable:
                    assert time.monotonic() - started < 20
                    await trio.sleep(0.05)
            assert server.statistics().connections_current <= 16


@pytest.mark.parametrize("spoiled", ["authority", "certificate", "key", "revoked"])
@pytest.mark.parametrize("how", ["gone", "nonsense"])
async def test_files_that_can_not_be_used_are_said(certify: Certify, spoiled: str, how: str) -> None:
    files = certify("one")
    transport = TlsTransport(files)
    path: Path = getattr(files, spoiled)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"nonsense")
        os.utime(path, ns=(1, 1))
    with pytest.raises(CertificateTrouble, match="can't be used"):
        TlsTransport(files)
    with pytest.raises(CertificateTrouble, match="can't be used"):
        await transport.connect("127.0.0.1:1")


async def test_addresses_that_are_none(certify: Certify) -> None:
    for address in ("", "host", "host:", ":1", "host:99999", "host:x"):
        with pytest.raises(AddressRefused):
            await TlsTransport(certify("one")).connect(address)


def test_the_key_of_an_authority_is_private(tmp_path: Path) -> None:
    authority = CertificateAuthority.create(tmp_path / "ca", "x")
    assert (tmp_path / "ca/ca.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ca").stat().st_mode & 0o777 == 0o700
    with pytest.raises(CertificateTrouble, match="holds an authority already"):
        CertificateAuthority.create(tmp_path / "ca", "x")
    with pytest.raises(CertificateTrouble, match="no certificate was issued"):
        authority.revoke("nobody")
    with pytest.raises(CertificateTrouble, match="at least one host"):
        authority.issue("n", [])
    with pytest.raises(CertificateTrouble, match="neither a host name nor an address"):
        authority.issue("n", ["nüx"])
    with pytest.raises(CertificateTrouble, match="ckptfs ca init"):
        CertificateAuthority(tmp_path)
    (tmp_path / "ca/ca.key").write_bytes(b"nonsense")
    with pytest.raises(CertificateTrouble, match="can't be read"):
        CertificateAuthority(tmp_path / "ca")
