"""Judge who is told of dead letters: a command that isn't there tells nobody."""

import shutil
from collections.abc import Callable, Iterator

from agentq.checks.finding import Finding, ok, warning
from agentq.config.settings import PREFIX, Settings

SUBJECT = "notifications"


def judge_notifications(settings: Settings, *, which: Callable[[str], str | None] = shutil.which) -> Iterator[Finding]:
    """Nothing where nobody is to be told. `which` finds a program in the path."""
    if settings.notify_task:
        yield ok(SUBJECT, f"dead letters are told to task {settings.notify_task} in queue {settings.notify_queue}")
    if not settings.notify_argv:
        return
    program = settings.notify_argv[0]
    if which(program) is not None:
        yield ok(SUBJECT, f"dead letters are told by {program}")
        return
    yield warning(
        SUBJECT,
        f"there is no program {program!r} here that could be run",
        why="nobody is told of a dead letter; they wait, and are told later",
        fix=f"install it where keepers run, or correct {PREFIX}NOTIFY_COMMAND",
    )
