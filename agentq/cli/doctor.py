"""`agentq doctor`: look at everything that can make a write run twice or a run be lost, and say what to do about it."""

import os
import sys
from contextlib import redirect_stdout

import click

from agentq.checks.finding import Finding, Level
from agentq.cli.exit_codes import ExitCode
from agentq.cli.output import Cell, Column, Format, View, emit_list, output_options, say
from agentq.config.settings import load_settings

STYLES = {Level.OK: "green", Level.NOTE: "blue", Level.WARNING: "yellow", Level.ERROR: "red"}
COLUMNS = (
    Column("", lambda view: Cell(view["level"], STYLES[view["level"]])),
    Column("WHAT", lambda view: Cell(view["subject"])),
    Column("FOUND", lambda view: Cell(view["found"])),
)


@click.command()
@output_options
def doctor(output: Format) -> ExitCode:
    """Check settings, agents, database, broker, workers, keeper, and what waits for a person.

    Changes nothing. Exits with 1 when something doesn't work or a promise doesn't hold; warnings alone don't. With
    AGENTQ_AGENTS set it imports those modules, to know their deadlines.
    """
    from agentq.bootstrap import Wiring  # noqa: PLC0415 - `--help` doesn't need it
    from agentq.checks.gathering import look_at_everything  # noqa: PLC0415

    with Wiring(load_settings()) as wiring, redirect_stdout(sys.stderr):  # A module of agents may print.
        findings = look_at_everything(wiring, os.environ)
    emit_list([_view(finding) for finding in findings], COLUMNS, output, id_of="subject", none="")
    if output.is_for_people:
        _advise(findings)
    return ExitCode.FAILED if any(finding.level is Level.ERROR for finding in findings) else ExitCode.DONE


def _advise(findings: list[Finding]) -> None:
    """The table has no room for it."""
    for finding in findings:
        if finding.why or finding.fix:
            say(f"{finding.subject}: {finding.why or finding.found}", style=STYLES[finding.level])
            if finding.fix:
                say(f"  fix: {finding.fix}")


def _view(finding: Finding) -> View:
    return {
        "subject": finding.subject,
        "level": finding.level.value,
        "found": finding.found,
        "why": finding.why or None,
        "fix": finding.fix or None,
    }
