"""Judge a Redis or Valkey: whether it keeps what it is told, and is where it can be written to."""

from collections.abc import Iterator

from agentq.adapters.redis.examine import RedisFacts
from agentq.checks.database import judge_clock
from agentq.checks.finding import Finding, broken_promise, note, ok, warning

COMMANDS_VERSION_MIN = (6, 2)  # LPOP with a count; SET with KEEPTTL is older.
MEMORY_SHARE_MAX = 0.9


def judge_redis(subject: str, facts: RedisFacts, *, holds_messages: bool) -> Iterator[Finding]:
    """What is wrong with it, after what it is. `holds_messages`: it is the broker, not the leases' alone."""
    yield ok(subject, f"{facts.product} {facts.version} at {facts.place}")
    yield from _judge_kind(subject, facts)
    yield from _judge_memory(f"{subject} memory", facts)
    yield from _judge_persistence(f"{subject} persistence", facts, holds_messages)
    if facts.replicas:
        yield note(
            f"{subject} replicas",
            f"{facts.replicas} follow it, as always without waiting",
            why="a failover forgets the last messages and leases, which costs time; writes are safe by their fences",
        )
    yield from judge_clock(subject, facts.seconds_ahead)


def _judge_kind(subject: str, facts: RedisFacts) -> Iterator[Finding]:
    if facts.is_cluster:
        yield broken_promise(
            subject,
            "it is a cluster",
            why="messages and what is unacknowledged of them would lie on different nodes, and can't change together",
            fix="use a single server, or one behind Sentinel",
        )
    if facts.is_replica:
        yield broken_promise(
            subject,
            "it is a replica",
            why="it can't be written to",
            fix="let the URL name the master, or its Sentinels: sentinel://HOST?master_name=NAME",
        )
    if _version(facts.commands_version) < COMMANDS_VERSION_MIN:
        yield broken_promise(
            subject,
            f"it is as old as Redis {facts.commands_version}",
            why="it lacks commands that leases need",
            fix="use Redis 6.2 or later, or Valkey",
        )


def _judge_memory(subject: str, facts: RedisFacts) -> Iterator[Finding]:
    if facts.eviction_policy is None:
        yield note(
            subject,
            "can't tell whether it drops keys when it is full: it doesn't say its maxmemory-policy",
            fix="see that it is noeviction, in the provider's console",
        )
    elif facts.eviction_policy != "noeviction":
        when = "when it is full" if facts.memory_max_bytes else "once it has a memory limit"
        yield broken_promise(
            subject,
            f"this Redis drops keys {when} (maxmemory-policy is {facts.eviction_policy})",
            why="leases and messages among them",
            fix="set maxmemory-policy noeviction",
        )
    elif facts.memory_max_bytes and facts.memory_used_bytes > MEMORY_SHARE_MAX * facts.memory_max_bytes:
        yield warning(
            subject,
            f"{facts.memory_used_bytes / facts.memory_max_bytes:.0%} of its memory is used",
            why="full, it refuses messages and leases: no step starts until there is room",
            fix="give it more, or find out what else lives in it",
        )
    else:
        yield ok(subject, "it keeps every key")


def _judge_persistence(subject: str, facts: RedisFacts, holds_messages: bool) -> Iterator[Finding]:
    if facts.has_write_error:
        yield warning(
            subject,
            "its last write to disk failed",
            why="it may refuse every change, and a restart loses what it holds",
            fix="see its log: is the disk full?",
        )
    elif facts.has_append_only_file is None:
        yield note(
            subject,
            "can't tell whether it keeps its keys over a restart: it doesn't say",
            fix="see that it does, in the provider's console",
        )
    elif facts.has_append_only_file:
        yield ok(subject, "it has an append-only file" + _fsync_text(facts.append_fsync))
    elif holds_messages:
        yield warning(
            subject,
            _without_file(facts.snapshots),
            why="a restart loses messages: runs are found again after a while, but an agentq.enqueue of another "
            "service that isn't in SQL yet is lost",
            fix="set appendonly yes",
        )
    else:
        yield note(subject, _without_file(facts.snapshots), why="after a restart reads wait for one lease time")


def _without_file(snapshots: str | None) -> str:
    match snapshots:
        case None:
            return "it has no append-only file; can't tell about snapshots"
        case "":
            return "it has no append-only file, and no snapshots"
        case _:
            return "it has no append-only file, only snapshots now and then"


def _fsync_text(append_fsync: str | None) -> str:
    return {None: "", "no": ", written when the system likes"}.get(append_fsync, f", written {append_fsync}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
