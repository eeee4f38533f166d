"""`agentq audit`: prove the audit log, and take it elsewhere."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from agentq.cli.exit_codes import ExitCode
from agentq.cli.lazy import LazyCommand, LazyGroup
from agentq.cli.output import Format, View, clean, emit_list, emit_one, emit_text, output_options, say, suggest
from agentq.cli.session import connected, given_ids
from agentq.domain.audit import AuditFinding
from agentq.views import audit_entry_view, finding_view

if TYPE_CHECKING:
    from agentq.services.verify import Checked

_COMMANDS = {
    "verify": LazyCommand("agentq.cli.audit:verify", "Prove that writes have an end, and nothing is missing."),
    "export": LazyCommand("agentq.cli.audit:export", "The log of a time as JSON lines."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS)
def audit() -> None:
    """Prove the audit log, and take it elsewhere."""


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID...|-]")
@click.option("--since", metavar="TIME", help="Runs created since: RFC 3339 (UTC), or an age: 30m, 1h, 3d.")
@click.option("--until", metavar="TIME", help="Runs created before.")
@output_options
def verify(ids: tuple[str, ...], since: str | None, until: str | None, output: Format) -> ExitCode:
    """Hold every run against its audit log: these, those of a time, or all.

    Each write has a fence event and an end, no event is missing, counts agree, and every seal matches the events that
    it seals. Exits with 1 when anything doesn't hold; one line for each says of which run, what, and why it matters.
    Changes nothing.
    """
    if ids and (since or until):
        raise click.UsageError("name runs, or a time: not both")
    report = _Report(output)
    with connected() as client:
        checked = client.verify_audit(given_ids(ids) if ids else (), since=since, until=until, tell=report.tell)
    report.end(checked)
    return ExitCode.FAILED if checked.findings else ExitCode.DONE


class _Report:
    """Prints findings as they come, so that no more of them are held than a format needs."""

    def __init__(self, output: Format) -> None:
        self._output = output
        self._held: list[View] = []
        self._first_run_id: str | None = None

    def tell(self, finding: AuditFinding) -> None:
        self._first_run_id = self._first_run_id or finding.run_id
        view = finding_view(finding)
        match self._output:
            case Format.TABLE:
                emit_text(clean(f"{finding.run_id or '(deployment)'}: {finding.what} ({finding.why})"))
            case Format.JSONL:
                emit_list([view], [], self._output, none="")
            case _:
                self._held.append(view)

    def end(self, checked: "Checked") -> None:
        match self._output:
            case Format.TABLE:
                self._summarize(checked)
            case Format.JSON:
                emit_one({**asdict(checked), "findings": self._held}, self._output, lambda: None)
            case Format.IDS:
                of_runs = [view for view in self._held if view["run_id"] is not None]
                emit_list(of_runs, [], self._output, id_of="run_id", none="")

    def _summarize(self, checked: "Checked") -> None:
        looked_at = f"{checked.runs} runs, {checked.events} events, {checked.writes} writes, {checked.seals} seals"
        emit_text(f"checked {looked_at}: {f'{checked.findings} findings' if checked.findings else 'all of it holds'}")
        if checked.events_unsealed:
            say(f"{checked.events_unsealed} events came after the last seal of their run; the next end seals them")
        if self._first_run_id:
            suggest(f"agentq runs events {self._first_run_id}")


@click.command()
@click.option("--since", metavar="TIME", help="Events since: RFC 3339 (UTC), or an age: 30m, 1h, 3d.")
@click.option("--until", metavar="TIME", help="Events before.")
def export(since: str | None, until: str | None) -> None:
    """Events as JSON lines on stdout, by time, run and sequence; seals among them, as lines of the kind `seal`.

    \b
      agentq audit export --since 2026-01-31 --until 2026-02-01 > audit-2026-01-31.jsonl

    A seal's line holds its number and digest in `data`. Keep exports where whoever owns the database can't write: a
    rewritten log can be told by its seals then. Let UNTIL be a minute ago: a transaction that is still open commits
    events of before.
    """
    with connected() as client:
        for entry in client.audit_entries(since=since, until=until):
            emit_list([audit_entry_view(entry)], [], Format.JSONL, none="")
