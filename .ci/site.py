"""Add to built pages what a host of sites looks for: ``python .ci/site.py FOLDER URL``.

These are a list of the pages for search engines, and a page for addresses that lead nowhere, which has no relative
links: the host shows it in the place of a page of any folder.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

LEFT_OUT = {"404.html", "genindex.html", "py-modindex.html", "search.html"}
RELATIVE = re.compile(r'(?P<before> (?:href|src)=")(?!https?:|data:|mailto:|#)(?P<name>[^"]*)"')


def main(folder: Path, url: str) -> None:
    """Write sitemap.xml and 404.html."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
    pages = [name for name in names if name not in LEFT_OUT and not name.startswith("_")]
    (folder / "sitemap.xml").write_text(sitemap(url, pages), encoding="utf-8")
    (folder / "404.html").write_text(
        missing((folder / "search.html").read_text(encoding="utf-8"), url), encoding="utf-8"
    )


def sitemap(url: str, pages: list[str]) -> str:
    """Return the list of pages, as sitemaps.org has it."""
    entries = "".join(f"<url><loc>{escape(url + page)}</loc></url>\n" for page in pages)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{entries}</urlset>\n'
    )


def missing(page: str, url: str) -> str:
    """Return the page of the search with another text, and with links that hold in every folder."""
    page, replaced = re.subn(
        r'(<article[^>]*id="furo-main-content">).*?(</article>)',
        r"\1<h1>This page is not here</h1><p>It has another name, or never was. Look for it on the left.</p>\2",
        page,
        flags=re.DOTALL,
    )
    assert replaced == 1, "expected the article of furo's page, found none"
    page = re.sub(r"<title>.*?</title>", "<title>Not found</title>", page, count=1, flags=re.DOTALL)
    page = re.sub(r'<script src="[^"]*search[^"]*"></script>|<script>[^<]*(?:Search|search)[^<]*</script>', "", page)
    return RELATIVE.sub(lambda link: f'{link["before"]}{url}{link["name"]}"', page)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
