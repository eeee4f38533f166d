"""The README's examples, run as they are written, against workers that serve the README's own agent."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentq import AgentQ, ToolContext
from agentq.cli.exit_codes import ExitCode
from agentq.cli.main import run_command
from agentq.config.settings import Settings
from agentq.domain.lifecycle import RUN_TRANSITIONS, mermaid
from agentq.domain.model import RunStatus
from agentq.domain.probes import ProbeVerdict
from tests.support.databases import fresh_sqlite
from tests.support.valkey import ValkeyServer
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess, environment

README = Path(__file__).parents[2] / "README.md"
ANSWER = 'Found: {"order_id":"17","amount_cents":4200}'


def example(name: str) -> str:
    """The one block that is marked with this name."""
    [text] = re.findall(rf"<!-- test: {name} -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Of servers and workers that run; the agents are in `shop`, as the README says."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "shop.py").write_text(example("agents"))
    with fresh_sqlite(folder) as database_url, ValkeyServer() as valkey:
        settings = Settings(
            home=folder, database_url=database_url, broker_url=valkey.url, agents=("shop",), tools_concurrency=1
        )
        workers = [WorkerProcess(role, settings, folder) for role in ("model", "tools")]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.wait_ready(seconds=60)
            yield settings
        finally:
            for worker in workers:
                worker.stop(seconds=5)


def test_every_python_block_is_marked_and_run_by_a_test() -> None:
    """An example that no test runs is soon wrong."""
    names = re.findall(r"(?:<!-- test: (\w+) -->\n)?```python\n", README.read_text())
    assert names == ["agents", "probe", "client", "celery"]


def test_its_picture_is_drawn_from_the_transition_table() -> None:
    """A change of the table changes the picture, or this fails."""
    assert f"```mermaid\n{mermaid(RUN_TRANSITIONS).strip()}\n```" in README.read_text()


def test_every_command_is_there_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    """A person types them as they stand."""
    blocks = re.findall(r"```console\n(.*?)```", README.read_text(), re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in "".join(blocks).splitlines() if line.startswith("agentq ")]
    assert len(commands) > 5
    for _, *words in commands:
        path = list(itertools.takewhile(lambda word: re.fullmatch("[a-z][a-z-]*", word), words))
        assert run_command([*path, "--help"]) == ExitCode.DONE
        told = capsys.readouterr().out
        assert all(option in told for option in words if option.startswith("-")), words


PAYMENTS = """
class Provider:
    def __init__(self):
        self.refunds = {}

    def refund(self, order_id, amount_cents, reference):
        self.refunds[reference] = {"order": order_id}
        raise OSError("the reply is lost")

    def find(self, reference):
        return self.refunds.get(reference)

provider = Provider()
"""


def test_the_probe_example_finds_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the key that the call had, and nothing before there was a call."""
    (tmp_path / "payments.py").write_text(PAYMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    module: dict[str, Any] = {}
    exec(example("probe"), module)
    refund, context = module["send_refund"], ToolContext(idempotency_key="key 17")
    arguments = {"order_id": "17", "amount_cents": 4200}
    assert refund.ask(context, arguments).verdict is ProbeVerdict.DID_NOT_HAPPEN
    with pytest.raises(OSError, match="lost"):
        refund.call(context, arguments)
    report = refund.ask(context, arguments)
    assert (report.verdict, report.result) == (ProbeVerdict.HAPPENED, {"order": "17"})
    assert refund.ask(ToolContext(idempotency_key="key 18"), arguments).verdict is ProbeVerdict.DID_NOT_HAPPEN


def test_the_client_example_prints_the_answer(settings: Settings) -> None:
    """It needs no agent's code: it runs where the agents can't be imported."""
    printed = run_script(example("client"), settings)
    steps = ["1 model None completed", "2 tool look_up_order completed", "3 model None completed"]
    assert printed.splitlines() == [f"completed {ANSWER}", *steps]
    with AgentQ(settings) as client:
        assert client.get_by_key("ticket-991").input == "Refund order 17"


def test_the_celery_example_starts_a_run(settings: Settings) -> None:
    """It imports Celery alone, and leaves a run under the key that it names."""
    script = (
        f"{example('celery')}\nimport sys\nassert not [name for name in sys.modules if name.startswith('agentq')]\n"
    )
    run_script(script, settings)
    with AgentQ(settings) as client:
        [started] = eventually(lambda: [run for run in client.runs() if run.idempotency_key == "ticket-992"])
        run = client.wait(started.id)
        assert (run.status, run.output) == (RunStatus.COMPLETED, ANSWER)


def run_script(script: str, settings: Settings) -> str:
    """What it printed, in a process that is given the settings and none of the agents."""
    environ = environment(replace(settings, agents=()), settings.home / "nowhere")
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environ, cwd=os.sep, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
