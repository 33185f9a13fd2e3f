"""Where a mount with a replica asks the catalog itself."""

import errno
from typing import Any

import pytest

from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.errors import HeldElsewhere, NameExists, NoSuchAttribute, NoSuchName
from ckptfs.fs.barrier import behind_barrier
from ckptfs.fs.fuse_format import Opcode


class Lagging(MemoryCatalog):
    """Counts its barriers."""

    caught_up = 0

    async def catch_up(self) -> None:
        self.caught_up += 1


def answering(kv: Lagging, until: int, error: Exception) -> Any:
    """A handler that is refused until the catalog has caught up so often."""

    async def handle(header: Any, body: Any) -> bytes:
        if kv.caught_up < until:
            raise error
        return b"%d" % kv.caught_up

    return handle


async def ask(opcode: Opcode, until: int, error: Exception) -> tuple[bytes, int]:
    kv = Lagging()
    handlers = behind_barrier({opcode: answering(kv, until, error)}, kv)
    try:
        answer = await handlers[opcode](None, memoryview(b""))  # type: ignore[arg-type]
    except type(error):
        return b"refused", kv.caught_up
    assert answer is not None
    return bytes(answer), kv.caught_up


@pytest.mark.parametrize("opcode", [Opcode.OPEN, Opcode.OPENDIR])
async def test_opens_ask_first(opcode: Opcode) -> None:
    assert await ask(opcode, 0, NoSuchName()) == (b"1", 1)
    assert await ask(opcode, 2, NoSuchName()) == (b"refused", 1)


@pytest.mark.parametrize("opcode", [Opcode.LOOKUP, Opcode.MKDIR, Opcode.UNLINK, Opcode.GETATTR, Opcode.CREATE, Opcode.RENAME2])
@pytest.mark.parametrize("error", [NoSuchName(), NameExists()])
async def test_a_refusal_is_believed_after_a_barrier_only(opcode: Opcode, error: Exception) -> None:
    assert await ask(opcode, 0, error) == (b"0", 0)
    assert await ask(opcode, 1, error) == (b"1", 1)
    assert await ask(opcode, 2, error) == (b"refused", 1)


@pytest.mark.parametrize("error", [NoSuchAttribute(), HeldElsewhere(), OSError(errno.EIO, "")])
async def test_other_answers_need_none(error: Exception) -> None:
    assert await ask(Opcode.GETXATTR, 1, error) == (b"refused", 0)


@pytest.mark.parametrize("opcode", [Opcode.READ, Opcode.WRITE, Opcode.FLUSH, Opcode.RELEASE])
async def test_bytes_never_wait_for_the_catalog(opcode: Opcode) -> None:
    assert await ask(opcode, 1, NoSuchName()) == (b"refused", 0)
