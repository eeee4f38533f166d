"""The `agentq` command as a whole: its help, its usage errors and its exit codes."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import click
import pytest

from agentq.cli.exit_codes import ExitCode, exit_code_of
from agentq.cli.lazy import LazyGroup
from agentq.cli.main import cli, run_command
from agentq.domain import errors


def all_commands(group: LazyGroup, path: str = "agentq") -> Iterator[tuple[str, str, click.Command]]:
    """Path, summary in the list, and the command itself, at every level."""
    for name, lazy in group.lazy_commands.items():
        command = lazy.load()
        yield f"{path} {name}", lazy.summary, command
        if isinstance(command, LazyGroup):
            yield from all_commands(command, f"{path} {name}")


assert isinstance(cli, LazyGroup)
COMMANDS = list(all_commands(cli))


@pytest.mark.parametrize("path", [path for path, _, _ in COMMANDS])
def test_every_command_explains_itself(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help needs no settings and no database, and names the command as it is typed."""
    assert run_command([*path.split()[1:], "--help"]) == ExitCode.DONE
    assert f"Usage: {path}" in capsys.readouterr().out


@pytest.mark.parametrize(("path", "summary", "command"), COMMANDS, ids=[path for path, _, _ in COMMANDS])
def test_a_command_is_called_what_the_list_calls_it(path: str, summary: str, command: click.Command) -> None:
    """The list is written down apart from the code that it stands for, so that it needn't import it."""
    assert command.name == path.rpartition(" ")[2]
    assert summary.endswith(".") and len(summary) < 65
    assert command.help


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run"], "Missing argument 'AGENT'"),
        (["rums"], "no command 'rums'; did you mean 'runs'?"),
        (["runs", "lst"], "no command 'lst'; did you mean 'list'?"),
        (["runs", "xyzzy"], "no command 'xyzzy'"),
        (["runs", "list", "-o", "yaml"], "'yaml' is not one of 'table', 'json', 'jsonl', 'ids'"),
        (["enqueue"], "name the agent and give its input"),
        (["enqueue", "support"], "give the INPUT as a text, or as --input-json"),
        (["enqueue", "support", "x", "--input-json", "1"], "one of them"),
        (["enqueue", "support", "--input-json", "{"], "--input-json is not JSON"),
        (["enqueue", "--from-jsonl", "nowhere.jsonl"], "'nowhere.jsonl' can't be read"),
        (["enqueue", "support", "--from-jsonl", "x"], "--from-jsonl goes with neither"),
        (["enqueue", "support", "x", "-m", "team"], "metadata is 'team'; it takes key=value"),
        (["dead-letters", "resolve", "r-1"], "say what became of the write"),
        (["dead-letters", "resolve", "r-1", "--happened", "nope"], "--happened is not JSON"),
        (["dead-letters", "resolve", "r-1", "--happened", "1", "--did-not-happen"], "contradict each other"),
        (["dead-letters", "resolve", "r-1", "--did-not-happen"], "--did-not-happen needs --looked-at"),
        (["dead-letters", "replay", "r-1", "--looked-at", "5m"], "--looked-at goes with --did-not-happen"),
        (["runs", "cancel", "r-1"], "Nobody is at the terminal to ask: add --yes"),
        (["dead-letters", "replay", "r-1"], "Nobody is at the terminal to ask: add --yes"),
        (["worker", "everything"], "'everything' is not one of"),
    ],
)
def test_wrong_usage_is_one_clear_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It names what is wrong and what to do; nothing is on stdout, and no traceback anywhere."""
    assert run_command(arguments) == ExitCode.REFUSED
    captured = capsys.readouterr()
    assert captured.out == ""
    first, *rest = captured.err.splitlines()
    assert first.startswith("error: ") and told in first
    assert "--help" not in first and len(rest) <= 1 and all(line.startswith("see agentq ") for line in rest)


def test_a_wrong_setting_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt variable that were ignored would be found at night."""
    monkeypatch.setenv("AGENTQ_DATABSE_URL", "sqlite:///x.db")
    assert run_command(["runs", "list"]) == ExitCode.REFUSED
    assert "unknown setting AGENTQ_DATABSE_URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInputError("x"), 2),
        (errors.NotFoundError("x"), 2),
        (errors.TooEarlyError("x", datetime.now(UTC)), 2),
        (errors.AlreadyDecidedError("x"), 2),
        (errors.ConfigurationError("x"), 2),
        (errors.SchemaError("x"), 2),
        (errors.WaitTimeoutError("x"), 5),
        (errors.StoreUnavailableError("x"), 1),
        (errors.StoreUnreachableError("x"), 2),
        (errors.BrokerUnavailableError("x"), 2),
        (errors.LeasesUnavailableError("x"), 2),
    ],
)
def test_the_exit_code_says_what_a_script_should_do(error: errors.AgentqError, code: int) -> None:
    """2: nothing was changed. 1: something may have been. 5: it goes on, look again."""
    assert exit_code_of(error) == code


def test_completion_needs_no_settings() -> None:
    """The shell asks for it at every tab."""
    answer = subprocess.run(
        [sys.executable, "-c", "from agentq.cli.main import main; main()"],
        env={"_AGENTQ_COMPLETE": "bash_complete", "COMP_WORDS": "agentq ru", "COMP_CWORD": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stdout.split() == ["plain,run", "plain,runs"]
