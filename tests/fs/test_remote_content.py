"""How long the mount waits for bytes and attributes of other nodes, with an agent that answers what it is told to."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trio

from ckptfs.cache.catalog_format import Version, VersionState
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.fs.fuse_errors import ContentUnreachable
from ckptfs.fs.local_socket import LocalClient, Message, serve
from ckptfs.fs.remote_content import RETRY_SECONDS, RemoteAttributes, RemoteContent, WholeCopy
from ckptfs.replication.local_copies import CopyPlace

pytestmark = pytest.mark.slow

INO = InodeNumber(7)
VID = Vid(b"v" * 16)
VERSION = Version(1, INO, VersionState.LOCAL, StoreId(b"s" * 16), SegmentId(b"g" * 16), True, 5, b"r" * 16)
ATTRIBUTES = RemoteAttributes(10, 20, 30)
PLACE = CopyPlace(Path("/copy"), (1, 2))
WAIT_SECONDS = 3 * RETRY_SECONDS + 0.1
PING_SECONDS = 0.5


class AgentSocket:
    """Answers "unreachable" until `comes_back_after` requests were made, or `error` for ever; or late, or never."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.comes_back_after = 0
        self.error = "unreachable"
        self.hangs = False
        self.works_seconds = 0.0
        self.asked: Counter[str] = Counter()

    async def answer(self, request: Message) -> Message:
        self.asked[request["do"]] += 1
        if self.hangs or (self.works_seconds and request["do"] != "ping"):
            await trio.sleep(float("inf") if self.hangs else self.works_seconds)
        if self.comes_back_after:
            self.comes_back_after -= 1
            return {"ok": False, "error": self.error, "message": "away"}
        answer = {"data": b"bytes"} if request["do"] == "read" else {"copy": "/copy", "identity": [1, 2], "vid": VID}
        return {"ok": True, **answer, **ATTRIBUTES._asdict()}


@pytest.fixture
def agent(tmp_path: Path) -> AgentSocket:
    return AgentSocket(tmp_path / "agent.sock")


@pytest.fixture
async def remote(agent: AgentSocket) -> AsyncIterator[RemoteContent]:
    client = LocalClient(agent.path)
    yield RemoteContent(client, wait_seconds=WAIT_SECONDS, ping_seconds=PING_SECONDS)
    await client.aclose()


ASKED: dict[str, Callable[[RemoteContent], Awaitable[object]]] = {
    "attributes": lambda remote: remote.attributes(INO, VID, None),
    "read": lambda remote: remote.read(INO, VID, None, 0, 5),
    "fetch": lambda remote: remote.fetch(INO, VID, VERSION, 0, 5),
    "fetch_whole": lambda remote: remote.fetch_whole(INO),
}


@pytest.mark.parametrize("what", ASKED)
async def test_what_is_away_for_a_moment_is_waited_for(
    agent: AgentSocket, remote: RemoteContent, nursery: trio.Nursery, what: str
) -> None:
    await nursery.start(serve, agent.path, agent.answer)
    agent.comes_back_after = 2
    assert await ASKED[what](remote) in (ATTRIBUTES, b"bytes", PLACE, WholeCopy(PLACE, VID))
    assert agent.asked[what] == 3


@pytest.mark.parametrize("what", ASKED)
async def test_an_agent_that_is_restarted_is_waited_for(
    agent: AgentSocket, remote: RemoteContent, nursery: trio.Nursery, what: str
) -> None:
    async def start_later() -> None:
        await trio.sleep(1.5 * RETRY_SECONDS)
        await nursery.start(serve, agent.path, agent.answer)

    nursery.start_soon(start_later)
    assert await ASKED[what](remote) in (ATTRIBUTES, b"bytes", PLACE, WholeCopy(PLACE, VID))


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("error", ["gone", "damaged", "failed"])
async def test_what_no_waiting_changes_is_said_at_once(
    agent: AgentSocket, remote: RemoteContent, nursery: trio.Nursery, what: str, error: str
) -> None:
    await nursery.start(serve, agent.path, agent.answer)
    agent.comes_back_after, agent.error = 1000, error
    with pytest.raises(ContentUnreachable):
        await ASKED[what](remote)
    assert agent.asked[what] == 1


async def test_a_home_that_stays_away_is_waited_for_once_for_attributes_and_each_time_for_bytes(
    agent: AgentSocket, remote: RemoteContent, nursery: trio.Nursery
) -> None:
    await nursery.start(serve, agent.path, agent.answer)
    agent.comes_back_after = 100_000
    with pytest.raises(ContentUnreachable):
        await remote.attributes(INO, VID, None)
    waited = agent.asked["attributes"]
    assert waited >= 3
    for number in range(100):  # a listing
        with pytest.raises(ContentUnreachable):
            await remote.attributes(InodeNumber(number), VID, None)
    assert agent.asked["attributes"] == waited + 100
    for _ in range(2):
        asked = agent.asked["read"]
        with pytest.raises(ContentUnreachable):
            await remote.read(INO, VID, None, 0, 5)
        assert agent.asked["read"] >= asked + 3
    agent.comes_back_after = 0
    assert await remote.attributes(INO, VID, None) == ATTRIBUTES


@pytest.mark.parametrize("what", ASKED)
async def test_an_agent_that_hangs_is_not_waited_for_as_one_that_works(
    agent: AgentSocket, remote: RemoteContent, nursery: trio.Nursery, what: str
) -> None:
    await nursery.start(serve, agent.path, agent.answer)
    agent.hangs = True
    with trio.fail_after(20 * PING_SECONDS), pytest.raises(ContentUnreachable, match="hangs"):
        await ASKED[what](remote)


async def test_an_agent_that_works_long_is_waited_for(agent: AgentSocket, remote: RemoteContent, nursery: trio.Nursery) -> None:
    await nursery.start(serve, agent.path, agent.answer)
    agent.works_seconds = 3 * PING_SECONDS
    assert await remote.read(INO, VID, None, 0, 5) == b"bytes"
    assert agent.asked["ping"] >= 1
