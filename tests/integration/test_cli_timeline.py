"""`agentq runs show`: every attempt with its story, 80 columns, and no number that could be too small unsaid."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentq.adapters.redis.client import redis_client
from agentq.adapters.redis.leases import RedisLeases
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.migration import deployment_id
from agentq.cli.exit_codes import ExitCode
from agentq.cli.main import run_command
from agentq.domain.failures import FailureClass
from agentq.domain.model import Charge
from agentq.domain.outcomes import Join, Recorded, Retried
from agentq.ports.steps import Settlement
from tests.support.databases import fresh_sqlite
from tests.support.stage import FIRST_CALL, PLAIN, READ, Stage
from tests.support.valkey import ValkeyServer

ANN, BOB = "shop-1/boot/17-1/x", "shop-2/boot/18-2/y"
LONG_ERROR = "ConnectionError: " + "the warehouse doesn't answer, " * 6


class Shown:
    """Runs over a SQLite database and a Valkey, and what `runs show` says of them."""

    def __init__(self, url: str, valkey: ValkeyServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.stage = Stage(database=Database(url))
        self.valkey = valkey
        self.leases = RedisLeases(
            redis_client(valkey.url), prefix="agentq", deployment=deployment_id(self.stage.database), lease_seconds=15
        )
        self._capsys = capsys

    def text(self, run_id: str, *options: str) -> str:
        self._capsys.readouterr()
        assert run_command(["runs", "show", run_id, *options]) == ExitCode.DONE
        return self._capsys.readouterr().out

    def step(self, run_id: str) -> dict[str, Any]:
        step: dict[str, Any] = json.loads(self.text(run_id, "--json"))["steps"][FIRST_CALL - 1]
        return step

    def deliver_in_vain(self, run_id: str, times: int) -> None:
        """While somebody else holds it."""
        ref = self.stage.ref(run_id, FIRST_CALL)
        self.leases.acquire(ref, ANN, 15)
        for _ in range(times):
            self.leases.acquire(ref, BOB, 15)

    def settle(self, run_id: str, change: Recorded | Retried, owner: str, **values: Any) -> None:
        ref = self.stage.ref(run_id, FIRST_CALL)
        self.stage.steps.settle(Settlement(ref=ref, owner=owner, effect=READ, change=change, **values))


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as valkey:
        yield valkey


@pytest.fixture
def shown(
    tmp_path: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Shown]:
    valkey.flush()
    with fresh_sqlite(tmp_path) as url:
        monkeypatch.setenv("AGENTQ_DATABASE_URL", url)
        monkeypatch.setenv("AGENTQ_BROKER_URL", valkey.url)
        monkeypatch.setenv("AGENTQ_HOME", str(tmp_path))
        shown = Shown(url, valkey, capsys)
        shown.leases.claim_deployment()
        with valkey.client() as client:  # A minute ago: that it was before the run is beyond doubt.
            key = f"agentq:{deployment_id(shown.stage.database)}:leases-since"
            since, server = client.get(key).split()
            client.set(key, f"{int(since) - 60_000} {server}")
        yield shown
        shown.stage.database.dispose()


def test_each_attempt_is_told_with_its_worker_its_end_and_its_charge(shown: Shown) -> None:
    """One look must do: nobody joins tables at 3 a.m."""
    run_id = shown.stage.asked(READ)
    failed = Retried(charge=Charge.TRY, error=LONG_ERROR, failure_class=FailureClass.CONNECTION, due_in_seconds=0)
    shown.settle(run_id, failed, ANN, held_seconds=1.5)
    died = Retried(charge=Charge.CRASH, error="the process that ran it died (1 of 3)")
    shown.settle(run_id, died, f"keeper/{uuid.uuid4().hex}", held_by=BOB, held_seconds=4.0)
    shown.settle(run_id, Recorded(result="seen", then=Join()), ANN, held_seconds=0.25)
    text = shown.text(run_id)
    for told in (
        "requeued after 1.5 s  (shop-1, pid 17)",
        "charged: try; due again at once",
        "died, seen after 4.0 s  (shop-2, pid 18)",
        "the process that ran it died (1 of 3)",
        "settled after 250 ms  (shop-1, pid 17)",
    ):
        assert told in text
    attempts = shown.step(run_id)["attempts"]
    assert [(each["number"], each["end"], each["worker"]) for each in attempts] == [
        (1, "requeued", ANN),
        (2, "died", BOB),
        (3, "settled", ANN),
    ]
    assert attempts[1]["seconds"] == 4.0 and attempts[1]["told"]["charge"] == "crash"


def test_nothing_is_wider_than_80_columns(shown: Shown) -> None:
    """It is read over a slow line, on a small screen, or in a chat."""
    run_id = shown.stage.unknown(PLAIN)
    shown.stage.change_run(run_id, error=LONG_ERROR, input=json.dumps("x y " * 200))
    assert max(map(len, shown.text(run_id).splitlines())) <= 80


def test_who_is_at_it_now_is_shown(shown: Shown) -> None:
    """A read leaves no trace in the database before its result."""
    run_id = shown.stage.asked(READ)
    assert shown.step(run_id)["attempts"][0]["is_held"] is False
    assert "nobody is at it now" in shown.text(run_id)
    shown.deliver_in_vain(run_id, 0)
    assert "under way  (shop-1, pid 17)" in shown.text(run_id)


def test_deliveries_that_came_to_nothing_are_counted(shown: Shown) -> None:
    """Exactly, as long as Redis covers the run."""
    run_id = shown.stage.asked(READ)
    assert "no delivery came to nothing" in shown.text(run_id)
    shown.deliver_in_vain(run_id, 2)
    assert "2 deliveries came to nothing" in shown.text(run_id)
    assert (shown.step(run_id)["suppressed"], shown.step(run_id)["suppressed_is_exact"]) == (2, True)


@pytest.mark.parametrize(
    ("kept", "says", "suppressed"),
    [
        (None, "not known", None),
        (0, "none until its steps ended; later ones are not known", 0),
        (3, "at least 3 deliveries came to nothing", 3),
    ],
)
@pytest.mark.parametrize("redis", ["flushed", "away"])
def test_without_redis_a_number_says_that_it_may_be_too_small(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, redis: str, kept: int | None, says: str, suppressed: int | None
) -> None:
    """What came after the last settle nobody knows any more."""
    run_id = shown.stage.asked(READ)
    shown.stage.change_step(run_id, 1, suppressed=0)
    shown.settle(run_id, Recorded(result="seen", then=Join()), ANN, suppressed=kept)
    shown.stage.change_step(run_id, 3, suppressed=0)
    if redis == "flushed":
        shown.valkey.flush()
    else:
        monkeypatch.setenv("AGENTQ_BROKER_URL", "redis://127.0.0.1:1/0")
    assert says in shown.text(run_id)
    step = shown.step(run_id)
    assert (step["suppressed"], step["suppressed_is_exact"]) == (suppressed, False)
