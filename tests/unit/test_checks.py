"""The judgements of the doctor and of a worker's start, as tables: what is found, how bad, and who doesn't start."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agentq.adapters.filesystem import filesystem_in, mounts_of_linux, mounts_of_macos
from agentq.adapters.outcome_facts import OutcomeFacts, examine_outcomes
from agentq.adapters.redis import examine as redis_examine
from agentq.adapters.redis.examine import RedisFacts
from agentq.adapters.redis.nudges import Leader
from agentq.adapters.sql import examine as sql_examine
from agentq.adapters.sql.examine import PostgresqlFacts, SqliteFacts, Standby
from agentq.adapters.worker_facts import WorkerFacts, as_message, facts_from
from agentq.checks.database import judge_database
from agentq.checks.deployment import Waiting, judge_agents, judge_dead_letters, judge_keeper, judge_queues
from agentq.checks.finding import Finding, Level, refusals, warnings
from agentq.checks.notifications import judge_notifications
from agentq.checks.outcomes import judge_outcomes
from agentq.checks.redis import judge_redis
from agentq.checks.settings import judge_flower, judge_settings
from agentq.checks.worker import judge_worker
from agentq.config.settings import Settings
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetter, DeadLetterReason
from agentq.ports.runs import ServedAgent

POSTGRESQL = PostgresqlFacts(version="18.1", place="db")
SQLITE = SqliteFacts(version="3.50", file=Path("/data/agentq.db"), filesystem="ext4")
REDIS = RedisFacts(product="Valkey", version="9.1", place="broker:6379/0")
SETTINGS = Settings()
WORKER = WorkerFacts(name="tools@here", queues=("agentq.control", "agentq.tools"), writers=("refund",))
LAGGING = Standby(name="second", sync_state="async", lag_seconds=3.2)

REFUSED = "refused"  # An error that no worker starts on.


def verdict(findings: Iterable[Finding]) -> str:
    """The worst of them."""
    found = list(findings)
    if refusals(found):
        return REFUSED
    return max((finding.level for finding in found), key=list(Level).index).value


def the_worst(findings: Iterable[Finding]) -> Finding:
    return max(findings, key=lambda finding: (list(Level).index(finding.level), finding.breaks_promise))


class TestPostgresql:
    @pytest.mark.parametrize(
        ("changes", "expected", "says"),
        [
            ({}, "ok", ""),
            ({"has_fsync": False}, REFUSED, "fsync is off"),
            ({"synchronous_commit": "off"}, REFUSED, "synchronous_commit is off on agentq's own connections"),
            ({"synchronous_commit": "remote_apply"}, "ok", ""),
            ({"synchronous_commit_default": "off"}, "warning", "synchronous_commit is off for this database or user"),
            ({"synchronous_commit_default": "local"}, "ok", ""),
            ({"synchronous_commit_default": None}, "note", "can't tell"),
            ({"has_full_page_writes": False}, "warning", "full_page_writes is off"),
            ({"unlogged_tables": ("runs",)}, REFUSED, "tables aren't logged: runs"),
            ({"is_replica": True, "is_read_only": True}, REFUSED, "is a replica"),
            ({"is_read_only": True}, REFUSED, "read-only"),
            ({"isolation": "repeatable read"}, REFUSED, "transactions are repeatable read"),
            ({"lock_timeout": "0"}, "warning", "no timeouts"),
            ({"standbys": (LAGGING,)}, "warning", "second (3.2 s behind): none is synchronous"),
            ({"standbys": (LAGGING, replace(LAGGING, sync_state="sync"))}, "ok", ""),
            ({"standbys": (replace(LAGGING, sync_state="quorum"),)}, "ok", ""),
            ({"standbys": (replace(LAGGING, sync_state=None),)}, "warning", "none is synchronous"),
            (
                {"standbys": (replace(LAGGING, sync_state=None),), "synchronous_standby_names": "*"},
                "note",
                "can't tell which are synchronous",
            ),
            ({"synchronous_standby_names": "*"}, "warning", "none is connected"),
            ({"seconds_ahead": 90.0}, "note", "90.0 s ahead of this machine's"),
            ({"seconds_ahead": -90.0}, "note", "90.0 s behind this machine's"),
        ],
    )
    def test_it_must_keep_what_it_commits(self, changes: dict[str, Any], expected: str, says: str) -> None:
        """A fence that the database forgets is a write that runs twice."""
        findings = list(judge_database(replace(POSTGRESQL, **changes)))
        assert verdict(findings) == expected
        assert says in the_worst(findings).line

    def test_all_that_is_wrong_is_said_at_once(self) -> None:
        """Whoever mends one thing at a time restarts a server for each."""
        wrong = replace(POSTGRESQL, has_fsync=False, has_full_page_writes=False, unlogged_tables=("runs",))
        assert len([finding for finding in judge_database(wrong) if finding.level is not Level.OK]) == 3


class TestSqlite:
    @pytest.mark.parametrize(
        ("changes", "expected", "says"),
        [
            ({}, "ok", ""),
            ({"synchronous": 3}, "ok", ""),
            ({"filesystem": "nfs4"}, REFUSED, "on a network file system (nfs4)"),
            ({"filesystem": "smbfs"}, REFUSED, "on a network file system (smbfs)"),
            ({"filesystem": "fuse.sshfs"}, REFUSED, "on a network file system (fuse.sshfs)"),
            ({"filesystem": "virtiofs"}, "warning", "shares with its host"),
            ({"filesystem": "tmpfs"}, "warning", "in memory"),
            ({"filesystem": "overlay"}, "ok", ""),
            ({"filesystem": None}, "note", "can't tell"),
            ({"synchronous": 1}, REFUSED, "synchronous 1"),
            ({"journal_mode": "delete"}, REFUSED, "journal_mode delete"),
        ],
    )
    def test_it_must_lock_and_keep(self, changes: dict[str, Any], expected: str, says: str) -> None:
        """Its locks and its log work on a local disk alone."""
        findings = list(judge_database(replace(SQLITE, **changes)))
        assert verdict(findings) == expected
        assert says in the_worst(findings).line


class TestRedis:
    @pytest.mark.parametrize(
        ("changes", "expected", "says"),
        [
            ({}, "ok", ""),
            ({"is_cluster": True}, REFUSED, "it is a cluster"),
            ({"is_replica": True}, REFUSED, "it is a replica"),
            ({"commands_version": "6.0.16"}, REFUSED, "as old as Redis 6.0.16"),
            ({"commands_version": "6.2.0"}, "ok", ""),
            ({"eviction_policy": "allkeys-lru", "memory_max_bytes": 1}, REFUSED, "drops keys when it is full"),
            ({"eviction_policy": "volatile-ttl"}, REFUSED, "drops keys once it has a memory limit"),
            ({"eviction_policy": None}, "note", "can't tell whether it drops keys"),
            ({"memory_max_bytes": 100, "memory_used_bytes": 95}, "warning", "95% of its memory is used"),
            ({"memory_max_bytes": 100, "memory_used_bytes": 60}, "ok", ""),
            ({"has_append_only_file": False}, "warning", "no append-only file, and no snapshots"),
            ({"has_append_only_file": False, "snapshots": "3600 1"}, "warning", "only snapshots now and then"),
            ({"has_append_only_file": False, "snapshots": None}, "warning", "can't tell about snapshots"),
            ({"has_append_only_file": None}, "note", "can't tell whether it keeps its keys"),
            ({"has_write_error": True}, "warning", "last write to disk failed"),
            ({"replicas": 1}, "note", "1 follow it"),
            ({"seconds_ahead": 30.0}, "note", "30.0 s ahead"),
        ],
    )
    def test_a_broker_must_keep_every_key(self, changes: dict[str, Any], expected: str, says: str) -> None:
        """What it forgets costs time; what it evicts it forgets when time is short."""
        findings = list(judge_redis("broker", replace(REDIS, **changes), holds_messages=True))
        assert verdict(findings) == expected
        assert says in the_worst(findings).line

    def test_leases_alone_may_be_forgotten_by_a_restart(self) -> None:
        """Only time is lost by it."""
        forgetful = replace(REDIS, has_append_only_file=False)
        assert verdict(judge_redis("leases", forgetful, holds_messages=False)) == "note"


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "tool_deadlines", "expected", "says"),
        [
            ({}, {}, "ok", ""),
            ({"visibility_timeout_seconds": 30.0}, {}, "error", "not longer than the longest operation deadline, 30 s"),
            ({}, {"export": 4000.0}, "error", "(tool 'export')"),
            ({}, {"export": 10.0}, "ok", ""),
            ({"visibility_timeout_seconds": 100.0}, {}, "warning", "a step may take 180 s"),
            ({"model_timeout_seconds": 4000.0, "stop_grace_seconds": 5000.0}, {}, "warning", "a step may take 4060 s"),
            ({"stop_grace_seconds": 60.0}, {}, "warning", "may need 190 s (tools 115 s, model 190 s)"),
            ({}, {"export": 200.0}, "warning", "may need 285 s (tools 285 s, model 190 s)"),
            ({"lease_seconds": 2.0}, {}, "warning", "it is 2 s"),
            ({"lease_seconds": 600.0}, {}, "note", "it is 600 s"),
            ({"lease_seconds": 60.0}, {}, "ok", ""),
            ({"keeper_interval_seconds": 20.0}, {}, "warning", "longer than a lease"),
            ({"keeper_beside_worker": False}, {}, "note", "workers bring no keeper"),
        ],
    )
    def test_durations_must_fit_together(
        self, changes: dict[str, Any], tool_deadlines: dict[str, float], expected: str, says: str
    ) -> None:
        """Each is sensible alone. Safety rests on none of them, so a worker starts, and warns."""
        findings = list(judge_settings(replace(SETTINGS, **changes), tool_deadlines))
        assert verdict(findings) == expected
        assert says in the_worst(findings).line

    @pytest.mark.parametrize(
        ("changes", "environ", "expected"),
        [
            ({}, {}, "ok"),
            ({"flower_address": "0.0.0.0"}, {}, "error"),
            ({"flower_address": "0.0.0.0", "flower_basic_auth": "ann:secret"}, {}, "ok"),
            ({"flower_basic_auth": "secret"}, {}, "error"),
            ({}, {"FLOWER_ADDRESS": "0.0.0.0"}, "error"),
            ({}, {"FLOWER_ADDRESS": "0.0.0.0", "FLOWER_BASIC_AUTH": "ann:secret"}, "ok"),
            ({"flower_read_only": False}, {}, "warning"),
        ],
    )
    def test_flower_must_be_closed(self, changes: dict[str, Any], environ: Mapping[str, str], expected: str) -> None:
        """It shows what agents do, and can end a write that is under way."""
        finding = judge_flower(replace(SETTINGS, **changes), environ)
        assert finding.level.value == expected
        assert "secret" not in finding.line


class TestWorker:
    @pytest.mark.parametrize(
        ("changes", "expected", "says"),
        [
            ({}, "ok", "prefork x 1, serves agentq.control, agentq.tools"),
            ({"can_end_calls": False, "pool": "threads"}, REFUSED, "serve agentq.tools with --pool prefork"),
            ({"can_end_calls": False, "queues": ("agentq.isolated",)}, REFUSED, "'refund' writes"),
            ({"can_end_calls": False, "writers": ()}, "ok", ""),
            ({"can_end_calls": False, "queues": ("agentq.model",)}, "ok", ""),
            ({"queues": ("agentq.isolated",), "concurrency": 2}, "warning", "2 at a time"),
            ({"queues": ("agentq.isolated", "agentq.tools")}, "warning", "beside 1 other queues"),
            ({"queues": ("agentq.isolated",)}, "ok", ""),
            ({"acks_late": False}, REFUSED, "acknowledged before they are worked on"),
            ({"acks_failures": False}, "warning", "isn't acknowledged"),
            ({"repeats_lost_tasks": True}, "warning", "delivered again by the broker"),
            ({"ends_tasks_on_connection_loss": True}, REFUSED, "ended when the broker's connection breaks"),
            ({"soft_time_limit_seconds": 100.0}, REFUSED, "a soft time limit of 100 s"),
            ({"time_limit_seconds": 100.0}, "warning", "a model turn may take 180 s"),
            ({"time_limit_seconds": 1000.0}, "ok", ""),
            ({"soft_shutdown_seconds": 10.0}, "warning", "soft shutdown of 10 s"),
            ({"prefetch_multiplier": 4}, "warning", "prefetch multiplier 4"),
            ({"has_prefetch_disabled": False}, "warning", "no slot for"),
            ({"visibility_timeout_seconds": 60}, "warning", "its visibility timeout is 60 s, not 3600 s"),
            ({"visibility_timeout_seconds": None}, "warning", "its visibility timeout is the default"),
            ({"unacked_key": None}, "warning", "another program's visibility timeout"),
            ({"has_result_backend": True}, "warning", "it has a result backend"),
            ({"reads_only_json": False}, "warning", "more than JSON"),
            ({"is_told": False}, "warning", "doesn't say how it works"),
        ],
    )
    def test_celery_must_work_as_it_was_set(self, changes: dict[str, Any], expected: str, says: str) -> None:
        """A configuration of one's own, a command line, a variable: each can take a promise back unseen."""
        findings = list(judge_worker(replace(WORKER, **changes), SETTINGS))
        assert verdict(findings) == expected
        assert says in the_worst(findings).line

    def test_a_worker_is_judged_by_the_names_of_its_own_deployment(self) -> None:
        """Its queues may have another prefix."""
        other = replace(WORKER, can_end_calls=False, queues=("shop.tools",), unacked_key="shop.unacked")
        assert verdict(judge_worker(other, replace(SETTINGS, key_prefix="shop"))) == REFUSED

    def test_what_it_tells_survives_the_way(self) -> None:
        """Over the broker it is JSON, and the other side may be of another version."""
        message = as_message(WORKER)
        told = {key: list(value) if isinstance(value, tuple) else value for key, value in message.items()}
        assert facts_from("tools@here", told) == WORKER
        assert facts_from("tools@here", {**told, "of_the_next_version": 1}) == WORKER
        assert facts_from("old@here", {"error": "KeyError('agentq_facts')"}).is_told is False


