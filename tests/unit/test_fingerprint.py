"""The fingerprint of an error: what it leaves out, and what it keeps apart."""

import pytest

from agentq.domain.fingerprint import CHARACTERS, fingerprint, masked


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("order 17 is unknown", "order 99812 is unknown", id="numbers"),
        pytest.param("no refund re_1Nx7", "no refund re_9Qa2", id="ids"),
        pytest.param("timed out after 30.0 s", "timed out after 2 s", id="fractions"),
        pytest.param("there is no tool 'pay'", "there is no tool 'send mail'", id="quotes"),
        pytest.param('no such "a"', 'no such "b c"', id="double quotes"),
        pytest.param("at 0x7f3a", "at 0xdeadbeef", id="addresses"),
        pytest.param("object deadbeefcafe", "object cafedeadbeef", id="hex without a digit"),
        pytest.param(
            "run 550e8400-e29b-41d4-a716-446655440000 failed",
            "run aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee failed",
            id="uuids",
        ),
        pytest.param("at 2026-01-31T12:00:00Z", "at 2026-02-01 03:04:05.123", id="times"),
        pytest.param("connect to 10.0.0.1:5432", "connect to 192.168.100.7:80", id="hosts and ports"),
        pytest.param("refused\n  by the bank", "refused by the bank", id="white space"),
        pytest.param("it can't be read: 'x'", "it can't be read: 'it is'", id="an apostrophe is no quote"),
        pytest.param("x" * 2000 + "a", "x" * 2000 + "b", id="what comes after a screenful"),
    ],
)
def test_the_same_error_of_another_run_has_the_same_fingerprint(first: str, second: str) -> None:
    """An outage that hits ten thousand runs is one line of the list, not ten thousand."""
    assert fingerprint(first) == fingerprint(second), (masked(first), masked(second))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("connection refused", "connection reset"),
        ("it can't be paid, and isn't shipped", "it can't be shipped, and isn't paid"),
        ("the card was declined", "the card is expired"),
        ("", "x"),
    ],
)
def test_different_errors_have_different_fingerprints(first: str, second: str) -> None:
    """Decided together, one of the two would be decided wrongly."""
    assert fingerprint(first) != fingerprint(second)


def test_it_stays_what_it_is() -> None:
    """It is stored beside each dead letter: another one for the same text would part one group in two."""
    assert fingerprint("order 17 is unknown") == "65badafcee"
    assert {len(fingerprint(text)) for text in ("", "\ud800", "x" * 100_000)} == {CHARACTERS}
