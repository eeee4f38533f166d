"""`agentq purge`: delete runs that finished long ago, with all that they own."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from agentq.cli.exit_codes import ExitCode
from agentq.cli.hints import same_command
from agentq.cli.output import (
    Format,
    ReaderGoneError,
    View,
    emit_one,
    emit_text,
    is_terminal,
    output_options,
    say,
    suggest,
)
from agentq.cli.progress import Progress
from agentq.cli.session import actor_option, ask, connected, yes_option
from agentq.domain.errors import AgentqError
from agentq.ports.purging import Kept, PurgedBatch


@dataclass(slots=True)
class Tally:
    """What has become of the runs so far."""

    runs: int = 0
    kept: Counter[Kept] = field(default_factory=Counter)

    def add(self, batch: PurgedBatch) -> None:
        self.runs += len(batch.run_ids)
        self.kept.update(batch.kept)


@click.command()
@click.option("--older-than", required=True, metavar="AGE", help="Runs that finished longer ago: 12h, 30d, 8w.")
@click.option("--batch", "batch_runs", type=int, metavar="COUNT", help="Runs of one transaction. [default: 200]")
@click.option("--with-contradictions", is_flag=True, help="Runs with a contradiction too: somebody has looked at them.")
@click.option("--dry-run", is_flag=True, help="Look at each in the same way, and delete nothing.")
@actor_option
@yes_option
@output_options
def purge(
    older_than: str,
    batch_runs: int | None,
    with_contradictions: bool,
    dry_run: bool,
    actor: str,
    yes: bool,
    output: Format,
) -> ExitCode:
    """Delete finished runs for good, oldest first, with their steps, their audit log and their closed dead letters.

    \b
      agentq purge --older-than 30d --dry-run
      agentq purge --older-than 30d --yes

    Never a run with a write in doubt, with an open dead letter, or with a contradiction unless you say so. The
    idempotency key of a purged run is forgotten: the same key starts a new run then. A copy of a purged run stays as it
    is. Workers go on meanwhile; broken off, the same command goes on with the rest. The database reuses the room.
    """
    options: dict[str, Any] = {"older_than": older_than, "with_contradictions": with_contradictions}
    if batch_runs is not None:
        options["batch_runs"] = batch_runs
    with connected(actor) as client:
        if dry_run or (not yes and is_terminal(sys.stdin) and is_terminal(sys.stderr)):
            tally = Tally()
            _carry_out(client.purge(**options, dry_run=True), tally, "would be purged", output if dry_run else None)
            if dry_run:
                return _conclude(tally, output, is_rehearsal=True)
            say(f"{tally.runs:,} runs would be purged{_kept(tally)}")
            if not tally.runs:
                return ExitCode.DONE
        batches = client.purge(**options)
        ask(f"Delete the runs that finished more than {older_than} ago for good?", yes=yes)
        tally = Tally()
        try:
            _carry_out(batches, tally, "purged", output)
        except BaseException as error:
            say(f"{tally.runs:,} runs were purged; the same command again goes on with the rest", style="yellow")
            if not tally.runs or not isinstance(error, AgentqError | ReaderGoneError):
                raise
            if isinstance(error, AgentqError):
                say(f"error: {error}", style="red")
            if not output.is_for_people:
                _conclude(tally, output, is_rehearsal=False)
            return ExitCode.PARTLY_DONE
    return _conclude(tally, output, is_rehearsal=False)


def _carry_out(batches: Iterator[PurgedBatch], tally: Tally, past: str, output: Format | None) -> None:
    progress = Progress()
    try:
        for batch in batches:
            tally.add(batch)
            if output is Format.IDS:
                for run_id in batch.run_ids:
                    emit_text(run_id)
            progress.show(f"{tally.runs:,} {past} so far")
    finally:
        progress.end()


def _conclude(tally: Tally, output: Format, *, is_rehearsal: bool) -> ExitCode:
    kept = {why.name.lower(): tally.kept[why] for why in Kept}
    view: View = {"runs": tally.runs, "dry_run": is_rehearsal, "kept": kept}
    past = "would be purged" if is_rehearsal else "purged"
    if output is not Format.IDS:
        emit_one(view, output, lambda: emit_text(f"{tally.runs:,} runs {past}{_kept(tally)}"))
    if output.is_for_people:
        if is_rehearsal and tally.runs:
            suggest(same_command(without="--dry-run"))
        if tally.kept[Kept.DEAD_LETTER]:
            suggest("agentq dead-letters list")
    return ExitCode.DONE


def _kept(tally: Tally) -> str:
    told = [f"{count:,} {'' if why is Kept.IN_USE else 'with '}{why}" for why, count in tally.kept.items()]
    return f", kept: {', '.join(told)}" if told else ""