class TestOutcomes:
    FACTS = OutcomeFacts(folder=Path("/data/outcomes"), free_bytes=10**9, filesystem="ext4")

    @pytest.mark.parametrize(
        ("changes", "expected", "says"),
        [
            ({}, "ok", ""),
            ({"waiting": 1, "oldest_seconds": 5.0}, "note", "1 wait to be recorded"),
            ({"waiting": 2, "oldest_seconds": 90.0}, "warning", "2 wait to be recorded, the oldest for 90 s"),
            ({"rejected": 1}, "warning", "1 were set aside"),
            ({"foreign": 1}, "warning", "1 are of other deployments"),
            ({"is_writable": False}, "warning", "can't be written to"),
            ({"free_bytes": 10**6}, "warning", "is full"),
            ({"filesystem": "tmpfs"}, "note", "in memory"),
        ],
    )
    def test_a_known_outcome_must_not_be_forgotten(self, changes: dict[str, Any], expected: str, says: str) -> None:
        """It lies there because the database didn't take it."""
        findings = list(judge_outcomes(replace(self.FACTS, **changes)))
        assert verdict(findings) == expected
        assert says in the_worst(findings).line

    def test_files_are_counted_by_whose_they_are(self, tmp_path: Path) -> None:
        """Looking sets none of them aside, and makes no folder."""
        assert examine_outcomes(tmp_path / "not" / "yet", "mine").waiting == 0
        for name in ("mine/a.json", "mine/b.json", "mine/c.json.rejected", "mine/d.unfinished", "theirs/e.json"):
            path = tmp_path / "outcomes" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("no JSON")
        facts = examine_outcomes(tmp_path, "mine")
        assert (facts.waiting, facts.rejected, facts.foreign, facts.is_writable) == (2, 1, 1, True)
        assert sorted(path.name for path in tmp_path.rglob("*.*")) == [
            *("a.json", "b.json", "c.json.rejected", "d.unfinished", "e.json")
        ]


