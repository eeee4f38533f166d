"""What people decide: about dead letters, and about tools that are switched off for a while."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentq.domain.decisions import Choice, Ruling
from agentq.domain.errors import AgentqError
from agentq.domain.model import DeadLetter, DeadLetterGroup, RunStatus, Step
from agentq.domain.pauses import Pause
from agentq.domain.replay import Copying, ReplayPlan
from agentq.ports.dispatch import Wakeup
from agentq.ports.runs import RunFilter


class PauseStore(Protocol):
    """Tools that people switch off for a while. Each change is in the audit log."""

    def pauses(self) -> tuple[Pause, ...]: ...

    def pause(self, tool: str | None, agent: str | None, *, reads: bool, actor: str, reason: str) -> Pause:
        """From when it returns, no write of that tool (for that agent) begins: every fence that is stamped later is
        refused. Writes that are in flight go on. Pausing it again changes reads and reason."""
        ...

    def resume(self, tool: str | None, agent: str | None, *, actor: str, reason: str) -> int:
        """End that pause and make the steps that waited for it due: how many. Raises NotFoundError."""
        ...

    def writes_in_flight(self, tool: str | None, agent: str | None) -> int:
        """How many fences stand over calls of that tool (for that agent) in runs that are active."""
        ...

    def tools_seen(self) -> set[str]:
        """The tools of steps that are open now, and of open dead letters."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What became of one run among many that were decided about. `refusal` says why nothing was changed."""

    run_id: str
    refusal: AgentqError | None = None
    wakeups: tuple[Wakeup, ...] = ()


class DecisionStore(Protocol):
    """Dead letters, and what people decide about them. Every decision is audited, refused ones too."""

    def dead_letters(self, filters: RunFilter) -> list[DeadLetter]:
        """Open ones, those with a contradiction first, then newest first."""
        ...

    def dead_letter_groups(self, filters: RunFilter) -> list[DeadLetterGroup]:
        """Open ones by what they have in common; those with a contradiction first, then the largest."""
        ...

    def count_dead_letters(self, filters: RunFilter) -> tuple[int, int]:
        """How many are open that match, and the highest number of any that is."""
        ...

    def page_of_dead_letters(self, filters: RunFilter, *, after: str, number_max: int, limit: int) -> list[str]:
        """The next runs behind run id `after` whose open one matches, in order; none that came after that number."""
        ...

    def resolve(self, run_id: str, ruling: Ruling, *, actor: str, reason: str) -> Step:
        """Record what became of the unknown write; the run stays failed until it is replayed.

        Raises NotFoundError, AlreadyDecidedError (no write is in doubt), TooEarlyError."""
        ...

    def resolve_by_probe(self, run_id: str, *, actor: str, reason: str) -> Step:
        """Withdraw the dead letter and make the step due again as a question to its tool's probe, with a new budget of
        questions; its fence stands. The run goes on by what the probe says, or comes back as a dead letter.

        Raises NotFoundError, AlreadyDecidedError (no write is in doubt, or its probe is being asked), RefusedError (the
        tool had no probe, or an interactive run)."""
        ...

    def discard(self, run_id: str, *, actor: str, reason: str) -> RunStatus:
        """Give the run up: it leaves the list for good; an unknown write stays unknown. The status after: a run that
        was to be cancelled is cancelled, every other one stays failed.

        Raises NotFoundError, AlreadyDecidedError, RefusedError (no dead letter)."""
        ...

    def replay_plan(self, run_id: str, copying: Copying | None = None) -> ReplayPlan:
        """What `replay`, or `copy`, would do now. Raises NotFoundError; InvalidInputError for a step that isn't there
        or begins nothing, or a write that can't be repeated."""
        ...

    def replay(
        self, run_id: str, *, actor: str, reason: str, ruling: Ruling | None = None, digest: str | None = None
    ) -> tuple[Wakeup, ...]:
        """Run a failed run again from where it stopped: recorded results stay, the failed step and those that its end
        closed are opened with new budgets. With a `ruling` the unknown write is resolved first, in the same
        transaction; what was resolved stays so when the replay is refused then.

        Raises NotFoundError, DecisionRequiredError, AlreadyDecidedError, RefusedError (cancelled), StalePlanError (the
        plan has another digest now), and with a ruling what `resolve` raises."""
        ...

    def copy(
        self, run_id: str, new_run_id: str, copying: Copying, *, actor: str, reason: str, digest: str | None = None
    ) -> tuple[Wakeup, ...]:
        """Start a new run with the recorded results before a step of an ended run, which stays as it was. A second copy
        needs the digest of a plan, which shows the first.

        Raises NotFoundError, InvalidInputError (no such step, or none that begins a turn or batch), RefusedError (a
        write would be made again that isn't accepted), AlreadyDecidedError, StalePlanError."""
        ...

    def decide_many(
        self, run_ids: Sequence[str], choice: Choice, *, actor: str, reason: str, is_rehearsal: bool = False
    ) -> list[Decided]:
        """Decide about several runs in one transaction, each as if it were alone; in the order of their ids.

        A rehearsal does all of it and takes it back."""
        ...
