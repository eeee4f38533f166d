"""`agentq dead-letters` for plans, discards, copies and many at once: what it prints, changes, and exits with."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentq.cli.exit_codes import ExitCode
from agentq.cli.main import run_command
from agentq.domain.model import RunStatus
from tests.support.command_line import Agentq, named_stage
from tests.support.databases import fresh_sqlite
from tests.support.stage import PLAIN, READ, Stage


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A SQLite database that the environment names; nobody answers for the broker."""
    with fresh_sqlite(tmp_path) as url, named_stage(url, tmp_path, monkeypatch) as stage:
        yield stage


@pytest.fixture
def agentq(stage: Stage, capsys: pytest.CaptureFixture[str]) -> Agentq:
    return Agentq(capsys, "dead-letters")


class TestList:
    def test_more_than_a_screenful_is_shown_by_groups(self, agentq: Agentq, stage: Stage) -> None:
        """At three at night nobody reads ten thousand lines; machines get each as ever."""
        for _ in range(20):
            stage.failed(READ)
        agentq("list")
        assert len(agentq.out.splitlines()) == 21
        unknown = stage.unknown(PLAIN)
        agentq("list")
        header, *lines = agentq.out.splitlines()
        assert "FINGERPRINT" in header
        assert [line.split()[:2] for line in lines] == [["20", "look"], ["1", "pay"]]
        assert "1 unknown" in lines[1]
        agentq("list", "--each", "--outcome-unknown")
        assert unknown in agentq.out
        agentq("list", "-o", "ids")
        assert len(agentq.out.split()) == 21
        agentq("list", "--group", "--json")
        assert [(group["tool"], group["count"], group["unknown_count"]) for group in agentq.data] == [
            ("look", 20, 0),
            ("pay", 1, 1),
        ]

    def test_each_command_prints_the_next(self, agentq: Agentq, stage: Stage) -> None:
        """From the list to the replay without remembering an option."""
        run_ids = [stage.failed(READ) for _ in range(21)]
        agentq("list")
        plan, rehearsal = agentq.next_commands
        assert agentq(*plan.split()) == ExitCode.DONE
        assert agentq(*rehearsal.split()) == ExitCode.DONE
        assert "21 would be replayed" in agentq.err
        assert {stage.runs.status(run_id) for run_id in run_ids} == {RunStatus.FAILED}
        assert agentq(*rehearsal.removesuffix(" --dry-run").split(), "--yes") == ExitCode.DONE
        assert {stage.runs.status(run_id) for run_id in run_ids} == {RunStatus.RUNNING}


class TestPlan:
    def test_a_plan_leads_to_a_replay_bound_to_it(self, agentq: Agentq, stage: Stage) -> None:
        """What was read is what is done, and once only."""
        run_id = stage.failed(READ, PLAIN)
        assert agentq("plan", run_id) == ExitCode.DONE
        assert "recorded result used" in agentq.out and "runs again (read)" in agentq.out
        (command,) = agentq.next_commands
        assert agentq(*command.split(), "--yes") == ExitCode.DONE
        assert stage.runs.status(run_id) is RunStatus.RUNNING
        stage.stop(run_id, 2)
        assert agentq(*command.split(), "--yes") == ExitCode.REFUSED
        assert len([line for line in agentq.err.splitlines() if line.startswith("error: ")]) == 1
        assert "read that first" in agentq.err
        assert stage.runs.status(run_id) is RunStatus.FAILED

    def test_a_write_in_doubt_is_shown_with_what_decides_it(self, agentq: Agentq, stage: Stage) -> None:
        """Who called it and when, and the commands for either answer."""
        run_id = stage.unknown(PLAIN)
        assert agentq("plan", run_id) == ExitCode.DONE
        assert "blocked: may have happened" in agentq.out and "by host, pid 1" in agentq.out
        assert [command.split()[:3] for command in agentq.next_commands] == [
            ["resolve", run_id, "--happened"],
            ["resolve", run_id, "--did-not-happen"],
        ]
        agentq("plan", run_id, "--json")
        assert [step["fate"] for step in agentq.data["steps"]] == ["recorded result used", "blocked: may have happened"]
        assert agentq.data["steps"][1]["fence"]["owner"] == "host/boot/1-1/x"

    def test_many_recorded_steps_are_one_line(self, agentq: Agentq, stage: Stage) -> None:
        """What happens again mustn't drown in what doesn't."""
        run_id = stage.asked(*[READ] * 12)
        for number in range(2, 13):
            stage.complete(run_id, number)
        stage.stop(run_id, 13)
        agentq("plan", run_id)
        rows = [line for line in agentq.out.splitlines() if "recorded result used" in line]
        assert [row.split()[:3] for row in rows] == [["1-12", "12", "steps"]]

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("nowhere",), "there is no run 'nowhere'"),
            (("RUN", "--from-step", "9"), "its steps are 1 to 2"),
            (("RUN", "--repeat-write", "2"), "repeat_writes goes with from_step"),
        ],
    )
    def test_what_can_t_be_planned_is_one_line(
        self, agentq: Agentq, stage: Stage, arguments: tuple[str, ...], told: str
    ) -> None:
        """Ids are pasted, and numbers are mistyped."""
        run_id = stage.unknown(PLAIN)
        assert agentq("plan", *(run_id if word == "RUN" else word for word in arguments)) == ExitCode.REFUSED
        assert agentq.out == "" and told in agentq.err and len(agentq.err.splitlines()) == 1


