"""Runs modules of CPython's own tests and prints what became of each test, one JSON list a line: [outcome, test, detail].

A program of its own, given to the system's Python as text: `python3 -P -c TEXT SECONDS_MAX LEFT_OUT MODULE`, where tests that
match the regular expression LEFT_OUT are not run. A test that begins is "started" first, so that one that hangs or kills the
process can be named; the last line is ["ended", "", ""].
"""

# ruff: noqa: N802  # the names are unittest's

import faulthandler
import importlib
import json
import re
import sys
import unittest
from collections.abc import Iterable, Iterator
from typing import Any


class _Outcomes(unittest.TestResult):
    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._outcome, self._detail = "passed", ""
        _say("started", test.id())

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        _say(self._outcome, test.id(), self._detail)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(test, err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._failed(test, err)

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._outcome = "failed"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._outcome, self._detail = "skipped", reason
        if not hasattr(test, "_testMethodName"):  # a whole class
            _say("skipped", str(test), reason)

    def _failed(self, test: unittest.TestCase, err: Any) -> None:
        self._outcome, self._detail = "failed", "".join(self._exc_info_to_string(err, test))[-3000:]  # type: ignore[attr-defined]
        if not hasattr(test, "_testMethodName"):
            _say("failed", str(test), self._detail)


_output = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # tests replace sys.stdout


def _say(outcome: str, test: str, detail: str = "") -> None:
    _output.write("\n" + json.dumps([outcome, test, detail]) + "\n")


def _flat(suite: Iterable[unittest.TestCase | unittest.TestSuite]) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _flat(one)
        else:
            yield one


def _main() -> None:
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
    support: Any = importlib.import_module("test.support")
    support.use_resources = ["largefile"]
    left_out = re.compile(sys.argv[2])
    suite = unittest.defaultTestLoader.loadTestsFromName(sys.argv[3])
    unittest.TestSuite(test for test in _flat(suite) if not left_out.search(test.id())).run(_Outcomes())
    _say("ended", "")


_main()
