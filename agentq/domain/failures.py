"""What went wrong, as a class that says whether trying again may help."""

from enum import StrEnum


class FailureClass(StrEnum):
    CONNECTION = "CONNECTION"
    RATE_LIMIT = "RATE_LIMIT"
    SERVER_ERROR = "SERVER_ERROR"
    CIRCUIT_OPEN = "CIRCUIT_OPEN"
    AUTH = "AUTH"
    CONFIGURATION = "CONFIGURATION"
    CLIENT_ERROR = "CLIENT_ERROR"
    UNKNOWN = "UNKNOWN"
