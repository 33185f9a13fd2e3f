"""What a path given to status, flush and verify leads to: a file of a mount, whatever links it goes through, or an error."""

import json
import os
from pathlib import Path

import pytest

from ckptfs.fs.cli import run
from ckptfs.fs.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.mount]

COMMANDS = ("status", "flush", "verify")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_out_of_the_mount_is_no_file_of_it(
    cluster: LocalCluster, scratch: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    mountpoint = cluster.nodes[0].mountpoint
    (scratch / "outside").mkdir()
    (scratch / "outside" / "file").write_bytes(b"on no other node")
    to_file, to_directory, dangling = (mountpoint / f"{command}-{what}" for what in ("file", "directory", "dangling"))
    to_file.symlink_to(scratch / "outside" / "file")
    to_directory.symlink_to(scratch / "outside")
    dangling.symlink_to(scratch / "none")
    for path in (to_file, to_directory, to_directory / "file", dangling):
        assert run([command, str(path)]) == 2
        captured = capsys.readouterr()
        assert "lies in no ckptfs mount" in captured.err
        assert captured.out == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_loop_and_a_path_through_a_file_are_wrong_use(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    loop, file = (cluster.nodes[0].mountpoint / f"{command}-{what}" for what in ("loop", "plain"))
    loop.symlink_to(loop)
    file.write_bytes(b"content")
    for path in (loop, file / "below"):
        assert run([command, str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_links_into_a_mount_lead_to_its_files(cluster: LocalCluster, scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (node.mountpoint for node in cluster.nodes[:2])
    (first / "linked").mkdir()
    (first / "linked" / "file").write_bytes(bytes(5000))
    (scratch / "link").symlink_to(first / "linked")
    (second / "to-the-first").symlink_to(first / "linked")
    (first / "linked" / "out").symlink_to("/etc")  # inside a directory links are not followed
    for path in (scratch / "link", scratch / "link" / "file", second / "to-the-first" / "file"):
        assert run(["flush", str(path), "--timeout", "60", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["files"] == 1
        assert run(["status", str(path), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["path"], document["state"], document["bytes"]) == (str(path), "protected", 5000)
        for options in ([], ["--deep", "--repair"]):
            assert run(["verify", str(path), *options, "--json"]) == 0
            assert [file["result"] for file in json.loads(capsys.readouterr().out)["files"]] == ["ok"]


@pytest.mark.parametrize("command", ["flush", "verify"])
def test_a_nodes_own_directory_is_told_from_its_mount(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    node = cluster.nodes[0]
    for path in (node.directory, node.store):
        assert run([command, str(path)]) == 2
        assert f"not in its mount, which is {node.mountpoint}" in capsys.readouterr().err


def test_a_clusters_directory_is_no_mount_to_flush(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["flush", os.fspath(cluster.directory)]) == 2
    assert "name the mount of one of its nodes" in capsys.readouterr().err
