"""A table of the report.

The report's look: one style sheet, light and dark.
"""

from collections.abc import Iterable, Sequence
from html import escape


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], first_number: int) -> str:
    """An HTML table. Columns from `first_number` on that hold numbers only are set right-aligned."""
    body = list(rows)
    numeric = {
        index
        for index in range(first_number, len(heads))
        if all(row[index].lstrip("-")[:1].isdigit() or row[index] in ("-", "not yet") for row in body)
    }

    def cells(tag: str, row: Sequence[str]) -> str:
        marked = ((' class="n"' if index in numeric else "", escape(cell)) for index, cell in enumerate(row))
        return "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in marked)

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    return f'<div class="table"><table><tr>{cells("th", heads)}</tr>{lines}</table></div>'


CSS = """
:root{--ink:#1d2328;--soft:#5c6770;--faint:#e3e7ea;--paper:#fbfbf9;--card:#fff;--s1:#2563a8;--s2:#c2571a;
--s3:#2d8659;--s4:#8250a8;--mark:#b8860b;--warn:#a8323a;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7e9;--soft:#98a3ab;--faint:#2b3238;--paper:#14181b;
--card:#1b2024;--s1:#6aa9e9;--s2:#ee935c;--s3:#63bf8f;--s4:#bb93dd;--mark:#d9ae42;--warn:#ee7d83}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",
Roboto,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:36px 24px 64px}
h1{font-size:27px;line-height:1.2;margin:0;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:17px;margin:40px 0 12px}
p{margin:6px 0;max-width:75ch}
small,.soft{color:var(--soft);font-size:13px}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
header{display:flex;gap:8px 16px;align-items:baseline;flex-wrap:wrap}
.state{font-size:13px;padding:2px 10px;border-radius:99px;border:1px solid var(--s3);color:var(--s3)}
.state.open{border-color:var(--mark);color:var(--mark)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px;margin:26px 0 14px}
.tile{background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:22px;font-weight:600;letter-spacing:-.01em;line-height:1.25}
.tile span{display:block;font-size:13px;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:12px 14px 6px}
figure.wide{grid-column:1/-1}
figcaption{display:flex;gap:8px;align-items:baseline;flex-wrap:wrap;margin-bottom:4px}
.legend{margin-left:auto;display:flex;gap:14px}
.key{font-size:13px;color:var(--soft);display:inline-flex;align-items:center;gap:6px}
.key::before{content:"";width:14px;height:3px;border-radius:2px;background:currentColor}
.key.s1::before{background:var(--s1)}.key.s2::before{background:var(--s2)}
.key.s3::before{background:var(--s3)}.key.s4::before{background:var(--s4)}
svg{display:block;width:100%;height:auto;overflow:visible}
.grid{stroke:var(--faint);stroke-width:1}
.notch{stroke:var(--soft);stroke-width:1}
.tick,.level-name{fill:var(--soft);font-size:11.5px}
.level{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 4}
.mark{stroke:var(--mark);stroke-width:1.4;stroke-dasharray:1.5 3}
.line{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.line.s1{stroke:var(--s1)}.line.s2{stroke:var(--s2)}.line.s3{stroke:var(--s3)}.line.s4{stroke:var(--s4)}
.dot.s1,.band.s1{fill:var(--s1)}.dot.s2,.band.s2{fill:var(--s2)}
.dot.s3,.band.s3{fill:var(--s3)}.dot.s4,.band.s4{fill:var(--s4)}
.band{opacity:.16}
.dot{stroke:var(--card);stroke-width:1.2}
.table{overflow-x:auto;background:var(--card);border:1px solid var(--faint);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:7px 14px;border-top:1px solid var(--faint);vertical-align:top}
th{color:var(--soft);font-weight:500;font-size:13px;border-top:0;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
.time{fill:var(--s1)}.idle{fill:var(--faint)}.commit{stroke:var(--s3);stroke-width:1.6}
details{background:var(--card);border:1px solid var(--faint);border-radius:10px;margin-top:12px}
summary{cursor:pointer;padding:10px 14px;font-weight:500}
pre{margin:0;padding:4px 16px 16px;overflow-x:auto}
@media print{body{background:#fff}.tile,figure,.table,details{break-inside:avoid}}
"""
