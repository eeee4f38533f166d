"""The rule for skipped tests: on a person's machine a missing service is skipped, in CI it is a failure."""

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _is_refused(report):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _is_refused(report):
        _fail(report)
    return report


def _is_refused(report: pytest.TestReport | pytest.CollectReport) -> bool:
    is_expected_to_fail = hasattr(report, "wasxfail")
    return report.skipped and not is_expected_to_fail and os.environ.get("CI", "").lower() == "true"


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A green run in which half of the tests were left out would say more than it knows."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped, which in CI is a failure: {reason}"
