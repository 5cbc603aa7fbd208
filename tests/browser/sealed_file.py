"""Use the page that takes a sealed file apart, in headless Chromium: ``python -m browser.sealed_file HTML [PICTURES]``.

The page opens its example, refuses it with any part altered or under another key, and hands nothing out then. It
connects to nothing, and is no wider than a phone. With PICTURES, a folder, it is photographed opened and refused.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from html import unescape
from http.server import ThreadingHTTPServer
from pathlib import Path

from browser.__main__ import BROWSERS, WIDTHS, Quiet, photograph

PAGE = "_static/sealed-file/index.html"

# Opens the example for a photograph, and then, where FLIP is a word and not nothing, flips a bit of it.
POSE = """<!doctype html><body style="margin:0">
<iframe width=WIDTH height=2400 style="border:0" src="/PAGE"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const $ = id => frame.contentDocument.getElementById(id);
  $("example").click();
  const flip = () => ($("verdict").dataset.state === "opened" ? $("flip").click() : setTimeout(flip, 20));
  if ("FLIP") flip();
};
</script>"""


def main(html, pictures=None):
    """Print what is wrong. Return 1 if anything is, and 2 if there is no browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.stdout.write(f"no browser: expected one of {', '.join(BROWSERS)}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        shutil.copytree(html, site)
        look = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        look = look.replace("WIDTHS)", f"{json.dumps(WIDTHS)})").replace("/PAGE", f"/{PAGE}")
        (site / "look.html").write_text(look, encoding="utf-8")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        start = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        run = [*start, "--virtual-time-budget=100000", "--dump-dom", f"{address}/look.html"]
        printed = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout
        found = re.search(r'<pre id="found">(.*?)</pre>', printed, re.DOTALL)
        wrong = json.loads(unescape(found[1])) if found else ["the page came to no end"]
        for width in WIDTHS if pictures else ():
            for state, flip in (("opened", ""), ("refused", "flip")):
                name = f"pose-{width}-{state}.html"
                pose = POSE.replace("WIDTH", str(width)).replace("PAGE", PAGE).replace("FLIP", flip)
                (site / name).write_text(pose, encoding="utf-8")
                path = Path(pictures, f"sealed-file-{state}-{width}.png").absolute()
                photograph(start, f"{address}/{name}", width, path)
        server.shutdown()
    told = [*wrong, f"the page of a sealed file: {len(wrong)} wrong"]
    sys.stdout.write("".join(f"{line}\n" for line in told))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
