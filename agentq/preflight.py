"""Check, in a process of its own, that a worker may start; register the agents that it serves.

Reads `{agent: input_bytes_max}` as JSON from standard input and prints the deployment's id. Exit code 2 with one line
when the worker must not start.
"""

import json
import sys

from agentq.bootstrap import Wiring
from agentq.config.settings import load_settings
from agentq.domain.errors import AgentqError


def main() -> int:
    """The exit code."""
    try:
        with Wiring(load_settings()) as wiring:
            wiring.check_schema()
            wiring.claim_redis()
            wiring.keeping.see_agents(json.load(sys.stdin))
            sys.stdout.write(f"{wiring.deployment}\n")
    except AgentqError as error:
        sys.stderr.write(f"agentq: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