class TestDeployment:
    LENGTHS: Mapping[str, int] = {"agentq.model": 7}

    @pytest.mark.parametrize(
        ("queues", "missing"),
        [
            (("model", "tools", "isolated", "control"), set()),
            (("model", "tools", "control"), {"queue agentq.isolated"}),
            (("isolated",), {"queue agentq.model", "queue agentq.tools", "queue agentq.control"}),
        ],
    )
    def test_every_queue_needs_a_worker(self, queues: tuple[str, ...], missing: set[str]) -> None:
        """What lies in a queue that nobody reads waits for ever, and looks like work."""
        workers = [replace(WORKER, queues=(SETTINGS.queue(name),)) for name in queues]
        assert {finding.subject for finding in judge_queues(workers, self.LENGTHS, SETTINGS)} == missing

    def test_no_worker_at_all_is_one_finding(self) -> None:
        """Not one for each queue."""
        [finding] = judge_queues([], self.LENGTHS, SETTINGS)
        assert (finding.level, finding.found) == (Level.WARNING, "none answers, 7 messages wait")

    @pytest.mark.parametrize(
        ("leader", "has_active_runs", "expected", "says"),
        [
            (Leader(owner="box/1a2b/77-123/ffee", seconds=61.2), True, "ok", "process 77 on box leads, for 61 s"),
            (Leader(owner="box/1a2b/77-123/ffee", seconds=None), True, "ok", "process 77 on box leads"),
            (None, False, "warning", "none leads"),
            (None, True, "error", "none leads, and runs are under way"),
        ],
    )
    def test_a_keeper_must_lead(self, leader: Leader | None, has_active_runs: bool, expected: str, says: str) -> None:
        """Without one a lost step stays lost."""
        finding = judge_keeper(leader, has_active_runs=has_active_runs)
        assert (finding.level.value, finding.found) == (expected, says)

    def test_agents_that_nobody_serves(self) -> None:
        """Their runs wait; an agent of last year, which nobody asks for, is no trouble."""
        agents = {
            name: ServedAgent(name=name, input_bytes_max=1, seen_seconds=seconds)
            for name, seconds in {"fresh": 3.0, "wanted": 7300.0, "old": 9e6}.items()
        }
        waiting = self.waiting(agents=agents, agents_with_runs=frozenset({"wanted"}))
        assert [(finding.subject, finding.level.value, finding.found) for finding in judge_agents(waiting)] == [
            ("agent fresh", "ok", "a worker was seen 3 s ago"),
            ("agent wanted", "warning", "a worker was seen 2 hours ago"),
            ("agent old", "note", "a worker was seen 104 days ago"),
        ]
        assert verdict(judge_agents(self.waiting())) == "warning"

    def test_dead_letters_and_above_all_contradictions(self) -> None:
        """A contradiction is a write that may have run twice."""
        letter = DeadLetter(
            run_id="r",
            number=1,
            reason=DeadLetterReason.NOT_RETRYABLE,
            failure_class=FailureClass.UNKNOWN,
            error="no reply",
            outcome_unknown=True,
            created_at=datetime(2026, 1, 2, tzinfo=UTC),
        )
        assert judge_dead_letters(self.waiting()).level is Level.OK
        one = judge_dead_letters(self.waiting(dead_letters=(letter,)))
        assert (one.level, one.found) == (Level.WARNING, "1 wait for a person, 1 with an unknown write")
        two = judge_dead_letters(self.waiting(dead_letters=(letter, replace(letter, has_contradiction=True))))
        assert two.found == "2 or more wait for a person, 2 with an unknown write, 1 with a contradiction"
        assert "may have run twice" in two.why

    @staticmethod
    def waiting(**changes: Any) -> Waiting:
        nothing = Waiting(agents={}, agents_with_runs=frozenset(), dead_letters=(), dead_letters_max=2)
        return replace(nothing, **changes)


