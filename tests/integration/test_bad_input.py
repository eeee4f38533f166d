"""Bad input: one clear line that names what is wrong and what to do, and nothing is changed."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentq import Agent, AgentQ, FunctionModel, tool
from agentq.adapters.sql.engine import Database
from agentq.cli.exit_codes import ExitCode
from agentq.cli.main import run_command
from agentq.config.settings import load_settings
from agentq.domain import errors
from agentq.domain.agents import Registry
from agentq.ports.runs import RunFilter
from tests.support.databases import fresh_sqlite
from tests.support.invariants import Picture, take_picture
from tests.support.stage import Stage
from tests.support.valkey import ValkeyServer
from tests.support.workers import environment

INPUT_BYTES_MAX = 1000
NOBODY_LISTENS = "redis://127.0.0.1:1/0"
NO_DATABASE = "postgresql://nobody@127.0.0.1:1/none"

AGENT = """
from agentq import Agent, FunctionModel, tool

def reply(messages, tools):
    return "done"

@tool
def look(order: int) -> str:
    "Look an order up."
    return "seen"
"""
HINTS_WITHOUT_SCHEMA = """
@tool
def send(to: object()) -> str:
    "Send something."
    return "sent"
"""
ONE_AGENT = """
support = Agent(name="support", model=FunctionModel(reply), tools=[look])
"""
TWO_TOOLS_OF_ONE_NAME = """
@tool(name="look")
def look_closely(order: int) -> str:
    "Look an order up."
    return "seen"

