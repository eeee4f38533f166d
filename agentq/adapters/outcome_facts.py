"""What lies in the folder of outcome files, and whether more can be kept there. Changes nothing."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from agentq.adapters.filesystem import filesystem_of
from agentq.adapters.outcome_files import KEPT, REJECTED


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeFacts:
    """Files by what they are: to be recorded, set aside, and of other deployments. `oldest_seconds`: of the first."""

    folder: Path
    waiting: int = 0
    oldest_seconds: float = 0.0
    rejected: int = 0
    foreign: int = 0
    is_writable: bool = True
    free_bytes: int | None = None
    filesystem: str | None = None


def examine_outcomes(home: Path, deployment: str) -> OutcomeFacts:
    """Those of this home."""
    folder = home.absolute() / "outcomes"
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    kept = list(folder.glob(f"*/*{KEPT}"))
    ours = [path for path in kept if path.parent.name == deployment]
    return OutcomeFacts(
        folder=folder,
        waiting=len(ours),
        oldest_seconds=max((_age_seconds(path) for path in ours), default=0.0),
        rejected=len(list(folder.glob(f"*/*{REJECTED}"))),
        foreign=len(kept) - len(ours),
        is_writable=os.access(existing, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(existing).free,
        filesystem=filesystem_of(existing),
    )


def _age_seconds(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0  # It has just been recorded.
