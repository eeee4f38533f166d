"""Judge the settings: those that contradict each other, and what their durations ask of the platform."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentq.checks.finding import Finding, broken_promise, error, note, ok, warning
from agentq.config.celery import step_limit_seconds
from agentq.config.flower import flower_options
from agentq.config.settings import PREFIX, Settings
from agentq.domain.agents import Registry
from agentq.domain.errors import ConfigurationError

LEASE_SECONDS_MIN = 5.0  # Two answers of a slow Redis, at two seconds each, and a beat between them.
LEASE_SECONDS_LONG = 120.0
STOP_MARGIN_SECONDS = 10.0  # To end the keeper beside the worker.


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """The longest operation deadline, and whose it is."""

    deadline_seconds: float
    whose: str


def tool_deadlines(registry: Registry) -> dict[str, float]:
    """Those that the tools of these agents declare, by the tool's name."""
    return {tool.name: tool.deadline_seconds for tool in registry.tools() if tool.deadline_seconds}


def longest_deadline(settings: Settings, tool_deadlines: Mapping[str, float]) -> Longest:
    """`tool_deadlines`: as above."""
    longest = Longest(deadline_seconds=settings.operation_deadline_seconds, whose=f"{PREFIX}OPERATION_DEADLINE_SECONDS")
    for name, seconds in sorted(tool_deadlines.items()):
        if seconds > longest.deadline_seconds:
            longest = Longest(deadline_seconds=seconds, whose=f"tool {name!r}")
    return longest


def judge_settings(settings: Settings, tool_deadlines: Mapping[str, float]) -> Iterator[Finding]:
    """What doesn't fit together, and what does."""
    longest = longest_deadline(settings, tool_deadlines)
    yield _judge_visibility_timeout(settings, longest)
    yield _judge_grace(settings, longest)
    yield _judge_lease(settings)
    yield _judge_keeper_interval(settings)
    if not settings.keeper_beside_worker:
        yield note(
            "keeper beside worker",
            "workers bring no keeper",
            why="without one nothing is recovered, retried or taken up again",
            fix="run agentq keeper as a service of its own",
        )


def judge_flower(settings: Settings, environ: Mapping[str, str]) -> Finding:
    """`environ`: Flower has variables of its own, which come first."""
    given = {name: environ.get(f"FLOWER_{name.upper()}") for name in ("address", "basic_auth", "auth")}
    address = given["address"] or settings.flower_address
    try:
        flower_options(settings, given=given)
    except ConfigurationError as refused:
        return error("flower", str(refused), why="it shows arguments, and can end tasks")
    if not settings.flower_read_only:
        return warning(
            "flower",
            "Flower may end tasks",
            why="ending one in a browser makes an unknown write of it",
            fix=f"set {PREFIX}FLOWER_READ_ONLY=true",
        )
    return ok("flower", f"closed: it listens on {address}, and only shows")


def step_seconds_max(settings: Settings, longest: Longest) -> float:
    """How long a step may occupy a worker, to the end of the time in which it is recorded."""
    model_seconds = settings.model_timeout_seconds + settings.settle_patience_seconds
    return max(step_limit_seconds(settings, longest.deadline_seconds), model_seconds)


def _judge_visibility_timeout(settings: Settings, longest: Longest) -> Finding:
    timeout, needed = settings.visibility_timeout_seconds, step_seconds_max(settings, longest)
    fix = f"set {PREFIX}VISIBILITY_TIMEOUT_SECONDS to more than {needed:g}"
    if timeout <= longest.deadline_seconds:
        return error(
            "visibility timeout",
            f"it is {timeout:g} s, not longer than the longest operation deadline, {longest.deadline_seconds:g} s "
            f"({longest.whose})",
            why="the broker delivers the message of a call that runs again and again, and leases alone turn it away",
            fix=fix,
        )
    if timeout <= needed:
        return warning(
            "visibility timeout",
            f"it is {timeout:g} s, and a step may take {needed:g} s",
            why="the broker delivers the message of a slow step again; that is turned away, and is only noise",
            fix=fix,
        )
    return ok("visibility timeout", f"{timeout:g} s, longer than any step ({needed:g} s)")


def _judge_grace(settings: Settings, longest: Longest) -> Finding:
    tools = step_limit_seconds(settings, longest.deadline_seconds) + STOP_MARGIN_SECONDS
    model = settings.model_timeout_seconds + settings.settle_patience_seconds + STOP_MARGIN_SECONDS
    needed, grace = max(tools, model), settings.stop_grace_seconds
    if grace < needed:
        return warning(
            "grace period",
            f"it is {grace:g} s, and a worker that stops may need {needed:g} s (tools {tools:g} s, model {model:g} s)",
            why="a worker that is killed in the middle of a call leaves an unknown write for a person",
            fix="let whatever stops workers (compose, Kubernetes, systemd) wait that long, and say so in "
            f"{PREFIX}STOP_GRACE_SECONDS",
        )
    return ok("grace period", f"a worker that stops may need {needed:g} s (tools {tools:g} s, model {model:g} s)")


def _judge_lease(settings: Settings) -> Finding:
    seconds = settings.lease_seconds
    if seconds < LEASE_SECONDS_MIN:
        return warning(
            "lease",
            f"it is {seconds:g} s",
            why="a busy machine or a slow Redis loses it while the work goes on, and reads run twice",
            fix=f"set {PREFIX}LEASE_SECONDS to {LEASE_SECONDS_MIN:g} or more",
        )
    if seconds > LEASE_SECONDS_LONG:
        return note(
            "lease",
            f"it is {seconds:g} s",
            why="so long a step of a worker that died waits before it runs again",
            fix=f"set {PREFIX}LEASE_SECONDS to less: a heartbeat renews it however long a step takes",
        )
    return ok("lease", f"{seconds:g} s")


def _judge_keeper_interval(settings: Settings) -> Finding:
    interval, lease = settings.keeper_interval_seconds, settings.lease_seconds
    if interval > lease:
        return warning(
            "keeper interval",
            f"it is {interval:g} s, longer than a lease, {lease:g} s",
            why="what a worker left, every retry and every delayed run waits for it",
            fix=f"set {PREFIX}KEEPER_INTERVAL_SECONDS to a few seconds",
        )
    return ok("keeper interval", f"{interval:g} s")


def judge_agents_module(problem: str) -> Finding:
    """The agents can't be loaded: `problem` says why."""
    return broken_promise("agents", problem, fix=f"correct the module, or {PREFIX}AGENTS")