support = Agent(name="support", model=FunctionModel(reply), tools=[look, look_closely])
"""
TWO_AGENTS_OF_ONE_NAME = f"""
{ONE_AGENT}
helper = Agent(name="support", model=FunctionModel(reply), tools=[look])
"""
A_FUNCTION_FOR_A_TOOL = """
support = Agent(name="support", model=FunctionModel(reply), tools=[look, reply])
"""
UNKNOWN_PROVIDER = """
support = Agent(name="support", model="acme:large", tools=[look])
"""
A_MODEL_WITHOUT_PROVIDER = """
support = Agent(name="support", model="gpt-5-mini", tools=[look])
"""
CYCLIC = f"""
import bad_agents_too
{ONE_AGENT}
"""
CYCLIC_TOO = """
from bad_agents import support
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A SQLite database with one waiting run and one dead letter; nobody answers for the broker."""
    for name in [name for name in os.environ if name.startswith("AGENTQ_")]:
        monkeypatch.delenv(name)
    with fresh_sqlite(tmp_path) as url:
        monkeypatch.setenv("AGENTQ_DATABASE_URL", url)
        monkeypatch.setenv("AGENTQ_BROKER_URL", NOBODY_LISTENS)
        monkeypatch.setenv("AGENTQ_HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        stage = Stage(database=Database(url))
        stage.keeping.see_agents({"support": INPUT_BYTES_MAX})
        stage.queued()
        stage.unknown(settles_within_seconds=0)
        yield stage
        stage.database.dispose()


class Refusal:
    """Runs commands in this process, and expects each to be refused without a change."""

    def __init__(self, stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
        self._stage = stage
        self._capsys = capsys

    def of(self, *arguments: str) -> str:
        """The one line; a second one at most says where to look further."""
        before = self._picture()
        self._capsys.readouterr()
        assert run_command(list(arguments)) == ExitCode.REFUSED
        out, err = self._capsys.readouterr()
        assert out == "" and "Traceback" not in err
        first, *rest = err.splitlines()
        assert all(line.startswith(("next: ", "see ")) for line in rest) and len(rest) <= 1, err
        assert self._picture() == before
        return first.removeprefix("error: ")

    def _picture(self) -> Picture:
        return take_picture(self._stage.database)


@pytest.fixture
def refusal(stage: Stage, capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(stage, capsys)


class TestEnqueue:
    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("suport", "x"), "unknown agent 'suport'; did you mean 'support'?"),
            (("support", "x" * INPUT_BYTES_MAX), "agent 'support' takes at most 1,000"),
            (("support", "--input-json", '{"order": '), "--input-json is not JSON"),
            (("support", "--input-json", "NaN"), "input can't be written as JSON"),
            (("support", "x", "--idempotency-key", ""), "idempotency_key has 0 characters"),
            (("support", "x", "-m", "team"), "it takes key=value"),
        ],
    )
    def test_the_command_names_what_is_wrong(self, refusal: Refusal, arguments: tuple[str, ...], told: str) -> None:
        """A run that was stored all the same would fail where nobody looks."""
        assert told in refusal.of("enqueue", *arguments)

    @pytest.mark.parametrize(
        ("lines", "told"),
        [
            ('{"agent": "support", "input": 1}\n{"agent": \n', "2"),
            ('{"agent": "support", "input": 1}\n{"agent": "nobody", "input": 1}\n', "unknown agent 'nobody'"),
            ('{"agent": "support", "input": 1}\n{"agent": "support", "prompt": 1}\n', "unknown field 'prompt'"),
            ('{"agent": "support", "input": 1}\n[1]\n', "2"),
        ],
    )
    def test_one_wrong_line_of_many_stores_none(self, refusal: Refusal, tmp_path: Path, lines: str, told: str) -> None:
        """Half a file is harder to mend than none of it."""
        (tmp_path / "runs.jsonl").write_text(lines)
        assert told in refusal.of("enqueue", "--from-jsonl", "runs.jsonl")

    @pytest.mark.parametrize(
        ("request_", "error", "told"),
        [
            ({"agent": "suport", "input": "x"}, errors.UnknownAgentError, "did you mean 'support'?"),
            ({"agent": "support", "input": "x" * INPUT_BYTES_MAX}, errors.InvalidInputError, "takes at most 1,000"),
            ({"agent": "support", "input": float("nan")}, errors.InvalidInputError, "can't be written as JSON"),
            ({"agent": "support", "input": object()}, errors.InvalidInputError, "can't be written as JSON"),
            ({"agent": "support", "input": "x", "run_id": "a b"}, errors.InvalidInputError, "run_id is 'a b'"),
            ({"agent": "support", "input": "x", "metadata": {"n": 1}}, errors.InvalidInputError, "metadata['n'] is 1"),
        ],
    )
    def test_the_client_raises_a_typed_error(
        self, stage: Stage, request_: dict[str, Any], error: type[errors.AgentqError], told: str
    ) -> None:
        """Other services tell a wrong call from a database that is away by the type."""
        before = take_picture(stage.database)
        with AgentQ.from_env() as client, pytest.raises(error) as raised:
            client.enqueue(**request_)
        assert told in str(raised.value) and len(str(raised.value).splitlines()) == 1
        assert take_picture(stage.database) == before


class TestDecisions:
    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("runs", "show", "nowhere"), "there is no run 'nowhere'"),
            (("runs", "list", "--status", "lost"), "lost"),
            (("runs", "list", "--since", "yesterday"), "yesterday"),
            (("runs", "list", "--limit", "0"), "0"),
            (("dead-letters", "resolve", "nowhere", "--happened", "1", "--yes"), "there is no run 'nowhere'"),
            (("dead-letters", "resolve", "nowhere", "--happened", "{", "--yes"), "--happened is not JSON"),
            (("dead-letters", "resolve", "nowhere", "--happened", "NaN", "--yes"), "happened can't be written as JSON"),
            (("dead-letters", "resolve", "nowhere", "--happened", '"\\ud800"', "--yes"), "half of a surrogate pair"),
            (("dead-letters", "replay", "nowhere", "--yes"), "there is no run 'nowhere'"),
            (("dead-letters", "discard", "--tool", "pay", "--fingerprint", "", "--yes"), "--fingerprint is empty"),
            (("dead-letters", "discard", "--stop-reason", "", "--all", "--yes"), "--stop-reason is empty"),
            (("runs", "events", "nowhere", "--after", "9" * 20), "--after"),
        ],
    )
    def test_the_command_names_what_is_wrong(self, refusal: Refusal, arguments: tuple[str, ...], told: str) -> None:
        """Ids are pasted, filters are guessed, results are quoted wrongly."""
        assert told in refusal.of(*arguments)

    @pytest.mark.parametrize(
        "command",
        [
            ("runs", "show"),
            ("dead-letters", "discard", "--yes", "--tool"),
            ("tools", "pause", "--reason", "x"),
        ],
    )
    def test_what_is_no_text_is_refused_by_every_command(self, refusal: Refusal, command: tuple[str, ...]) -> None:
        """A terminal with another encoding sends such bytes; half of a change was made before the database met them."""
        assert "'\\udcff' isn't valid UTF-8 text" in refusal.of(*command, os.fsdecode(b"\xff"))

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            (b"a\0b\n", "'a\\x00b' is no id"),
            (b"\xff\n", "stdin isn't valid UTF-8 text"),
            (b"\n \n", "no ids on stdin"),
        ],
    )
    def test_rubbish_on_stdin_is_refused(
        self, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, given: bytes, told: str
    ) -> None:
        """A pipe from the wrong file; none of its lines is acted on."""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        assert told in refusal.of("dead-letters", "discard", "-", "--yes")

    def test_a_look_at_the_future_is_refused(self, stage: Stage) -> None:
        """It is in the audit log, as every decision that was asked for is; the dead letter stays as it was."""
        [letter] = stage.decisions.dead_letters(RunFilter())
        with AgentQ.from_env() as client, pytest.raises(errors.InvalidInputError, match="which is to come"):
            client.resolve(letter.run_id, did_not_happen=True, looked_at="2999-01-01T00:00:00Z")
        assert stage.decisions.dead_letters(RunFilter()) == [letter]
        assert stage.kinds_of_events(letter.run_id)[-1] == "decision.refused"


class TestSettings:
    @pytest.mark.parametrize(
        ("variable", "value", "told"),
        [
            ("AGENTQ_DATABSE_URL", "sqlite:///x.db", "unknown setting AGENTQ_DATABSE_URL"),
            ("AGENTQ_LEASE_SECONDS", "soon", "AGENTQ_LEASE_SECONDS is 'soon'; it takes a number of seconds"),
            ("AGENTQ_LEASE_SECONDS", "nan", "AGENTQ_LEASE_SECONDS is nan"),
            ("AGENTQ_TRIES_MAX", "-1", "AGENTQ_TRIES_MAX is -1; it must be greater than 0"),
            ("AGENTQ_KEEPER_BESIDE_WORKER", "perhaps", "it takes true or false"),
            ("AGENTQ_DATABASE_URL", "mysql://db/agentq", "AGENTQ_DATABASE_URL begins with 'mysql:'"),
            ("AGENTQ_DATABASE_URL", "sqlite://", "SQLite needs a file"),
            ("AGENTQ_BROKER_URL", "amqp://broker", "AGENTQ_BROKER_URL begins with 'amqp:'"),
            ("AGENTQ_LEASE_URL", "http://broker", "AGENTQ_LEASE_URL begins with 'http:'"),
        ],
    )
    def test_a_wrong_one_is_named(
        self, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str
    ) -> None:
        """A misspelt variable that was ignored would be found at night."""
        monkeypatch.setenv(variable, value)
        assert told in refusal.of("runs", "list")

    def test_the_library_raises_a_typed_error(self) -> None:
        """The variable is in it."""
        with pytest.raises(errors.ConfigurationError, match="AGENTQ_BROKER_URL begins with 'amqp:'"):
            load_settings({"AGENTQ_BROKER_URL": "amqp://broker"})


class TestServers:
    @pytest.mark.parametrize("command", [("runs", "list"), ("enqueue", "support", "x"), ("db", "upgrade")])
    def test_a_database_that_is_not_there(
        self, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
    ) -> None:
        """The line names its address, without a password that might be in the URL."""
        monkeypatch.setenv("AGENTQ_DATABASE_URL", NO_DATABASE.replace("nobody", "nobody:secret"))
        line = refusal.of(*command)
        assert "the database can't be reached" in line and "127.0.0.1" in line and "secret" not in line

    def test_a_broker_that_is_not_there(self, refusal: Refusal) -> None:
        """Enqueueing needs none; a nudge does."""
        assert "can't be reached" in refusal.of("reap")

    def test_an_interactive_run_without_a_redis_is_refused_before_it_is_stored(
        self, refusal: Refusal, agents: "Agents"
    ) -> None:
        """Nobody could tell whether its caller still lives."""
        agents.write(ONE_AGENT)
        assert "the lease store doesn't answer" in refusal.of("run", "support", "x")

    def test_a_redis_that_evicts(self, stage: Stage, tmp_path: Path) -> None:
        """It drops leases when they matter most: no worker starts on it."""
        before = take_picture(stage.database)
        options = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
        with ValkeyServer(options=options) as valkey:
            settings = replace(load_settings(), broker_url=valkey.url, agents=("tests.support.smoke_agents",))
            ended = subprocess.run(
                [sys.executable, "-m", "agentq.cli.main", "worker", "tools"],
                env=environment(settings, tmp_path),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert ended.returncode == ExitCode.REFUSED
            [line] = [line for line in ended.stderr.splitlines() if line.startswith("agentq: ")]
            assert "drops keys" in line and "set maxmemory-policy noeviction" in line
            assert valkey.client().dbsize() == 0
        assert take_picture(stage.database) == before


class Agents:
    """Writes a module of agents, which the settings name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, text: str, *, other: str = "") -> None:
        (self._folder / "bad_agents.py").write_text(AGENT + text)
        (self._folder / "bad_agents_too.py").write_text(other)


