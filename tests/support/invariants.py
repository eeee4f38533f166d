"""What must be true of the database at any moment, whatever was killed: every fault test ends with it."""

import json
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import RowMapping, select

from agentq.adapters.sql.auditing import SqlAuditStore
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.schema import dead_letters, events, runs, steps
from agentq.domain.audit import AuditFinding
from agentq.domain.model import RunMode, RunStatus, StepKind, StepState
from agentq.ports.auditing import AuditScope
from agentq.services.verify import verify

ACTIVE = (RunStatus.QUEUED, RunStatus.RUNNING)
OPEN = (StepState.AVAILABLE, StepState.WAITING)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What was seen outside of the database, by run id and step number.

    `effects` counts how often the step changed the world. `in_hand`: a living process calls now, or knows the outcome.
    `lies` counts the wrong words that were given on unknown writes.
    """

    effects: Mapping[tuple[str, int], int] = field(default_factory=dict)
    in_hand: Container[tuple[str, int]] = ()
    lies: int = 0


def check_invariants(database: Database, *, attempts_max: int | None = None, world: World | None = None) -> None:
    """Fails with every broken sentence and the run that breaks it. `attempts_max` bounds the attempts of each step;
    with a `world` it is also asked whether what happened there is recorded, or shown as unknown."""
    broken = list(broken_invariants(take_picture(database), attempts_max=attempts_max, world=world))
    broken += broken_audit(database)
    assert not broken, "\n".join(broken)


def broken_audit(database: Database) -> list[str]:
    """What `agentq audit verify` finds."""
    findings: list[AuditFinding] = []
    verify(SqlAuditStore(database), AuditScope(), findings.append)
    return [f"run {finding.run_id}: {finding.what} ({finding.broken})" for finding in findings]


@dataclass(frozen=True, slots=True)
class Picture:
    """The whole database at one moment; steps, events and dead letters by run id."""

    runs: list[RowMapping]
    steps: defaultdict[str, list[RowMapping]]
    events: defaultdict[str, list[RowMapping]]
    dead_letters: defaultdict[str, list[RowMapping]]


def take_picture(database: Database) -> Picture:
    with database.snapshot() as connection:
        return Picture(
            list(connection.execute(select(runs)).mappings()),
            _by_run(connection.execute(select(steps).order_by(steps.c.number)).mappings()),
            _by_run(connection.execute(select(events).order_by(events.c.sequence)).mappings()),
            _by_run(connection.execute(select(dead_letters)).mappings()),
        )


def broken_invariants(
    picture: Picture, *, attempts_max: int | None = None, world: World | None = None
) -> Iterator[str]:
    for run in picture.runs:
        its_steps, its_events = picture.steps[run["id"]], picture.events[run["id"]]
        broken = [
            *_broken_in_run(run, its_steps),
            *_broken_in_steps(run, its_steps, attempts_max),
            *_broken_in_audit(run, its_steps, its_events),
            *_broken_in_dead_letters(run, picture.dead_letters[run["id"]]),
            *(_broken_in_world(run, its_steps, its_events, world) if world is not None else ()),
        ]
        yield from (f"run {run['id']} ({run['status']}): {sentence}" for sentence in broken)


def _broken_in_run(run: RowMapping, its_steps: list[RowMapping]) -> Iterator[str]:
    is_active = run["status"] in ACTIVE
    open_steps = [step for step in its_steps if step["state"] in OPEN]
    available = [step for step in open_steps if step["state"] == StepState.AVAILABLE]
    if not is_active and open_steps:
        yield f"it has ended, and step {open_steps[0]['number']} is {open_steps[0]['state']}"
    if is_active and not available:
        yield "it is active, and no step of it is available"
    if is_active != (run["finished_at"] is None):
        yield "its status and the time it finished at disagree"
    if run["status"] in (RunStatus.COMPLETED, RunStatus.CANCELLED) and run["pending_effect_id"] is not None:
        yield "it has ended, and a fence stands"
    if run["status"] == RunStatus.COMPLETED and run["output"] is None:
        yield "it is completed without an output"
    if run["cancel_requested"] and is_active and run["pending_effect_id"] is None:
        yield "its cancel is requested, no fence stands, and it goes on"
    calls = sum(step["kind"] == StepKind.TOOL for step in available)
    if is_active and run["open_calls"] != calls:
        yield f"its join counter is {run['open_calls']}, and {calls} calls are open"
    if [step["number"] for step in its_steps] != list(range(1, run["next_step"])):
        yield f"its steps are not numbered 1 to {run['next_step'] - 1}"


def _broken_in_steps(run: RowMapping, its_steps: list[RowMapping], attempts_max: int | None) -> Iterator[str]:
    for step in its_steps:
        if (step["state"] == StepState.COMPLETED) != (step["result"] is not None):
            yield f"step {step['number']} is {step['state']} {'with' if step['result'] else 'without'} a result"
        if attempts_max is not None and step["attempt"] > attempts_max:
            yield f"step {step['number']} is at attempt {step['attempt']}, the limit is {attempts_max}"
    available = [step for step in its_steps if step["state"] == StepState.AVAILABLE]
    writes = [step for step in available if step["effect"] != "read_only"]
    if writes and len(available) > 1:
        yield f"step {writes[0]['number']} writes, and is not open alone"
    fenced = [step for step in its_steps if step["number"] == run["pending_effect_number"]]
    if fenced and fenced[0]["state"] not in (StepState.AVAILABLE, StepState.DEAD_LETTERED):
        yield f"a fence stands for step {fenced[0]['number']}, which is {fenced[0]['state']}"


def _broken_in_audit(run: RowMapping, its_steps: list[RowMapping], its_events: list[RowMapping]) -> Iterator[str]:
    if [event["sequence"] for event in its_events] != list(range(1, run["events_count"] + 1)):
        yield f"its events are not numbered 1 to {run['events_count']}"
    if run["events_lost"]:
        return
    recording = ("step.settled", "outcome.late", "write.resolved")
    recorded = {event["number"] for event in its_events if event["kind"] in recording}
    for step in its_steps:
        # A call that couldn't be made is completed by the turn that asked for it.
        is_refused = step["is_error"] and step["settled_by"] is None
        is_copied = step["number"] <= run["copied_steps"]
        is_told = is_refused or is_copied or step["number"] in recorded
        if step["state"] == StepState.COMPLETED and not is_told:
            yield f"step {step['number']} has a result that the audit log doesn't know"
    stamped = {event["number"] for event in its_events if event["kind"] == "fence.stamped"}
    if run["pending_effect_number"] is not None and run["pending_effect_number"] not in stamped:
        yield "a fence stands that the audit log doesn't know"


def _broken_in_dead_letters(run: RowMapping, its_dead_letters: list[RowMapping]) -> Iterator[str]:
    is_open = any(each["closed_at"] is None for each in its_dead_letters)
    if is_open and run["status"] != RunStatus.FAILED:
        yield "it is not failed, and has an open dead letter"
    started = run["next_step"] > 1  # A refused run has no step, and nothing to replay.
    if run["status"] == RunStatus.FAILED and run["mode"] == RunMode.QUEUED and started and not its_dead_letters:
        yield "it is failed without a dead letter"
    if run["status"] == RunStatus.FAILED and run["pending_effect_id"] is not None and not is_open:
        yield "it is failed over an unknown write that no open dead letter shows"


def _broken_in_world(
    run: RowMapping, its_steps: list[RowMapping], its_events: list[RowMapping], world: World
) -> Iterator[str]:
    for step in its_steps:
        name = (run["id"], step["number"])
        effects = world.effects.get(name, 0)
        told = [event for event in its_events if event["number"] == step["number"]]
        results = [event for event in told if _records_success(event)]
        contradictions = [event for event in told if event["kind"] == "outcome.contradicted"]
        if len(results) > 1:
            yield f"step {step['number']} got {len(results)} results"
        if step["effect"] == "read_only":
            continue
        if step["effect"] == "non_idempotent_write" and effects > 1 + world.lies:
            yield f"the plain write of step {step['number']} happened {effects} times"
        if len(results) > effects and not run["events_lost"]:
            yield f"the write of step {step['number']} has a result and never happened"
        if contradictions and not world.lies:
            yield f"step {step['number']} is contradicted, though nobody lied"
        stands = run["pending_effect_number"] == step["number"] or step["may_have_happened"]
        is_told = stands or len(results) + len(contradictions) >= effects
        if step["state"] not in OPEN and not is_told and name not in world.in_hand:
            yield f"the write of step {step['number']} is hidden: no result, no fence, no doubt, no contradiction"


def _records_success(event: RowMapping) -> bool:
    data = json.loads(event["data"])
    if event["kind"] == "write.resolved":
        return bool(data["decision"] == "happened")
    return event["kind"] in ("step.settled", "outcome.late") and not data.get("is_error")


def _by_run(rows: Any) -> defaultdict[str, list[RowMapping]]:
    found: defaultdict[str, list[RowMapping]] = defaultdict(list)
    for row in rows:
        found[row["run_id"]].append(row)
    return found
