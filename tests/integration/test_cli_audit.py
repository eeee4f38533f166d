"""`agentq audit`: what an auditor types, and what each wrong word is told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentq.cli.exit_codes import ExitCode
from agentq.domain.seals import LoggedEvent, digest_of
from agentq.filters import parse_filters
from tests.support.audit_log import tampering
from tests.support.command_line import Agentq, named_stage
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.stage import FIRST_CALL, Stage

on_sqlite = pytest.mark.parametrize("stage", ["sqlite"], indirect=True)  # PostgreSQL's columns are typed.


@pytest.fixture(params=["sqlite", "postgresql"])
def stage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A database that the environment names."""
    made = fresh_sqlite(tmp_path) if request.param == "sqlite" else fresh_postgresql()
    with made as url, named_stage(url, tmp_path, monkeypatch) as stage:
        yield stage


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str]) -> Agentq:
    return Agentq(capsys, "audit")


def paid(stage: Stage) -> str:
    """A completed run with a write."""
    run_id = stage.fenced()
    stage.complete(run_id, FIRST_CALL, "paid", fence_id=run_id)
    stage.answer(run_id, 3)
    return run_id


class TestVerify:
    def test_what_holds_is_said_in_one_line(self, stage: Stage, audit: Agentq) -> None:
        """With how much was looked at: nothing looked at holds as well."""
        assert audit("verify") == ExitCode.DONE
        assert audit.out == "checked 0 runs, 0 events, 0 writes, 0 seals: all of it holds\n"
        paid(stage)
        stage.unknown()
        assert audit("verify") == ExitCode.DONE
        assert audit.out == "checked 2 runs, 10 events, 2 writes, 2 seals: all of it holds\n"
        assert audit.err == ""

    def test_each_finding_is_a_line_with_run_what_and_why(self, stage: Stage, audit: Agentq) -> None:
        """Who reads it at night sees where to look, and why they were called."""
        paid(stage)
        run_id = paid(stage)
        with tampering(stage.database) as execute:
            execute(f"DELETE FROM events WHERE run_id = '{run_id}' AND sequence = 4")

        assert audit("verify") == ExitCode.FAILED
        *findings, summary = audit.out.splitlines()
        assert [finding.rpartition(" (")[0] for finding in findings] == [
            f"{run_id}: event 4 is missing",
            f"{run_id}: the write of step 2 (event 3) has no end",
            f"{run_id}: step 2 is a write with a result that no event tells of",
            f"{run_id}: seal 1 doesn't match events 1 to 6",
        ]
        assert "(the run went on over a result that the log doesn't hold)" in findings[2]
        assert summary == "checked 2 runs, 11 events, 2 writes, 2 seals: 4 findings"
        assert f"next: agentq runs events {run_id}" in audit.err

    def test_machines_get_counts_and_findings(self, stage: Stage, audit: Agentq) -> None:
        """A nightly job reads the kinds, not the sentences."""
        run_id = paid(stage)
        assert audit("verify", "--json") == ExitCode.DONE
        holds = {"runs": 1, "events": 6, "writes": 1, "seals": 1, "events_unsealed": 0, "findings": []}
        assert audit.data == holds

        stage.change_run(run_id, events_count=7)
        assert audit("verify", "--json") == ExitCode.FAILED
        (finding,) = audit.data["findings"]
        assert (finding["run_id"], finding["kind"], finding["what"]) == (run_id, "gap", "event 7 is missing")
        assert finding["why"]
        assert audit("verify", "-o", "jsonl") == ExitCode.FAILED
        assert audit.lines == [finding]
        assert audit("verify", "-o", "ids") == ExitCode.FAILED
        assert audit.out == f"{run_id}\n"

    def test_runs_are_chosen_by_id_or_time(self, stage: Stage, audit: Agentq) -> None:
        """What one customer asks about, or what came since last night."""
        run_id, other = paid(stage), paid(stage)
        stage.change_run(other, events_count=7, created_at=parse_filters({"since": "3d"}).since)
        assert audit("verify", run_id, run_id) == ExitCode.DONE
        assert audit.out.startswith("checked 1 runs")
        assert audit("verify", "--since", "1d") == ExitCode.DONE
        assert audit.out.startswith("checked 1 runs")
        assert audit("verify", "--until", "1d") == ExitCode.FAILED

    def test_what_came_after_an_end_is_counted(self, stage: Stage, audit: Agentq) -> None:
        """It isn't wrong, but no seal speaks for it yet: said, so that nobody takes it for sealed."""
        run_id = stage.unknown()
        stage.decisions.discard(run_id, actor="ann", reason="nobody knows")
        assert audit("verify") == ExitCode.DONE
        assert "2 events came after the last seal of their run; the next end seals them" in audit.err

    def test_the_deployment_s_log_is_named_as_such(self, stage: Stage, audit: Agentq) -> None:
        """It belongs to no run."""
        for _ in range(2):
            stage.pausing.pause("pay", None, reads=False, actor="ann", reason="")
        with tampering(stage.database) as execute:
            execute("DELETE FROM events WHERE run_id = '' AND sequence = 1")
        assert audit("verify") == ExitCode.FAILED
        assert audit.out.startswith("(deployment): event 1 is missing")

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE runs SET status = 'odd' WHERE id = '{0}'",
            "UPDATE steps SET effect = 'odd' WHERE run_id = '{0}'",
            """UPDATE events SET data = '{{"fence": [1]}}' WHERE run_id = '{0}'""",
        ],
    )
    def test_a_run_that_nobody_can_read_hides_no_other(self, stage: Stage, audit: Agentq, statement: str) -> None:
        """One changed row that ended the whole look would be the way to change all others unseen."""
        odd, short_of_one = paid(stage), paid(stage)
        with tampering(stage.database) as execute:
            execute(statement.format(odd))
            execute(f"DELETE FROM events WHERE run_id = '{short_of_one}' AND sequence = 4")
        assert audit("verify") == ExitCode.FAILED
        assert {line.partition(":")[0] for line in audit.out.splitlines()[:-1]} == {odd, short_of_one}
        assert audit.out.splitlines()[-1].startswith("checked 2 runs") and "Traceback" not in audit.err

    @on_sqlite
    @pytest.mark.parametrize(
        "value",
        [
            "events SET at = 'soon'",
            "events SET sequence = 'first' WHERE sequence = 1",
            "events SET actor = x'ff'",
            "seals SET at = 'soon'",
            "seals SET number = 'first'",
            "runs SET events_count = 'many'",
        ],
    )
    def test_values_that_no_column_takes_are_found_on_sqlite(self, stage: Stage, audit: Agentq, value: str) -> None:
        """It keeps any kind of value in any column; PostgreSQL refuses them. An export says where it ends."""
        run_id = paid(stage)
        with tampering(stage.database) as execute:
            execute(f"UPDATE {value}")
        assert audit("verify") == ExitCode.FAILED
        assert audit.out.startswith(f"{run_id}: a row of it can't be read, so it is not judged")
        code = audit("export")
        assert code == (ExitCode.DONE if value.startswith("runs") else ExitCode.FAILED)
        assert audit.err == "" if code == ExitCode.DONE else "the export ends before it" in audit.err

    @on_sqlite
    def test_a_deployment_s_log_that_nobody_can_read_is_found(self, stage: Stage, audit: Agentq) -> None:
        """As one of a run is."""
        stage.pausing.pause("pay", None, reads=False, actor="ann", reason="")
        with tampering(stage.database) as execute:
            execute("UPDATE events SET at = 'soon'")
        assert audit("verify") == ExitCode.FAILED
        assert audit.out.startswith("(deployment): a row of it can't be read")


