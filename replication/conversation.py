"""Who talks, and which message may come when: the answering side's view of one connection. Pure.

::

    state      message                                        next state
    GREETING   Hello                                          READY
    READY      PutBegin                                       PUTTING
    READY      FooterGet CellsGet CopiesPut CopyGet           READY (the answer is sent before the next frame is read)
               SegmentGet SegmentAsk SegmentHash
               SegmentMend Verify KeptVerify Ping HomeCall
    READY      Cell FooterPart PutStop of the refused put     READY (passed over: they were under way when it was refused)
    PUTTING    Cell of this put                               PUTTING
    PUTTING    FooterPart of this put                         ENDING
    ENDING     FooterPart of this put                         ENDING
    PUTTING, ENDING   PutStop of this put                     READY
    PUTTING, ENDING   (PutDone or Refused is sent)            READY

Anything else is a `ProtocolViolation`, which ends the connection.
"""

import enum
from dataclasses import dataclass

from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.replication.errors import ProtocolViolation
from ckptfs.replication.peer_messages import (
    Cell,
    CellsGet,
    CopiesPut,
    CopyGet,
    FooterGet,
    FooterPart,
    Hello,
    HomeCall,
    KeptVerify,
    Message,
    Ping,
    PutBegin,
    PutStop,
    SegmentAsk,
    SegmentGet,
    SegmentHash,
    SegmentMend,
    Verify,
)

_REQUESTS = (
    FooterGet,
    CellsGet,
    CopiesPut,
    CopyGet,
    SegmentGet,
    SegmentAsk,
    SegmentHash,
    SegmentMend,
    Verify,
    KeptVerify,
    Ping,
    HomeCall,
)


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who this node is in its conversations with peers. `cluster` is the 16 bytes of the catalog's settings."""

    cluster: bytes
    store: StoreId
    node: NodeId


class State(enum.Enum):
    """Where a connection is in its conversation."""

    GREETING = enum.auto()
    READY = enum.auto()
    PUTTING = enum.auto()
    ENDING = enum.auto()


class Conversation:
    """The state of one connection. `receive` is called for every frame, `answered` when a put has got its answer."""

    def __init__(self) -> None:
        self.state = State.GREETING
        self._put_request = 0
        """The put under way, or the last one that was refused; 0 where there was none."""

    def receive(self, message: Message, request: int) -> bool:
        """Apply the message's transition. False if it is to be passed over. Raises `ProtocolViolation`."""
        if self.state is State.GREETING:
            if isinstance(message, Hello):
                self.state = State.READY
                return True
        elif self.state is State.READY:
            if isinstance(message, PutBegin):
                self.state, self._put_request = State.PUTTING, request
                return True
            if isinstance(message, _REQUESTS):
                return True
            if isinstance(message, Cell | FooterPart | PutStop) and request == self._put_request:
                return False
        elif request == self._put_request:
            if isinstance(message, Cell) and self.state is State.PUTTING:
                return True
            if isinstance(message, FooterPart):
                self.state = State.ENDING
                return True
            if isinstance(message, PutStop):
                self.state, self._put_request = State.READY, 0
                return True
        raise ProtocolViolation(f"a {type(message).__name__} out of turn ({self.state.name.lower()})")

    def answered(self, *, refused: bool) -> None:
        """The put under way has got PutDone or Refused."""
        if self.state not in (State.PUTTING, State.ENDING):
            raise AssertionError(f"no put is under way ({self.state.name.lower()})")
        self.state = State.READY
        if not refused:
            self._put_request = 0
