"""`agentq doctor` and a worker's check before its start, on servers that are really set up wrongly."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentq import AgentQ
from agentq.adapters.sql.migration import upgrade
from agentq.bootstrap import Wiring
from agentq.checks.finding import Finding, Level
from agentq.checks.gathering import LOOK_SECONDS_MAX, look_at_everything
from agentq.cli.exit_codes import ExitCode
from agentq.cli.main import run_command
from agentq.config.settings import PREFIX, Settings, environment_of
from tests.support.databases import PostgresServer, fresh_postgresql, postgresql_server
from tests.support.processes import LoggedProcess
from tests.support.valkey import ValkeyServer
from tests.support.waiting import eventually
from tests.support.workers import READY_TEXT, WorkerProcess, environment

AGENTS = ("tests.support.smoke_agents",)
LEADER_SECONDS = 60.0


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer(is_durable=True) as server:
        yield server


@pytest.fixture
def settings(tmp_path: Path, valkey: ValkeyServer) -> Settings:
    """With these there is nothing wrong but that nobody works."""
    valkey.flush()
    settings = Settings(home=tmp_path, broker_url=valkey.url)
    upgrade(settings.effective_database_url)
    return settings


def examined(settings: Settings, **environ: str) -> dict[str, list[Finding]]:
    """All findings, by their subject."""
    with Wiring(settings) as wiring:
        findings = look_at_everything(wiring, environ)
    by_subject: dict[str, list[Finding]] = {}
    for finding in findings:
        by_subject.setdefault(finding.subject, []).append(finding)
    return by_subject


def examined_with_answer(settings: Settings, worker: str) -> dict[str, list[Finding]]:
    """Once that worker answers in time: on a busy machine it may not at once."""

    def look() -> dict[str, list[Finding]] | None:
        found = examined(settings)
        return found if f"worker {worker}" in found else None

    return eventually(look, seconds=45, what=f"{worker} answers")


def levels(settings: Settings, subject: str) -> list[str]:
    return [finding.level.value for finding in examined(settings)[subject]]


def refusal(settings: Settings) -> list[str]:
    """The lines of a check before a worker's start that forbids it."""
    checked = subprocess.run(
        (sys.executable, "-m", "agentq.preflight"),
        input="{}",
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == ExitCode.REFUSED, checked.stdout + checked.stderr
    return checked.stderr.splitlines()


class TestRedis:
    def test_one_that_evicts(self, settings: Settings) -> None:
        """It drops leases and messages under load, when they matter most."""
        with ValkeyServer(options=("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")) as evicting:
            settings = replace(settings, broker_url=evicting.url)
            [finding] = examined(settings)["broker memory"]
            assert (finding.level, finding.breaks_promise) == (Level.ERROR, True)
            assert refusal(settings) == [f"agentq: {finding.line}"]
            assert "allkeys-lru" in finding.found and finding.fix == "set maxmemory-policy noeviction"

    def test_one_that_forgets(self, settings: Settings, valkey: ValkeyServer) -> None:
        """A restart loses messages: a warning for a broker, a note for leases."""
        with ValkeyServer() as forgetful:
            assert levels(replace(settings, broker_url=forgetful.url), "broker persistence") == ["warning"]
            leases_apart = replace(settings, lease_url=forgetful.url)
            assert levels(leases_apart, "leases persistence") == ["note"]
            assert levels(leases_apart, "broker persistence") == ["ok"]

    def test_one_that_refuses_config(self, settings: Settings, valkey: ValkeyServer) -> None:
        """As managed ones do: what INFO tells is enough, and what it doesn't is said to be unknown."""
        with ValkeyServer() as managed:
            with managed.client() as client:
                client.acl_setuser("guest", enabled=True, passwords=["+pass"], keys=["*"], channels=["*"],
                                   categories=["+@all"], commands=["-config"])  # fmt: skip
            url = managed.url.replace("redis://", "redis://guest:pass@")
            found = examined(replace(settings, broker_url=url))
        assert [finding.level.value for finding in found["broker memory"]] == ["ok"]
        [finding] = found["broker persistence"]
        assert finding.found == "it has no append-only file; can't tell about snapshots"

    def test_one_of_another_deployment(self, settings: Settings, valkey: ValkeyServer) -> None:
        """And whoever only looks leaves no mark."""
        assert levels(settings, "deployment") == ["note"]
        with valkey.client() as client:
            assert client.get("agentq:deployment") is None
            client.set("agentq:deployment", "another")
        [finding] = examined(settings)["deployment"]
        assert finding.breaks_promise and "belong to deployment 'another'" in finding.found
        assert refusal(settings) == [f"agentq: {finding.line}"]

    def test_one_that_hangs_is_not_waited_for_long(self, settings: Settings) -> None:
        """The doctor is called when something hangs."""
        with ValkeyServer() as hung:
            hung.pause()
            began = time.monotonic()
            found = examined(replace(settings, broker_url=hung.url))
            assert time.monotonic() - began < LOOK_SECONDS_MAX + 2
        assert [finding.level.value for finding in found["broker"]] == ["error"]
        assert [finding.level.value for finding in found["schema"]] == ["ok"]


class TestPostgresql:
    @pytest.fixture
    def on_postgresql(self, settings: Settings) -> Iterator[Settings]:
        with fresh_postgresql() as url:
            yield replace(settings, database_url=url)

    def change(self, settings: Settings, statement: str) -> None:
        """In this database alone."""
        name = settings.database_url.partition("@/")[2].partition("?")[0]
        postgresql_server().execute(statement.format(name=name), database=name)

    def test_one_that_keeps_what_it_commits(self, on_postgresql: Settings) -> None:
        """The engine's own settings are in force, and the server's are as they should be."""
        found = examined(on_postgresql)
        assert {finding.level for name in ("database", "durability", "schema") for finding in found[name]} == {Level.OK}

    def test_a_database_where_commits_do_not_wait(self, on_postgresql: Settings) -> None:
        """agentq's own do, whatever the database says; it is told all the same."""
        self.change(on_postgresql, "ALTER DATABASE {name} SET synchronous_commit = off")
        [finding] = examined(on_postgresql)["durability"]
        assert (finding.level, finding.breaks_promise) == (Level.WARNING, False)
        assert finding.found == "synchronous_commit is off for this database or user"

    def test_tables_that_a_crash_empties(self, on_postgresql: Settings) -> None:
        """Somebody made them quick."""
        self.change(on_postgresql, "ALTER TABLE events SET UNLOGGED")
        [finding] = examined(on_postgresql)["durability"]
        assert finding.breaks_promise and finding.found == "tables aren't logged: events"

    def test_a_database_that_is_read_only(self, on_postgresql: Settings) -> None:
        """For maintenance, or by mistake."""
        self.change(on_postgresql, "ALTER DATABASE {name} SET default_transaction_read_only = on")
        assert levels(on_postgresql, "database role") == ["error"]

    def test_a_server_that_trades_safety_for_speed_and_one_that_is_a_replica(self, settings: Settings) -> None:
        """Each is found by the doctor, and by a worker before it starts."""
        server = PostgresServer("fsync=off", "full_page_writes=off")
        try:
            server.create().start()
            settings = replace(settings, database_url=server.url())
            upgrade(server.url())
            fsync, pages = examined(settings)["durability"]
            assert (fsync.found, fsync.breaks_promise) == ("fsync is off", True)
            assert (pages.found, pages.level) == ("full_page_writes is off", Level.WARNING)
            assert refusal(settings) == [f"agentq: {fsync.line}"]
            server.stop()
            (server.folder / "data" / "standby.signal").touch()
            server.start()
            assert any("this server is a replica" in line for line in refusal(settings))
        finally:
            server.remove()


class TestCommand:
    @pytest.fixture(autouse=True)
    def environ(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            monkeypatch.delenv(name)
        for name, value in environment_of(settings).items():
            monkeypatch.setenv(name, value)

    def told(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
        code = run_command(["doctor", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    def test_warnings_alone_are_no_failure(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Its exit code is a health check: it must not be red because a person should look some time."""
        code, out, err = self.told(capsys)
        assert code == ExitCode.DONE
        assert "warning  workers " in out and "none answers, 0 messages wait" in out
        assert "workers: nothing runs, and every run waits\n  fix: agentq worker" in err

    def test_what_is_broken_is_a_failure_and_the_rest_is_looked_at_all_the_same(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second thing that is wrong may be the cause of the first."""
        monkeypatch.setenv("AGENTQ_BROKER_URL", "redis://127.0.0.1:1/0")
        monkeypatch.setenv("AGENTQ_VISIBILITY_TIMEOUT_SECONDS", "10")
        code, out, _ = self.told(capsys, "--json")
        assert code == ExitCode.FAILED
        found = {finding["subject"]: finding for finding in json.loads(out)}
        assert {name for name, finding in found.items() if finding["level"] == "error"} == {
            "broker",
            "visibility timeout",
        }
        assert found["broker"]["fix"].startswith("start it") and found["schema"]["level"] == "ok"
        assert set(found["broker"]) == {"subject", "level", "found", "why", "fix"}
        lines = self.told(capsys, "-o", "jsonl")[1].splitlines()
        subjects = dict.fromkeys(json.loads(line)["subject"] for line in lines)
        assert list(subjects) == self.told(capsys, "-o", "ids")[1].splitlines()

    def test_it_makes_no_database(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It changes nothing: not even an empty file in the place of a mistyped one."""
        monkeypatch.setenv("AGENTQ_DATABASE_URL", f"sqlite:///{tmp_path / 'mistyped.db'}")
        code, out, _ = self.told(capsys)
        assert code == ExitCode.FAILED and "run `agentq db upgrade`" in out
        assert not (tmp_path / "mistyped.db").exists()

    def test_no_secret_is_shown(
        self, capsys: pytest.CaptureFixture[str], valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What it says ends in tickets and chats."""
        monkeypatch.setenv("AGENTQ_DATABASE_URL", "postgresql://ann:pass-1@127.0.0.1:1/shop?password=pass-2")
        monkeypatch.setenv("AGENTQ_FLOWER_BASIC_AUTH", "ann:pass-3")
        with valkey.client() as client:
            client.acl_setuser("bob", enabled=True, passwords=["+pass-4"], keys=["*"], categories=["+@all"])
        monkeypatch.setenv("AGENTQ_BROKER_URL", valkey.url.replace("redis://", "redis://bob:pass-4@"))
        for arguments in ((), ("--json",)):
            code, out, err = self.told(capsys, *arguments)
            assert code == ExitCode.FAILED
            assert "pass-" not in out + err

    def test_agents_are_asked_for_their_deadlines_and_may_not_spoil_the_data(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A module that prints is no reason for data that can't be read."""
        (tmp_path / "doctor_agents.py").write_text(
            "from agentq import Agent, FunctionModel, tool\n"
            "print('hello')\n"
            "@tool(deadline=7200)\n"
            "def export() -> str:\n"
            "    'Takes long.'\n"
            "    return ''\n"
            "slow = Agent(name='slow', model=FunctionModel(lambda messages, tools: ''), tools=[export])\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("AGENTQ_AGENTS", "doctor_agents")
        code, out, err = self.told(capsys, "--json")
        assert code == ExitCode.FAILED and "hello" in err
        [finding] = [finding for finding in json.loads(out) if finding["subject"] == "visibility timeout"]
        assert finding["found"].endswith("7200 s (tool 'export')")
        monkeypatch.setenv("AGENTQ_AGENTS", "agents_that_are_not_there")
        code, out, _ = self.told(capsys)
        assert code == ExitCode.FAILED and "can't be imported" in out


class TestDeployment:
    def test_runs_without_a_keeper(self, settings: Settings) -> None:
        """A lost step of theirs stays lost; with nothing under way it is only not yet there."""
        with Wiring(settings) as wiring:
            assert levels(settings, "keeper") == ["warning"]
            wiring.keeping.see_agents({"clerk": 1000})
            with AgentQ(settings) as client:
                client.enqueue("clerk", "hello")
            assert levels(settings, "keeper") == ["error"]
            wiring.nudges.lead("box/1a2b/77-123/ffee", LEADER_SECONDS)
        [finding] = examined(settings)["keeper"]
        assert finding.level is Level.OK and finding.found.startswith("process 77 on box leads")

    def test_workers_tell_what_they_serve(self, settings: Settings, tmp_path: Path) -> None:
        """So a queue that nobody consumes is found before something lies in it."""
        settings = replace(settings, agents=AGENTS)
        worker = WorkerProcess("tools", settings, tmp_path, arguments=("--hostname", "tools@here", "-c", "1"))
        with running(worker), Wiring(settings) as wiring:
            eventually(wiring.nudges.leader, what="the keeper beside it leads")
            found = examined_with_answer(settings, "tools@here")
        [finding] = found["worker tools@here"]
        assert finding.found == "prefork x 1, serves agentq.control, agentq.tools"
        assert {name for name in found if name.startswith("queue ")} == {"queue agentq.model", "queue agentq.isolated"}
        assert found["keeper"][0].level is Level.OK
        assert [finding.level for finding in found["agent clerk"]] == [Level.OK]

    def test_a_worker_with_a_configuration_of_its_own_is_found_out(self, settings: Settings, tmp_path: Path) -> None:
        """What counts is what Celery does, not what agentq asked of it."""
        worker = own_celery(
            settings,
            tmp_path,
            f"app.conf.result_backend = {settings.broker_url!r}",
            *("--prefetch-multiplier", "4", "--time-limit", "60", "--hostname", "own@here"),
        )
        with running(worker):
            found = examined_with_answer(settings, "own@here")
            log = worker.log()
        told = {finding.found for finding in found["worker own@here"]}
        assert told == {
            "there is a time limit of 60 s, and a model turn may take 180 s",
            "it takes messages that it has no slot for (prefetch multiplier 4)",
            "it has a result backend",
        }
        assert all(found in log for found in told)

    @pytest.mark.parametrize(
        ("own", "options", "says"),
        [
            ("app.conf.task_acks_late = False", (), "acknowledged before they are worked on"),
            ("", ("--soft-time-limit", "20"), "there is a soft time limit of 20 s"),
            (
                "app.conf.worker_cancel_long_running_tasks_on_connection_loss = True",
                (),
                "ended when the broker's connection breaks",
            ),
        ],
    )
    def test_one_whose_configuration_breaks_a_promise_does_not_start(
        self, settings: Settings, tmp_path: Path, own: str, options: tuple[str, ...], says: str
    ) -> None:
        """By one line that names it."""
        worker = own_celery(settings, tmp_path, own, *options)
        worker.start()
        assert worker.wait() == ExitCode.REFUSED
        [line] = [line for line in worker.log().splitlines() if line.startswith("agentq: ")]
        assert says in line


def own_celery(settings: Settings, folder: Path, own: str, *options: str) -> LoggedProcess:
    """A worker by Celery's own command, with an app that a user has changed."""
    (folder / "own_app.py").write_text(f"from agentq.tasks.app import app\n{own}\n")
    return LoggedProcess(
        (
            sys.executable,
            "-m",
            "celery",
            "-A",
            "own_app:app",
            "worker",
            "-l",
            "INFO",
            "-c",
            "1",
            "-Q",
            "agentq.tools",
            *options,
        ),
        log_path=folder / "own.log",
        environ=environment(replace(settings, agents=AGENTS, keeper_beside_worker=False), folder),
        folder=folder,
        ready_text=READY_TEXT,
    )


@contextmanager
def running(process: Any) -> Iterator[None]:
    process.start()
    try:
        process.wait_ready()
        yield
    finally:
        process.stop()
