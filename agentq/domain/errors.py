"""The errors that agentq raises, named by what the caller should do about them."""

from datetime import datetime


class AgentqError(Exception):
    """The base of every error that agentq raises on purpose. Its text is one line, fit to show to a person."""


class ConfigurationError(AgentqError):
    """A setting, an agent or a tool is wrong: correct it and start again."""


class InvalidInputError(AgentqError):
    """An argument of the caller is wrong; nothing was changed. Correct it and call again."""


class NotFoundError(InvalidInputError):
    """Nothing has that id or name."""


class UnknownAgentError(NotFoundError):
    """No worker has ever served an agent of that name."""


class IdempotencyConflictError(InvalidInputError):
    """The idempotency key was used before, for another agent or another input."""


class RefusedError(AgentqError):
    """The request is well formed, but what it asks is not safe or not possible now; nothing was changed."""


class DecisionRequiredError(RefusedError):
    """A write's outcome is unknown: say whether it happened first."""


class StalePlanError(RefusedError):
    """The world moved on since the plan was made that this replay is bound to: read the new one."""


class TooEarlyError(RefusedError):
    """ "Did not happen" can't be known yet: look again at `not_before` (UTC, database time) or later."""

    def __init__(self, message: str, not_before: datetime) -> None:
        super().__init__(message)
        self.not_before = not_before


class AlreadyDecidedError(RefusedError):
    """Somebody was first; the message says who and when."""


class SchemaError(AgentqError):
    """The database's schema is missing, too old, or no longer admits this version: run what the message says."""


class StoreUnavailableError(AgentqError):
    """The database could not be reached, or its reply was lost: whether the change was made is not known."""


class StoreUnreachableError(StoreUnavailableError):
    """No connection to the database could be made: nothing was changed."""


class StoreRefusedError(AgentqError):
    """The database answered and refused the change: nothing was changed, and trying the same again won't help."""


class AuditRefusedError(StoreRefusedError):
    """The database refused the audit event; nothing was changed."""


class UnreadableLogError(AgentqError):
    """The audit log holds what agentq never wrote: see what verifying it says."""


class OutcomeNotKeptError(AgentqError):
    """The outcome of a write could be stored neither in the database nor in a file: its fence stays."""


class LeasesUnavailableError(AgentqError):
    """Redis could not be reached: whether the lease is still held is not known."""


class BrokerUnavailableError(AgentqError):
    """The broker could not be reached: nothing is lost, what was to be published is published later."""


class NotToldError(AgentqError):
    """Whoever was to be told of dead letters was not: they are told of later."""


class WaitTimeoutError(AgentqError):
    """The run had not ended when the time to wait for it was over; it goes on."""
