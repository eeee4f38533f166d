"""A database whose transactions stop before their COMMIT, so that tests see what another one does meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection

from agentq.adapters.sql.engine import Database

WAIT_SECONDS = 10.0


class HeldDatabase(Database):
    """Its transactions stop before their COMMIT until they are let go."""

    def __init__(self, url: str, *, holds_functions: bool) -> None:
        """`holds_functions` False: a function that finds that it doesn't fit isn't the transaction to hold."""
        super().__init__(url, application_name="held")
        self._holds_functions = holds_functions
        self.has_arrived = threading.Event()
        self.may_commit = threading.Event()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        with super().writing() as connection:
            yield connection
            self._hold()

    @contextmanager
    def raw(self) -> Iterator[Any]:
        with super().raw() as connection:
            if not self._holds_functions:
                yield connection
                return
            connection.execute("BEGIN")
            yield connection
            self._hold()
            connection.execute("COMMIT")

    def _hold(self) -> None:
        self.has_arrived.set()
        assert self.may_commit.wait(WAIT_SECONDS)
