"""The parts of pages: pieces of HTML, and their style sheet. All text from a store goes through `escape_text`."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from data_service.printable import escape_controls

CSS = resources.files("launcher.observe.inspect.report").joinpath("assets", "report.css").read_text("utf-8")


def escape_text(value: object) -> str:
    """Return a value as text escaped for HTML. Control characters and text direction marks, which could disguise it,
    are made visible."""
    return escape(escape_controls(str(value)))


def html_page(title: str, sections: Iterable[str], head: str = "") -> str:
    """Return a page without references to anything outside it, except those in `head`, which is HTML, not text."""
    about = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    about += f"<title>{escape_text(title)}</title>"
    page = f"<body><main>{''.join(sections)}</main></body>"
    return f'<!doctype html><html lang="en"><head>{about}<style>{CSS}</style>{head}</head>{page}</html>\n'


def page_header(title: str, badge: str = "", *lines: str) -> str:
    """Return the head of a page. `badge` and the `lines` below the title are HTML, not text."""
    below = f'<p class="soft">{"<br>".join(lines)}</p>' if lines else ""
    return f"<header><h1>{escape_text(title)}</h1>{badge}</header>{below}"


def state_badge(state: str, kind: str = "") -> str:
    """Return a badge with the state of a run. `kind`: "", " open", " bad" or " live"."""
    return f'<span class="state{kind}">{escape_text(state)}</span>'


def figure_tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Return the HTML of a tile for each pair of a number and its label."""
    shown = "".join(
        f'<div class="tile"><b>{escape_text(figure)}</b><span>{escape_text(what)}</span></div>'
        for figure, what in figures
    )
    return f'<div class="tiles">{shown}</div>'


def html_table(
    column_names: Sequence[str],
    rows: Iterable[Sequence[str]],
    first_number_column: int,
    *,
    bad_rows: Sequence[bool] = (),
    is_scrollable: bool = False,
) -> str:
    """Return an HTML table. Columns from `first_number_column` on are right-aligned if they hold only numbers.

    `bad_rows`: for each row, whether it is highlighted as a problem. `is_scrollable`: whether the table scrolls within
    a limited height.
    """
    body = list(rows)
    numeric = {
        index
        for index in range(first_number_column, len(column_names))
        if all(row[index].lstrip("-")[:1].isdigit() or row[index] in ("-", "not yet") for row in body)
    }

    def row_cells(tag: str, row: Sequence[str]) -> str:
        marked = ((' class="n"' if index in numeric else "", escape_text(cell)) for index, cell in enumerate(row))
        return "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in marked)

    problems = (*bad_rows, *[False] * (len(body) - len(bad_rows)))
    lines = "".join(
        f"<tr{' class=bad' if problem else ''}>{row_cells('td', row)}</tr>"
        for row, problem in zip(body, problems, strict=True)
    )
    box = '"table scrolled" tabindex="0" role="region"' if is_scrollable else '"table"'
    return f"<div class={box}><table><tr>{row_cells('th', column_names)}</tr>{lines}</table></div>"
