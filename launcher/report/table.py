"""A table of the report."""

from collections.abc import Iterable, Sequence
from html import escape

from data_service.visible import visible


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], first_number: int) -> str:
    """An HTML table. Columns from `first_number` on that hold numbers only are set right-aligned."""
    body = list(rows)
    numeric = {
        index
        for index in range(first_number, len(heads))
        if all(row[index].lstrip("-")[:1].isdigit() or row[index] in ("-", "not yet") for row in body)
    }

    def cells(tag: str, row: Sequence[str]) -> str:
        marked = (
            (' class="n"' if index in numeric else "", escape(visible(cell)))
            for index, cell in enumerate(row)
        )
        return "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in marked)

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    return f'<div class="table"><table><tr>{cells("th", heads)}</tr>{lines}</table></div>'
