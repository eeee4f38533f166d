"""Check, in a process of its own, that a worker may start; register the agents that it serves.

Reads `{agent: input_bytes_max}` as JSON from standard input and prints JSON: the deployment's id, and warnings, a line
each. Exit code 2, with a line on standard error for each thing that forbids it, when the worker must not start.
"""

import json
import sys

from agentq.bootstrap import Wiring
from agentq.checks.finding import refusals, warnings
from agentq.checks.servers import look_at_database, look_at_mark, look_at_outcomes, look_at_redis
from agentq.config.settings import load_settings
from agentq.domain.errors import AgentqError


def main() -> int:
    """The exit code."""
    try:
        with Wiring(load_settings()) as wiring:
            looks = (look_at_database, look_at_redis, look_at_mark, look_at_outcomes)
            findings = [finding for look in looks for finding in look(wiring)]
            refused = [finding.line for finding in refusals(findings)]
            if refused:
                return _refuse(refused)
            wiring.claim_redis()
            wiring.keeping.see_agents(json.load(sys.stdin))
            told = [f"{finding.subject}: {finding.line}" for finding in warnings(findings)]
            json.dump({"deployment": wiring.deployment, "warnings": told}, sys.stdout)
    except AgentqError as error:
        return _refuse([str(error)])
    return 0


def _refuse(lines: list[str]) -> int:
    for line in lines:
        sys.stderr.write(f"agentq: {line}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
