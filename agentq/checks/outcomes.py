"""Judge the folder of outcome files: what a worker writes there when the database doesn't take a write's outcome."""

from collections.abc import Iterator

from agentq.adapters.outcome_facts import OutcomeFacts
from agentq.checks.database import FLEETING_FILESYSTEMS
from agentq.checks.finding import Finding, note, ok, warning

SUBJECT = "outcome files"
FREE_BYTES_MIN = 64 * 1024 * 1024  # A few of the largest results.
SOON_SECONDS = 60.0  # Until then a keeper has recorded them, if the database answers.


def judge_outcomes(facts: OutcomeFacts) -> Iterator[Finding]:
    findings = [*_judge_files(facts), *_judge_folder(facts)]
    yield from findings or [ok(SUBJECT, f"none waits in {facts.folder}")]


def _judge_files(facts: OutcomeFacts) -> Iterator[Finding]:
    if facts.waiting and facts.oldest_seconds <= SOON_SECONDS:
        yield note(SUBJECT, f"{facts.waiting} wait to be recorded", why="the database didn't take them just now")
    elif facts.waiting:
        yield warning(
            SUBJECT,
            f"{facts.waiting} wait to be recorded, the oldest for {facts.oldest_seconds:.0f} s",
            why="each holds the known outcome of a write that looks unknown until it is recorded",
            fix=f"run a keeper or a worker where {facts.folder} is, with a database that answers",
        )
    if facts.rejected:
        yield warning(
            SUBJECT,
            f"{facts.rejected} were set aside as no outcomes",
            why="one that was cut or changed may hold what became of a write",
            fix=f"see what they hold, in {facts.folder}, and resolve the dead letters by hand",
        )
    if facts.foreign:
        yield warning(
            SUBJECT,
            f"{facts.foreign} are of other deployments",
            why="no worker of this database records them",
            fix="give each deployment a folder of its own (AGENTQ_HOME), or run theirs once more",
        )


def _judge_folder(facts: OutcomeFacts) -> Iterator[Finding]:
    why = "an outcome that the database doesn't take is lost with the worker, and a person has to find it out"
    if not facts.is_writable:
        yield warning(
            SUBJECT, f"{facts.folder} can't be written to", why=why, fix="set AGENTQ_HOME to a folder on a volume"
        )
    elif facts.free_bytes is not None and facts.free_bytes < FREE_BYTES_MIN:
        yield warning(
            SUBJECT, f"the disk of {facts.folder} is full", why=why, fix="make room, or set AGENTQ_HOME to another one"
        )
    elif facts.filesystem in FLEETING_FILESYSTEMS:
        yield note(SUBJECT, f"{facts.folder} is in memory", why=why, fix="set AGENTQ_HOME to a folder on a volume")
