"""What every HTML page shares: its frame, tables, bars and legends. Without scripts or external files."""

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --line: #d9d9de; --quiet: #63636e; --track: #ededf0; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3c3c44; --quiet: #a5a5b0; --track: #2c2c33; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1.25rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p, .legend { color: var(--quiet); margin: .25rem 0 .75rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.figures div { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.figures b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.figures i { font-style: normal; white-space: nowrap; font-weight: 400; font-size: .85rem; color: var(--quiet); }
.figures span { color: var(--quiet); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; }
td.wide, th.wide { text-align: left; white-space: normal; min-width: 15rem; }
.bar { display: flex; height: 1.1rem; min-width: 8rem; background: var(--track); border-radius: .2rem;
  overflow: hidden; }
.stages { display: grid; grid-template-columns: auto 1fr auto; gap: .3rem .7rem; align-items: center; }
.stages span { font-variant-numeric: tabular-nums; white-space: nowrap; }
.over { color: var(--bad); font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem; margin-right: .35rem;
  vertical-align: -.08rem; }
svg { display: block; width: 100%; min-width: 44rem; }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; }
summary span { color: var(--quiet); }
pre { overflow-x: auto; font-size: .85rem; margin: .6rem 0 .2rem; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """The text of a page from its title and the HTML of its parts."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A scrollable table of HTML cells. A column whose name ends in a colon holds sentences."""
    classes = [' class="wide"' if name.endswith(":") else "" for name in columns]
    head = "".join(f"<th{kind}>{escape(name.rstrip(':'))}</th>" for name, kind in zip(columns, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>{body}</table></div>'


def bar(segments: Iterable[tuple[str, str, float]]) -> str:
    """A bar of segments, each with colour, name and share of the width."""
    parts = "".join(
        f'<div style="width:{100 * share:.2f}%;background:{color}" title="{escape(name)}"></div>'
        for color, name, share in segments
        if share > 0
    )
    return f'<div class="bar">{parts}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colour and name of each entry in a row."""
    items = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for color, name in entries)
    return f'<div class="legend">{items}</div>'
