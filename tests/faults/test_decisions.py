"""Two people who decide about the same dead letter at the same moment."""

import subprocess
import sys

import pytest

from agentq.cli.exit_codes import ExitCode
from agentq.domain.model import RunStatus
from tests.support.locks import wait_for_waiters
from tests.support.system import System, call
from tests.support.workers import environment

pytestmark = pytest.mark.usefixtures("workers")


def test_one_replays_and_the_other_is_told_who_was_first(system: System) -> None:
    """A run that two people start again would go on twice, each with its own next steps."""
    run_id = unknown_write(system, "replayed by two")
    system.client.resolve(run_id, happened="paid", reason="the receiver has it")
    codes, errors = at_once(system, run_id, ("replay", "--actor", "ann"), ("replay", "--actor", "bob"))
    assert sorted(codes) == [ExitCode.DONE, ExitCode.REFUSED]
    first, second = ("ann", "bob") if codes[0] == ExitCode.DONE else ("bob", "ann")
    assert f"{first} replayed it at" in errors[codes.index(ExitCode.REFUSED)]
    assert system.completes(run_id).output == "paid"
    assert [event.actor for event in system.events(run_id, "run.replayed")] == [first]
    assert [event.actor for event in system.events(run_id, "decision.refused")] == [second]
    assert system.receiver.effects_of(run_id) == 1


def test_one_resolves_and_the_other_is_told_what_was_decided(system: System) -> None:
    """The first word stands; the second isn't taken for a correction of it."""
    run_id = unknown_write(system, "resolved by two")
    codes, errors = at_once(
        system,
        run_id,
        ("resolve", "--happened", '"ann\'s"', "--actor", "ann"),
        ("resolve", "--happened", '"bob\'s"', "--actor", "bob"),
    )
    assert sorted(codes) == [ExitCode.DONE, ExitCode.REFUSED]
    first = "ann" if codes[0] == ExitCode.DONE else "bob"
    refusal = errors[codes.index(ExitCode.REFUSED)]
    assert f"{first} decided at" in refusal and "happened" in refusal
    run = system.client.get(run_id)
    assert (run.status, run.steps[1].result) == (RunStatus.FAILED, f"{first}'s")


def unknown_write(system: System, name: str) -> str:
    """A run that stopped over it."""
    run_id = system.enqueue([call("charge", name, is_rejected=False)])
    system.stops_as_unknown(run_id)
    return run_id


def at_once(system: System, run_id: str, *commands: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Exit codes and messages of these commands over the run's dead letter; none gets its lock before all ask."""
    with system.database.locked(run_id):
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "agentq.cli.main", "dead-letters", verb, run_id, "--yes", *options],
                env=environment(system.settings),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for verb, *options in commands
        ]
        wait_for_waiters(system.database, len(commands))
    messages = [process.communicate(timeout=20)[1] for process in started]
    return [process.returncode for process in started], messages
