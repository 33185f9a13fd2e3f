"""Paths for the labels of shards, from what programs have come through."""

from ckptfs.cache.ids import ROOT_INODE, InodeNumber
from ckptfs.fs.directory_paths import DIRECTORIES_MAX, PATH_SIZE_MAX, DirectoryPaths

A, B, C = InodeNumber(10), InodeNumber(11), InodeNumber(12)


def test_a_path_has_the_directories_it_leads_through() -> None:
    paths = DirectoryPaths()
    assert paths.path(ROOT_INODE, b"x") == b"x"
    paths.note(A, ROOT_INODE, b"run")
    paths.note(B, A, b"step-1")
    assert paths.path(B, b"x") == b"run/step-1/x"
    assert paths.path(C, b"x") == b"x", "a directory nobody has come through is left out"
    paths.moved(B, ROOT_INODE, b"kept")
    paths.moved(C, ROOT_INODE, b"no directory")
    assert paths.path(B, b"x") == b"kept/x"
    assert paths.path(C, b"x") == b"x"


def test_paths_end_and_memory_is_bounded() -> None:
    paths = DirectoryPaths()
    paths.note(A, B, b"a")
    paths.note(B, A, b"b")  # two nodes moved them, and this one saw halves of it
    assert paths.path(A, b"x").endswith(b"b/a/x")
    for number in range(2 * DIRECTORIES_MAX):
        paths.note(InodeNumber(100 + number), InodeNumber(99 + number), b"n" * 200)
    assert paths.path(A, b"x") == b"x"
    assert PATH_SIZE_MAX // 2 < len(paths.path(InodeNumber(99 + 2 * DIRECTORIES_MAX), b"x")) <= PATH_SIZE_MAX
