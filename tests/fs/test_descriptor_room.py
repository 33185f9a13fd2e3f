"""When another file may be opened, and who is told that it may not."""

import errno

import pytest

from ckptfs.fs import descriptor_room as module
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.descriptor_room import SPARE_COUNT, DescriptorRoom
from ckptfs.fs.fuse_format import Opcode, RequestHeader

HEADER = RequestHeader(fuse.IN_HEADER.size, Opcode.OPEN, 2, 1, 0, 0, 1, 0, 0)


async def test_opens_are_refused_before_the_last_descriptor_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count, asked = 0, []

    async def handler(header: RequestHeader, body: memoryview) -> bytes:
        asked.append(header.opcode)
        return b""

    monkeypatch.setattr(module, "limit_now", lambda: 1000)
    room = DescriptorRoom(lambda: count, lambda: 0, lambda: None)
    handlers = room.guarded(dict.fromkeys(Opcode, handler), lambda unique: unique == 6)
    for opcode in Opcode:
        await handlers[opcode](HEADER._replace(opcode=opcode), memoryview(b""))
    assert asked == list(Opcode)
    count = 1000 - SPARE_COUNT
    for opcode in Opcode:
        if opcode in module.TAKES_ONE:
            with pytest.raises(OSError, match="1000 descriptors") as refused:
                await handlers[opcode](HEADER._replace(opcode=opcode), memoryview(b""))
            assert refused.value.errno == errno.ENFILE
        else:
            await handlers[opcode](HEADER._replace(opcode=opcode), memoryview(b""))
    await handlers[Opcode.OPEN](HEADER._replace(unique=6), memoryview(b""))  # it is open, and only asked for again
    assert caplog.text.count("descriptors_used_up") == 1
    count -= 1
    await handlers[Opcode.OPEN](HEADER, memoryview(b""))
    assert room.problem() == ""


async def test_who_opens_waits_for_closed_files_to_be_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "limit_now", lambda: 1000)
    closed = 500

    def seal() -> None:
        nonlocal closed
        closed -= 100

    room = DescriptorRoom(lambda: 600 + closed, lambda: closed, seal)
    await room.require_one()
    assert (closed, room.shortage) == (200, "")
    closed, open_count = 3, 1000
    room = DescriptorRoom(lambda: open_count + closed, lambda: closed, lambda: None)
    monkeypatch.setattr(module, "WAIT_SECONDS_MAX", 0.0)
    with pytest.raises(OSError, match="1003 are in use"):
        await room.require_one()


async def test_a_low_limit_leaves_half_of_it_to_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "limit_now", lambda: 100)
    await DescriptorRoom(lambda: 49, lambda: 0, lambda: None).require_one()
    with pytest.raises(OSError, match="ENFILE"):
        await DescriptorRoom(lambda: 50, lambda: 0, lambda: None).require_one()
