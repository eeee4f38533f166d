"""The filter grammar that CLI, client and API share."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agentq.domain.errors import InvalidInputError
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetterReason, RunStatus
from agentq.filters import parse_filters
from agentq.ports.runs import RunFilter

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"status": (), "agent": None, "metadata": ()}, {}),
        ({"status": "failed"}, {"statuses": (RunStatus.FAILED,)}),
        ({"status": ["failed", "Queued,failed"]}, {"statuses": (RunStatus.FAILED, RunStatus.QUEUED)}),
        ({"status": RunStatus.RUNNING}, {"statuses": (RunStatus.RUNNING,)}),
        ({"agent": "support", "tool": "send_refund"}, {"agent": "support", "tool": "send_refund"}),
        ({"reason": "not-retryable"}, {"reason": DeadLetterReason.NOT_RETRYABLE}),
        ({"failure_class": "rate_limit"}, {"failure_class": FailureClass.RATE_LIMIT}),
        ({"outcome_unknown": False}, {"outcome_unknown": False}),
        ({"outcome_unknown": "yes"}, {"outcome_unknown": True}),
        ({"since": "3d"}, {"since": NOW - timedelta(days=3)}),
        ({"since": "90s"}, {"since": NOW - timedelta(seconds=90)}),
        ({"until": "2026-01-31T13:00:00+02:00"}, {"until": NOW - timedelta(hours=1)}),
        ({"since": "2026-01-31T11:00:00Z"}, {"since": NOW - timedelta(hours=1)}),
        ({"since": "2026-01-31"}, {"since": NOW - timedelta(hours=12)}),
        ({"metadata": ["team=eu", "note=a=b"]}, {"metadata": {"team": "eu", "note": "a=b"}}),
        ({"metadata": {"team": "eu"}}, {"metadata": {"team": "eu"}}),
        ({"limit": "7"}, {"limit": 7}),
    ],
)
def test_names_and_texts_become_a_filter(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """What is typed in a shell, sent in a query and written in Python means the same."""
    assert parse_filters(given, now=NOW) == RunFilter(**expected)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"colour": "red"}, "unknown filter 'colour'; the filters are status, agent"),
        ({"status": "done"}, "status is 'done'; it takes one of queued, running"),
        ({"reason": "bad luck"}, "reason is 'BAD LUCK'; it takes one of NOT_RETRYABLE"),
        ({"since": "yesterday"}, "since is 'yesterday'; it takes a time such as"),
        ({"since": "99999999999d"}, "since is '99999999999d'"),
        ({"since": "999999w"}, "since is '999999w'"),
        ({"since": "1h", "until": "2h"}, "is not before until"),
        ({"metadata": "team"}, "metadata is 'team'; it takes key=value"),
        ({"limit": 0}, "limit is 0; it takes a whole number from 1"),
        ({"limit": "many"}, "limit is 'many'"),
        ({"outcome_unknown": "maybe"}, "outcome_unknown is 'maybe'; it takes true or false"),
        ({"agent": 17}, "agent is 17; it takes a name"),
    ],
)
def test_a_wrong_filter_is_named(given: dict[str, Any], told: str) -> None:
    """A filter that were ignored would let a bulk change reach runs that nobody meant."""
    with pytest.raises(InvalidInputError) as refusal:
        parse_filters(given, now=NOW)
    assert told in str(refusal.value)
