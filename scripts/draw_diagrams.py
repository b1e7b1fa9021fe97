"""Draws the diagrams of the documentation, blocks of Mermaid in its pages, as pictures that are kept beside them.

It needs Chromium and Mermaid's script, neither of which is needed to build or to read the documentation:

    npm pack mermaid && tar xzf mermaid-*.tgz package/dist/mermaid.min.js
    python scripts/draw_diagrams.py package/dist/mermaid.min.js
"""

import argparse
import html
import json
import re
import subprocess
import tempfile
from pathlib import Path

from documentation import DOCS, diagrams_of, mark_of, picture_of

_PAGE = """<!doctype html><meta charset="utf-8"><script src="{script}"></script><pre id="drawn"></pre><script>
mermaid.initialize({{startOnLoad: false, theme: "neutral", deterministicIds: true, htmlLabels: false,
                    flowchart: {{htmlLabels: false}}, fontFamily: "system-ui, sans-serif"}});
(async () => {{
  const drawn = [];
  for (const text of {diagrams}) drawn.push((await mermaid.render("diagram", text)).svg);
  document.getElementById("drawn").textContent = JSON.stringify(drawn);
}})();
</script>"""


def main() -> None:
    """Draw every diagram of every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="mermaid.min.js")
    parser.add_argument("--chromium", default="chromium", help="the browser's command (default: chromium)")
    options = parser.parse_args()

    sources = {}
    for page in sorted(DOCS.rglob("*.md")):
        for index, diagram in enumerate(diagrams_of(page.read_text(encoding="utf-8"))):
            sources[picture_of(page.relative_to(DOCS).as_posix(), index)] = diagram
    folder = DOCS / "images" / "diagrams"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    pictures = _draw(list(sources.values()), options.script, options.chromium)
    for (name, diagram), picture in zip(sources.items(), pictures, strict=True):
        (DOCS / name).write_text(f"{mark_of(diagram)}\n{picture}\n", encoding="utf-8")
        print(f"docs/{name}")


def _draw(diagrams: list[str], script: Path, chromium: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        text = json.dumps(diagrams).replace("<", "\\u003c")
        page.write_text(_PAGE.format(script=script.resolve().as_uri(), diagrams=text), encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        command = [chromium, *flags, "--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
        dom = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    drawn = re.search(r'<pre id="drawn">(.*?)</pre>', dom, re.DOTALL)
    if drawn is None or not drawn[1]:
        raise SystemExit(f"Mermaid drew nothing; is {script} its script, and are the diagrams valid?")
    pictures = json.loads(html.unescape(drawn[1]))
    return [_with_size(picture) for picture in pictures]


def _with_size(picture: str) -> str:
    """Return a picture shown at its natural size where there is room, instead of as wide as the page."""
    width, height = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', picture).groups()
    return picture.replace('width="100%"', f'width="{float(width):.0f}" height="{float(height):.0f}"', 1)


if __name__ == "__main__":
    main()
