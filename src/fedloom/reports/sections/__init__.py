"""The sections of a report. A section without data is None."""

from collections.abc import Callable

from fedloom.reports.html import Section
from fedloom.reports.report_data import Book
from fedloom.reports.sections.clients import client_curves, client_table, distribution
from fedloom.reports.sections.cost import cost, gap
from fedloom.reports.sections.data import partition, projection
from fedloom.reports.sections.diagnostics import conflict, hybrid, others, parts, prototypes
from fedloom.reports.sections.overview import headline, learning
from fedloom.reports.sections.reproduce import how, pictures, tables

SECTIONS: tuple[Callable[[Book], Section | None], ...] = (
    headline,
    learning,
    distribution,
    partition,
    projection,
    gap,
    conflict,
    parts,
    prototypes,
    hybrid,
    others,
    cost,
    pictures,
    client_curves,
    client_table,
    tables,
    how,
)
"""In the order in which a reader asks: what came out, for whom, why, at what price, how to do it again."""

__all__ = ["SECTIONS"]
