"""The rule for skipped tests holds: a CI run that left something out isn't green."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TESTS = """
import pytest

def test_needs_a_server():
    pytest.skip("no server here")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False

def test_passes():
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(TESTS)
    return pytester


def test_in_ci_a_skipped_test_fails(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """There every service is brought along, so a missing one is a defect of the run itself."""
    monkeypatch.setenv("CI", "true")
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1, xfailed=1, passed=1)
    result.stdout.fnmatch_lines(["*skipped, which in CI is a failure: *no server here*"])


def test_in_ci_a_skipped_module_fails(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that skips itself while it is collected leaves out even more."""
    monkeypatch.setenv("CI", "true")
    project.makepyfile(test_other="import pytest\npytest.skip('not here', allow_module_level=True)")
    result = project.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*skipped, which in CI is a failure: *not here*"])
    assert result.ret != pytest.ExitCode.OK


def test_elsewhere_a_skipped_test_is_skipped(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer without a server still gets an answer about the rest."""
    monkeypatch.delenv("CI", raising=False)
    project.runpytest_inprocess().assert_outcomes(skipped=1, xfailed=1, passed=1)
