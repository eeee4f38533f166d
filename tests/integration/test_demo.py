"""The demo as a newcomer meets it: its processes, its promises, and that it leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from agentq import ToolContext, ToolError
from agentq.config.settings import PREFIX
from agentq.demo.agents import SHOP_URL, answer_ticket, refund_order, support
from agentq.demo.promises import Seen, promises
from agentq.demo.run import main
from agentq.demo.shop import HELD_REFUND, RejectedError, Shop, ShopServer
from agentq.demo.shop_client import ShopClient, requests_by_order
from agentq.demo.tickets import TICKETS
from agentq.demo.view import opened_view
from agentq.demo.watch import Sight
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import ConfigurationError
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetter, DeadLetterReason, Run, RunMode, RunStatus, Step, StepKind, StepState
from tests.support.model_server import Answer, ModelServer, call, reply
from tests.support.waiting import eventually

SECONDS_MAX = 120.0  # For a machine that is busy with other tests; alone the demo takes less than thirty.
REFUNDS = sum(ticket.order_id is not None for ticket in TICKETS)


class Demo:
    """`agentq demo` as a process, with its temporary folders in a folder of its own and its output in files there."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        self.temporary = folder / "t"
        self.temporary.mkdir()
        self._output = {name: folder / name for name in ("stdout", "stderr")}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        with self._output["stdout"].open("wb") as stdout, self._output["stderr"].open("wb") as stderr:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "agentq.cli.main", "demo", *arguments),
                cwd=folder,
                env={**inherited, "TMPDIR": str(self.temporary), **environ},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._output["stdout"].read_text()

    @property
    def stderr(self) -> str:
        return self._output["stderr"].read_text()

    def remains(self) -> list[str]:
        """Processes that work in its temporary folder, and what is left in that."""
        processes = [" ".join(process.cmdline()) for process in psutil.process_iter() if self._is_ours(process)]
        return [*processes, *(str(path) for path in self.temporary.iterdir())]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return str(self.temporary) in process.cwd() or any(
                str(self.temporary) in word for word in process.cmdline()
            )
        except psutil.Error:
            return False

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def demos(tmp_path: Path) -> Iterator[list[Demo]]:
    """What is started is put here, and has ended after the test."""
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.end()


# --- The whole of it ------------------------------------------------------------------------------------------------


def test_the_demo_keeps_its_promises_and_leaves_nothing_behind(tmp_path: Path, demos: list[Demo]) -> None:
    """The first thing that a newcomer runs; its last line is what scripts read."""
    demos.append(demo := Demo(tmp_path, "--json"))
    exit_code = demo.process.wait(SECONDS_MAX)
    assert exit_code == 0, demo.stderr

    summary = json.loads(demo.stdout)
    recovery_seconds = summary.pop("recovery_seconds")
    assert summary == {
        "runs": len(TICKETS),
        "completed": len(TICKETS),
        "dead_lettered": 1,
        "resolved": 1,
        "refund_requests": REFUNDS,
        "duplicate_refunds": 0,
    }
    assert 0 < recovery_seconds < SECONDS_MAX
    assert "SIGKILL to worker" in demo.stderr
    assert "taken up again as attempt 2" in demo.stderr
    assert "dead letter at refund 1003: NOT_RETRYABLE" in demo.stderr
    assert "$ agentq dead-letters resolve" in demo.stderr
    eventually(lambda: not demo.remains(), what="no process and no folder is left")


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_an_interrupted_demo_leaves_nothing_behind(
    number: signal.Signals, exit_code: int, tmp_path: Path, demos: list[Demo]
) -> None:
    """People stop what they have seen enough of; a Valkey that stays would be theirs to find."""
    demos.append(demo := Demo(tmp_path))
    eventually(lambda: "model: done" in demo.stdout, seconds=SECONDS_MAX, what="the first step is done")
    demo.process.send_signal(number)
    assert demo.process.wait(SECONDS_MAX) == exit_code
    assert "Traceback" not in demo.stderr
    eventually(lambda: not demo.remains(), what="no process and no folder is left")