class TestExport:
    def test_each_event_is_a_line_and_seals_are_among_them(self, stage: Stage, audit: Agentq) -> None:
        """What goes to another place holds all that is needed to tell a rewritten log by it."""
        run_id = paid(stage)
        assert audit("export") == ExitCode.DONE
        *told, seal = audit.lines
        assert [(line["sequence"], line["kind"], line["step"], line["attempt"]) for line in told] == [
            (1, "run.enqueued", None, None),
            (2, "step.settled", 1, 1),
            (3, "fence.stamped", 2, 1),
            (4, "step.settled", 2, 1),
            (5, "step.settled", 3, 1),
            (6, "run.completed", None, None),
        ]
        assert {line["run_id"] for line in told} == {run_id}
        assert told[2]["data"]["fence"] == run_id and told[2]["actor"] == "host/boot/1-1/x"
        assert (seal["kind"], seal["sequence"], seal["data"]["number"]) == ("seal", 6, 1)

    def test_a_seal_can_be_computed_again_from_an_export(self, stage: Stage, audit: Agentq) -> None:
        """Without the database: the text that was digested is all there."""
        paid(stage)
        audit("export")
        *told, seal = audit.lines
        events = [
            LoggedEvent(
                run_id=line["run_id"],
                sequence=line["sequence"],
                at=moment(line["at"]),
                kind=line["kind"],
                number=line["step"],
                attempt=line["attempt"],
                actor=line["actor"],
                data=json.dumps(line["data"], ensure_ascii=False, separators=(",", ":")),
            )
            for line in told
        ]
        fields = {"run_id": seal["run_id"], "sequence": seal["sequence"], "at": moment(seal["at"]), "previous": None}
        counted = {name: seal["data"][name] for name in ("number", "events_lost")}
        assert seal["data"]["digest"] == digest_of(events, **fields, **counted)

    def test_a_time_can_be_chosen_and_may_be_empty(self, stage: Stage, audit: Agentq) -> None:
        """A nightly export of a day on which nothing happened is an empty file, and no failure."""
        paid(stage)
        assert audit("export", "--until", "1d") == ExitCode.DONE
        assert (audit.out, audit.err) == ("", "")
        assert audit("export", "--since", "1h") == ExitCode.DONE
        assert len(audit.lines) == 7

    def test_what_somebody_else_wrote_is_exported_as_it_is(self, stage: Stage, audit: Agentq) -> None:
        """An export that ends at the first wrong line would hide what comes after it."""
        paid(stage)
        with tampering(stage.database) as execute:
            execute("UPDATE events SET data = 'no JSON' WHERE sequence = 1")
        assert audit("export") == ExitCode.DONE
        assert audit.lines[0]["data"] == "no JSON" and len(audit.lines) == 7


def moment(text: str) -> Any:
    return parse_filters({"since": text}).since


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("verify", "missing"), "there is no run 'missing'"),
        (("verify", "x", "--since", "1h"), "name runs, or a time: not both"),
        (("verify", "--since", "yesterday"), "since is 'yesterday'; it takes a time such as"),
        (("verify", "--since", "1h", "--until", "2h"), "is not before until"),
        (("export", "--since", "2026-13-01"), "since is '2026-13-01'; it takes a time such as"),
        (("export", "--until", "soon"), "until is 'soon'; it takes a time such as"),
        (("export", "--since", "1h", "--until", "2h"), "is not before until"),
        (("export", "x"), "unexpected extra argument"),
        (("exprot",), "did you mean 'export'?"),
    ],
    ids=str,
)
def test_a_wrong_word_is_a_clear_line(stage: Stage, audit: Agentq, arguments: tuple[str, ...], told: str) -> None:
    """Nothing on stdout that could pass for a proof or an export."""
    assert audit(*arguments) == ExitCode.REFUSED
    assert audit.out == ""
    assert told in audit.err and "Traceback" not in audit.err
