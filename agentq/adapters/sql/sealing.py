"""Sealing the audit events of a run that ends, in the transaction of its end."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Integer, Text, bindparam, func, insert, select

from agentq.adapters.sql.errors import auditing
from agentq.adapters.sql.rows import logged_event_from
from agentq.adapters.sql.schema import UtcDateTime, events, seals
from agentq.domain.seals import digest_of

_seal_by_function = select(
    func.agentq_seal_1(
        bindparam("run_id", type_=Text),
        bindparam("sequence", type_=Integer),
        bindparam("events_lost", type_=Integer),
        bindparam("at", type_=UtcDateTime),
    )
)
_last_seal = select(seals).where(seals.c.run_id == bindparam("run_id")).order_by(seals.c.number.desc()).limit(1)
_unsealed = (
    select(events)
    .where(
        events.c.run_id == bindparam("run_id"),
        events.c.sequence > bindparam("after"),
        events.c.sequence <= bindparam("sequence"),
    )
    .order_by(events.c.sequence)
)
_insert_seal = insert(seals)


def seal(connection: Connection, run_id: str, *, sequence: int, events_lost: int, at: datetime) -> None:
    """Seal the events up to that one, which are stored already, under the run's lock. Raises AuditRefusedError."""
    names: dict[str, Any] = {"run_id": run_id, "sequence": sequence, "events_lost": events_lost, "at": at}
    with auditing():
        if connection.dialect.name == "postgresql":  # One round trip.
            connection.execute(_seal_by_function, names)
            return
        last = connection.execute(_last_seal, {"run_id": run_id}).one_or_none()
        since = {"run_id": run_id, "after": 0 if last is None else last.sequence, "sequence": sequence}
        unsealed = map(logged_event_from, connection.execute(_unsealed, since).mappings())
        names["number"] = 1 if last is None else last.number + 1
        names["digest"] = digest_of(unsealed, previous=None if last is None else last.digest, **names)
        connection.execute(_insert_seal, names)
