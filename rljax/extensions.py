"""What other packages add by entry points: environments, agents and graders.

Their names are read from the metadata of installed packages, which imports none of them. A package is imported when a name of its
own is used, and one that cannot be is an error of that name alone.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any

KINDS = {"environment": "rljax.environments", "agent": "rljax.agents", "grader": "rljax.graders"}  # and their groups


@functools.cache
def entries(kind: str) -> dict[str, list[metadata.EntryPoint]]:
    """What packages register for a kind of `KINDS`, by name: more than one where they disagree."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry in sorted(metadata.entry_points(group=KINDS[kind])):
        found.setdefault(entry.name, []).append(entry)
    return found


def find(kind: str, name: str, own: Callable[[], Iterable[str]]) -> metadata.EntryPoint | None:
    """The entry point of a name; None where no package registers it.

    Args:
      own: the names that need no package; asked only where one registers ``name``.

    Raises:
      ValueError: the name is registered twice, or is one of ``own``.
    """
    found = entries(kind).get(name, [])
    owners = [*(["rljax"] if found and name in own() else []), *sorted(map(package, found))]
    if len(owners) > 1:
        raise ValueError(f"{kind} {name!r} is of {' and of '.join(owners)}: rename one, or uninstall the package")
    return found[0] if found else None


def package(entry: metadata.EntryPoint) -> str:
    """``"NAME VERSION"`` of the package that an entry point is of."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def load(kind: str, entry: metadata.EntryPoint) -> Any:
    """What an entry point names; imports its package.

    Raises:
      ValueError: it cannot be loaded; one line that names the package.
    """
    try:
        return entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the code of a package may raise
        words = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{kind} {entry.name!r} of {package(entry)} cannot be loaded from {entry.value}: {type(error).__name__}: {words}"
        ) from error


@contextlib.contextmanager
def search_path(directory: str) -> Iterator[None]:
    """Modules are looked for in ``directory`` first."""
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
