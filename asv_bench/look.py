"""Open the published benchmarks in a real browser, headless: python asv_bench/look.py

Fails unless the browser draws the graph of the speedup from points that it has fetched. Leaves pictures
of the pages beside the published files, to be looked at. Needs chromium. asv's pages load libraries from
the web; without it, `npm install` in this folder brings the same ones:

    apt-get install chromium npm && npm install --prefix asv_bench
"""

from __future__ import annotations

import argparse
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

HTML = Path(__file__).with_name("html")
MODULES = Path(__file__).with_name("node_modules")
GRAPH = "fit.StrongScaling.track_speedup"
# What asv's page loads from the web, by the end of its address, and where npm puts it.
LIBRARIES = {
    "jquery-3.3.1.min.js": "jquery/dist/jquery.min.js",
    "jquery.flot.min.js": "flot/jquery.flot.js",
    "jquery.flot.time.min.js": "flot/jquery.flot.time.js",
    "jquery.flot.selection.min.js": "flot/jquery.flot.selection.js",
    "jquery.flot.categories.min.js": "flot/jquery.flot.categories.js",
    "jquery.flot.orderBars.js": "flot-orderbars/js/jquery.flot.orderBars.js",
    "stupidtable.min.js": "stupid-table-plugin/stupidtable.min.js",
    "md5.min.js": "blueimp-md5/js/md5.min.js",
    "bootstrap.min.js": "bootstrap/dist/js/bootstrap.min.js",
    "bootstrap.min.css": "bootstrap/dist/css/bootstrap.min.css",
}


class Handler(http.server.SimpleHTTPRequestHandler):
    """The published files, and the libraries under /library/ where they are here."""

    fetched: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        if self.path.split("?")[0] in ("/", "/index.html"):
            self._send(
                _with_local_libraries((HTML / "index.html").read_text("utf-8")).encode(), "text/html"
            )
        elif self.path.startswith("/library/"):
            name = self.path.rsplit("/", 1)[1]
            kind = "text/css" if name.endswith(".css") else "text/javascript"
            self._send((MODULES / LIBRARIES[name]).read_bytes(), kind)
        else:
            self.fetched.add(unquote(self.path.split("?")[0]))
            super().do_GET()

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def _with_local_libraries(page: str) -> str:
    for name, file in LIBRARIES.items():
        if (MODULES / file).exists():
            # A library that was built or zipped otherwise has not the hash that the page asks for.
            page = re.sub(
                rf'"https://[^"]*/{re.escape(name)}" integrity="[^"]*"', f'"library/{name}"', page
            )
    return page


@contextmanager
def served() -> Iterator[str]:
    """The address of the published files."""
    handler = partial(Handler, directory=str(HTML))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def browse(chromium: str, url: str, *options: str) -> str:
    """What the browser prints."""
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command += ["--hide-scrollbars", "--window-size=1300,900", "--virtual-time-budget=20000"]
        result = subprocess.run(
            [*command, *options, url], capture_output=True, text=True, timeout=120, check=False
        )
    if result.returncode:
        raise SystemExit(f"{chromium} failed:\n{result.stderr}")
    return result.stdout


def missing_of(dom: str) -> list[str]:
    """What a page with a graph has, and this one has not."""
    wanted = {
        "the canvas of a graph": 'class="flot-base"',
        "the benchmark's name": GRAPH,
        "labels of its axes": "flot-tick-label",
        "the parameter that tells modes apart": "sync_every",
    }
    missing = [what for what, text in wanted.items() if text not in dom]
    return missing if _points() else [*missing, "points"]


def _points() -> list:
    """What the browser has fetched to be drawn: pairs of a commit and a value for each mode."""
    asked = [path for path in Handler.fetched if path.endswith(f"/{GRAPH}.json") and "summary" not in path]
    # The browser asks for every combination of what differs, also for those that were never run.
    files = [HTML / path.lstrip("/") for path in asked]
    series = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    return [point for points in series for point in points if point[1] is not None]


def main() -> None:
    """Look at the list of benchmarks and at the graph of the speedup."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    options = parser.parse_args()
    if options.chromium is None:
        raise SystemExit("No browser: apt-get install chromium, or name one with --chromium.")
    if not (HTML / "index.html").exists():
        raise SystemExit(f"Nothing is published in {HTML}: run asv publish.")
    with served() as root:
        dom = browse(options.chromium, f"{root}#{GRAPH}", "--dump-dom")
        for name, page in (("list", root), ("speedup", f"{root}#{GRAPH}")):
            browse(options.chromium, page, f"--screenshot={HTML / name}.png")
            print(HTML / f"{name}.png")
    if missing := missing_of(dom):
        sys.exit(f"The page of {GRAPH} lacks: {', '.join(missing)}.")
    print(f"{GRAPH} shows a graph of {len(_points())} point(s).")


if __name__ == "__main__":
    main()
