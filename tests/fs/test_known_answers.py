"""What is answered from memory. That it is what the handlers answer `BareNode.ask` sees to, in every test that asks."""

import errno
import os
from contextlib import aclosing
from typing import Any

from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode, RequestHeader

GETATTR, GETXATTR = fuse.GETATTR_IN.pack(0, 0, 0), fuse.GETXATTR_IN.pack(0, 0)


def _known(node: Any, opcode: int, ino: int, body: bytes) -> Any:
    header = RequestHeader(fuse.IN_HEADER.size + len(body), opcode, 0, ino, 0, 0, 1, 0, 0)
    return node.at_once[opcode](header, memoryview(body))


async def test_what_is_asked_for_each_file_that_is_made_is_known(node: Any) -> None:
    directory = await node.mkdir(b"d")
    for number in range(8):
        name = b"%d\0" % number
        assert await node.errno(node.lookup(directory, name[:-1])) == "ENOENT"
        await node.getattr(directory)
        if number >= 4:  # the names around it have been read by now
            assert _known(node, Opcode.LOOKUP, directory, name) == errno.ENOENT
            assert _known(node, Opcode.GETATTR, directory, GETATTR) is not None
        ino, fh = await node.create(name[:-1], directory)
        assert _known(node, Opcode.LOOKUP, directory, name) is None
        assert _known(node, Opcode.GETXATTR, ino, GETXATTR + b"security.capability\0") == errno.ENODATA
        assert _known(node, Opcode.GETATTR, ino, GETATTR) == await node.ask(Opcode.GETATTR, ino, GETATTR)
        await node.release(fh)
    await node.unlink(b"3", directory)
    assert _known(node, Opcode.LOOKUP, directory, b"3\0") == errno.ENOENT


async def test_a_commit_of_another_process_leaves_nothing_known(node: Any) -> None:
    ino, _ = await node.create(b"file")
    await node.getattr(1)
    assert _known(node, Opcode.GETATTR, 1, GETATTR) is not None
    async with aclosing(SqliteCatalog.open(node.catalog, writer_label="other")) as other:
        await other.transact([], [Put(b"x/1", b"")])
    assert _known(node, Opcode.GETATTR, 1, GETATTR) is None
    assert _known(node, Opcode.GETXATTR, ino, GETXATTR + b"user.a\0") is None
    assert _known(node, Opcode.LOOKUP, 1, b"other\0") is None


async def test_what_is_gone_or_no_usual_name_is_left_to_the_handlers(node: Any) -> None:
    ino, fh = await node.create(b"file")
    for number in range(5):
        await node.errno(node.lookup(1, b"x%d" % number))
    for name in (b".", b"..", b"x" * 256, b".ckptfs-inode-%d" % ino):
        assert _known(node, Opcode.LOOKUP, 1, name + b"\0") is None
    assert _known(node, Opcode.LOOKUP, ino, b"x\0") is None
    await node.errno(node.lookup(ino, b"x"))  # ENOTDIR
    for name in (b"user.", b"system.other", b"nothing"):
        assert _known(node, Opcode.GETXATTR, ino, GETXATTR + name + b"\0") is None
        assert await node.errno(node.ask(Opcode.GETXATTR, ino, GETXATTR + name + b"\0")) in ("EINVAL", "ENOTSUP")
    await node.write(fh, b"content")
    await node.unlink(b"file")
    assert (await node.getattr(ino)).nlink == 0
    assert (await node.getattr(ino)).size == 7
    await node.release(fh)
    assert _known(node, Opcode.GETATTR, ino, GETATTR) is None
    assert _known(node, Opcode.GETATTR, 1 << 40, GETATTR) is None
    assert await node.errno(node.getattr(1 << 40)) == "ESTALE"


async def test_attributes_that_are_there_are_known(node: Any) -> None:
    ino, fh = await node.create(b"file", flags=os.O_RDWR)
    await node.ask(Opcode.SETXATTR, ino, fuse.SETXATTR_IN.pack(5, 0, 0, 0) + b"user.a\0value")
    for size, known in ((0, fuse.GETXATTR_OUT.pack(5, 0)), (100, b"value")):
        assert _known(node, Opcode.GETXATTR, ino, fuse.GETXATTR_IN.pack(size, 0) + b"user.a\0") == known
    assert await node.errno(node.ask(Opcode.GETXATTR, ino, fuse.GETXATTR_IN.pack(2, 0) + b"user.a\0")) == "ERANGE"
    await node.release(fh)
