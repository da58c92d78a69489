"""The state of a run according to its status.json. Imports no torch, as `hardmix watch` needs it.

Files of a run may come from anyone: what cannot be read is an unknown state.
"""

import os
import socket
from pathlib import Path

from hardmix.settings.saved import read_json


def state_of(folder: Path) -> str:
    """Return the state in status.json; "lost" if it says running but its process is gone."""
    try:
        status = read_json(folder / "status.json")
    except (OSError, ValueError):
        return "unknown"
    state = status.get("state") if isinstance(status, dict) else None
    if not isinstance(state, str):
        return "unknown"
    gone = status.get("host") == socket.gethostname() and not _alive(status.get("process"))
    return "lost" if state == "running" and gone else state


def _alive(process: object) -> bool:
    """Return whether a process exists; True if that is unknown."""
    if not isinstance(process, int) or process < 1:
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
