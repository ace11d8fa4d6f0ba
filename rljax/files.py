"""Files that are whole or not there at all."""

import os
import secrets
from pathlib import Path


def write_whole(path: str | Path, data: bytes) -> Path:
    """Writes a file, and the folders that it lies in, so that a kill at any moment leaves the old file or the new one.

    A link stays one: what it leads to is written. What is no regular file, as ``/dev/stdout``, is written straight to.

    Raises:
      OSError: it cannot be written; what was there before is as it was.
    """
    path = Path(path)
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        place.write_bytes(data)
        return path
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")  # of each call its own: threads may write one file
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine could leave the name with nothing behind it
        os.replace(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
