"""Results of several sides in one table with ratios, and as a bar chart."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

Row = dict[str, Any]
TITLES = {"decode": "decode step, {requests} a rank, ms", "prefill": "prefill, tokens/s", "mixed": "mixed, tokens/s"}
TITLES["start"] = "start, s"


def _said(value: float) -> str:
    """As the table has it."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


class Comparison:
    """Values by row and side.

    Args:
        rows: as the sides said them.

    Raises:
        click.ClickException: rows of different setups, or two of the same side and test.
    """

    def __init__(self, rows: Iterable[Row]):
        self.sides: list[str] = []
        self.values: dict[str, dict[str, float]] = {}
        self.notes: list[str] = []
        setup = None
        for row in rows:
            setup = row["setup"] if setup is None else setup
            if row["setup"] != setup:
                raise click.ClickException(f"rows of different setups: {setup} and {row['setup']}")
            side, title = row["side"], TITLES[row["test"]].format(**row)
            if side in self.values.setdefault(title, {}):
                raise click.ClickException(f"{title!r} of {side} is there twice: give each result once")
            if side not in self.sides:
                self.sides.append(side)
            self.values[title][side] = row["value"]
            self.notes += [f"{side}: {note}" for note in row.get("notes", [])]
        self.setup = setup or {}

    def table(self) -> list[str]:
        """Markdown: a column a side, then the first side's value over each other's."""
        first, *others = self.sides
        lines = ["| | " + " | ".join([*self.sides, *(f"{first} / {other}" for other in others)]) + " |"]
        lines.append("|---" * (1 + len(self.sides) + len(others)) + "|")
        for title, by_side in self.values.items():
            cells = [number(by_side.get(side)) for side in self.sides]
            for other in others:
                both = first in by_side and other in by_side
                cells.append(f"{by_side[first] / by_side[other]:.2f}" if both else "")
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
        return lines

    def draw(self, path: str) -> None:
        """Two panels of bars as a PNG: steps in ms, less is better; rates in tokens/s, more is better."""
        from matplotlib.figure import Figure

        steps = [title for title in self.values if title.endswith(", ms")]
        rates = [title for title in self.values if title.endswith("tokens/s")]
        panels = [(titles, unit) for titles, unit in ((steps, "ms, less is better"), (rates, "tokens/s")) if titles]
        figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
        width = 0.8 / len(self.sides)
        for axes, (titles, unit) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for index, side in enumerate(self.sides):
                places = [place + index * width for place in range(len(titles))]
                heights = [self.values[title].get(side, float("nan")) for title in titles]
                axes.bar_label(axes.bar(places, heights, width, label=side), fmt=_said, fontsize=7)
            labels = [title.rsplit(",", 1)[0].removeprefix("decode step, ") for title in titles]
            axes.set_xticks([place + width * (len(self.sides) - 1) / 2 for place in range(len(titles))], labels)
            axes.set_title("decode step" if titles is steps else "rates")
            axes.set_ylabel(unit)
            axes.legend()
        figure.savefig(path, dpi=120, format="png")


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def rows_of(files: Sequence[str]) -> list[Row]:
    """Raises click.ClickException: a line that is no result."""
    rows = []
    for file in files:
        with open(file, encoding="utf-8") as lines:
            for index, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    known = {"side", "value", "setup"} <= row.keys() and row["test"] in TITLES
                except (ValueError, AttributeError, KeyError, TypeError):
                    known = False
                if not known:
                    raise click.ClickException(f"{file}, line {index} is no result of a side: {line[:80]!r}")
                rows.append(row)
    return rows
