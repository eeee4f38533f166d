"""What an operator does to a whole deployment from the command line: pause tools, check the audit log, purge."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from agentq.cli.exit_codes import ExitCode
from agentq.domain.model import RunStatus
from agentq.ports.runs import RunFilter
from tests.support.command_line import Agentq, named_stage
from tests.support.databases import fresh_sqlite
from tests.support.purged import age, old
from tests.support.stage import FIRST_CALL, PLAIN, READ, Stage

AGENTS = """
from agentq import Agent, FunctionModel, ToolEffect, tool

@tool
def look(order: int) -> str:
    "Look an order up."
    return "1200 cents"

@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def refund(order: int) -> str:
    "Pay it back."
    return "paid"

support = Agent(name="support", model=FunctionModel(lambda messages, tools: "done"), tools=[look, refund])
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A SQLite database that the environment names; nobody answers for the broker."""
    with fresh_sqlite(tmp_path) as url, named_stage(url, tmp_path, monkeypatch) as stage:
        yield stage


@pytest.fixture
def agentq(stage: Stage, capsys: pytest.CaptureFixture[str]) -> Agentq:
    return Agentq(capsys)


class TestPause:
    def test_a_tool_is_paused_and_resumed(self, agentq: Agentq, stage: Stage) -> None:
        """Two commands in an outage, each printed by the one before."""
        run_id = stage.asked(PLAIN)
        assert agentq("tools", "pause", "pay", "--reason", "the bank is down", "--actor", "ann") == ExitCode.DONE
        assert "next: agentq tools resume pay" in agentq.err
        stage.steps.park(stage.ref(run_id, FIRST_CALL))

        assert agentq("runs", "show", run_id) == ExitCode.DONE
        assert "step 2 waits, pay is not called: ann paused tool pay" in agentq.err
        assert "the bank is down" in agentq.err
        assert agentq("runs", "show", run_id, "--json") == ExitCode.DONE
        assert [(each["step"], each["pause"]["paused_by"]) for each in agentq.data["parked"]] == [(2, "ann")]

        assert agentq("tools", "pauses", "--json") == ExitCode.DONE
        assert [(each["tool"], each["reads"]) for each in agentq.data] == [("pay", False)]
        assert agentq("tools", "resume", "pay") == ExitCode.DONE
        assert "1 steps waited" in agentq.err
        assert stage.pausing.pauses() == ()

    def test_writes_in_flight_are_told(self, agentq: Agentq, stage: Stage) -> None:
        """A pause doesn't end what began before it: the person must know that it is still under way."""
        stage.fenced(PLAIN)
        assert agentq("tools", "pause", "pay", "--json") == ExitCode.DONE
        assert agentq.data["writes_in_flight"] == 1
        assert "1 writes of it were in flight already" in agentq.err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("pau",), "did you mean 'pay'?"),
            (("zzz",), "Pause it all the same? Nobody is at the terminal to ask: add --yes"),
            ((), "name a tool, or an --agent, or say --all"),
            (("pay", "--all"), "leave TOOL and --agent out"),
            (("--all",), "Pause every tool? Nobody is at the terminal to ask: add --yes"),
            (("--agent", "support"), "add --yes"),
            (("", "--agent", "support"), "isn't empty"),
        ],
    )
    def test_what_cannot_be_meant_pauses_nothing(
        self, agentq: Agentq, stage: Stage, arguments: tuple[str, ...], message: str
    ) -> None:
        """A mistyped name would leave the real tool running, and everything paused by mistake is an outage."""
        stage.asked(PLAIN)
        assert agentq("tools", "pause", *arguments) == ExitCode.REFUSED
        assert message in agentq.err
        assert stage.pausing.pauses() == ()

    def test_an_unknown_tool_can_be_paused_on_purpose(self, agentq: Agentq, stage: Stage) -> None:
        """Before the deploy that brings it."""
        assert agentq("tools", "pause", "soon", "--yes") == ExitCode.DONE
        assert agentq("tools", "pause", "--all", "--reads", "--yes") == ExitCode.DONE
        assert [(each.tool, each.reads) for each in stage.pausing.pauses()] == [(None, True), ("soon", False)]

    def test_resuming_what_is_not_paused_says_what_is(self, agentq: Agentq, stage: Stage) -> None:
        """Nothing was changed, and the right name is one line away."""
        agentq("tools", "pause", "--agent", "support", "--yes")
        assert agentq("tools", "resume", "pay") == ExitCode.REFUSED
        assert "tool 'pay' is not paused; paused now: every tool of agent 'support'" in agentq.err

    def test_the_list_of_tools_shows_what_is_paused(
        self, agentq: Agentq, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where an operator looks first for why nothing is refunded."""
        (tmp_path / "paused_agents.py").write_text(AGENTS)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("AGENTQ_AGENTS", "paused_agents")
        assert agentq("tools", "pause", "refnd") == ExitCode.REFUSED
        assert "did you mean 'refund'?" in agentq.err
        assert agentq("tools", "pause", "refund", "--reason", "the bank is down", "--actor", "ann") == ExitCode.DONE
        assert agentq("tools", "list") == ExitCode.DONE
        assert "by ann: the bank is down" in agentq.out
        assert agentq("tools", "list", "--json") == ExitCode.DONE
        assert {tool["name"]: len(tool["pauses"]) for tool in agentq.data} == {"look": 0, "refund": 1}


class TestPurge:
    def test_old_runs_go_and_it_is_told_what_stays(self, agentq: Agentq, stage: Stage) -> None:
        """What a cron line writes into its log is enough to trust it by."""
        gone, young = [old(stage), old(stage)], old(stage, timedelta(days=1))
        stays = age(stage, stage.failed(READ))
        assert agentq("purge", "--older-than", "30d", "--yes") == ExitCode.DONE
        assert agentq.out == "2 runs purged, kept: 1 with an open dead letter\n"
        assert "next: agentq dead-letters list" in agentq.err
        assert {run.id for run in stage.runs.runs(RunFilter(limit=10))} == {young, stays} and gone
        assert agentq("purge", "--older-than", "30d", "--yes", "--json") == ExitCode.DONE
        kept = {"fence": 0, "dead_letter": 1, "contradiction": 0, "in_use": 0}
        assert agentq.data == {"runs": 0, "dry_run": False, "kept": kept}

    def test_a_dry_run_deletes_nothing(self, agentq: Agentq, stage: Stage) -> None:
        """It prints the command that does."""
        run_id = old(stage)
        assert agentq("purge", "--older-than", "4w", "--dry-run") == ExitCode.DONE
        assert agentq.out == "1 runs would be purged\n"
        assert agentq("purge", "--older-than", "4w", "--dry-run", "-o", "ids") == ExitCode.DONE
        assert agentq.out == f"{run_id}\n"
        assert stage.runs.status(run_id) is RunStatus.COMPLETED
        assert agentq("purge", "--older-than", "4w", "--yes", "-o", "ids") == ExitCode.DONE
        assert agentq.out == f"{run_id}\n"

    def test_contradictions_are_named_to_go(self, agentq: Agentq, stage: Stage) -> None:
        """Two answers about one payment are the last thing to lose by a cron line."""
        stage.change_run(old(stage), has_contradiction=True)
        assert agentq("purge", "--older-than", "30d", "--yes") == ExitCode.DONE
        assert agentq.out == "0 runs purged, kept: 1 with a contradiction\n"
        assert agentq("purge", "--older-than", "30d", "--yes", "--with-contradictions") == ExitCode.DONE
        assert agentq.out == "1 runs purged\n"

    def test_a_purge_whose_reader_leaves_is_partly_done(self, stage: Stage) -> None:
        """`agentq purge ... -o ids | head -1`: the rest stays, and the exit code doesn't say that all went."""
        run_ids = {old(stage), old(stage)}
        purge = subprocess.Popen(
            [
                *(sys.executable, "-m", "agentq.cli.main", "purge"),
                *("--older-than", "30d", "--batch", "1", "--yes", "-o", "ids"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert purge.stdout is not None and purge.stderr is not None
        purge.stdout.close()
        told = b"1 runs were purged; the same command again goes on with the rest\n"
        assert purge.stderr.read() == told
        purge.stderr.close()
        assert purge.wait(10) == ExitCode.PARTLY_DONE
        assert len({run.id for run in stage.runs.runs(RunFilter(limit=10))} & run_ids) == 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--older-than", "30d"), "Nobody is at the terminal to ask: add --yes"),
            (("--older-than", "0s", "--yes"), "older_than is 0s; it takes 2h or more"),
            (("--older-than", "30", "--yes"), "older_than is '30'; it takes an age such as 12h, 30d, 8w"),
            (("--older-than", "2026-01-31", "--yes"), "it takes an age such as"),
            (("--older-than", "999999w", "--yes"), "no run is that old"),
            (("--older-than", "30d", "--batch", "0", "--yes"), "batch is 0; it takes a whole number"),
            (("--yes",), "Missing option '--older-than'"),
        ],
    )
    def test_what_cannot_be_meant_deletes_nothing(
        self, agentq: Agentq, stage: Stage, arguments: tuple[str, ...], message: str
    ) -> None:
        """There is no way back."""
        run_id = old(stage)
        assert agentq("purge", *arguments) == ExitCode.REFUSED
        assert message in agentq.err and agentq.out == ""
        assert stage.runs.status(run_id) is RunStatus.COMPLETED
