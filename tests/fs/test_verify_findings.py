"""What verify found stays said until it is right, or no longer about what the file has."""

from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.fs.verify_findings import VerifyFindings
from ckptfs.replication.verify_report import FileReport

INO, VID, NEWER = InodeNumber(7), Vid(b"a" * 16), Vid(b"b" * 16)


def wrong() -> FileReport:
    return FileReport(INO, 10, damaged=[1], message="shard 1 on node-2: cut")


def foreign_parity() -> FileReport:
    return FileReport(INO, 10, damaged=[5], foreign_parity=[5], message="shard 5: parity of stripe 0 does not belong to its data")


async def test_a_finding_stays_until_it_is_right_or_the_file_is_another() -> None:
    current: dict[InodeNumber, Vid] = {INO: VID}

    async def current_version(ino: InodeNumber) -> Vid | None:
        return current.get(ino)

    findings = VerifyFindings(current_version)
    assert await findings.problems() == []
    findings.note(INO, VID, b"run/bad", wrong(), deep=True)
    (problem,) = await findings.problems()
    assert "1 file" in problem
    assert "run/bad (damaged)" in problem
    assert "--repair" in problem
    assert (await findings.of([INO, InodeNumber(8)]))[INO].message == "shard 1 on node-2: cut"
    findings.note(INO, VID, b"run/bad", FileReport(INO, 10), deep=False)
    assert await findings.problems() == [], "any look would show this"
    for found in (foreign_parity(), FileReport(INO, 10, copies=["b"]), FileReport(INO, 10, reading="damaged")):
        findings.note(INO, VID, b"run/bad", found, deep=True)
        findings.note(INO, VID, b"run/bad", FileReport(INO, 10), deep=False)
        assert await findings.problems(), "a shallower look proves nothing"
        findings.note(INO, VID, b"run/bad", wrong(), deep=False)
        findings.note(INO, VID, b"run/bad", FileReport(INO, 10, repaired=[1]), deep=False)
        assert await findings.problems(), "nor does a repair of what that look found besides"
        findings.note(INO, VID, b"run/bad", FileReport(INO, 10), deep=True)
        assert await findings.problems() == []
    findings.note(INO, VID, b"run/bad", wrong(), deep=False)
    findings.note(INO, VID, b"run/bad", wrong(), deep=True)
    findings.note(INO, VID, b"run/bad", FileReport(INO, 10, repaired=[1]), deep=False)
    assert await findings.problems() == [], "a repair that looked at all that was wrong"
    mended = foreign_parity()
    mended.damaged, mended.repaired, mended.missing = [], [5], [2]
    findings.note(INO, VID, b"run/bad", mended, deep=True)
    findings.note(INO, VID, b"run/bad", FileReport(INO, 10, repaired=[2]), deep=False)
    assert await findings.problems() == [], "what only the deep look showed was made right with it"
    for now in (NEWER, None):
        current[INO] = VID
        findings.note(INO, VID, b"", wrong(), deep=False)
        assert await findings.problems()
        current.pop(INO)
        if now:
            current[INO] = now
        assert await findings.problems() == []
    current[INO] = VID
    findings.note(INO, VID, b"", FileReport(INO, 10, damaged=[1], is_protected=False), deep=False)
    assert await findings.problems() == [], "that it is damaged is its state"
