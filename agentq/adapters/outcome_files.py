"""Outcomes of writes that the database didn't take, one file each, durable before its worker goes on."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentq.domain.effects import ToolEffect
from agentq.domain.errors import OutcomeNotKeptError
from agentq.domain.model import StepRef
from agentq.domain.outcomes import Join, Recorded
from agentq.ports.steps import KeptOutcome, Settlement

logger = logging.getLogger(__name__)

VERSION = 1
KEPT, REJECTED, UNFINISHED = ".json", ".rejected", ".unfinished"


class OutcomeFolder:
    """`ports.OutcomeFiles` in `home/outcomes/DEPLOYMENT`. Processes may share it: each file has one writer, is complete
    as soon as it has its name, and can be forgotten twice."""

    def __init__(self, home: Path, deployment: str) -> None:
        self._folder = home.absolute() / "outcomes" / deployment
        self._deployment = deployment

    def keep(self, settlement: Settlement) -> None:
        text = _written(settlement, self._deployment)
        name = f"{settlement.ref.run_id}-{settlement.ref.number}-{sha256(settlement.owner.encode()).hexdigest()[:12]}"
        unfinished = self._folder / f"{name}{UNFINISHED}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                _write_durably(unfinished, text)
                unfinished.rename(self._folder / f"{name}{KEPT}")
                _sync_folder(self._folder)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise OutcomeNotKeptError(f"the outcome could not be kept in {self._folder}: {error}") from error

    def pending(self) -> Iterator[KeptOutcome]:
        """What isn't ours to read is set aside under another name, never deleted, with one line that says why."""
        for path in sorted(self._folder.glob(f"*{KEPT}")):
            try:
                yield KeptOutcome(name=path.name, settlement=_read(path.read_bytes(), self._deployment))
            except FileNotFoundError:
                continue  # Another healer was faster.
            except (OSError, ValueError) as error:
                self._set_aside(path, str(error))

    def forget(self, outcome: KeptOutcome) -> None:
        with suppress(OSError):  # Left behind, it is sent again, and finds itself recorded.
            (self._folder / outcome.name).unlink(missing_ok=True)

    def set_aside(self, outcome: KeptOutcome, why: str) -> None:
        self._set_aside(self._folder / outcome.name, why)

    def _set_aside(self, path: Path, why: str) -> None:
        rejected = path.with_name(path.name + REJECTED)
        try:
            path.rename(rejected)
        except FileNotFoundError:
            return  # Another healer was faster.
        except OSError as error:
            why = f"{why}; it couldn't be renamed: {error}"
        logger.error("not an outcome to record, see what it holds: %s: %s", rejected, why)


def _write_durably(path: Path, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        view = memoryview(text)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """The new name is durable too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written(settlement: Settlement, deployment: str) -> bytes:
    change = settlement.change
    assert isinstance(change, Recorded)
    outcome = {
        "run_id": settlement.ref.run_id,
        "number": settlement.ref.number,
        "attempt": settlement.ref.attempt,
        "owner": settlement.owner,
        "effect": settlement.effect.value,
        "fence_id": settlement.fence_id,
        "result": change.result,
        "is_error": change.is_error,
        "note": change.note,
    }
    kept = {"version": VERSION, "deployment": deployment, "outcome": outcome, "sha256": _digest(outcome)}
    return json.dumps(kept).encode()


def _read(text: bytes, deployment: str) -> Settlement:
    """Raises ValueError that says what is wrong."""
    kept = json.loads(text)
    if not isinstance(kept, dict) or "version" not in kept:
        raise ValueError("it isn't an outcome file")
    if kept["version"] != VERSION:
        raise ValueError(f"it has version {kept['version']!r}, this agentq knows {VERSION}")
    if kept.get("deployment") != deployment:
        raise ValueError(f"it is of deployment {kept.get('deployment')!r}, not of {deployment!r}")
    outcome = kept.get("outcome")
    if not isinstance(outcome, dict) or kept.get("sha256") != _digest(outcome):
        raise ValueError("its content isn't what was written")
    return _settlement(outcome)


def _settlement(outcome: dict[str, Any]) -> Settlement:
    try:
        return Settlement(
            ref=StepRef(run_id=outcome["run_id"], number=outcome["number"], attempt=outcome["attempt"]),
            owner=outcome["owner"],
            effect=ToolEffect(outcome["effect"]),
            fence_id=outcome["fence_id"],
            change=Recorded(result=outcome["result"], then=Join(), is_error=outcome["is_error"], note=outcome["note"]),
        )
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from error


def _digest(outcome: dict[str, Any]) -> str:
    return sha256(json.dumps(outcome, sort_keys=True).encode()).hexdigest()
