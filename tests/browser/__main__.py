"""Look at the built documentation in headless Chromium: ``python -m browser HTML [PICTURES]``.

Each page is laid out at the width of a desktop and of a phone. Nothing may be wider than the window, no code wider than
its block, and each link to a place of a page must lead to one. Addresses that moved lead on, and the search finds a
name in the files, without a server. With PICTURES, a folder, each page is photographed at both widths too.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WIDTHS = (1280, 390)
OLD = {  # addresses of 0.2, and where they lead
    "api.html#fastrack.attest.Policy": "api-attest.html#fastrack.attest.Policy",
    "api.html#wrapped-keys": "api-providers.html",
    "api.html#fastrack.seal": "api.html#fastrack.seal",
    "costs.html": "benchmarks.html",
}
SOUGHT, FOUND = "protect_checkpoints", "api.html#fastrack.protect_checkpoints"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# One frame for each page and width. What is found stands in the document in the end, which Chromium prints.
LOOK = """<!doctype html><body><script>
(async () => {
  const found = {wide: [], cut: [], links: [], lost: [], ids: {}};
  for (const width of WIDTHS) for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.width = width; frame.height = 900; frame.style.border = 0; frame.src = page;
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    const inside = frame.contentDocument, content = inside.scrollingElement;
    if (content.scrollWidth > width) found.wide.push([page, width, content.scrollWidth]);
    for (const code of inside.querySelectorAll("pre"))
      if (code.scrollWidth > code.clientWidth) found.cut.push([page, width, code.textContent.trim().slice(0, 60)]);
    found.ids[page] = [...inside.querySelectorAll("[id], a[name]")].map(each => each.id || each.name);
    for (const link of inside.querySelectorAll("a[href]"))
      if (link.host === location.host && link.hash && link.pathname !== "/genindex.html")
        found.links.push([page, link.pathname.slice(1), decodeURIComponent(link.hash.slice(1))]);
    frame.remove();
  }
  for (const [old, now] of Object.entries(OLD)) {
    const frame = document.createElement("iframe");
    frame.src = old; document.body.append(frame);
    await new Promise(done => setTimeout(done, 5000));
    const at = frame.contentWindow.location, there = at.pathname.slice(1) + at.hash;
    if (there !== now) found.lost.push([old, there]);
    frame.remove();
  }
  const told = document.createElement("pre");
  told.id = "found"; told.textContent = JSON.stringify(found); document.body.append(told);
})();
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class NoBrowserError(Exception):
    """No browser is installed."""


@contextmanager
def serve(html):
    """Serve a copy of a site: give its folder, its address, and the beginning of a browser's command."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise NoBrowserError(f"no browser: expected one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        shutil.copytree(html, site)
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            start = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
            yield site, f"http://127.0.0.1:{server.server_port}", start
            server.shutdown()


def main(look):
    """Run a look at a site, and return the status: 1 if anything is wrong, and 2 if there is no browser."""
    for pictures in sys.argv[2:]:
        Path(pictures).mkdir(parents=True, exist_ok=True)  # Chromium says nothing of one that is not there
    try:
        return look(*sys.argv[1:])
    except NoBrowserError as error:
        sys.stdout.write(f"{error}\n")
        return 2


def look_at_pages(html, pictures=None):
    """Print what is wrong. Return 1 if anything is."""
    with serve(html) as (site, address, start):
        pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
        pages = [page for page in pages if page not in {"genindex.html", "search.html"} and "_static" not in page]
        (site / "look.html").write_text(
            LOOK.replace("WIDTHS", json.dumps(WIDTHS))
            .replace("PAGES", json.dumps(pages))
            .replace("(OLD)", f"({json.dumps(OLD)})"),
            encoding="utf-8",
        )
        look = [*start, "--virtual-time-budget=600000", "--dump-dom", f"{address}/look.html"]
        printed = subprocess.run(look, capture_output=True, text=True, check=True, timeout=500).stdout
        found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', printed, re.DOTALL)[1]))
        search = [*start, "--virtual-time-budget=30000", "--dump-dom", f"{(site / 'search.html').as_uri()}?q={SOUGHT}"]
        results = subprocess.run(search, capture_output=True, text=True, check=True, timeout=120).stdout
        for width in WIDTHS if pictures else ():
            for page in pages:
                path = Path(pictures, f"{page.removesuffix('.html').replace('/', '-')}-{width}.png").absolute()
                photograph(start, f"{address}/{page}", width, path)
    wrong = [f"{page} is {wide} pixels wide at {width}" for page, width, wide in found["wide"]]
    wrong += [f"{page} cuts code at {width}, which begins with {text!r}" for page, width, text in found["cut"]]
    wrong += [f"{old} leads to {there}" for old, there in found["lost"]]
    wrong += [] if f'href="{FOUND}"' in results else [f"the search finds no {SOUGHT} without a server"]
    ids = found["ids"]
    wrong += [f"{page} links to {to}#{at}" for page, to, at in found["links"] if at not in ids.get(to, ())]
    told = [*sorted(set(wrong)), f"{len(pages)} pages, {len(found['links'])} links to places, {len(set(wrong))} wrong"]
    sys.stdout.write("".join(f"{line}\n" for line in told))
    return int(bool(wrong))


def photograph(start, address, width, path):
    """Chromium has no window below 500 pixels, so a page is framed in one that is as wide as the window should be."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder, "frame.html")
        frame.write_text(f'<body style="margin:0"><iframe src="{address}" width={width} height=2400 style="border:0">')
        size = [f"--window-size={max(width, 500)},2400", f"--screenshot={path}", "--virtual-time-budget=5000"]
        subprocess.run([*start, *size, frame.as_uri()], capture_output=True, check=True, timeout=60)


if __name__ == "__main__":
    sys.exit(main(look_at_pages))