def test_a_real_model_plays_the_same_demo(tmp_path: Path, demos: list[Demo]) -> None:
    """The tools and the machinery are the same whoever answers; only who proposes the calls changes."""

    def answered(request: dict[str, Any]) -> Answer:
        proposed = answer_ticket(request["messages"], request["tools"])
        if isinstance(proposed, str):
            return reply(proposed)
        return reply(calls=[call(each.name, each.arguments, f"call_{at}") for at, each in enumerate(proposed)])

    with ModelServer(answered) as model:
        environ = {f"{PREFIX}OPENAI_BASE_URL": model.base_url}
        demos.append(demo := Demo(tmp_path, "--json", "--model", "openai:stub", **environ))
        exit_code = demo.process.wait(SECONDS_MAX)
    assert exit_code == 0, demo.stderr
    assert {request["model"] for request in model.requests} == {"stub"}
    assert json.loads(demo.stdout)["completed"] == len(TICKETS)


@pytest.mark.parametrize("model", ["gpt-5-mini", "nobody:gpt-5-mini", "openai:gpt-5-mini"])
def test_a_model_that_cannot_be_asked_is_refused_at_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the demo would start everything and then wait for a run that can't go on."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", f"{PREFIX}OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=r"OPENAI|openai"):
        main(model=model, as_json=False)


# --- The shop -------------------------------------------------------------------------------------------------------


def test_the_payment_service_pays_and_counts_each_request(tmp_path: Path) -> None:
    """A service that quietly dropped repetitions would prove nothing about who sends them."""
    shop = Shop(tmp_path / "shop.db")
    first, second = shop.refund("1001", 100), shop.refund("1001", 100)
    assert first["refund_id"] != second["refund_id"]
    assert requests_by_order(shop.refunds()) == {"1001": 2}


def test_what_the_shop_rejects_has_not_happened(tmp_path: Path) -> None:
    """The refund tool tells the model `nothing_happened` of a rejection, so that must be true."""
    shop = Shop(tmp_path / "shop.db")
    for order_id, amount_cents in (("1001", 10**9), ("1001", 0), ("no such order", 1)):
        with pytest.raises(RejectedError):
            shop.refund(order_id, amount_cents)
    assert shop.refunds() == []


def test_the_same_key_tags_an_order_one_time(tmp_path: Path) -> None:
    """That is what makes tagging a keyed write."""
    shop = Shop(tmp_path / "shop.db")
    shop.tag("1001", "damaged", "key")
    shop.tag("1001", "missing", "key")
    assert shop.order("1001")["tags"] == ["damaged"]


@pytest.fixture
def served_shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShopClient]:
    """A shop over HTTP, which the agent's tools ask."""
    server = ShopServer(Shop(tmp_path / "shop.db"))
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    serving.start()
    monkeypatch.setenv(SHOP_URL, server.url)
    yield ShopClient(server.url)
    server.shutdown()
    server.server_close()
    serving.join()


def test_a_held_refund_is_committed_before_it_is_answered(served_shop: ShopClient) -> None:
    """The kill must hit between the two, or it would show nothing."""
    answers: list[Any] = []
    arguments = {"order_id": HELD_REFUND, "amount_cents": 100}
    asking = Thread(target=lambda: answers.append(refund_order.call(ToolContext(), arguments)), daemon=True)
    asking.start()
    committed = eventually(lambda: served_shop.refund_of(HELD_REFUND))
    assert answers == []
    served_shop.release()
    asking.join()
    assert answers == [committed]


def test_a_rejected_refund_is_told_to_the_model(served_shop: ShopClient) -> None:
    """A dead letter for every wrong amount would call people for nothing."""
    with pytest.raises(ToolError, match="was paid with 8900 cents, not 9000") as caught:
        refund_order.call(ToolContext(), {"order_id": "1001", "amount_cents": 9000})
    assert caught.value.nothing_happened
    assert served_shop.refunds() == []


def test_the_agent_declares_what_its_tools_do() -> None:
    """The demo is the first agent that people read."""
    assert {tool.name: tool.effect for tool in support.tools} == {
        "look_up_order": ToolEffect.READ_ONLY,
        "tag_order": ToolEffect.IDEMPOTENT_WRITE,
        "refund_order": ToolEffect.NON_IDEMPOTENT_WRITE,
    }


# --- What is shown --------------------------------------------------------------------------------------------------


