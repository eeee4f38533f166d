"""An outage rehearsed: a payment service dies under runs, workers are killed, and one operator clears everything.

`REHEARSAL_RUNS=500 REHEARSAL_OUTAGE_SECONDS=120` is the full size; the transcript is in the deployment's folder.
"""

import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from agentq.domain.model import RunStatus
from tests.support.databases import fresh_postgresql
from tests.support.invariants import World, check_invariants
from tests.support.operator import Operator
from tests.support.paying_agents import AGENT, SERVICE_FILE
from tests.support.payment_service import READY_TEXT, payments_in
from tests.support.processes import LoggedProcess
from tests.support.system import System
from tests.support.waiting import eventually
from tests.support.workers import environment

RUNS = int(os.environ.get("REHEARSAL_RUNS", "40"))
OUTAGE_SECONDS = float(os.environ.get("REHEARSAL_OUTAGE_SECONDS", "3"))
WIRES = 3  # Their probe can't tell.
COMMANDS_MAX = 9
END_SECONDS = 60 + RUNS / 2

pytestmark = pytest.mark.timeout(3 * END_SECONDS + OUTAGE_SECONDS)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A probe is asked twice and a call tried twice, so that an outage of seconds is as bad as one of minutes."""
    folder = tmp_path_factory.mktemp("deployment")
    changes = {
        "agents": ("tests.support.paying_agents",),
        "operation_deadline_seconds": 3.0,
        "probe_deadline_seconds": 2.0,
        "probes_max": 2,
        "tries_max": 1,
    }
    with fresh_postgresql() as url, System(folder, url, **changes) as system:
        system.keeper()
        yield system


@pytest.fixture
def system(deployment: System) -> Iterator[System]:
    """The deployment; at its end every invariant must hold, with what the payment service did as the world."""
    yield deployment
    paid = Counter(order for _, order in payments_in(deployment.folder))
    calls = deployment.execute("SELECT run_id, number, arguments FROM steps WHERE tool = 'send_payment'")
    effects = {(run_id, number): paid[json.loads(arguments)["order_id"]] for run_id, number, arguments in calls}
    check_invariants(deployment.database, world=World(effects=effects))


@pytest.fixture
def service(deployment: System) -> Iterator[LoggedProcess]:
    """The payment service, on a port that stays the same when it starts again."""
    folder = deployment.folder
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / SERVICE_FILE).write_text(f"http://127.0.0.1:{port}/")
    service = LoggedProcess(
        (sys.executable, "-m", "tests.support.payment_service", str(folder), str(port)),
        log_path=folder / "service.log",
        environ=environment(deployment.settings, folder),
        folder=folder,
        ready_text=READY_TEXT,
    )
    service.start()
    service.wait_ready()
    yield service
    service.stop()


@dataclass(frozen=True, slots=True)
class Outage:
    """What happens to the others before the operator comes."""

    system: System
    service: LoggedProcess

    def happen(self) -> dict[str, str]:
        """The order of each run, once every run has ended and the service is back."""
        system, folder = self.system, self.system.folder
        first, second, *_ = system.workers("tools", "tools", "tools", "model")
        before = RUNS // 2
        orders = self._enqueue(range(before))
        eventually(lambda: len(payments_in(folder)) >= before // 4, what="it pays", seconds=END_SECONDS)
        system.end(first)
        self.service.kill()
        self.service.wait()
        began = time.monotonic()

        late = range(before, RUNS - WIRES)
        orders |= self._enqueue(late[: len(late) // 2])
        eventually(lambda: time.monotonic() > began + OUTAGE_SECONDS / 2, what="half of it", seconds=OUTAGE_SECONDS + 9)
        system.end(second)
        orders |= self._enqueue(late[len(late) // 2 :])
        orders |= self._enqueue(range(RUNS - WIRES, RUNS), method="wire")

        eventually(lambda: time.monotonic() > began + OUTAGE_SECONDS, what="all of it", seconds=OUTAGE_SECONDS + 9)
        eventually(lambda: has_none_active(system), what="every run ends", seconds=END_SECONDS)
        self.service.start()
        self.service.wait_ready()
        return orders

    def _enqueue(self, numbers: range, method: str = "") -> dict[str, str]:
        client = self.system.client
        inputs = [f"{number} {method or ('card', 'account')[number % 2]}" for number in numbers]
        run_ids = client.enqueue_many({"agent": AGENT, "input": each} for each in inputs)
        return dict(zip(run_ids, map(str, numbers), strict=True))


def has_none_active(system: System) -> bool:
    return not system.client.runs(status=(RunStatus.QUEUED, RunStatus.RUNNING), limit=1)


def has_nothing_to_ask(system: System) -> bool:
    """No question of a probe is open any more."""
    open_questions = "SELECT 1 FROM runs WHERE finished_at IS NULL AND pending_effect_id IS NOT NULL"
    return not system.execute(open_questions)


def answers(system: System) -> Counter[str]:
    """What probes said, by what was believed of it."""
    rulings = "SELECT ruling, count(*) FROM steps WHERE ruled_by = 'probe' GROUP BY ruling"
    return Counter(dict(system.execute(rulings)))


def test_one_operator_clears_an_outage_with_what_each_command_prints(system: System, service: LoggedProcess) -> None:
    """At three at night nobody looks options up: each command is printed by the one before."""
    orders = Outage(system, service).happen()
    said_before = answers(system)
    stopped = system.client.count_dead_letters()
    assert stopped > WIRES
    operator = Operator(environ=environment(system.settings, system.folder), folder=system.folder)

    operator.first("agentq dead-letters list")
    operator.next("tools pause send_payment")
    operator.next("dead-letters plan ")
    operator.next("dead-letters resolve --tool send_payment --by-probe", consents=True)
    operator.next("dead-letters replay --tool check_balance", consents=True)
    eventually(lambda: has_nothing_to_ask(system), what="the probe was asked", seconds=END_SECONDS)
    operator.next("dead-letters list")
    in_doubt = system.client.dead_letters()
    assert {orders[letter.run_id] for letter in in_doubt} == set(map(str, range(RUNS - WIRES, RUNS)))
    word = {"looked_at": "now", "reason": "not on the bank's list"}
    operator.next("dead-letters replay ", having="--did-not-happen", consents=True, **word)
    operator.next("tools resume send_payment")

    eventually(lambda: has_none_active(system), what="every run ends", seconds=END_SECONDS)
    assert {run.status for run in system.client.runs(limit=RUNS + 1)} == {RunStatus.COMPLETED}
    assert Counter(order for _, order in payments_in(system.folder)) == Counter(orders.values())
    assert system.client.count_dead_letters() == 0
    operator.next("audit verify")
    assert len(operator.commands) <= COMMANDS_MAX
    said = answers(system) - said_before
    assert said["happened"] and said["did_not_happen"], said