class TestFinding:
    def test_a_line_says_it_all(self) -> None:
        """It is all that a person sees of a worker that refused to start."""
        finding = Finding("broker", Level.ERROR, "it is a cluster", "keys lie apart", "use one server")
        assert finding.line == "it is a cluster: keys lie apart; use one server"
        assert replace(finding, why="").line == "it is a cluster: use one server"
        assert replace(finding, why="", fix="").line == "it is a cluster"

    def test_a_worker_warns_of_errors_that_it_starts_on(self) -> None:
        """They are no less wrong for that."""
        findings = [Finding("a", level, "x") for level in Level]
        assert [finding.level for finding in warnings(findings)] == [Level.WARNING, Level.ERROR]
        assert refusals(findings) == []


class TestPlaces:
    @pytest.mark.parametrize(
        ("url", "place"),
        [
            ("postgresql://ann:secret@db:5433/shop", "db:5433, database shop"),
            ("postgresql://ann@/shop?host=/run/pg&password=secret", "/run/pg, database shop"),
            ("postgresql:///", "the local socket, database of the user"),
            ("sqlite:////data/agentq.db", "/data/agentq.db"),
        ],
    )
    def test_a_database_is_named_without_secrets(self, url: str, place: str) -> None:
        """What the doctor says ends in tickets and chats."""
        assert sql_examine.place_of(url) == place

    @pytest.mark.parametrize(
        ("url", "place"),
        [
            ("redis://:secret@broker/2", "broker:6379/2"),
            ("rediss://ann:secret@broker:7000", "broker:7000/0"),
            ("redis+socket:///run/valkey.sock", "/run/valkey.sock"),
            ("sentinel://:secret@one;sentinel://two?master_name=mine", "mine of one:26379, two:26379"),
        ],
    )
    def test_a_redis_is_named_without_secrets(self, url: str, place: str) -> None:
        """The same."""
        assert redis_examine.place_of(url) == place


