"""The parts of pages: pieces of HTML, and a style sheet, light and dark, for screens from a phone's width on. All text
from a store goes through `text`."""

from collections.abc import Iterable, Sequence
from html import escape

from data_service.printable import visible


def text(value: object) -> str:
    """Return a value as escaped text. Control characters and marks of direction, which could disguise it, are made
    visible."""
    return escape(visible(str(value)))


def document(title: str, sections: Iterable[str]) -> str:
    """Return a page without references to anything outside it."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{text(title)}</title>'
    page = f"<body><main>{''.join(sections)}</main></body>"
    return f'<!doctype html><html lang="en"><head>{head}<style>{CSS}</style></head>{page}</html>\n'


def header(title: str, badge: str = "", *lines: str) -> str:
    """Return the head of a page; `badge` and the lines below the title are HTML already."""
    below = f'<p class="soft">{"<br>".join(lines)}</p>' if lines else ""
    return f"<header><h1>{text(title)}</h1>{badge}</header>{below}"


def badge(state: str, kind: str = "") -> str:
    """Return a badge with the state of a run. `kind`: "", " open", " bad" or " live"."""
    return f'<span class="state{kind}">{text(state)}</span>'


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Return tiles of figures, each with what it counts."""
    shown = "".join(
        f'<div class="tile"><b>{text(figure)}</b><span>{text(what)}</span></div>' for figure, what in figures
    )
    return f'<div class="tiles">{shown}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], first_number: int) -> str:
    """Return an HTML table. Columns from `first_number` on are right-aligned if they hold only numbers."""
    body = list(rows)
    numeric = {
        index
        for index in range(first_number, len(heads))
        if all(row[index].lstrip("-")[:1].isdigit() or row[index] in ("-", "not yet") for row in body)
    }

    def cells(tag: str, row: Sequence[str]) -> str:
        marked = ((' class="n"' if index in numeric else "", text(cell)) for index, cell in enumerate(row))
        return "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in marked)

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    return f'<div class="table"><table><tr>{cells("th", heads)}</tr>{lines}</table></div>'


CSS = """
:root{--ink:#1d2328;--soft:#5a656e;--faint:#e3e7ea;--paper:#fbfbf9;--card:#fff;--s1:#2563a8;--s2:#c2571a;
--s3:#2d8659;--s4:#8250a8;--s5:#0e7c8b;--s6:#b5306f;--s7:#77751a;--s8:#7d5a3c;--mark:#8f6a06;--warn:#a8323a;
--wash:#f2f4f5;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7e9;--soft:#9aa5ad;--faint:#2b3238;--paper:#14181b;
--card:#1b2024;--s1:#6aa9e9;--s2:#ee935c;--s3:#63bf8f;--s4:#bb93dd;--s5:#55bccb;--s6:#ee82b3;--s7:#c5c25a;
--s8:#c99f7b;--mark:#d9ae42;--warn:#ee7d83;--wash:#20262b}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",
Roboto,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:36px 24px 64px}
h1{font-size:27px;line-height:1.2;margin:0;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:17px;margin:40px 0 12px}
p{margin:6px 0;max-width:75ch;overflow-wrap:anywhere}
a{color:var(--s1)}
small,.soft{color:var(--soft);font-size:13px}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
header{display:flex;gap:8px 16px;align-items:baseline;flex-wrap:wrap}
.state{font-size:13px;padding:2px 10px;border-radius:99px;border:1px solid var(--s3);color:var(--s3);
white-space:nowrap}
.state.open{border-color:var(--mark);color:var(--mark)}
.state.bad{border-color:var(--warn);color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px;margin:26px 0 14px}
.tile{background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:22px;font-weight:600;letter-spacing:-.01em;line-height:1.25}
.tile span{display:block;font-size:13px;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:12px 14px 8px;
position:relative;container-type:inline-size;min-width:0}
figure.wide{grid-column:1/-1}
figcaption{display:flex;gap:2px 8px;align-items:baseline;flex-wrap:wrap;margin-bottom:4px}
.legend{margin-left:auto;display:flex;flex-wrap:wrap;gap:2px 14px}
.key{font:inherit;font-size:13px;color:var(--soft);display:inline-flex;align-items:center;gap:6px;max-width:100%;
overflow-wrap:anywhere;text-align:left}
.key::before{content:"";flex:none;width:14px;height:3px;border-radius:2px;background:currentColor}
svg{display:block;width:100%;height:auto;overflow:visible}
.grid{stroke:var(--faint);stroke-width:1}
.notch{stroke:var(--soft);stroke-width:1}
.grid,.notch,.line,.level,.mark{vector-effect:non-scaling-stroke}
.tick,.level-name{fill:var(--soft);font-size:10.5px}
@container(min-width:560px){.tick,.level-name{font-size:8.5px}.dot{r:2px}}
@container(max-width:400px){.tick,.level-name{font-size:12.5px}}
@container(max-width:330px){.tick,.level-name{font-size:14.5px}}
.level{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 4}
.level-name{paint-order:stroke;stroke:var(--card);stroke-width:3px}
.mark{stroke:var(--mark);stroke-width:1.4;stroke-dasharray:1.5 3}
.line{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.band{opacity:.16}
.dot{stroke:var(--card);stroke-width:1.2}
.ends{display:flex;justify-content:space-between;color:var(--soft);font-size:12px;margin-top:2px}
.timeline{height:34px}
.table{overflow-x:auto;background:var(--card);border:1px solid var(--faint);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:7px 14px;border-top:1px solid var(--faint);vertical-align:top}
td{overflow-wrap:break-word}td:first-child:not(:only-child){white-space:nowrap}
th{color:var(--soft);font-weight:500;font-size:13px;border-top:0;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
.time{fill:var(--s1)}.idle{fill:var(--faint)}.commit{stroke:var(--s3);stroke-width:1.6;vector-effect:non-scaling-stroke}
details{background:var(--card);border:1px solid var(--faint);border-radius:10px;margin-top:12px}
summary{cursor:pointer;padding:10px 14px;font-weight:500}
pre{margin:0;padding:4px 16px 16px;overflow-x:auto}
@media(max-width:600px){main{padding:20px 14px 48px}h1{font-size:22px}h2{margin:30px 0 10px}
.tiles{grid-template-columns:1fr 1fr;gap:8px;margin:18px 0 12px}.tile{padding:9px 11px}.tile b{font-size:18px}
figure{padding:10px 10px 6px}.legend{margin-left:0}figcaption{row-gap:2px}th,td{padding:6px 10px}}
@media print{body{background:#fff}.tile,figure,.table,details{break-inside:avoid}}
""" + "".join(
    f".line.s{tone}{{stroke:var(--s{tone})}}.dot.s{tone},.band.s{tone}{{fill:var(--s{tone})}}"
    f".key.s{tone}::before{{background:var(--s{tone})}}\n"
    for tone in range(1, 9)
)
