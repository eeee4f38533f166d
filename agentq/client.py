"""What another program does with runs: start them, wait for them, read them, cancel them, decide about dead letters."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from agentq.bootstrap import Wiring
from agentq.config.settings import Settings, load_settings
from agentq.domain.audit import AuditFinding
from agentq.domain.decisions import RUNS_PER_SECOND_MIN, Asking, Choice, Discarding, Replaying, Ruling, signed
from agentq.domain.errors import InvalidInputError, UnknownAgentError, WaitTimeoutError
from agentq.domain.ledger import Ledger
from agentq.domain.model import DeadLetter, DeadLetterGroup, Decision, Event, Json, Run, RunMode, RunStatus, Step
from agentq.domain.pauses import Pause
from agentq.domain.replay import Copying, ReplayPlan
from agentq.domain.seals import LoggedEvent, Seal
from agentq.filters import parse_age, parse_filters, parse_time
from agentq.ports.auditing import AuditScope
from agentq.ports.deciding import Decided
from agentq.ports.purging import PurgedBatch
from agentq.ports.runs import ServedAgent
from agentq.services.decide import decide
from agentq.services.enqueue import Enqueued, EnqueueRequest, check, enqueue, json_text, new_run_id, request_from
from agentq.services.ledger import read_ledger
from agentq.services.purge import BATCH_RUNS, purge
from agentq.services.replay import replay as replay_run
from agentq.services.replay import replay_as_copy
from agentq.services.verify import Checked, verify

POLL_SECONDS_FIRST = 0.05
POLL_SECONDS_MAX = 1.0
_NOT_GIVEN: Any = object()  # `happened=None` is an answer: the write happened and returned nothing.


class AgentQ:
    """A client of one deployment. It needs the database, and for quick starts the broker; never an agent's code.

    Safe to share between threads; not across a fork. Close it, or use it as a context manager.
    """

    def __init__(
        self, settings: Settings | None = None, *, actor: str = "client", wiring: Wiring | None = None
    ) -> None:
        """`actor` is who decisions and cancels are written down for, unless a call says otherwise."""
        self._wiring = wiring or Wiring(settings or load_settings())
        self._actor = actor

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, *, actor: str = "client") -> Self:
        """The client that the `AGENTQ_` variables describe. Raises ConfigurationError that names the wrong one."""
        return cls(load_settings(environ), actor=actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give connections back. The client can't be used afterwards."""
        self._wiring.close()

    # --- Starting runs ----------------------------------------------------------------------------------------------

    def enqueue(
        self,
        agent: str,
        input: Json,
        *,
        idempotency_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        run_id: str | None = None,
    ) -> str:
        """Store a run and return its id; it starts when a worker is free. Needs the database only.

        The same idempotency key returns the run that it started before. Raises UnknownAgentError,
        IdempotencyConflictError or another InvalidInputError (nothing is stored), StoreUnavailableError.
        """
        return self.enqueue_one(
            EnqueueRequest(agent=agent, input=input, idempotency_key=idempotency_key, metadata=metadata, run_id=run_id)
        ).run_id

    def enqueue_one(self, request: EnqueueRequest) -> Enqueued:
        """Like `enqueue`; also says whether the run is new, and warns when no worker serves its agent right now."""
        return self._enqueue([request])[0]

    def enqueue_many(self, requests: Iterable[EnqueueRequest | Mapping[str, Any]]) -> list[str]:
        """Store many runs, 500 a transaction, each given with the names of `enqueue`'s arguments; their ids in order.

        All are checked before the first is stored. When the database fails midway, the batches before are stored: with
        idempotency keys the whole call can safely be made again.
        """
        checked = [one if isinstance(one, EnqueueRequest) else request_from(one) for one in requests]
        return [enqueued.run_id for enqueued in self._enqueue(checked)]

    def _enqueue(self, requests: list[EnqueueRequest]) -> list[Enqueued]:
        return enqueue(
            requests,
            runs=self._wiring.runs,
            dispatcher=self._wiring.dispatcher,
            backlog_max=self._wiring.settings.backlog_max,
        )

    # --- Reading runs -----------------------------------------------------------------------------------------------

    def status(self, run_id: str) -> RunStatus:
        """Where the run is now. Raises NotFoundError."""
        return self._wiring.runs.status(run_id)

    def get(self, run_id: str) -> Run:
        """The run with its steps and its open dead letter. Raises NotFoundError."""
        return self._wiring.runs.run(run_id)

    def get_by_key(self, idempotency_key: str) -> Run:
        """The run that this idempotency key started, or the refusal of it. Raises NotFoundError."""
        return self._wiring.runs.run_by_key(idempotency_key)

    def runs(self, **filters: Any) -> list[Run]:
        """Newest first, without their steps; the filters are those of `agentq.filters.parse_filters`."""
        return self._wiring.runs.runs(parse_filters(filters))

    def wait(self, run_id: str, timeout: float | None = 60) -> Run:
        """The run once it has ended, whichever way. Raises WaitTimeoutError after `timeout` seconds (None: never)."""
        poll = _Poll(run_id, timeout)
        while not (status := self.status(run_id)).is_terminal:
            poll.pause(status)
        return self.get(run_id)

    def events(
        self, run_id: str, after: int = 0, *, follow: bool = False, timeout: float | None = None
    ) -> Iterator[Event]:
        """The run's audit log behind sequence number `after`; with `follow` also what comes until the run's end.

        Raises NotFoundError; WaitTimeoutError when following took `timeout` seconds (None: never).
        """
        poll = _Poll(run_id, timeout)
        while True:
            status = self.status(run_id)  # Asked before reading, so that its last event isn't missed.
            events = self._wiring.runs.events(run_id, after)
            yield from events
            if status.is_terminal or not follow:
                return
            if events:
                after = events[-1].sequence
                poll.hurry()
            poll.pause(status)

    def ledger(self, run_id: str) -> Ledger:
        """The run with its audit log and, for each step, every attempt at it: when, by whom, how it ended; and how many
        deliveries of the step came to nothing.

        The last is exact while Redis has its counts from the run's beginning on, else at least so many, or None: not
        known. Raises NotFoundError.
        """
        return read_ledger(run_id, runs=self._wiring.runs, leases=self._wiring.glanced_leases, clock=self._wiring.clock)

    # --- Changing runs ----------------------------------------------------------------------------------------------

    def cancel(self, run_id: str, *, reason: str = "", actor: str | None = None) -> RunStatus:
        """Stop the run; a write that is in flight ends first. The status after: an ended run keeps its own.

        Raises NotFoundError.
        """
        return self._wiring.runs.cancel(run_id, **signed(actor or self._actor, reason))

    def dead_letters(self, **filters: Any) -> list[DeadLetter]:
        """Runs that stopped and wait for a person; contradictions first, then newest first. Filters as for `runs`."""
        return self._wiring.decisions.dead_letters(parse_filters(filters))

    def resolve(
        self,
        run_id: str,
        *,
        happened: Json = _NOT_GIVEN,
        did_not_happen: bool = False,
        looked_at: datetime | str | None = None,
        reason: str = "",
        actor: str | None = None,
    ) -> Step:
        """Say what became of an unknown write: `happened` with its result, or `did_not_happen` and when you looked.

        `looked_at` is a time, an age such as "5m", or "now": what was seen before the write's time was over says
        nothing, however late it is told. The run stays failed until it is replayed. Raises NotFoundError,
        AlreadyDecidedError, TooEarlyError.
        """
        ruling = _ruling(happened, did_not_happen, looked_at)
        if ruling is None:
            raise InvalidInputError("say what became of the write: happened=<its result>, or did_not_happen=True")
        return self._wiring.decisions.resolve(run_id, ruling, **signed(actor or self._actor, reason))

    def resolve_by_probe(self, run_id: str, *, reason: str = "", actor: str | None = None) -> Step:
        """Have the tool's probe asked again what became of an unknown write; a worker does it, within seconds.

        By its answer the run goes on, or the write is made again; if it can't tell, the run is a dead letter again.
        Raises NotFoundError, AlreadyDecidedError, RefusedError (the tool had no probe, an interactive run).
        """
        return self._wiring.decisions.resolve_by_probe(run_id, **signed(actor or self._actor, reason))

    def discard(self, run_id: str, *, reason: str = "", actor: str | None = None) -> RunStatus:
        """Give a dead-lettered run up, for good: it leaves the list, stays failed, and can't be replayed, only copied.

        An unknown write of it stays unknown, and is written down as that. Returns the status after. Raises
        NotFoundError, AlreadyDecidedError, RefusedError (no dead letter).
        """
        return self._wiring.decisions.discard(run_id, **signed(actor or self._actor, reason))

    def replay_plan(
        self, run_id: str, *, from_step: int | None = None, repeat_writes: Iterable[int] = ()
    ) -> ReplayPlan:
        """What a replay would do now, step by step, and its digest; with `from_step`: what a copy from there would do.

        Changes nothing. Raises NotFoundError, InvalidInputError (a step that isn't there, or begins no turn or batch).
        """
        return self._wiring.decisions.replay_plan(run_id, _copying(from_step, repeat_writes))

    def replay(
        self,
        run_id: str,
        *,
        happened: Json = _NOT_GIVEN,
        did_not_happen: bool = False,
        looked_at: datetime | str | None = None,
        from_step: int | None = None,
        repeat_writes: Iterable[int] = (),
        digest: str | None = None,
        reason: str = "",
        actor: str | None = None,
    ) -> str:
        """Run a dead-lettered run again from the step that stopped it; completed steps keep their results.

        An unknown write needs a decision first, by `resolve` or here with the same arguments. With `from_step` a new
        run begins with the results before that step, and the old one stays as it was; a write that would be made again
        must be named in `repeat_writes`. With a plan's `digest` nothing else than that plan is done. Returns the id of
        the run that goes on: this one, or the new one.

        Raises NotFoundError, DecisionRequiredError, AlreadyDecidedError, TooEarlyError, StalePlanError, RefusedError (a
        cancelled run, a write that isn't accepted), InvalidInputError.
        """
        ruling, copying = _ruling(happened, did_not_happen, looked_at), _copying(from_step, repeat_writes)
        if copying is None:
            replay_run(run_id, ruling, digest=digest, **self._deciding(actor, reason))
            return run_id
        if ruling is not None:
            raise InvalidInputError("a copy leaves the old run as it was: resolve its unknown write by itself")
        copied_run_id = new_run_id()
        replay_as_copy(run_id, copied_run_id, copying, digest=digest, **self._deciding(actor, reason))
        return copied_run_id

    # --- Deciding about many ----------------------------------------------------------------------------------------

    def dead_letter_groups(self, **filters: Any) -> list[DeadLetterGroup]:
        """Open dead letters by tool, class, reason and fingerprint; contradictions first, then the largest group."""
        return self._wiring.decisions.dead_letter_groups(parse_filters(filters))

    def count_dead_letters(self, **filters: Any) -> int:
        """How many are open that match."""
        return self._wiring.decisions.count_dead_letters(parse_filters(filters))[0]

    def replay_many(self, filters: Mapping[str, Any], **options: Any) -> Iterator[list[Decided]]:
        """Replay every open dead letter that matches: the safe ones run, those that need a decision are left.

        `filters` are those of `dead_letters`; the limit is none unless one is given. Options: `reason`, `actor`,
        `runs_per_second`, and `dry_run`, which does all of it and takes it back. Nothing is done before the first batch
        is asked for; each is one transaction, and `Decided.refusal` says why a run was left. After an interruption call
        it again: what is done isn't matched any more.
        """
        return self._decide(filters, Replaying(), **options)

    def resolve_many(
        self,
        filters: Mapping[str, Any],
        *,
        happened: Json = _NOT_GIVEN,
        did_not_happen: bool = False,
        looked_at: datetime | str | None = None,
        **options: Any,
    ) -> Iterator[list[Decided]]:
        """Say the same of every matching write that is in doubt; like `resolve`, with the options of `replay_many`."""
        ruling = _ruling(happened, did_not_happen, looked_at)
        if ruling is None:
            raise InvalidInputError("say what became of the writes: happened=<their result>, or did_not_happen=True")
        return self._decide({**filters, "outcome_unknown": True}, ruling, **options)

    def resolve_many_by_probe(self, filters: Mapping[str, Any], **options: Any) -> Iterator[list[Decided]]:
        """Have the probe asked about every matching write in doubt; `resolve_by_probe` with `replay_many`'s options."""
        return self._decide({**filters, "outcome_unknown": True}, Asking(), **options)

    def discard_many(self, filters: Mapping[str, Any], **options: Any) -> Iterator[list[Decided]]:
        """Give every matching dead letter up; like `discard`, with the options of `replay_many`."""
        return self._decide(filters, Discarding(), **options)

    def _decide(
        self,
        filters: Mapping[str, Any],
        choice: Choice,
        *,
        reason: str = "",
        actor: str | None = None,
        runs_per_second: float | None = None,
        dry_run: bool = False,
    ) -> Iterator[list[Decided]]:
        if runs_per_second is not None and not RUNS_PER_SECOND_MIN <= runs_per_second < math.inf:
            raise InvalidInputError(
                f"runs_per_second is {runs_per_second!r}; it takes a number above 0, one a day or more"
            )
        chosen = parse_filters(filters)
        return decide(
            chosen if filters.get("limit") else replace(chosen, limit=sys.maxsize),
            choice,
            clock=self._wiring.clock,
            backlog_max=self._wiring.settings.backlog_max,
            runs_per_second=runs_per_second,
            is_rehearsal=dry_run,
            **self._deciding(actor, reason),
        )

    def _deciding(self, actor: str | None, reason: str) -> dict[str, Any]:
        return {
            **signed(actor or self._actor, reason),
            "decisions": self._wiring.decisions,
            "runs": self._wiring.runs,
            "dispatcher": self._wiring.dispatcher,
        }

    # --- Pausing tools ----------------------------------------------------------------------------------------------

    def pauses(self) -> tuple[Pause, ...]:
        """What is paused now."""
        return self._wiring.pausing.pauses()

    def pause(
        self,
        tool: str | None = None,
        *,
        agent: str | None = None,
        reads: bool = False,
        reason: str = "",
        actor: str | None = None,
    ) -> Pause:
        """Let calls of that tool (None: of every tool), for that agent (None: for every agent) wait.

        From when it returns no write of them begins; those that are in flight go on. With `reads` reading calls wait
        too, within a second. Steps that wait cost their runs nothing. Pausing again changes `reads` and `reason`.
        """
        return self._wiring.pausing.pause(tool, agent, reads=reads, **signed(actor or self._actor, reason))

    def resume(
        self, tool: str | None = None, *, agent: str | None = None, reason: str = "", actor: str | None = None
    ) -> int:
        """End the pause with the same tool and agent; returns how many steps waited for it. Raises NotFoundError."""
        return self._wiring.pausing.resume(tool, agent, **signed(actor or self._actor, reason))

    def writes_in_flight(self, tool: str | None = None, *, agent: str | None = None) -> int:
        """How many calls of writing tools are under way in active runs, or have an outcome that nobody knows yet."""
        return self._wiring.pausing.writes_in_flight(tool, agent)

    def tools_seen(self) -> set[str]:
        """The tools of steps that are open now, and of open dead letters; asks no agent's code."""
        return self._wiring.pausing.tools_seen()

    # --- Keeping what is needed -------------------------------------------------------------------------------------

    def purge(
        self,
        older_than: timedelta | str,
        *,
        batch_runs: int = BATCH_RUNS,
        with_contradictions: bool = False,
        dry_run: bool = False,
        actor: str | None = None,
    ) -> Iterator[PurgedBatch]:
        """Delete the runs that finished longer ago than that (`30d`) for good, with all that they own, oldest first.

        Runs as the batches are asked for, each one transaction; broken off, the same call goes on with the rest. Never
        a run with a write in doubt or an open dead letter; one with a contradiction only if asked to. The idempotency
        key of a purged run is forgotten: the same key starts a new run. Raises InvalidInputError.
        """
        return purge(
            self._wiring.purging,
            older_than=parse_age("older_than", older_than),
            visibility_timeout=timedelta(seconds=self._wiring.settings.visibility_timeout_seconds),
            clock=self._wiring.clock,
            actor=actor or self._actor,
            batch_runs=batch_runs,
            with_contradictions=with_contradictions,
            is_rehearsal=dry_run,
        )

    # --- The audit log ----------------------------------------------------------------------------------------------

    def verify_audit(
        self,
        run_ids: Iterable[str] = (),
        *,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
        tell: Callable[[AuditFinding], None] = lambda finding: None,
    ) -> Checked:
        """Hold runs against their audit log: these, those created in that time, or all; changes nothing.

        Each finding is told as it is made; `findings` of what is returned counts them, and how much was looked at is
        beside it. Raises NotFoundError, InvalidInputError.
        """
        chosen = parse_filters({"since": since, "until": until})
        scope = AuditScope(run_ids=tuple(run_ids), since=chosen.since, until=chosen.until)
        return verify(self._wiring.auditing, scope, tell)

    def audit_entries(
        self, *, since: datetime | str | None = None, until: datetime | str | None = None
    ) -> Iterator[LoggedEvent | Seal]:
        """All events and seals of that time, by time, run id and sequence; read as they are asked for, so that
        none of them are held. Raises InvalidInputError."""
        chosen = parse_filters({"since": since, "until": until})
        return self._wiring.auditing.entries(chosen.since, chosen.until)

    # --- Running in this process ------------------------------------------------------------------------------------

    def run(
        self,
        agent: str,
        input: Json,
        *,
        metadata: Mapping[str, str] | None = None,
        see: Callable[[Run], None] = lambda run: None,
    ) -> Run:
        """Execute a run here and now, through the same steps as a worker would; it needs the agent's code.

        Returns it once it has ended; `see` is shown it after every step. If this process dies, the run fails. Raises
        UnknownAgentError and other InvalidInputErrors, ConfigurationError (AGENTQ_AGENTS), LeasesUnavailableError.
        """
        served = {
            name: ServedAgent(name=name, input_bytes_max=bytes_max, seen_seconds=0)
            for name, bytes_max in self._wiring.serves.items()
        }
        if agent not in served:
            known = ", ".join(sorted(served)) or "none: set AGENTQ_AGENTS to the modules that define them"
            raise UnknownAgentError(f"unknown agent {agent!r}; the agents of this process are {known}")
        new_run = check(EnqueueRequest(agent=agent, input=input, metadata=metadata), served)
        return self._wiring.interaction.drive(replace(new_run, mode=RunMode.INTERACTIVE), see)


