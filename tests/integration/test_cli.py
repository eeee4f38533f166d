"""The `agentq` command on a real database: what it prints, what it changes, and how it exits."""

import io
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentq.cli.exit_codes import ExitCode
from agentq.domain.model import RunStatus, StepKind, StepState
from agentq.ports.runs import RunFilter
from tests.support.command_line import Agentq, named_stage
from tests.support.databases import fresh_sqlite
from tests.support.stage import FIRST_CALL, PLAIN, READ, Stage
from tests.support.valkey import ValkeyServer
from tests.support.waiting import eventually

FULL_DISK = Path("/dev/full")

AGENTS = """
import time

from agentq import Agent, FunctionModel, ToolEffect, tool
from agentq.domain.model import ToolCall

@tool
def look(order: int) -> str:
    "Look an order up."
    return "1200 cents"

@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def pay(order: int) -> str:
    "Pay it back."
    raise ConnectionResetError("no reply")

@tool
def linger(order: int) -> str:
    "Take longer than anybody waits."
    time.sleep(60)

def turn(messages, tools):
    if messages[-1]["role"] == "tool":
        return "It costs 1200 cents."
    return ToolCall(id="c-1", name=tools[0]["function"]["name"], arguments={"order": 17})

support = Agent(name="support", model=FunctionModel(turn), tools=[look, pay])
slow = Agent(name="slow", model=FunctionModel(turn), tools=[linger])
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A SQLite database that the environment names; nobody answers for the broker."""
    with fresh_sqlite(tmp_path) as url, named_stage(url, tmp_path, monkeypatch) as stage:
        stage.keeping.see_agents({"support": 1000})
        yield stage


@pytest.fixture
def agentq(stage: Stage, capsys: pytest.CaptureFixture[str]) -> Agentq:
    return Agentq(capsys)


def type_into_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


