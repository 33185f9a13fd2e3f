"""What the wire and the drive alone take: shards sent and received with nothing done to them. The baselines of `bench`."""

import contextlib
import multiprocessing
import os
import selectors
import socket
import time
from collections.abc import Sequence
from pathlib import Path

CELL_SIZE = 1 << 20


def send_shards(size_bytes: int, directory: Path, data_shards: int, parity_shards: int) -> float:
    """Seconds to send what protecting `size_bytes` sends, over a loopback connection for each shard into a synced file.

    One process sends cells of 1 MiB in turns; one for each shard receives and writes, and syncs once at the end. No code and no
    hashes.
    """
    each = -(-size_bytes // data_shards)
    context = multiprocessing.get_context("spawn")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(data_shards + parity_shards)]
    paths = [directory / f"bench-bare-{index}" for index in range(len(listeners))]
    receivers = [
        context.Process(target=_receive_into_file, args=(listener, path)) for listener, path in zip(listeners, paths, strict=True)
    ]
    for receiver in receivers:
        receiver.start()
    connections = [socket.create_connection(listener.getsockname()) for listener in listeners]
    for connection in connections:
        connection.recv(1)  # its receiver is ready
    cell = memoryview(os.urandom(CELL_SIZE))
    started = time.monotonic()
    left = each
    while left:
        part = cell[: min(left, CELL_SIZE)]
        for connection in connections:
            connection.sendall(part)
        left -= len(part)
    for connection in connections:
        connection.shutdown(socket.SHUT_WR)
    for connection in connections:
        connection.recv(1)  # it is synced
    seconds = time.monotonic() - started
    for connection, listener, receiver, path in zip(connections, listeners, receivers, paths, strict=True):
        connection.close()
        listener.close()
        receiver.join()
        path.unlink()
    return seconds


def receive_shards(paths: Sequence[Path]) -> float:
    """Seconds to receive these files, each from a process of its own over a loopback connection. No code, no hashes, no copy."""
    context = multiprocessing.get_context("spawn")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in paths]
    senders = [context.Process(target=_send_file, args=pair) for pair in zip(listeners, paths, strict=True)]
    for sender in senders:
        sender.start()
    buffer = memoryview(bytearray(CELL_SIZE))
    with contextlib.ExitStack() as held, selectors.DefaultSelector() as readable:
        for listener in listeners:
            connection = held.enter_context(socket.create_connection(listener.getsockname()))
            connection.recv(1)  # its sender is ready
            readable.register(connection, selectors.EVENT_READ)
        started = time.monotonic()
        for key in list(readable.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.sendall(b"g")
        while readable.get_map():
            for key, _ in readable.select():
                assert isinstance(key.fileobj, socket.socket)
                if not key.fileobj.recv_into(buffer):
                    readable.unregister(key.fileobj)
        seconds = time.monotonic() - started
    for sender, listener in zip(senders, listeners, strict=True):
        sender.join()
        listener.close()
    return seconds


def copy_shards(paths: Sequence[Path], directory: Path) -> tuple[float, float]:
    """Seconds to copy these files over one loopback connection into files that are synced, and the processor seconds that took.

    One process sends file after file, another writes; each is synced before the next begins to be sent. No code, no hashes. The
    files are in memory, as those are that the repair reads: what the drives of several machines give at once is not to be had of
    one.
    """
    context = multiprocessing.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0))
    targets = [directory / f"bench-copy-{number}" for number in range(len(paths))]
    receiver = context.Process(target=_receive_files, args=(listener, targets, [path.stat().st_size for path in paths]))
    receiver.start()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(CELL_SIZE):
                pass
    with socket.create_connection(listener.getsockname()) as connection:
        connection.recv(1)  # it is ready
        used = _used_seconds(receiver.pid) + time.process_time()
        started = time.monotonic()
        for path in paths:
            with open(path, "rb") as file:
                connection.sendfile(file)
            connection.recv(1)  # it is synced
        seconds = time.monotonic() - started
        used = _used_seconds(receiver.pid) + time.process_time() - used
    receiver.join()
    listener.close()
    for target in targets:
        target.unlink()
    return seconds, used


def _used_seconds(pid: int | None) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _receive_files(listener: socket.socket, targets: Sequence[Path], sizes: Sequence[int]) -> None:
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(CELL_SIZE))
    with connection:
        connection.sendall(b"r")
        for target, size in zip(targets, sizes, strict=True):
            with open(target, "wb", buffering=0) as file:
                while size:
                    count = connection.recv_into(buffer[: min(size, CELL_SIZE)])
                    file.write(buffer[:count])
                    size -= count
                os.fsync(file.fileno())
            connection.sendall(b"s")
        connection.recv(1)  # it has looked what this process used


def _send_file(listener: socket.socket, path: Path) -> None:
    connection, _ = listener.accept()
    with connection, open(path, "rb") as file:
        connection.sendall(b"r")
        connection.recv(1)
        connection.sendfile(file)


def _receive_into_file(listener: socket.socket, path: Path) -> None:
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(CELL_SIZE))
    with connection, open(path, "wb", buffering=0) as file:
        connection.sendall(b"r")
        while count := connection.recv_into(buffer):
            file.write(buffer[:count])
        os.fsync(file.fileno())
        connection.sendall(b"s")