class _Poll:
    """Asks often at first and at every change, less often while nothing happens, until time is up."""

    def __init__(self, run_id: str, timeout_seconds: float | None) -> None:
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._started = time.monotonic()
        self._pause_seconds = POLL_SECONDS_FIRST

    def hurry(self) -> None:
        self._pause_seconds = POLL_SECONDS_FIRST

    def pause(self, status: RunStatus) -> None:
        pause_seconds = self._pause_seconds
        if self._timeout_seconds is not None:
            left_seconds = self._timeout_seconds - (time.monotonic() - self._started)
            if left_seconds <= 0:
                raise WaitTimeoutError(
                    f"run {self._run_id} is still {status} after {self._timeout_seconds:g} s; it goes on"
                )
            pause_seconds = min(pause_seconds, left_seconds)
        time.sleep(pause_seconds)
        self._pause_seconds = min(self._pause_seconds * 1.5, POLL_SECONDS_MAX)


def _copying(from_step: int | None, repeat_writes: Iterable[int]) -> Copying | None:
    accepted = frozenset(repeat_writes)
    if from_step is None:
        if accepted:
            raise InvalidInputError("repeat_writes goes with from_step: a replay of the run itself repeats no write")
        return None
    return Copying(from_step=from_step, repeat_writes=accepted)


def _ruling(happened: Json, did_not_happen: bool, looked_at: datetime | str | None) -> Ruling | None:
    if happened is not _NOT_GIVEN and did_not_happen:
        raise InvalidInputError("happened and did_not_happen contradict each other; say one of them")
    if looked_at is not None and not did_not_happen:
        raise InvalidInputError("looked_at goes with did_not_happen: it says when you looked and found nothing")
    if did_not_happen:
        if looked_at is None:
            raise InvalidInputError(
                "did_not_happen needs looked_at: when you looked and found nothing; a time, an age such as 5m, or now"
            )
        looked = None if looked_at == "now" else parse_time("looked_at", looked_at, datetime.now(UTC))
        return Ruling(decision=Decision.DID_NOT_HAPPEN, looked_at=looked)
    if happened is not _NOT_GIVEN:
        json_text("happened", happened)  # What can't be kept as it was said is asked for anew, not kept otherwise.
        return Ruling(decision=Decision.HAPPENED, result=happened)
    return None