class TestEnqueue:
    def test_the_id_is_all_that_is_on_stdout(self, agentq: Agentq, stage: Stage) -> None:
        """`ID=$(agentq enqueue ...)` is how scripts call it."""
        assert agentq("enqueue", "support", "Refund order 17") == ExitCode.DONE
        run = stage.runs.run(agentq.out.strip())
        assert (run.input, run.status) == ("Refund order 17", RunStatus.QUEUED)
        assert "the broker can't be reached" in agentq.err
        assert f"next: agentq runs events {run.id} --follow" in agentq.err

    def test_an_input_may_be_json_and_a_key_finds_its_run(self, agentq: Agentq, stage: Stage) -> None:
        """A person who isn't sure whether the first try got through tries again."""
        call = ("enqueue", "support", "--input-json", '{"order": 17}', "-k", "ticket-991", "-m", "team=eu", "--json")
        assert agentq(*call) == ExitCode.DONE
        first = agentq.data
        assert agentq(*call) == ExitCode.DONE
        assert (agentq.data["id"], first["is_new"], agentq.data["is_new"]) == (first["id"], True, False)
        run = stage.runs.run(first["id"])
        assert (run.input, run.metadata) == ({"order": 17}, {"team": "eu"})

    def test_an_input_may_come_from_stdin(self, agentq: Agentq, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        """Long inputs come from files and pipes."""
        type_into_stdin(monkeypatch, "a long\ninput")
        assert agentq("enqueue", "support", "-") == ExitCode.DONE
        assert stage.runs.run(agentq.out.strip()).input == "a long\ninput"

    def test_many_come_from_lines_of_json(self, agentq: Agentq, stage: Stage, tmp_path: Path) -> None:
        """One process for a thousand runs, and one id for each line, in order."""
        (tmp_path / "runs.jsonl").write_text(
            '{"agent": "support", "input": 1}\n\n{"agent": "support", "input": {"n": 2}, "run_id": "mine"}\n'
        )
        assert agentq("enqueue", "--from-jsonl", "runs.jsonl") == ExitCode.DONE
        first, second = agentq.out.split()
        assert (stage.runs.run(first).input, second) == (1, "mine")

    def test_a_wrong_line_is_named_and_nothing_is_stored(self, agentq: Agentq, stage: Stage, tmp_path: Path) -> None:
        """Half a bulk is worse than none."""
        (tmp_path / "runs.jsonl").write_text('{"agent": "support", "input": 1}\n{"agent": support}\n')
        assert agentq("enqueue", "--from-jsonl", "runs.jsonl") == ExitCode.REFUSED
        assert "line 2 of runs.jsonl is not JSON" in agentq.err
        (tmp_path / "runs.jsonl").write_text('{"agent": "support", "input": 1}\n{"agent": "suport", "input": 2}\n')
        assert agentq("enqueue", "--from-jsonl", "runs.jsonl") == ExitCode.REFUSED
        assert "did you mean 'support'?" in agentq.err
        assert agentq("runs", "list", "-o", "ids") == ExitCode.DONE
        assert agentq.out == ""

    def test_waiting_too_long_has_its_own_exit_code(self, agentq: Agentq, stage: Stage) -> None:
        """A script must tell "it goes on" from "it failed"."""
        assert agentq("enqueue", "support", "x", "--wait", "--timeout", "0.1") == ExitCode.WAITED_TOO_LONG
        assert "is still queued after 0.1 s; it goes on" in agentq.err

    def test_a_watched_run_that_failed_has_its_own_exit_code(self, agentq: Agentq, stage: Stage) -> None:
        """And the person is told where to look next."""
        run_id = stage.runs.run_by_key("k").id if agentq("enqueue", "support", "x", "-k", "k") == 0 else ""
        stage.stop(run_id, 1)
        assert agentq("enqueue", "support", "x", "-k", "k", "--wait") == ExitCode.WATCHED_RUN_FAILED
        assert agentq.out == ""
        assert f"next: agentq dead-letters show {run_id}" in agentq.err

    def test_a_watched_run_prints_its_answer(self, agentq: Agentq, stage: Stage) -> None:
        """`answer=$(agentq enqueue ... --wait)`."""
        agentq("enqueue", "support", "x", "-k", "k")
        stage.answer(stage.runs.run_by_key("k").id, 1, "refunded")
        assert agentq("enqueue", "support", "x", "-k", "k", "--wait") == ExitCode.DONE
        assert agentq.out == "refunded\n"
        assert "run.completed" in agentq.err


class TestRuns:
    def test_a_list_shows_what_needs_somebody(self, agentq: Agentq, stage: Stage) -> None:
        """The run with the unknown write must catch the eye among those that are well."""
        unknown, queued = stage.unknown(), stage.queued()
        assert agentq("runs", "list") == ExitCode.DONE
        header, *lines = agentq.out.splitlines()
        assert header.split()[:3] == ["RUN", "STATUS", "AGENT"]
        shown = {line.split()[0]: line for line in lines}
        assert "outcome unknown" in shown[unknown]
        assert "queued" in shown[queued] and "unknown" not in shown[queued]

    def test_lists_are_filtered_and_piped_on(
        self, agentq: Agentq, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`agentq runs list -o ids ... | agentq runs cancel - --yes` is the bulk cancel."""
        first, second, running = stage.queued(), stage.queued(), stage.asked(READ)
        assert agentq("runs", "list", "--status", "queued", "--since", "1h", "-o", "ids") == ExitCode.DONE
        assert set(agentq.out.split()) == {first, second}
        type_into_stdin(monkeypatch, agentq.out)
        assert agentq("runs", "cancel", "-", "--yes", "--reason", "test", "--actor", "ann") == ExitCode.DONE
        assert [event.actor for event in stage.runs.events(first, 0)][-1] == "ann"
        assert {stage.runs.status(run_id) for run_id in (first, second)} == {RunStatus.CANCELLED}
        assert stage.runs.status(running) is RunStatus.RUNNING

    def test_a_run_is_shown_with_its_steps_and_events(self, agentq: Agentq, stage: Stage) -> None:
        """One look says what it did, and what it was doing when it stopped."""
        run_id = stage.unknown()
        assert agentq("runs", "show", run_id) == ExitCode.DONE
        assert "pay" in agentq.out and "non_idempotent_write" in agentq.out and "run.dead_lettered" in agentq.out
        assert f"next: agentq dead-letters show {run_id}" in agentq.err
        assert agentq("runs", "show", run_id, "--json") == ExitCode.DONE
        assert agentq.data["status"] == "failed"
        assert [step["kind"] for step in agentq.data["steps"]] == ["model", "tool"]
        assert agentq.data["events"][-1]["kind"] == "run.dead_lettered"
        assert agentq.data["dead_letter"]["tool"] == "pay"
        assert agentq.err == ""

    def test_a_change_of_many_that_fails_for_some_is_partly_done(self, agentq: Agentq, stage: Stage) -> None:
        """The good ones are done, the bad ones are named, and the exit code tells a script."""
        run_id = stage.queued()
        assert agentq("runs", "cancel", "nowhere", run_id, "--yes", "-o", "jsonl") == ExitCode.PARTLY_DONE
        assert [json.loads(line)["done"] for line in agentq.out.splitlines()] == [False, True]
        assert "there is no run 'nowhere'" in agentq.err
        assert agentq("runs", "cancel", "nowhere", "--yes") == ExitCode.REFUSED

    def test_an_unknown_run_is_one_line(self, agentq: Agentq) -> None:
        """Ids are pasted, and cut off by mistake."""
        for command in (("runs", "show"), ("runs", "events"), ("dead-letters", "show")):
            assert agentq(*command, "nowhere") == ExitCode.REFUSED
            assert agentq.err == "error: there is no run 'nowhere'\n"

    def test_a_database_without_schema_says_what_to_run(
        self, agentq: Agentq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first command of a newcomer is rarely the right one."""
        for home in (tmp_path / "nowhere" / "yet.db", tmp_path / "empty.db"):
            monkeypatch.setenv("AGENTQ_DATABASE_URL", f"sqlite:///{home}")
            for command in (("runs", "list"), ("dead-letters", "list"), ("enqueue", "support", "x")):
                assert agentq(*command) == ExitCode.REFUSED
                assert "agentq db upgrade" in agentq.err and len(agentq.err.splitlines()) == 1
        assert agentq("db", "upgrade") == ExitCode.DONE
        assert agentq("runs", "list") == ExitCode.DONE


class TestDeadLetters:
    def test_the_card_has_what_a_decision_needs_and_the_commands_for_it(self, agentq: Agentq, stage: Stage) -> None:
        """At three at night nobody remembers the options."""
        run_id = stage.unknown()
        assert agentq("dead-letters", "show", run_id) == ExitCode.DONE
        for told in ("NOT_RETRYABLE", "UNKNOWN: the write may have happened", "pay", "by host, pid 1"):
            assert told in agentq.out
        assert f"agentq dead-letters resolve {run_id} --happened" in agentq.out
        assert f"agentq dead-letters resolve {run_id} --did-not-happen" in agentq.out
        assert f"agentq dead-letters replay {run_id}" in agentq.out

    def test_a_card_offers_only_what_can_be_done(self, agentq: Agentq, stage: Stage) -> None:
        """A command that is refused when it is copied costs trust."""
        agentq("dead-letters", "show", stage.failed(READ))
        assert "resolve" not in agentq.out and "agentq dead-letters replay" in agentq.out
        agentq("dead-letters", "show", stage.unknown(is_cancelled=True))
        assert "agentq dead-letters resolve" in agentq.out and "agentq dead-letters replay" not in agentq.out

    def test_a_replay_without_a_decision_is_refused_with_the_way_on(self, agentq: Agentq, stage: Stage) -> None:
        """It says what is missing, and where to read more."""
        run_id = stage.unknown()
        assert agentq("dead-letters", "replay", run_id, "--yes") == ExitCode.REFUSED
        assert f"next: agentq dead-letters show {run_id}" in agentq.err
        assert stage.runs.status(run_id) is RunStatus.FAILED

    def test_resolve_then_replay(self, agentq: Agentq, stage: Stage) -> None:
        """The two commands that the card names, as they are."""
        run_id = stage.unknown()
        decided = ("--happened", '{"refund": "re_17"}', "--reason", "seen there", "--actor", "ann", "--yes")
        assert agentq("dead-letters", "resolve", run_id, *decided) == ExitCode.DONE
        assert f"next: agentq dead-letters replay {run_id}" in agentq.err
        assert agentq("dead-letters", "replay", run_id, "--yes") == ExitCode.DONE
        run = stage.runs.run(run_id)
        assert run.status is RunStatus.RUNNING
        assert run.steps[FIRST_CALL - 1].result == {"refund": "re_17"}
        [resolved] = [event for event in stage.runs.events(run_id) if event.kind == "write.resolved"]
        assert (resolved.actor, resolved.data["reason"]) == ("ann", "seen there")

    def test_one_command_decides_and_replays(self, agentq: Agentq, stage: Stage) -> None:
        """A look that was late enough lets the step run again, as a new attempt."""
        run_id = stage.unknown()
        assert (
            agentq("dead-letters", "replay", run_id, "--did-not-happen", "--looked-at", "now", "--yes") == ExitCode.DONE
        )
        [call] = [step for step in stage.runs.run(run_id).steps if step.kind is StepKind.TOOL]
        assert (call.state, call.attempt) == (StepState.AVAILABLE, 2)

    def test_an_early_look_is_refused_with_the_time_to_wait(self, agentq: Agentq, stage: Stage) -> None:
        """The request may still land."""
        run_id = stage.unknown(PLAIN, deadline_seconds=300)
        assert (
            agentq("dead-letters", "resolve", run_id, "--did-not-happen", "--looked-at", "now", "--yes")
            == ExitCode.REFUSED
        )
        assert "too early" in agentq.err and "wait" in agentq.err

    def test_several_are_resolved_by_one_look(self, agentq: Agentq, stage: Stage) -> None:
        """An outage leaves many of the same kind."""
        ids = [stage.unknown(), stage.unknown()]
        assert (
            agentq("dead-letters", "resolve", *ids, "--did-not-happen", "--looked-at", "now", "--yes", "--json")
            == ExitCode.DONE
        )
        assert [(each["id"], each["tool"]) for each in agentq.data] == [(run_id, "pay") for run_id in ids]

    def test_a_pause_is_not_forgotten_when_nothing_is_left(self, agentq: Agentq) -> None:
        """The list is empty and the outage seems over, while calls wait for somebody to resume the tool."""
        agentq("tools", "pause", "pay", "--yes")
        assert agentq("dead-letters", "list") == ExitCode.DONE
        assert "paused: pay" in agentq.err and "next: agentq tools resume pay\n" in agentq.err

    def test_a_time_that_is_none_is_said_once(self, agentq: Agentq, stage: Stage) -> None:
        """By the name that was typed, and not for each of a hundred runs."""
        ids = [stage.unknown(), stage.unknown()]
        code = agentq("dead-letters", "replay", *ids, "--did-not-happen", "--looked-at", "TIME", "--yes")
        assert code == ExitCode.REFUSED
        assert agentq.err.count("--looked-at is 'TIME'") == 1 and "or now" in agentq.err

    def test_no_dead_letters_is_good_news(self, agentq: Agentq) -> None:
        """Silence could also mean that the command did nothing."""
        assert agentq("dead-letters", "list") == ExitCode.DONE
        assert (agentq.out, agentq.err) == ("", "no dead letters: nothing waits for a person\n")


class TestHere:
    def test_a_run_is_executed_in_the_terminal(
        self, agentq: Agentq, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its steps are seen as they happen, on stderr; the answer alone is on stdout."""
        (tmp_path / "agents_of_cli_test.py").write_text(AGENTS)
        monkeypatch.setenv("AGENTQ_AGENTS", "agents_of_cli_test")
        monkeypatch.syspath_prepend(tmp_path)
        with ValkeyServer() as valkey:
            monkeypatch.setenv("AGENTQ_BROKER_URL", valkey.url)
            assert agentq("run", "support", "what does order 17 cost?") == ExitCode.DONE
            assert agentq.out == "It costs 1200 cents.\n"
            assert "step 2  look(order=17)" in agentq.err
            assert agentq("run", "suport", "x") == ExitCode.REFUSED
            assert "the agents of this process are slow, support" in agentq.err

    def test_tools_are_listed_with_their_effects(
        self, agentq: Agentq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What may an agent do to the world? The answer is in code, and this is where it can be read."""
        (tmp_path / "agents_of_cli_test.py").write_text(AGENTS)
        monkeypatch.setenv("AGENTQ_AGENTS", "agents_of_cli_test")
        monkeypatch.syspath_prepend(tmp_path)
        assert agentq("tools", "list", "--json") == ExitCode.DONE
        assert {tool["name"]: (tool["effect"], tool["agents"]) for tool in agentq.data} == {
            "linger": ("read_only", ["slow"]),
            "look": ("read_only", ["support"]),
            "pay": ("non_idempotent_write", ["support"]),
        }


class TestAway:
    def test_a_broker_that_is_away_is_one_line_and_a_way_on(self, agentq: Agentq) -> None:
        """A nudge that nobody gets must not be reported as given."""
        assert agentq("reap") == ExitCode.REFUSED
        assert agentq.err.startswith("error: the keeper can't be reached")
        assert agentq.err.endswith("next: agentq doctor\n")

    def test_a_database_that_is_away_is_one_line_and_a_way_on(
        self, agentq: Agentq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The exit code says that nothing was changed."""
        monkeypatch.setenv("AGENTQ_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
        assert agentq("runs", "list") == ExitCode.REFUSED
        error, advice = agentq.err.splitlines()
        assert error.startswith("error: ") and "127.0.0.1" in error
        assert advice == "next: agentq doctor"


class TestTerminal:
    def test_a_change_asks_and_no_changes_nothing(self, stage: Stage) -> None:
        """A run is cancelled by a person who meant it."""
        run_id = stage.queued()
        refused = at_terminal(["runs", "cancel", run_id], answer="n\n")
        assert f"Cancel run {run_id}? [y/N]" in refused.shown
        assert (refused.exit_code, stage.runs.status(run_id)) == (ExitCode.REFUSED, RunStatus.QUEUED)
        agreed = at_terminal(["runs", "cancel", run_id], answer="y\n")
        assert (agreed.exit_code, stage.runs.status(run_id)) == (ExitCode.DONE, RunStatus.CANCELLED)

    def test_a_terminal_gets_colours_unless_it_wants_none(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        """https://no-color.org"""
        stage.unknown()
        assert "\x1b[31m" in at_terminal(["runs", "list"]).shown
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b[" not in at_terminal(["runs", "list"]).shown

    @pytest.mark.parametrize(
        ("arguments", "stays"),
        [
            (["runs", "list"], "NOTE"),
            (["dead-letters", "list", "--each"], "ERROR"),
            (["dead-letters", "list", "--group"], "NEWEST"),
            (["tools", "pauses"], "REASON"),
        ],
    )
    def test_lists_fit_into_80_columns(
        self, arguments: list[str], stays: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Lines that wrap can't be read at a glance: what matters least makes room, what to act on stays."""
        monkeypatch.setenv("NO_COLOR", "")
        stage.unknown(PLAIN)
        stage.queued(agent="an-agent-of-a-long-name")
        stage.pausing.pause("pay", None, reads=False, actor="a person of a long name", reason="it is down " * 9)
        table = re.sub(r"\x1b\[[0-9;]*m", "", at_terminal(arguments, columns_count=80).shown)
        lines = [line.rstrip() for line in table.splitlines() if line and not line.startswith("next: ")]
        assert len(lines) > 1 and max(map(len, lines)) <= 80
        assert stays in lines[0]

    def test_a_reader_that_leaves_is_no_error(self, stage: Stage) -> None:
        """`agentq runs list | head -1` must not end in a traceback."""
        for _ in range(20):
            stage.queued()
        listing = subprocess.Popen(
            [sys.executable, "-m", "agentq.cli.main", "runs", "list", "-o", "jsonl"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert listing.stdout is not None and listing.stderr is not None
        listing.stdout.close()
        assert listing.stderr.read() == b""
        listing.stderr.close()
        assert listing.wait(10) == ExitCode.DONE

    @pytest.mark.parametrize("command", [("runs", "list"), ("runs", "list", "-o", "jsonl"), ("audit", "export")])
    def test_a_full_disk_is_one_line(self, stage: Stage, command: tuple[str, ...]) -> None:
        """`agentq audit export > FILE` every night: half a file must not look like a whole one."""
        stage.queued()
        if not FULL_DISK.exists():
            pytest.skip("no device that is always full")
        with FULL_DISK.open("w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "agentq.cli.main", *command],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert (ended.returncode, ended.stderr) == (
            ExitCode.FAILED,
            "error: stdout can't be written: No space left on device\n",
        )

    @pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
    def test_closed_streams_change_no_exit_code(self, stage: Stage, closed: str) -> None:
        """Some supervisors and cron jobs start programs so."""
        stage.queued()
        for command, code in (("runs list", ExitCode.DONE), ("dead-letters discard nowhere", ExitCode.REFUSED)):
            agentq = f"{shlex.quote(sys.executable)} -m agentq.cli.main"
            ended = subprocess.run(["sh", "-c", f"{agentq} {command} {closed}"], capture_output=True, check=False)
            assert (ended.returncode, b"Traceback" in ended.stderr) == (code, False)

    def test_ctrl_c_is_clean(self, stage: Stage) -> None:
        """Following is ended by it every time."""
        run_id = stage.queued()
        following = at_terminal(["runs", "events", run_id, "--follow"], answer="\x03", after="run.enqueued")
        assert following.exit_code == ExitCode.INTERRUPTED
        assert "Traceback" not in following.shown

    def test_ctrl_c_cancels_a_run_that_is_executed_here(
        self, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody else would go on with it, so nobody should believe that it goes on."""
        (tmp_path / "agents_of_cli_test.py").write_text(AGENTS)
        monkeypatch.setenv("AGENTQ_AGENTS", "agents_of_cli_test")
        with ValkeyServer() as valkey:
            monkeypatch.setenv("AGENTQ_BROKER_URL", valkey.url)
            running = at_terminal(["run", "slow", "x"], answer="\x03", after="step 2  linger")
        [run] = stage.runs.runs(RunFilter())
        assert (running.exit_code, run.status) == (ExitCode.INTERRUPTED, RunStatus.CANCELLED)
        assert "Traceback" not in running.shown and f"{run.id}: cancelled" in running.shown


class at_terminal:
    """A command with a terminal: what it showed, and its exit code. `answer` is typed once it has shown `after`."""

    def __init__(
        self, arguments: list[str], *, answer: str = "", after: str = "[y/N]", columns_count: int = 200
    ) -> None:
        command = [sys.executable, "-m", "agentq.cli.main", *arguments]
        pid, terminal = pty.fork()
        if pid == 0:
            os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", "COLUMNS": str(columns_count)})
        self._terminal = terminal
        self.shown = ""
        try:
            if answer:
                eventually(lambda: after in self._read(), what=f"{after!r} is shown")
                os.write(terminal, answer.encode())
            ends_at = time.monotonic() + 15
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
                assert time.monotonic() < ends_at, f"still running: {self.shown}"
                self._read()
            self.exit_code = os.waitstatus_to_exitcode(ended[1])
            self._read()
        finally:
            os.close(terminal)

    def _read(self) -> str:
        while select.select([self._terminal], [], [], 0.02)[0]:
            try:
                data = os.read(self._terminal, 65_536)
            except OSError:  # Linux: the other side is closed.
                break
            self.shown += data.decode()
        return self.shown
