"""What people do to the deployment rather than to a run: in the audit log under no run's name."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, insert, select

from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.engine import now_plus
from agentq.adapters.sql.errors import auditing
from agentq.adapters.sql.schema import events
from agentq.domain.events import EventKind

DEPLOYMENT = ""  # Where a run's id stands in the events of runs.

_lock = select(func.pg_advisory_xact_lock(func.hashtext("agentq deployment log")))
_last = select(func.coalesce(func.max(events.c.sequence), 0), now_plus()).where(events.c.run_id == DEPLOYMENT)


def tell(connection: Connection, kind: EventKind, *, actor: str, data: Mapping[str, Any]) -> None:
    """Store an event with the change that it tells of. Who changes a run in the same transaction locks that first."""
    if connection.dialect.name == "postgresql":  # One after the other, or two would take the same number.
        connection.execute(_lock)
    last, now = connection.execute(_last).one()
    row = {
        "run_id": DEPLOYMENT,
        "sequence": last + 1,
        "at": now,
        "kind": kind.value,
        "actor": clean_text(actor),
        "data": encode({name: value for name, value in data.items() if value is not None}),
    }
    with auditing():
        connection.execute(insert(events), row)
