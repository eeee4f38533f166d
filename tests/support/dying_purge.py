"""A purge that kills itself: `python -m tests.support.dying_purge DATABASE_URL WORDS NTH`.

It is killed just before the nth statement that begins with these words, or at the nth COMMIT: `COMMIT` before it,
`COMMITTED` after it. It ends by itself when there are fewer.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from sqlalchemy import Connection, event

from agentq.adapters.process import SystemClock
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.purging import SqlPurgeStore
from agentq.services.purge import purge


class MortalDatabase(Database):
    """Its process dies at the nth of those words."""

    def __init__(self, url: str, words: str, nth: int) -> None:
        super().__init__(url)
        self._words = words
        self._left = nth
        event.listen(self.engine, "before_cursor_execute", self._before_statement)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        with super().writing() as connection:
            yield connection
            self._meet("COMMIT")
        self._meet("COMMITTED")

    def _before_statement(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith(self._words):
            self._meet(self._words)

    def _meet(self, words: str) -> None:
        self._left -= words == self._words
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    url, words, nth = sys.argv[1:]
    store = SqlPurgeStore(MortalDatabase(url, words, int(nth)))
    batches = purge(
        store,
        older_than=timedelta(days=30),
        visibility_timeout=timedelta(hours=1),
        clock=SystemClock(),
        actor="ann",
        batch_runs=3,
    )
    for _ in batches:
        pass


if __name__ == "__main__":
    main()
