"""Which node answers a command about nodes, where some don't."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.fs import cli_nodes
from ckptfs.fs.cli_errors import Unreachable
from ckptfs.fs.status import Place


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes: the first takes every request and answers none, the second is not there."""
    (tmp_path / "run").mkdir()
    places = [Place("node-0", tmp_path, tmp_path), Place("node-1", tmp_path / "none", tmp_path)]
    monkeypatch.setattr(cli_nodes, "places_of_one_cluster", lambda of, how: places)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "run" / "agent.sock"))
        listener.listen()
        yield


@pytest.mark.usefixtures("hanging")
def test_a_change_that_one_node_began_with_is_not_asked_of_the_next() -> None:
    with pytest.raises(Unreachable, match=r"node-0 took the request and has not answered .*see `ckptfs nodes list`"):
        cli_nodes.ask(None, {"do": "remove_node"}, 0.05, is_change=True)


@pytest.mark.usefixtures("hanging")
def test_a_question_is_asked_of_the_next() -> None:
    with pytest.raises(Unreachable, match="no node answers that could tell"):
        cli_nodes.ask(None, {"do": "status"}, 0.05)