class TestCopy:
    def test_a_copy_asks_for_each_write_by_name(self, agentq: Agentq, stage: Stage) -> None:
        """The plan prints the very command that accepts them."""
        run_id = stage.unknown(PLAIN)
        assert agentq("replay", run_id, "--from-step", "2", "--yes") == ExitCode.REFUSED
        assert "--repeat-write 2" in agentq.err
        agentq("plan", run_id, "--from-step", "2")
        agentq(*agentq.next_commands[0].split())
        assert "1 WRITES HAPPEN AGAIN" in agentq.out and "accepted" in agentq.out
        assert agentq(*agentq.next_commands[0].split(), "--yes", "--json") == ExitCode.DONE
        new_run_id = agentq.data[0]["new_run_id"]
        new = stage.runs.run(new_run_id)
        assert (new.copied_from, new.copied_steps, new.steps[1].tool) == (run_id, 1, "pay")
        assert stage.runs.run(run_id).pending_effect is not None
        assert run_command(["runs", "show", new_run_id, "--no-events"]) == ExitCode.DONE

    def test_options_that_name_one_run_go_with_one(self, agentq: Agentq, stage: Stage) -> None:
        """A digest of one plan says nothing of another run."""
        for wrong in (("a", "b", "--digest", "x"), ("--all", "--from-step", "2"), ("--all", "--happened", "1")):
            assert agentq("replay", *wrong, "--yes") == ExitCode.REFUSED
            assert " go with " in agentq.err


class TestDiscard:
    def test_a_discarded_run_leaves_the_list_once(self, agentq: Agentq, stage: Stage) -> None:
        """A second one is told who was first, and nothing is changed."""
        run_id = stage.unknown(PLAIN)
        assert agentq("discard", run_id, "--yes", "--actor", "ann", "--reason", "gone") == ExitCode.DONE
        assert agentq("list", "-o", "ids") == ExitCode.DONE and agentq.out == ""
        before = stage.runs.run(run_id)
        for command in (("discard",), ("replay",), ("resolve", "--did-not-happen", "--looked-at", "now")):
            assert agentq(*command, run_id, "--yes") == ExitCode.REFUSED
            assert "ann discarded it at" in agentq.err
        assert stage.runs.run(run_id) == before
        assert [event.data["reason"] for event in stage.runs.events(run_id) if event.kind == "write.given_up"] == [
            "gone"
        ]


