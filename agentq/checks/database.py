"""Judge a database: whether what it commits stays, and is what agentq believes that it is."""

from collections.abc import Iterator
from typing import assert_never

from agentq.adapters.sql.examine import PostgresqlFacts, SqliteFacts
from agentq.checks.finding import Finding, broken_promise, note, ok, warning

CLOCK_SECONDS_MAX = 2.0  # A second of it is a busy machine.
SQLITE_FULL = 2
SURE_COMMITS = ("on", "remote_apply", "remote_write", "local")  # Each waits for the server's own disk.

# WAL needs memory that all processes share, and locks that hold: neither crosses a network.
NETWORK_FILESYSTEMS = frozenset({
    "afpfs", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs",
    "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs", "webdav",
})  # fmt: skip
SHARED_FILESYSTEMS = frozenset({"9p", "fuse.grpcfuse", "fuse.osxfs", "prl_fs", "vboxsf", "virtiofs", "vmhgfs"})
FLEETING_FILESYSTEMS = frozenset({"ramfs", "tmpfs"})


def judge_database(facts: PostgresqlFacts | SqliteFacts) -> Iterator[Finding]:
    """What is wrong with it, after what it is."""
    match facts:
        case PostgresqlFacts():
            yield ok("database", f"PostgreSQL {facts.version} at {facts.place}")
            yield from _judge_role(facts)
            yield from _judge_durability(facts)
            yield from _judge_session(facts)
            yield from _judge_standbys(facts)
            yield from judge_clock("database", facts.seconds_ahead)
        case SqliteFacts():
            yield ok("database", f"SQLite {facts.version} in {facts.file}")
            yield from _judge_sqlite(facts)
        case _:
            assert_never(facts)


def judge_clock(whose: str, seconds_ahead: float) -> Iterator[Finding]:
    """Nothing depends on it: deadlines are the database's time, leases Redis's, and only durations cross."""
    if abs(seconds_ahead) > CLOCK_SECONDS_MAX:
        direction = "ahead of" if seconds_ahead > 0 else "behind"
        yield note(
            f"{whose} clock",
            f"it is {abs(seconds_ahead):.1f} s {direction} this machine's",
            why="no deadline or lease depends on it, but times in logs and lists don't agree",
            fix="let all machines keep their time by NTP",
        )


def _judge_role(facts: PostgresqlFacts) -> Iterator[Finding]:
    if facts.is_replica:
        yield broken_promise(
            "database role",
            "this server is a replica",
            why="it can't be written to, and shows the past",
            fix="let AGENTQ_DATABASE_URL name the primary (target_session_attrs=read-write finds it among several)",
        )
    elif facts.is_read_only:
        yield broken_promise(
            "database role",
            "transactions are read-only here",
            why="no run can be recorded",
            fix="set default_transaction_read_only = off for this database and user",
        )


def _judge_durability(facts: PostgresqlFacts) -> Iterator[Finding]:
    findings = [*_judge_disk(facts), *_judge_synchronous_commit(facts)]
    yield from findings or [ok("durability", "what is committed stays")]


def _judge_disk(facts: PostgresqlFacts) -> Iterator[Finding]:
    if not facts.has_fsync:
        yield broken_promise(
            "durability",
            "fsync is off",
            why="a crash of the server's machine can lose a fence, and its write may run twice",
            fix="set fsync = on",
        )
    if not facts.has_full_page_writes:
        yield warning(
            "durability",
            "full_page_writes is off",
            why="a crash can tear a page that was being written, with runs that were recorded long before",
            fix="set full_page_writes = on, unless the file system writes pages whole, as ZFS does",
        )
    if facts.unlogged_tables:
        yield broken_promise(
            "durability",
            f"tables aren't logged: {', '.join(facts.unlogged_tables)}",
            why="they are empty after a crash of the server, fences and all",
            fix=f"ALTER TABLE {facts.unlogged_tables[0]} SET LOGGED",
        )


