"""Open a report of `kbit bench report` in headless Chromium and check what only a browser knows.

`python tools/check_report.py PAGE [FOLDER]`; `make report-check` runs it. At a wide and a narrow window:
nothing is loaded from outside, nothing is wider than the window, tables scroll inside their containers, and
every chart has a size. Screenshots of both, light and dark, go to FOLDER for whoever wants to look.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WINDOWS = {"wide": (1440, 2400), "narrow": (500, 2400)}
SCHEMES = {"light": 1, "dark": 0}  # Blink's numbers
SECONDS = 120
# Run by the browser after the page is laid out; the result is read from the dumped document.
PROBE = """<script>addEventListener("load", () => {
  document.querySelectorAll("details").forEach(one => one.open = true);
  const charts = [...document.querySelectorAll("figure > svg")];
  const boxes = [...document.querySelectorAll(".scroll")];
  const found = {
    loaded: performance.getEntriesByType("resource").map(one => one.name),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    tables: document.querySelectorAll("table").length,
    escaping: boxes.filter(box => box.getBoundingClientRect().right > innerWidth + 1).length,
    scrolling: boxes.filter(box => box.scrollWidth > box.clientWidth + 1).length,
    flat: charts.filter(svg => svg.getBoundingClientRect().height < 80).length,
    charts: charts.length,
    sections: document.querySelectorAll("section").length,
  };
  const text = document.createElement("pre");
  text.id = "probe"; text.textContent = JSON.stringify(found);
  document.body.append(text);
});</script>"""


def browser() -> str:
    """Path of a Chromium; exits where there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        sys.exit(f"report-check: no browser; looked for {', '.join(BROWSERS)}. sudo apt-get install chromium")
    return found


def run(program: str, page: Path, size: tuple[int, int], *options: str) -> str:
    """What headless Chromium prints for a page."""
    width, height = size
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},{height}"]
    command += [*options, page.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout


def problems(found: dict[str, object]) -> list[str]:
    """What is wrong with a page of which `PROBE` found this."""
    wrong = []
    if found["loaded"]:
        wrong.append(f"loads {found['loaded']}")
    if found["overflow"]:
        wrong.append(f"is {found['overflow']} px wider than the window")
    if found["escaping"]:
        wrong.append(f"{found['escaping']} tables reach out of the window")
    if found["flat"]:
        wrong.append(f"{found['flat']} charts have no height")
    if not (found["sections"] and found["tables"]):
        wrong.append("is empty")
    return wrong


def main() -> None:
    """Check a page; exit code 1 and a line for each problem."""
    page = Path(sys.argv[1])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else page.parent
    program = browser()
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        probed = Path(temporary) / "probed.html"
        text = page.read_text(encoding="utf-8")
        probed.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
        for name, size in WINDOWS.items():
            dumped = re.search(r'<pre id="probe">(.*?)</pre>', run(program, probed, size, "--dump-dom"), re.S)
            if dumped is None:
                sys.exit(f"report-check: {page} did not run in {program}")
            found = json.loads(dumped.group(1))
            print(f"{name}: {found}")
            wrong += [f"{page}, {name}: {problem}" for problem in problems(found)]
            for scheme, number in SCHEMES.items():
                picture = folder / f"report-{name}-{scheme}.png"
                options = [f"--blink-settings=preferredColorScheme={number}", "--hide-scrollbars"]
                run(program, page, size, *options, f"--screenshot={picture.resolve()}")
                print(picture)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