@pytest.fixture
def agents(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setenv("AGENTQ_AGENTS", "bad_agents")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Agents(tmp_path)
    for name in ("bad_agents", "bad_agents_too"):
        sys.modules.pop(name, None)


class TestAgents:
    @pytest.mark.parametrize("command", [("tools", "list"), ("run", "support", "x")])
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("raise RuntimeError('no key')", "RuntimeError: no key (bad_agents.py:"),
            ("", "defines no Agent at its top level"),
            (HINTS_WITHOUT_SCHEMA, "'to'"),
            (TWO_TOOLS_OF_ONE_NAME, "has two tools named 'look'; rename one"),
            (TWO_AGENTS_OF_ONE_NAME, "agent 'support' is defined twice in 'bad_agents'; rename one"),
            (A_FUNCTION_FOR_A_TOOL, "reply is not a tool; decorate it with @tool"),
            (UNKNOWN_PROVIDER, "no provider 'acme' (known: openai)"),
            (A_MODEL_WITHOUT_PROVIDER, "write it as 'openai:gpt-5-mini'"),
        ],
    )
    def test_a_wrong_module_is_named_with_its_mistake(
        self, refusal: Refusal, agents: Agents, command: tuple[str, ...], text: str, told: str
    ) -> None:
        """Its author reads the line, and not a traceback through our code."""
        agents.write(text)
        assert told in refusal.of(*command)

    def test_modules_that_import_each_other_are_told_so(self, refusal: Refusal, agents: Agents) -> None:
        """Python's own word for it is at the end of a long traceback."""
        agents.write(CYCLIC, other=CYCLIC_TOO)
        line = refusal.of("tools", "list")
        assert "bad_agents" in line and "circular" in line

    def test_the_library_raises_where_the_mistake_is_written(self) -> None:
        """An editor shows the very line."""
        model = FunctionModel(lambda messages, tools: "done")
        agent = Agent(name="support", model=model)
        with pytest.raises(errors.ConfigurationError, match="two agents are named 'support'"):
            Registry([agent, Agent(name="support", model=model)])
        with pytest.raises(errors.ConfigurationError, match="'to'"):

            @tool
            def send(to: object()) -> str:  # type: ignore[valid-type]
                return "sent"