class TestFilesystem:
    LINUX = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:26 / /mnt/our\\040files rw shared:2 - nfs4 server:/files rw,vers=4.2\n"
        "31 22 0:27 / /srv rw - tmpfs tmpfs rw\n"
        "32 22 8:2 / /srv rw - xfs /dev/sdb1 rw\n"
    )
    MACOS = (
        "/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)\n"
        "//ann@server/files on /Volumes/our files (smbfs, nodev, nosuid)\n"
    )

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/opt/shop", "ext4"),
            ("/mnt/our files/shop", "nfs4"),
            ("/mnt/our files", "nfs4"),
            ("/mnt/our filesystem", "ext4"),
            ("/srv/agentq", "xfs"),
        ],
    )
    def test_the_deepest_mount_counts(self, path: str, kind: str) -> None:
        """Of two at one place, the one that hides the other."""
        assert filesystem_in(mounts_of_linux(self.LINUX), Path(path)) == kind

    def test_macos_writes_it_another_way(self) -> None:
        """Its list is for people."""
        mounts = mounts_of_macos(self.MACOS)
        assert filesystem_in(mounts, Path("/Volumes/our files/shop")) == "smbfs"
        assert filesystem_in(mounts, Path("/Applications")) == "apfs"
        assert filesystem_in([], Path("/")) is None


class TestNotifications:
    @pytest.mark.parametrize(
        ("changes", "levels", "says"),
        [
            ({}, [], ""),
            ({"notify_task": "ops.page"}, ["ok"], "task ops.page in queue celery"),
            ({"notify_command": "page ann"}, ["ok"], "by page"),
            ({"notify_command": "paeg ann"}, ["warning"], "no program 'paeg' here"),
            ({"notify_task": "ops.page", "notify_command": "paeg ann"}, ["ok", "warning"], "no program 'paeg' here"),
        ],
    )
    def test_a_program_that_is_not_there_is_said(self, changes: dict[str, Any], levels: list[str], says: str) -> None:
        """Before the night in which it was to wake somebody; a keeper keeps all the same."""
        programs = {"page": "/bin/page"}
        findings = list(judge_notifications(replace(SETTINGS, **changes), which=programs.get))
        assert [finding.level.value for finding in findings] == levels
        assert says in (findings[-1].line if findings else "")
        assert refusals(findings) == []