class TestMany:
    def test_safe_ones_run_and_blocked_ones_are_left_with_the_reason(self, agentq: Agentq, stage: Stage) -> None:
        """A result for each, on stdout; the reasons together, on stderr."""
        safe, blocked = [stage.failed(READ) for _ in range(3)], stage.unknown(PLAIN)
        assert agentq("replay", "--all", "--yes", "--reason", "mended", "-o", "jsonl") == ExitCode.PARTLY_DONE
        results = {line["id"]: line for line in agentq.lines}
        assert {run_id for run_id, line in results.items() if line["done"]} == set(safe)
        assert "is not known" in results[blocked]["error"]
        assert "3 replayed, 1 left:" in agentq.err and "1: whether 'pay' of step 2 happened" in agentq.err
        assert agentq("replay", "--all", "--yes", "--json") == ExitCode.REFUSED
        assert [line["id"] for line in agentq.data] == [blocked]

    def test_filters_choose_by_what_dead_letters_have_in_common(self, agentq: Agentq, stage: Stage) -> None:
        """The reason that they stopped for isn't the reason of the decision."""
        failed, unknown = stage.failed(READ), stage.unknown(PLAIN)
        agentq("list", "--group", "--json")
        fingerprint = agentq.data[0]["fingerprint"]
        chosen = (
            "--tool",
            "look",
            "--class",
            "unknown",
            "--stop-reason",
            "not_retryable",
            "--fingerprint",
            fingerprint,
        )
        assert agentq("replay", *chosen, "--since", "1h", "--yes", "-o", "ids") == ExitCode.DONE
        assert (agentq.out.split(), stage.runs.status(failed)) == ([failed], RunStatus.RUNNING)
        assert (
            agentq("resolve", "--tool", "pay", "--did-not-happen", "--looked-at", "now", "--yes", "-o", "ids")
            == ExitCode.DONE
        )
        assert agentq.out.split() == [unknown]
        assert agentq("discard", "--tool", "pay", "--yes", "-o", "ids") == ExitCode.DONE
        assert stage.runs.run(unknown).dead_letter is None

    def test_a_dry_run_changes_nothing(self, agentq: Agentq, stage: Stage) -> None:
        """And its exit code is that of the real thing."""
        run_ids = [stage.failed(READ), stage.unknown(PLAIN)]
        before = [(stage.runs.run(run_id), stage.runs.events(run_id)) for run_id in run_ids]
        for verb in (("replay",), ("discard",), ("resolve", "--did-not-happen", "--looked-at", "now")):
            code = agentq(*verb, "--all", "--dry-run", "-o", "jsonl")
            assert code == (ExitCode.PARTLY_DONE if verb == ("replay",) else ExitCode.DONE)
            assert "would be" in agentq.err
        assert [(stage.runs.run(run_id), stage.runs.events(run_id)) for run_id in run_ids] == before

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("replay",), "take every one by --all"),
            (("discard", "-n", "5"), "take every one by --all"),
            (("replay", "--tool", "mail", "--yes"), "none of the 1 open dead letters matches"),
            (("replay", "--tool", "look"), "Nobody is at the terminal to ask: add --yes"),
            (("replay", "--all"), "every one that is open"),
            (("replay", "r-1", "--tool", "look"), "one of them"),
            (("discard", "r-1", "--all"), "one of them"),
            (("replay", "r-1", "--dry-run"), "agentq dead-letters plan"),
            (("replay", "--all", "--rate", "fast"), "rate is 'fast'"),
            (("replay", "--all", "--rate", "0"), "rate is '0'"),
            (("replay", "--all", "--rate", "nan"), "rate is 'nan'"),
            (("replay", "--all", "--rate", "1e-300", "--yes"), "rate is '1e-300'"),
            (
                ("discard", "--all", "--reason", "x" * 2001, "--yes"),
                "reason has 2,001 characters; it takes at most 2,000",
            ),
            (("discard", "--all", "--actor", "x" * 201, "--yes"), "actor has 201 characters"),
            (("replay", "--all", "-n", "0", "--yes"), "limit is 0"),
            (("resolve", "--all"), "say what became of the write"),
            (("resolve", "--all", "--happened", "nope"), "--happened is not JSON"),
            (("replay", "--class", "sad", "--yes"), "failure_class is 'SAD'"),
            (("replay", "--metadata", "tenant", "--yes"), "metadata is 'tenant'"),
        ],
    )
    def test_a_wrong_choice_is_one_clear_line_and_changes_nothing(
        self, agentq: Agentq, stage: Stage, arguments: tuple[str, ...], told: str
    ) -> None:
        """A filter that is mistyped mustn't replay a thousand runs, nor say that all is well."""
        run_ids = [stage.failed(READ), stage.failed(READ)] if "every one" in told else [stage.failed(READ)]
        assert agentq(*arguments) == ExitCode.REFUSED
        first, *rest = agentq.err.splitlines()
        assert first.startswith("error: ") and told in first and len(rest) <= 1
        assert agentq.out == ""
        assert {stage.runs.status(run_id) for run_id in run_ids} == {RunStatus.FAILED}

    def test_ids_from_a_list_still_work(self, agentq: Agentq, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        """`agentq dead-letters list -o ids | agentq dead-letters discard -`."""
        run_ids = [stage.failed(READ), stage.failed(READ)]
        agentq("list", "-o", "ids")
        monkeypatch.setattr(sys, "stdin", io.StringIO(agentq.out))
        assert agentq("discard", "-", "--yes") == ExitCode.DONE
        assert [stage.runs.run(run_id).dead_letter for run_id in run_ids] == [None, None]


class TestByProbe:
    def test_the_probe_is_asked_once_and_the_second_is_told_who_was_first(self, agentq: Agentq, stage: Stage) -> None:
        """Nothing is in the list meanwhile, and nothing else can be decided."""
        run_id = stage.unknown(PLAIN, has_probe=True)
        by_probe = ("resolve", run_id, "--by-probe", "--yes")
        assert agentq(*by_probe, "--actor", "ann", "--reason", "it is back") == ExitCode.DONE
        assert "the probe of pay is being asked about step 2" in agentq.err
        assert f"next: agentq runs events {run_id} --follow" in agentq.err
        assert agentq("list", "-o", "ids") == ExitCode.DONE and agentq.out == ""
        before = stage.runs.run(run_id)
        assert before.status is RunStatus.RUNNING
        for command in (by_probe, ("resolve", run_id, "--happened", "1", "--yes")):
            assert agentq(*command) == ExitCode.REFUSED
            assert "ann wanted it at" in agentq.err
        assert stage.runs.run(run_id) == before

    def test_what_no_probe_can_tell_is_refused_and_left(self, agentq: Agentq, stage: Stage) -> None:
        """A tool without a probe, and a run that nobody knows."""
        run_id = stage.unknown(PLAIN)
        before = stage.runs.run(run_id)
        assert agentq("resolve", run_id, "--by-probe", "--yes") == ExitCode.REFUSED
        assert "had no probe" in agentq.err and len(agentq.err.splitlines()) == 1
        assert agentq("resolve", "nowhere", "--by-probe", "--yes") == ExitCode.REFUSED
        assert stage.runs.run(run_id) == before

    def test_many_are_asked_about_and_those_without_a_probe_are_left(self, agentq: Agentq, stage: Stage) -> None:
        """Rehearsed first, at a rate, with a result for each; then what is safe, and what is left."""
        asked = sorted(stage.unknown(PLAIN, has_probe=True) for _ in range(3))
        left, safe = stage.unknown(PLAIN), stage.failed(READ)
        chosen = ("resolve", "--tool", "pay", "--by-probe")
        assert agentq(*chosen, "--dry-run") == ExitCode.PARTLY_DONE
        assert "3 would be asked about, 1 left:" in agentq.err
        assert {stage.runs.status(run_id) for run_id in asked} == {RunStatus.FAILED}
        assert agentq(*chosen, "--rate", "1000", "--yes") == ExitCode.PARTLY_DONE
        assert agentq.next_commands == ["replay --tool look --outcome-known --rate 50", "list"]
        assert {stage.runs.status(run_id) for run_id in asked} == {RunStatus.RUNNING}
        assert {stage.runs.status(run_id) for run_id in (left, safe)} == {RunStatus.FAILED}
        assert agentq(*chosen, "--yes", "-o", "jsonl") == ExitCode.REFUSED
        assert [(line["id"], line["done"]) for line in agentq.lines] == [(left, False)]

    @pytest.mark.parametrize("wrong", [("--happened", "1"), ("--did-not-happen",), ("--looked-at", "5m")])
    def test_a_person_s_word_doesn_t_go_with_it(self, agentq: Agentq, wrong: tuple[str, ...]) -> None:
        """Whose word would count?"""
        assert agentq("resolve", "a", "--by-probe", *wrong, "--yes") == ExitCode.REFUSED

    def test_plan_and_show_tell_of_it_where_there_is_a_probe(self, agentq: Agentq, stage: Stage) -> None:
        """For one, or for all of its tool that are in doubt."""
        run_id = stage.unknown(PLAIN, has_probe=True)
        agentq("show", run_id)
        assert f"agentq dead-letters resolve {run_id} --by-probe" in agentq.out
        agentq("plan", run_id)
        assert agentq.next_commands[0] == f"resolve {run_id} --by-probe"
        without = stage.unknown(PLAIN)
        agentq("plan", run_id)
        assert agentq.next_commands[0] == "resolve --tool pay --by-probe --rate 50"
        for command in ("plan", "show"):
            agentq(command, without)
            assert "--by-probe" not in agentq.out + agentq.err


class TestNext:
    def test_a_list_of_writes_in_doubt_leads_to_a_pause_and_on(self, agentq: Agentq, stage: Stage) -> None:
        """No more of it, one looked at, all asked about; what was replayed waits for the pause, and says so."""
        for _ in range(21):
            newest = stage.unknown(PLAIN, has_probe=True)
        agentq("list")
        assert "next: agentq tools pause pay\n" in agentq.err
        agentq.run("tools", "pause", "pay")
        assert agentq.next_commands == [f"plan {newest}"]
        agentq("list")
        assert "tools pause" not in agentq.err
        assert agentq("replay", newest, "--did-not-happen", "--looked-at", "now", "--yes") == ExitCode.DONE
        assert "next: agentq tools resume pay\n" in agentq.err
        agentq.run("tools", "resume", "pay")
        assert agentq.next_commands == ["list"]

    def test_a_few_writes_in_doubt_lead_to_one_decision(self, agentq: Agentq, stage: Stage) -> None:
        """Named one by one: whoever decides has looked at each. What happened has a result of its own each time."""
        older, newer = stage.unknown(PLAIN), stage.unknown(PLAIN)
        stage.failed(READ)
        agentq("list")
        show, did_not_happen = agentq.next_commands
        assert show.startswith("show ")
        assert did_not_happen == f"replay {newer} {older} --did-not-happen --looked-at TIME --reason '...'"

    def test_what_nothing_is_in_doubt_about_can_be_replayed(self, agentq: Agentq, stage: Stage) -> None:
        """There is nothing to decide first."""
        run_id = stage.failed(READ)
        agentq("list")
        assert agentq.next_commands == [f"show {run_id}", f"replay {run_id}"]

    def test_asking_a_probe_tells_what_its_answer_will_wait_for(self, agentq: Agentq, stage: Stage) -> None:
        """A write that didn't happen is made again only when the tool is resumed: runs would seem to hang."""
        stage.unknown(PLAIN, has_probe=True)
        agentq.run("tools", "pause", "pay", "--yes")
        agentq("resolve", "--tool", "pay", "--by-probe", "--yes")
        assert "paused: pay; its calls wait until it is resumed" in agentq.err
        assert "next: agentq tools resume pay\n" in agentq.err

    def test_when_nothing_is_left_the_log_is_to_prove_it(self, agentq: Agentq) -> None:
        """The outage is over."""
        agentq.run("tools", "pause", "pay", "--yes")
        agentq.run("tools", "resume", "pay")
        assert agentq.err.endswith("next: agentq audit verify\n")
