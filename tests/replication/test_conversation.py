"""Which message may come when: every message in every state."""

import pytest

from ckptfs.replication import peer_messages as m
from ckptfs.replication.conversation import Conversation, State
from ckptfs.replication.errors import ProtocolViolation

ID = bytes(16)
PUT = 5
"""The request of the put under way."""

HELLO = m.Hello(1, 1, "", ID, ID, "")
BEGIN = m.PutBegin(ID, 0, 1, 0, 1, 1)
QUESTIONS: list[m.Message] = [
    m.FooterGet(ID, 0),
    m.CellsGet(ID, 0, 0, 1),
    m.CopiesPut([m.CopyFields(ID, 1, 1, b"", 1)]),
    m.CopyGet(ID),
    m.SegmentGet(ID, ID, 0, 1),
    m.SegmentAsk(ID),
    m.SegmentHash(ID, 1, 0, 1),
    m.SegmentMend(ID),
    m.Verify(ID, 0),
    m.KeptVerify(ID, False),
    m.Ping(),
    m.HomeCall(1, 1, 1),
]
ANSWERS: list[m.Message] = [
    m.Welcome(1, "", ID, ID, ""),
    m.Refused(1, ""),
    m.Working(),
    m.PutReady(0),
    m.PutDone(ID),
    m.CellsDone(),
    m.CopiesDone([]),
    m.Copy(ID),
    m.SegmentData(),
    m.SegmentIs(0, 0, 0),
    m.SegmentHashed(0),
    m.SegmentMended(True, ""),
    m.Verified(True, [], ""),
    m.KeptVerified(0, []),
    m.Status("", ID, 0, ""),
    m.HomeAnswer(0, 0, ""),
]
PARTS: list[m.Message] = [m.Cell(0), m.FooterPart(0, 1), m.PutStop()]


def in_state(state: State) -> Conversation:
    conversation = Conversation()
    if state is not State.GREETING:
        conversation.receive(HELLO, 1)
    if state in (State.PUTTING, State.ENDING):
        conversation.receive(BEGIN, PUT)
    if state is State.ENDING:
        conversation.receive(m.FooterPart(0, 1), PUT)
    assert conversation.state is state
    return conversation


ALLOWED: dict[State, dict[type, State]] = {
    State.GREETING: {m.Hello: State.READY},
    State.READY: {m.PutBegin: State.PUTTING, **{type(question): State.READY for question in QUESTIONS}},
    State.PUTTING: {m.Cell: State.PUTTING, m.FooterPart: State.ENDING, m.PutStop: State.READY},
    State.ENDING: {m.FooterPart: State.ENDING, m.PutStop: State.READY},
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("message", [HELLO, BEGIN, *QUESTIONS, *ANSWERS, *PARTS], ids=lambda value: type(value).__name__)
def test_every_message_in_every_state(state: State, message: m.Message) -> None:
    conversation = in_state(state)
    following = ALLOWED[state].get(type(message))
    if following is None:
        with pytest.raises(ProtocolViolation, match="out of turn"):
            conversation.receive(message, PUT)
        assert conversation.state is state
    else:
        assert conversation.receive(message, PUT)
        assert conversation.state is following


@pytest.mark.parametrize("state", [State.PUTTING, State.ENDING])
@pytest.mark.parametrize("message", PARTS, ids=lambda value: type(value).__name__)
def test_parts_of_another_request_break_the_protocol(state: State, message: m.Message) -> None:
    with pytest.raises(ProtocolViolation):
        in_state(state).receive(message, PUT + 1)


@pytest.mark.parametrize("message", PARTS, ids=lambda value: type(value).__name__)
def test_what_was_under_way_when_a_put_was_refused_is_passed_over(message: m.Message) -> None:
    conversation = in_state(State.PUTTING)
    conversation.answered(refused=True)
    assert not conversation.receive(message, PUT)
    assert conversation.state is State.READY
    with pytest.raises(ProtocolViolation):
        conversation.receive(message, PUT + 1)


@pytest.mark.parametrize("message", PARTS, ids=lambda value: type(value).__name__)
def test_nothing_may_follow_a_put_that_was_done(message: m.Message) -> None:
    conversation = in_state(State.ENDING)
    conversation.answered(refused=False)
    with pytest.raises(ProtocolViolation):
        conversation.receive(message, PUT)


def test_only_a_put_under_way_is_answered() -> None:
    with pytest.raises(AssertionError):
        in_state(State.READY).answered(refused=True)
