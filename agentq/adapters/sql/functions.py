"""Fence, and a settle that fits, as calls of PostgreSQL's functions: one round trip, one transaction each."""

import json
from typing import Any, cast

from sqlalchemy import RowMapping

from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.rows import wakeup_from
from agentq.adapters.sql.settling import fence_data, settled_data
from agentq.domain.model import RunStatus, StepKind, StepRef
from agentq.domain.outcomes import Answer, Join, Recorded, Turn
from agentq.ports.dispatch import Wakeup
from agentq.ports.steps import FenceRequest, FenceVerdict, Settled, Settlement, Verdict


def _call(function: str, *types: str) -> str:
    # With their types: a number that is too large is refused as such, not as a function that doesn't exist.
    return f"{function}({', '.join(f'%s::{each}' for each in types)})"


_FENCE = "SELECT " + _call(
    "agentq_fence_1",
    *("text", "integer", "integer", "text", "text", "text", "text", "double precision", "double precision", "boolean"),
    "boolean",
    "text",
)
_SETTLE = "SELECT o_status, o_agent, o_first_number, o_opened FROM " + _call(
    "agentq_settle_1",
    *("text", "integer", "integer", "text", "text", "text", "boolean", "integer", "integer", "text", "text", "jsonb"),
    "text",
    "integer",
)


def fence_by_function(connection: Any, request: FenceRequest) -> FenceVerdict:
    """See `StepStore.fence`; `connection` is the driver's own, in autocommit mode."""
    arguments = (
        request.ref.run_id,
        request.ref.number,
        request.ref.attempt,
        request.id,
        request.owner,
        clean_text(request.tool),
        request.effect.value,
        float(request.deadline_seconds),
        None if request.settles_within_seconds is None else float(request.settles_within_seconds),
        request.is_callable,
        request.has_probe,
        encode(fence_data(request)),
    )
    return FenceVerdict(connection.execute(_FENCE, arguments).fetchone()[0])


def settle_by_function(connection: Any, settlement: Settlement, recorded: Recorded) -> Settled | None:
    """See `StepStore.settle`. None: it doesn't fit, nothing was changed."""
    ref, then = settlement.ref, recorded.then
    output = calls_text = None
    match then:
        case Answer():
            kind, output = "answer", encode(then.output)
        case Turn():
            if not then.calls or any(call.error is not None for call in then.calls):
                return None
            kind = "turn"
            calls_text = _calls_text(then)
        case Join():
            kind = "join"
    arguments = (
        ref.run_id,
        ref.number,
        ref.attempt,
        settlement.owner,
        settlement.fence_id,
        encode(recorded.result),
        recorded.is_error,
        recorded.usage.input_tokens,
        recorded.usage.output_tokens,
        kind,
        output,
        calls_text,
        encode(settled_data(settlement, recorded)) if settlement.with_events else None,
        settlement.suppressed,
    )
    status, agent, first_number, opened = connection.execute(_SETTLE, arguments).fetchone()
    if status is None:
        return None
    if status == RunStatus.COMPLETED:
        return Settled(verdict=Verdict.APPLIED, run_status=RunStatus.COMPLETED)
    return Settled(
        verdict=Verdict.APPLIED,
        wakeups=_wakeups(ref.run_id, agent, then, first_number, opened),
        run_status=RunStatus.RUNNING,
    )


def _calls_text(turn: Turn) -> str:
    first_batch = min(call.batch for call in turn.calls)
    return json.dumps(
        [
            {
                "batch": call.batch,
                "tool": call.tool and clean_text(call.tool),
                "call_id": call.call_id and clean_text(call.call_id),
                "arguments": encode(call.arguments),
                "effect": call.effect.value,
                "deadline_seconds": call.deadline_seconds,
                "is_open": call.batch == first_batch,
            }
            for call in turn.calls
        ]
    )


def _wakeups(
    run_id: str, agent: str, then: Turn | Join | Answer, first_number: int | None, opened: list[dict[str, Any]] | None
) -> tuple[Wakeup, ...]:
    """What the function opened: the turn's first batch, a batch that waited, or the model's next turn."""
    if isinstance(then, Turn) and first_number is not None:
        first_batch = min(call.batch for call in then.calls)
        return tuple(
            Wakeup(
                ref=StepRef(run_id=run_id, number=number, attempt=1),
                agent=agent,
                kind=StepKind.TOOL,
                tool=call.tool,
                effect=call.effect,
                deadline_seconds=call.deadline_seconds,
            )
            for number, call in enumerate(then.calls, first_number)
            if call.batch == first_batch
        )
    if opened is not None:
        rows = ({**row, "run_id": run_id, "kind": StepKind.TOOL.value, "agent": agent} for row in opened)
        return tuple(wakeup_from(cast(RowMapping, row)) for row in rows)
    if first_number is not None:
        return (Wakeup(ref=StepRef(run_id=run_id, number=first_number, attempt=1), agent=agent, kind=StepKind.MODEL),)
    return ()
