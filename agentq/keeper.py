"""The keeper as a process: `python -m agentq.keeper`, or `agentq keeper`."""

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

from agentq.bootstrap import Wiring
from agentq.checks.finding import warnings
from agentq.checks.notifications import judge_notifications
from agentq.config.settings import Settings, load_settings
from agentq.domain.errors import AgentqError, LeasesUnavailableError

logger = logging.getLogger("agentq.keeper")  # Also when it is run as a module.
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def keep(settings: Settings, serves: Mapping[str, int]) -> None:
    """Keep until SIGTERM or SIGINT. Raises AgentqError when it must not start. It imports no user code.

    `serves`: the agents of the worker that it runs beside, with the largest input of each.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    for finding in warnings(judge_notifications(settings)):
        logger.warning("%s: %s", finding.subject, finding.line)
    with Wiring(settings) as wiring:
        wiring.check_schema()
        with suppress(LeasesUnavailableError):  # It is waited for, and marked by the first worker.
            wiring.claim_redis()
        wiring.keeper(serves).keep(stop)


def main() -> int:
    """The exit code: 2 when it must not start."""
    parser = argparse.ArgumentParser(prog="agentq.keeper")
    parser.add_argument("--serves", type=json.loads, default={}, help="JSON: agents served beside it, input limits")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        keep(load_settings(), arguments.serves)
    except AgentqError as error:
        sys.stderr.write(f"agentq: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
