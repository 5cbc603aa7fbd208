"""Use the page that takes a sealed file apart, in headless Chromium: ``python -m browser.sealed_file HTML [PICTURES]``.

The page opens its example, refuses it with any part altered or under another key, and hands nothing out then. It
connects to nothing, and is no wider than a phone. With PICTURES, a folder, it is photographed opened and refused.
"""

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

from browser.__main__ import WIDTHS, main, serve

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


def look_at_page(html, pictures=None):
    """Print what is wrong. Return 1 if anything is."""
    with serve(html) as (site, address, start):
        look = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        look = look.replace("WIDTHS)", f"{json.dumps(WIDTHS)})").replace("/PAGE", f"/{PAGE}")
        (site / "look.html").write_text(look, encoding="utf-8")
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
                size = [f"--window-size={max(width, 500)},2400", f"--screenshot={path}", "--virtual-time-budget=20000"]
                subprocess.run([*start, *size, f"{address}/{name}"], capture_output=True, check=True, timeout=60)
    told = [*wrong, f"the page of a sealed file: {len(wrong)} wrong"]
    sys.stdout.write("".join(f"{line}\n" for line in told))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(look_at_page))
