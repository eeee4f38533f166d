"""Tell somebody by a command of their own: JSON on its standard input, no shell, and an end when it takes too long."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentq.adapters.embedded import launch
from agentq.domain.errors import NotToldError


class NotifyCommand:
    """`ports.Channel`. What the command writes on stderr is in the log of whoever runs it; stdout goes nowhere."""

    name = "AGENTQ_NOTIFY_COMMAND"

    def __init__(self, argv: Sequence[str], *, timeout_seconds: float) -> None:
        self._argv = tuple(argv)
        self._timeout_seconds = timeout_seconds

    def tell(self, notification: Mapping[str, Any]) -> None:
        try:
            process = subprocess.Popen(
                launch.command(self._argv),  # It ends with this process, whatever ends that.
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # So that it can be ended with all that it started.
            )
        except OSError as error:
            raise NotToldError(f"it can't be started: {error}") from error
        try:
            process.communicate(json.dumps(notification).encode(), timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired:
            raise NotToldError(f"it took longer than {self._timeout_seconds:g} s, and was ended") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            raise NotToldError(f"it ended with exit code {process.returncode}")
