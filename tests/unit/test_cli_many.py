"""A decision about many that is broken off: what was done is told, in every format and by the exit code."""

import json
from collections.abc import Iterator

import pytest

from agentq.cli.exit_codes import ExitCode
from agentq.cli.many import Verb, decide_about_many
from agentq.cli.output import Format, ReaderGoneError
from agentq.domain.errors import RefusedError, StoreUnavailableError
from agentq.ports.deciding import Decided

VERB = Verb(command="replay", question="Replay {}?", past="replayed")
AWAY = StoreUnavailableError("the database can't be reached")


def broken_off(*done: Decided, by: Exception, output: Format) -> ExitCode:
    def batches() -> Iterator[list[Decided]]:
        if done:
            yield list(done)
        raise by

    return decide_about_many(
        VERB,
        lambda **_options: batches(),
        matching=5,
        open_count=5,
        dry_run=False,
        rate=None,
        yes=True,
        output=output,
    )


@pytest.mark.parametrize("by", [AWAY, ReaderGoneError()], ids=["the database is away", "nobody reads"])
def test_what_was_broken_off_is_partly_done(by: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that takes it for done, or for not begun, leaves runs behind."""
    code = broken_off(Decided(run_id="r-1"), by=by, output=Format.IDS)
    assert code is ExitCode.PARTLY_DONE
    out, err = capsys.readouterr()
    assert out == "r-1\n" and "1 replayed, 0 left; the same command again goes on with the rest" in err


def test_its_results_are_printed_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Which of ten thousand were decided is known to nobody else."""
    left = Decided(run_id="r-2", refusal=RefusedError("no"))
    broken_off(Decided(run_id="r-1"), left, by=AWAY, output=Format.JSON)
    assert [(view["id"], view["done"]) for view in json.loads(capsys.readouterr().out)] == [
        ("r-1", True),
        ("r-2", False),
    ]


def test_what_failed_before_anything_was_done_fails_as_ever() -> None:
    """Nothing was changed: the exit code is that of the error."""
    with pytest.raises(StoreUnavailableError):
        broken_off(by=AWAY, output=Format.TABLE)