def _judge_synchronous_commit(facts: PostgresqlFacts) -> Iterator[Finding]:
    if facts.synchronous_commit not in SURE_COMMITS:
        yield broken_promise(
            "durability",
            f"synchronous_commit is {facts.synchronous_commit} on agentq's own connections",
            why="a crash can lose the last commits, a fence among them, and its write may run twice",
            fix="something between (a pooler?) drops what agentq asks for: let it pass `options`, or set "
            "synchronous_commit = on for the database",
        )
    elif facts.synchronous_commit_default is None:
        yield note("durability", "can't tell what synchronous_commit is for other programs")
    elif facts.synchronous_commit_default not in SURE_COMMITS:
        yield warning(
            "durability",
            f"synchronous_commit is {facts.synchronous_commit_default} for this database or user",
            why="agentq's own connections turn it on, so its fences are safe; whatever else decides here isn't, nor "
            "would agentq be behind a pooler that drops what it asks for",
            fix="set synchronous_commit = on for the database and the user",
        )


def _judge_session(facts: PostgresqlFacts) -> Iterator[Finding]:
    fix = "something between (a pooler?) drops what agentq asks for: let it pass `options`, or connect directly"
    if facts.isolation != "read committed":
        yield broken_promise(
            "database session",
            f"transactions are {facts.isolation}",
            why="after it waited for a run's lock a statement must see the present, or it decides on the past",
            fix=fix,
        )
    if facts.lock_timeout == "0":
        yield warning(
            "database session",
            "there are no timeouts for locks and statements",
            why="a statement of a dead client that waits for a lock is carried out later",
            fix=fix,
        )


def _judge_standbys(facts: PostgresqlFacts) -> Iterator[Finding]:
    if not facts.standbys:
        if facts.synchronous_standby_names:
            yield warning(
                "replicas",
                f"none is connected, and commits wait for {facts.synchronous_standby_names!r}",
                why="nothing can be recorded until it is back",
                fix="bring the standby back, or take it out of synchronous_standby_names",
            )
        return
    names = ", ".join(_described(standby.name, standby.lag_seconds) for standby in facts.standbys)
    states = {standby.sync_state for standby in facts.standbys}
    if states & {"sync", "quorum"}:
        yield ok("replicas", f"{names}: commits wait for them")
    elif None in states and facts.synchronous_standby_names:
        yield note("replicas", f"{names}: can't tell which are synchronous", fix="grant pg_monitor to this user")
    else:
        yield warning(
            "replicas",
            f"{names}: none is synchronous",
            why="a failover to one that lags forgets the last commits, a fence among them, and its write may run twice",
            fix="set synchronous_standby_names",
        )


def _described(name: str, lag_seconds: float | None) -> str:
    return f"{name or 'a replica'}{f' ({lag_seconds:.1f} s behind)' if lag_seconds else ''}"


def _judge_sqlite(facts: SqliteFacts) -> Iterator[Finding]:
    findings = [*_judge_filesystem(facts), *_judge_pragmas(facts)]
    yield from findings or [ok("durability", "what is committed stays")]


def _judge_filesystem(facts: SqliteFacts) -> Iterator[Finding]:
    if facts.filesystem in NETWORK_FILESYSTEMS:
        yield broken_promise(
            "database disk",
            f"SQLite's file {facts.file} is on a network file system ({facts.filesystem})",
            why="two processes may both believe that they hold a lock there",
            fix="put it on a local disk, or set AGENTQ_DATABASE_URL to a PostgreSQL",
        )
    elif facts.filesystem in SHARED_FILESYSTEMS:
        yield warning(
            "database disk",
            f"SQLite's file is on a folder that a virtual machine shares with its host ({facts.filesystem})",
            why="locks hold only among processes on one side of it",
            fix="open it from one side alone, or put it on a volume",
        )
    elif facts.filesystem in FLEETING_FILESYSTEMS:
        yield warning(
            "database disk",
            f"SQLite's file is in memory ({facts.filesystem})",
            why="a restart of the machine forgets all runs, and writes that were under way",
            fix="put it on a disk",
        )
    elif facts.filesystem is None:
        yield note("database disk", "can't tell whether SQLite's file is on a local disk", fix="make sure that it is")


def _judge_pragmas(facts: SqliteFacts) -> Iterator[Finding]:
    if facts.synchronous < SQLITE_FULL or facts.journal_mode != "wal":
        yield broken_promise(
            "durability",
            f"SQLite doesn't take what agentq asks for (journal_mode {facts.journal_mode}, synchronous "
            f"{facts.synchronous})",
            why="a crash can lose a fence, and its write may run twice",
            fix="put its file on a local disk, where write-ahead logs work",
        )
