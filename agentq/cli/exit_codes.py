"""What the `agentq` command exits with."""

from enum import IntEnum

from agentq.domain.errors import (
    AgentqError,
    BrokerUnavailableError,
    ConfigurationError,
    InvalidInputError,
    LeasesUnavailableError,
    RefusedError,
    SchemaError,
    StoreUnreachableError,
    WaitTimeoutError,
)


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    REFUSED = 2  # Wrong usage, refused, or a server that isn't there: nothing was changed.
    PARTLY_DONE = 3
    WATCHED_RUN_FAILED = 4
    WAITED_TOO_LONG = 5
    INTERRUPTED = 130  # What a shell expects of a program that Ctrl-C ended.


def exit_code_of(error: AgentqError) -> ExitCode:
    match error:
        case InvalidInputError() | RefusedError() | ConfigurationError() | SchemaError():
            return ExitCode.REFUSED
        case StoreUnreachableError() | BrokerUnavailableError() | LeasesUnavailableError():
            return ExitCode.REFUSED
        case WaitTimeoutError():
            return ExitCode.WAITED_TOO_LONG
        case _:
            return ExitCode.FAILED
