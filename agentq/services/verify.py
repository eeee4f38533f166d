"""Prove the audit log: judge every run of it, a page at a time."""

from collections.abc import Callable
from dataclasses import dataclass

from agentq.domain.audit import AuditFinding, Judged, judge, judge_deployment, judge_stray, judge_unreadable
from agentq.ports.auditing import AuditScope, AuditStore


@dataclass(slots=True, kw_only=True)
class Checked:
    """How much was looked at. `events_unsealed` came after the last seal of their run: no seal speaks for them yet."""

    runs: int = 0
    events: int = 0
    writes: int = 0
    seals: int = 0
    events_unsealed: int = 0
    findings: int = 0

    def add(self, judged: Judged) -> None:
        self.events += judged.events
        self.writes += judged.writes
        self.seals += judged.seals
        self.events_unsealed += judged.events_unsealed


def verify(audit: AuditStore, scope: AuditScope, tell: Callable[[AuditFinding], None]) -> Checked:
    """Every finding is told as soon as it is made. Raises NotFoundError for an unknown run, and then looked at none."""
    checked = Checked()

    def note(findings: tuple[AuditFinding, ...]) -> None:
        checked.findings += len(findings)
        for finding in findings:
            tell(finding)

    for page in audit.pages(scope):
        for run in page.runs:
            judged = judge(run)
            checked.runs += 1
            checked.add(judged)
            note(judged.findings)
        checked.runs += len(page.unreadable)
        note(tuple(judge_unreadable(run_id) for run_id in page.unreadable))
        note(tuple(judge_stray(run_id) for run_id in page.strays))
    if scope.is_everything:
        of_deployment = audit.deployment_events()
        if of_deployment is None:
            note((judge_unreadable(""),))
        else:
            judged = judge_deployment(of_deployment)
            checked.add(judged)
            note(judged.findings)
    return checked
