"""What pages and figures are made of: numbers in words, plots, and HTML that loads nothing from elsewhere."""

import base64
import io
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

# Okabe and Ito's colours, told apart by readers with any colour vision; their yellow is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")


# Words


def number_format(values: Iterable[float | None]) -> Callable[[float | None], str]:
    """A formatter with as many decimals as the largest of `values` needs for four digits, so that columns line up."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    decimals = min(max(3 - math.floor(math.log10(largest)), 0), 3) if largest else 1
    return lambda value: "n/a" if value is None else f"{value:,.{decimals}f}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines of text, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join([f"{first:<{widths[0]}}", *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for first, *cells in rows
    ]


# Figures


def line_style(number: int) -> tuple[str, str]:
    """Colour and dash of the line of this number: 28 of them are different."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def figure(rows: int, columns: int, width: float, height: float, sharey: bool = False) -> tuple[Any, list[Any]]:
    """A figure of its own (no pyplot, so no state is shared) and its axes, quietly styled."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color("#888888")
        ax.grid(color="#e6e6e6", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8, color="#888888")
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.margins(x=0.01)
    return figure, axes


def legend(figure: Any, axes: Any) -> None:
    """Under a figure, of the lines of one of its axes, where there is more than one."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = max(1, min(len(labels), 100 // (max(map(len, labels)) + 8)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def png(figure: Any, dpi: int | None = None) -> bytes:
    """A figure as the bytes of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi or (160 if figure.get_figwidth() > 6 else 200))
    return buffer.getvalue()


# HTML

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #dfe3e8; --back: #fff; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa4af; --line: #343b43; --back: #14171a; --card: #1d2125; }
}
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 960px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.75rem; margin: 0; } h2 { margin: 3rem 0 0; padding-top: 2rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 2.2rem 0 .6rem; } a { color: inherit; }
.id { color: var(--soft); margin: .2rem 0 0; overflow-wrap: anywhere; }
.score { margin: 1.2rem 0 .2rem; font-size: 2.1rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.score small { font-size: 1.15rem; font-weight: 400; color: var(--soft); margin-left: .4rem; }
.about { margin: 0 0 1.4rem; color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .75rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; min-width: 5rem; }
summary { cursor: pointer; font-size: .875rem; color: var(--soft); } th { color: var(--soft); font-weight: 500; }
tr.best td { font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 1rem 0; font-size: .875rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; border-radius: 6px; background: #fff; }
@media (prefers-color-scheme: dark) { img { padding: .6rem; box-sizing: border-box; } }
figure { margin: 1rem 1rem 1rem 0; display: inline-block; vertical-align: top; }
figcaption { color: var(--soft); font-size: .8rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; margin: .4rem 0;
  overflow-x: auto; font: 12.5px/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], best: str | None = None) -> str:
    """With the row in bold whose first cell is `best`."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = [
        f"<tr{' class=best' if row[0] == best else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    ]
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def terms(pairs: Iterable[tuple[str, str]]) -> str:
    """(name, sentence) pairs, one below the other."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in pairs)}</dl>"


def image(data: bytes, caption: str, kind: str = "png") -> str:
    """An image that is part of the page."""
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<figure><img alt="" src="{source}"><figcaption>{escape(caption)}</figcaption></figure>'


def document(title: str, body: str) -> bytes:
    """A whole page."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>{body}</body></html>\n'.encode()
