"""Sections → one HTML page that needs nothing else: no network, no script, every figure inside."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from lgelu_lab.report.figures.drawing import Drawing
from lgelu_lab.report.markup import html_text, to_html
from lgelu_lab.report.section import Section

_HALF_UP_TO = 7.9  # inches; a wider figure is not legible at half the page

_STYLE = """
:root { --paper: #fbfbf9; --ink: #1d2125; --soft: #5c646c; --line: #d9dcdf; --panel: #ffffff; --link: #0057a3;
  --better: #00694a; --worse: #a83c00; --warning: #7a5200; --stripe: #f3f4f4; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #16191c; --ink: #e4e6e8; --soft: #a2a9b0; --line: #3a4046;
  --panel: #1e2226; --link: #7cbcff; --better: #5fd3a8; --worse: #ff9d66; --warning: #e5b84b; --stripe: #23282c; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.6 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
a { color: var(--link); }
header, main, nav { padding: 0 1.25rem; }
header { max-width: 62rem; padding-top: 2.5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.4rem; line-height: 1.3; margin: 3.5rem 0 .5rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
header p, main > section > p { max-width: 44rem; }
.soft, figcaption, .notes { color: var(--soft); }
nav ol { padding-left: 1.2rem; margin: .5rem 0; }
nav li { margin: .2rem 0; }
main { max-width: 66rem; }
figure { margin: 2rem 0; min-width: 0; }
figcaption { font-size: .9rem; line-height: 1.5; max-width: 50rem; margin: .6rem 0; }
figcaption b { color: var(--ink); }
.drawings { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
.drawings figure { margin: 1rem 0; }
.drawings .full { grid-column: 1 / -1; }
.picture { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 8px; }
.picture img { display: block; width: 100%; height: auto; padding: .6rem; }
.full .picture img { min-width: 36rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--panel); }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; width: 100%; font-size: .86rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .6rem; text-align: left; vertical-align: top; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; font-weight: 600; border-bottom: 2px solid var(--line);
  min-width: 4.5rem; }
tbody th { font-weight: 400; background: var(--panel); }
tbody + tbody { border-top: 1px solid var(--line); }
tr.group th { font-weight: 600; padding-top: .6rem; }
tr.group span { position: sticky; left: .6rem; }
tbody tr:not(.group):hover > * { background: var(--stripe); }
.number { text-align: right; }
td.wide { white-space: normal; min-width: 14rem; }
.better { color: var(--better); }
.worse { color: var(--worse); }
.warning { color: var(--warning); }
.missing { color: var(--soft); font-style: italic; }
.notes { font-size: .85rem; line-height: 1.5; max-width: 50rem; }
.notes p { margin: .4rem 0; }
footer { padding: 3rem 1.25rem; }
@media (min-width: 40rem) { tbody tr:not(.group) th { position: sticky; left: 0; } }
@media (min-width: 78rem) {
  body { display: grid; grid-template-columns: 15rem minmax(0, 66rem); column-gap: 2rem; justify-content: center; }
  header, main, footer { grid-column: 2; }
  nav { grid-column: 1; grid-row: 1 / span 3; position: sticky; top: 0; align-self: start; padding-top: 2.6rem;
    max-height: 100vh; overflow-y: auto; font-size: .92rem; }
}
@media print { nav { display: none; } .scroll { overflow: visible; } body { display: block; } }
"""


def render_page(
    title: str, introduction: Sequence[str], sections: Sequence[Section], figures: Mapping[str, Path]
) -> str:
    """The whole page. `figures`: {key of a drawing: its SVG or PNG file}, which are put into the page."""
    entries = "".join(f'<li><a href="#{section.key}">{html_text(section.title)}</a></li>' for section in sections)
    parts = "\n".join(_section(section, figures) for section in sections)
    opening = "".join(f'<p class="soft">{html_text(text)}</p>' for text in introduction)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{html_text(title)}</h1>{opening}</header>
<nav aria-label="Contents"><b>Contents</b><ol>{entries}</ol></nav>
<main>
{parts}
</main>
</body>
</html>
"""


def _section(section: Section, figures: Mapping[str, Path]) -> str:
    text = f"<p>{html_text(section.text)}</p>" if section.text else ""
    drawings, said = [], set()
    for drawing in section.drawings:  # how to read a kind of figure is said once
        drawings.append(_figure(drawing, figures[drawing.key], how="" if drawing.caption in said else drawing.caption))
        said.add(drawing.caption)
    tables = [to_html(table) for table in section.tables]
    inner = "\n".join([text, '<div class="drawings">', *drawings, "</div>", *tables])
    return f'<section id="{html.escape(section.key)}"><h2>{html_text(section.title)}</h2>\n{inner}\n</section>'


def _figure(drawing: Drawing, path: Path, how: str) -> str:
    alternative = html.escape(f"{drawing.title}. {drawing.caption} {drawing.note}".strip())
    return (
        f'<figure class="{_width(drawing)}" id="figure-{html.escape(drawing.key)}"><div class="picture" tabindex="0" '
        f'role="region" aria-label="{html.escape(drawing.title)}"><img alt="{alternative}" src="{_data_uri(path)}">'
        f"</div><figcaption><b>{html_text(drawing.title)}.</b> {html_text(f'{how} {drawing.note}'.strip())}"
        "</figcaption></figure>"
    )


def _width(drawing: Drawing) -> str:
    return "drawing full" if drawing.figure.get_figwidth() > _HALF_UP_TO else "drawing"


def _data_uri(path: Path) -> str:
    kind = {".svg": "image/svg+xml", ".png": "image/png"}[path.suffix]
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
