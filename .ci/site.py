"""Add to built pages what a host of sites looks for: ``python .ci/site.py FOLDER URL``.

It is a list of the pages, for search engines, and a page for addresses that lead nowhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

LEFT_OUT = {"404.html", "genindex.html", "py-modindex.html", "search.html"}
REDIRECTS = 'http-equiv="refresh"'  # is in pages that only lead to others
# The host shows it in the place of a page of any folder, so it has no relative links.
MISSING = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="robots" content="noindex">
<title>Not found</title>
<body style="font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 4rem auto; padding: 0 1rem">
<h1>This page is not here</h1>
<p>It has another name now, or never was. <a href="{url}">All pages</a>, <a href="{url}search.html">search</a>.</p>
</body>
</html>
"""


def main(folder: Path, url: str) -> None:
    """Write sitemap.xml and 404.html."""
    found = [path for path in folder.rglob("*.html") if REDIRECTS not in path.read_text(encoding="utf-8")]
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    pages = [name for name in names if name not in LEFT_OUT and not name.startswith("_")]
    (folder / "sitemap.xml").write_text(sitemap(url, pages), encoding="utf-8")
    (folder / "404.html").write_text(MISSING.format(url=url), encoding="utf-8")


def sitemap(url: str, pages: list[str]) -> str:
    """Return the list of pages, as sitemaps.org has it."""
    entries = "".join(f"<url><loc>{escape(url + page)}</loc></url>\n" for page in pages)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{entries}</urlset>\n'
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
