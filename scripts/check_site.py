"""Check the built documentation in a headless browser: overflow and search.

    make docs
    python scripts/check_site.py                      # uses chromium from PATH
    python scripts/check_site.py --browser BROWSER --site build/docs

Every page is opened at the width of a desktop and of a phone. A page that is wider than
its window is an error. The search must find the collectors. The exit code is 1 if there
was an error. ``mkdocs build --strict`` has checked the links.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

WIDTHS = (1280, 390)
QUERY = "MultiSyncCollector"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

PAGE = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS;
const wait = ms => new Promise(done => setTimeout(done, ms));
async function open(page, width) {
  const frame = document.createElement("iframe");
  frame.style.width = width + "px"; frame.style.height = "900px";
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page; document.body.append(frame);
  await loaded; await wait(150);
  return frame;
}
async function search() {
  const frame = await open("index.html", widths[0]);
  const inside = frame.contentDocument;
  const field = inside.querySelector("[data-md-component=search-query]");
  field.focus(); field.value = QUERY;
  for (const name of ["focus", "input", "keyup", "change"])
    field.dispatchEvent(new frame.contentWindow.Event(name, {bubbles: true}));
  for (let tries = 0; tries < 100; tries++) {
    const found = [...inside.querySelectorAll(".md-search-result__item a")];
    if (found.length) return found.map(each => each.getAttribute("href"));
    await wait(100);
  }
  return [];
}
(async () => {
  const wide = [];
  for (const page of pages) for (const width of widths) {
    const frame = await open(page, width);
    const root = frame.contentDocument.documentElement;
    if (root.scrollWidth > width + 1) wide.push([page, width, root.scrollWidth]);
    frame.remove();
  }
  const result = {wide, found: await search()};
  await fetch("/__result", {method: "POST", body: JSON.stringify(result)});
})();
</script></body>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site and the page that opens the others; receives its result."""

    pages: ClassVar[list[str]] = []
    result: ClassVar[dict[str, Any]] = {}
    done: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        """Send a file of the site, or the page with the checks."""
        if self.path != "/__check.html":
            super().do_GET()
            return
        text = PAGE.replace("PAGES", json.dumps(self.pages))
        text = text.replace("WIDTHS", json.dumps(WIDTHS))
        body = text.replace("QUERY", json.dumps(QUERY)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Keep the result."""
        length = int(self.headers["Content-Length"])
        type(self).result = json.loads(self.rfile.read(length))
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        """Print nothing."""


def in_browser(site: Path, browser: str, timeout: float) -> dict[str, Any]:
    """Return what the browser measured."""
    Handler.pages = sorted(
        str(page.relative_to(site))
        for page in site.rglob("*.html")
        if page.name != "404.html"
    )
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/__check.html"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}"]
        command += ["--remote-debugging-port=0", address]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                answered = Handler.done.wait(timeout)
            finally:
                process.terminate()
    server.shutdown()
    if not answered:
        raise SystemExit(f"{browser} sent no result within {timeout:.0f} seconds.")
    return Handler.result


def main() -> int:
    """Print what is wrong; 1 if there is anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, default=Path("build/docs"))
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--timeout", type=float, default=240.0)
    arguments = parser.parse_args()
    if shutil.which(arguments.browser) is None:
        raise SystemExit(f"There is no {arguments.browser}: pass --browser.")
    if not (arguments.site / "index.html").exists():
        raise SystemExit(f"{arguments.site} has no index.html: run `make docs`.")
    result = in_browser(arguments.site, arguments.browser, arguments.timeout)
    problems = [
        f"{page} is {wide} pixels wide in a window of {width}"
        for page, width, wide in result["wide"]
    ]
    if not any("collect" in str(link) for link in result["found"]):
        problems.append(f"the search for {QUERY} finds {result['found']}")
    for problem in problems:
        print(problem)
    print(f"{len(Handler.pages)} pages, {len(WIDTHS)} widths, {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
