"""What the labs share: each `run.py` measures, keeps what it measured as JSON, and writes a page and its figure of that."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljax.experiment.statistics import bootstrap_interval, iqm

MARKER = "<!-- results -->"


def say(event: dict[str, Any]) -> None:
    """A listener that prints what a run has to say."""
    if "text" in event:
        print(event["text"], flush=True)


def spread(values: list[float], digits: int = 2) -> str:
    """IQM over seeds, and its interval."""
    low, high = bootstrap_interval(values)
    return f"**{iqm(values):.{digits}f}** [{low:.{digits}f}, {high:.{digits}f}]"


def main(
    doc: str | None,
    results: Path,
    place: Path,
    measure: Callable[[], dict[str, Any]],
    draw: Callable[[dict[str, Any]], None],
    page: Callable[[dict[str, Any]], str],
    tune: Callable[[], None] | None = None,
) -> None:
    """The command of a lab.

    Args:
      doc: of its module, whose first line is the help.
      results: the file of what was measured.
      place: the page, which holds what ``page`` gives between two markers.
      measure: runs what has not been run; what is to be kept.
      draw, page: the figure and the tables of what was kept.
      tune: prints what settings reach on the tuning seeds, for ``--tune``.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if tune is not None:
        parser.add_argument("--tune", action="store_true", help="print what settings reach on the tuning seeds")
    parser.add_argument("--page", action="store_true", help="only write the page, from what was kept")
    wanted = parser.parse_args()
    if tune is not None and wanted.tune:
        tune()
        return
    if not wanted.page:
        results.write_text(json.dumps(measure()) + "\n")
    kept = json.loads(results.read_text())
    draw(kept)
    before, _, rest = place.read_text().partition(MARKER)
    _, _, after = rest.partition(MARKER)
    place.write_text(f"{before}{MARKER}\n\n{page(kept)}\n{MARKER}{after}")
