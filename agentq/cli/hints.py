"""The next useful commands, where they follow from what waits for a person."""

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentq.cli.output import View, say, suggest
from agentq.domain.model import RunMode

if TYPE_CHECKING:
    from agentq.client import AgentQ
    from agentq.domain.model import DeadLetterGroup

RATE = 50  # Runs a second: gentle with a service that has just come back.
NAMED_MAX = 10  # Runs that one suggested command names.


def suggest_about_groups(client: "AgentQ", groups: Sequence[View]) -> None:
    """Where most is in doubt: keep more of it from happening, and look at one. Then whatever is safe."""
    urgent = max(groups, key=lambda group: (group["contradicted_count"], group["unknown_count"]))
    tool = urgent["tool"]
    if urgent["unknown_count"] and tool and not _is_paused(client, tool):
        suggest(f"agentq tools pause {shlex.quote(tool)}")
    suggest(f"agentq dead-letters plan {urgent['newest_run_id']}")
    if urgent["unknown_count"]:
        suggest(f"agentq dead-letters list --each --outcome-unknown {_like(urgent)}")
    safe = max(groups, key=lambda group: group["count"] - group["unknown_count"])
    if safe["unknown_count"] < safe["count"]:
        suggest(f"agentq dead-letters replay {_like(safe)} --dry-run")


def suggest_about_each(views: Sequence[View]) -> None:
    """Look at the first. Where nothing is in doubt, replay; several calls of one tool that are take one decision."""
    suggest(f"agentq dead-letters show {shlex.quote(views[0]['run_id'])}")
    unknown = [view for view in views if view["outcome_unknown"]]
    same = [view["run_id"] for view in unknown if view["tool"] == unknown[0]["tool"]]
    if not unknown and len(views) <= NAMED_MAX and not any(view["has_contradiction"] for view in views):
        suggest(f"agentq dead-letters replay {shlex.join(view['run_id'] for view in views)}")
    if 1 < len(same) <= NAMED_MAX:
        # Not `--happened`: one result said of several writes would be wrong for most of them.
        suggest(f"agentq dead-letters replay {shlex.join(same)} --did-not-happen --looked-at TIME --reason '...'")


def newest_unknown(client: "AgentQ", tool: str | None, agent: str | None) -> str | None:
    """The run that stopped last over a write of that tool (for that agent) that is in doubt."""
    scope = {name: value for name, value in (("tool", tool), ("agent", agent)) if value is not None}
    return next((letter.run_id for letter in client.dead_letters(**scope, outcome_unknown=True, limit=1)), None)


def suggest_probe(client: "AgentQ", run_id: str, tool: str) -> None:
    """To have the probe asked about that write, and about others of its tool that are in doubt."""
    if client.get(run_id).mode is not RunMode.QUEUED:
        return  # No worker takes it up.
    if client.count_dead_letters(tool=tool, outcome_unknown=True) > 1:
        suggest(f"agentq dead-letters resolve --tool {shlex.quote(tool)} --by-probe --rate {RATE}")
    else:
        suggest(f"agentq dead-letters resolve {shlex.quote(run_id)} --by-probe")


def suggest_after_probe(client: "AgentQ") -> None:
    """What nothing is in doubt about, while workers ask; then what is left, and the pauses that writes may wait for."""
    groups = [group for group in client.dead_letter_groups() if group.unknown_count < group.count]
    if groups:
        safe = max(groups, key=lambda group: group.count - group.unknown_count)
        suggest(f"agentq dead-letters replay {_of_tool(safe)} --outcome-known --rate {RATE}")
    suggest("agentq dead-letters list")
    say_paused(client)


def suggest_after_replays(client: "AgentQ") -> None:
    """What is left, and the pauses that what was replayed may wait for."""
    if client.count_dead_letters():
        suggest("agentq dead-letters list")
    say_paused(client)


def say_paused(client: "AgentQ") -> None:
    for pause in client.pauses():
        options = scope_options(pause.tool, pause.agent)
        say(f"paused: {options}; its calls wait until it is resumed", style="yellow")
        suggest(f"agentq tools resume {options}")


def after_resume(client: "AgentQ") -> list[str]:
    """What is left; nothing: prove it."""
    return ["agentq dead-letters list" if client.count_dead_letters() else "agentq audit verify"]


def same_command(*, without: str) -> str:
    """The command of this process, without that option."""
    return shlex.join(["agentq", *(argument for argument in sys.argv[1:] if argument != without)])


def scope_options(tool: str | None, agent: str | None) -> str:
    """What names a pause on the command line."""
    if tool is None and agent is None:
        return "--all"
    parts = [shlex.quote(tool)] if tool is not None else []
    return " ".join([*parts, *(["--agent", shlex.quote(agent)] if agent is not None else [])])


def _is_paused(client: "AgentQ", tool: str) -> bool:
    return any(pause.tool in (None, tool) and pause.agent is None for pause in client.pauses())


def _like(group: dict[str, Any]) -> str:
    chosen = f"--fingerprint {group['fingerprint']}"
    return f"--tool {shlex.quote(group['tool'])} {chosen}" if group["tool"] else chosen


def _of_tool(group: "DeadLetterGroup") -> str:
    return f"--tool {shlex.quote(group.tool)}" if group.tool else f"--fingerprint {group.fingerprint}"
