# SPDX-License-Identifier: Apache-2.0
"""Tables of the report's page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def html_table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table with these names of columns. All is text, and is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