class Terminal(StringIO):
    """A stream that says that a person watches it."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_who_works_on_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test but this one reads the plain lines, and people see the table."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    killed, held = replace(REFUND, run_id="1"), replace(READ, run_id="2")
    sight = Sight(
        runs={
            TICKETS[2]: run_of("1", [killed], RunStatus.RUNNING),
            TICKETS[4]: run_of("2", [held, READ_AGAIN], RunStatus.RUNNING),
        },
        events=[],
        workers={("1", 2): "A", ("2", 1): "B"},
        held={killed.ref: "A", held.ref: "B"},
        killed="A",
    )
    with opened_view(terminal := Terminal()) as view:
        view.show(sight)
        view.tell("SIGKILL to worker A", "bold red")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\N{NO-BREAK SPACE}", " ")
    for text in ("3 Lena", "☠ refund", "✓ ↻look up 907", "worker A ☠ killed", "worker B", "SIGKILL to worker A"):
        assert text in shown


# --- The promises ---------------------------------------------------------------------------------------------------

READ = Step(
    run_id="2",
    number=1,
    kind=StepKind.TOOL,
    state=StepState.AVAILABLE,
    attempt=1,
    tool="look_up_order",
    arguments={"order_id": "907"},
)
REFUND = replace(READ, run_id="1", number=2, tool="refund_order", effect=ToolEffect.NON_IDEMPOTENT_WRITE)
READ_AGAIN = replace(READ, state=StepState.COMPLETED, attempt=2, result={"order_id": "907"})
REFUND_RESOLVED = replace(REFUND, state=StepState.COMPLETED, result={"order_id": "1003", "refund_id": "re_1"})
LETTER = DeadLetter(
    run_id="1",
    number=2,
    reason=DeadLetterReason.NOT_RETRYABLE,
    failure_class=FailureClass.UNKNOWN,
    error="the process is gone",
    outcome_unknown=True,
    created_at=datetime.now(UTC),
)


def run_of(run_id: str, steps: Sequence[Step], status: RunStatus = RunStatus.COMPLETED) -> Run:
    return Run(
        id=run_id,
        agent="support",
        input="",
        status=status,
        mode=RunMode.QUEUED,
        created_at=datetime.now(UTC),
        steps=tuple(steps),
    )


KEPT = Seen(
    runs=[run_of("1", [REFUND_RESOLVED]), run_of("2", [READ_AGAIN])],
    dead_letters=[LETTER],
    interrupted=REFUND,
    reads_interrupted=[READ],
    reads_expected=True,
    resolved=1,
    refund_requests={"1003": 1},
    recovery_seconds=5.0,
)


def test_promises_that_came_true_are_kept() -> None:
    """The other rows of the table below mean something only beside this one."""
    assert [promise.text for promise in promises(KEPT) if not promise.is_kept] == []


@pytest.mark.parametrize(
    "broken",
    [
        replace(KEPT, runs=[KEPT.runs[0], run_of("2", [READ_AGAIN], RunStatus.RUNNING)]),
        replace(KEPT, refund_requests={"1003": 2}),
        replace(KEPT, refund_requests={"1003": 1, "1001": 1}),
        replace(KEPT, refund_requests={}),
        replace(KEPT, dead_letters=[]),
        replace(KEPT, dead_letters=[LETTER, replace(LETTER, run_id="2")]),
        replace(KEPT, dead_letters=[replace(LETTER, outcome_unknown=False)]),
        replace(KEPT, dead_letters=[replace(LETTER, reason=DeadLetterReason.RETRIES_EXHAUSTED)]),
        replace(KEPT, reads_interrupted=[]),
        replace(KEPT, runs=[KEPT.runs[0], run_of("2", [replace(READ_AGAIN, attempt=1)])]),
        replace(KEPT, resolved=0),
        replace(KEPT, runs=[run_of("1", [replace(REFUND_RESOLVED, result=None)]), KEPT.runs[1]]),
    ],
    ids=[
        "a run goes on",
        "a refund was made twice",
        "a refund that no run knows of",
        "a refund that the service never saw",
        "no dead letter",
        "another run was dead-lettered too",
        "its outcome was known",
        "another reason",
        "no read was interrupted",
        "the read was not repeated",
        "nobody resolved it",
        "its result was lost",
    ],
)
def test_a_broken_promise_is_noticed(broken: Seen) -> None:
    """A demo that can't fail shows nothing."""
    assert any(not promise.is_kept for promise in promises(broken))
