"""A notebook executed, and its cells with what each gave as one HTML file, much as Jupyter shows them."""

import html
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

STYLE = """
body { margin: 12px; font: 14px/1.45 system-ui, sans-serif; color: #222; background: #fff; }
pre { margin: 0; padding: 6px 8px; background: #f5f5f5; border: 1px solid #ddd; white-space: pre-wrap;
      font: 13px/1.4 Menlo, "DejaVu Sans Mono", "Liberation Mono", monospace; }
pre.out { background: none; border: 0; }
.cell { display: grid; grid-template-columns: 52px minmax(0, 1fr); gap: 6px; margin: 6px 0; }
.cell > span { color: #307fc1; font: 12px/2.4 monospace; text-align: right; }
.shown { padding-left: 8px; }
table { border-collapse: collapse; font-size: 12px; margin: 4px 0; }
th, td { padding: 3px 8px; text-align: right; border: 0; }
thead { border-bottom: 1px solid #bbb; }
tr:nth-child(even) td { background: #f5f5f5; }
h1 { font-size: 20px; margin: 4px 0; } h2, h3 { font-size: 16px; margin: 6px 0; } p { margin: 6px 0; }
"""
# Runs in a process of its own: the code cells on standard input, for each its last line's value as HTML out.
EXECUTED = """
import ast, html, json, sys
names, shown = {}, []
for source in json.load(sys.stdin):
    *body, last = ast.parse(source).body
    value = None
    is_value = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if is_value else [*body, last], []), "cell", "exec"), names)
    if is_value:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    as_html = getattr(value, "_repr_html_", lambda: f'<pre class="out">{html.escape(repr(value))}</pre>')
    shown.append("" if value is None else as_html())
print("\\n" + json.dumps(shown))
"""


def notebook_page(notebook: Path, folder: Path, environment: Mapping[str, str]) -> Path:
    """Execute its code cells in the folder, and write `notebook.html` there."""
    from markdown_it import MarkdownIt

    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    code = [source for cell, source in zip(cells, sources, strict=True) if cell["cell_type"] == "code"]
    command = [sys.executable, "-c", EXECUTED]
    done = subprocess.run(
        command, input=json.dumps(code), cwd=folder, env=dict(environment), check=True, capture_output=True, text=True
    )
    shown = iter(json.loads(done.stdout.splitlines()[-1]))
    parts, number = [], 0
    for cell, source in zip(cells, sources, strict=True):
        if cell["cell_type"] != "code":
            parts.append(f'<div class="cell"><span></span><div>{MarkdownIt().render(source)}</div></div>')
            continue
        number += 1
        out = next(shown)
        parts.append(f'<div class="cell"><span>[{number}]:</span><pre>{html.escape(source)}</pre></div>')
        parts.append(f'<div class="cell"><span></span><div class="shown">{out}</div></div>' if out else "")
    page = folder / "notebook.html"
    text = f'<!DOCTYPE html><meta charset="utf-8"><style>{STYLE}</style>{"".join(parts)}'
    page.write_text(text.replace(str(folder), "/home/me/work"), encoding="utf-8")
    return page
