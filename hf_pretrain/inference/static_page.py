"""Serve an exported page (`convert --format web`) with the headers that threads in a browser need."""

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ..runtime.command_line import print_result


class PageHandler(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".wasm": "application/wasm", ".js": "text/javascript"}

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing for each file."""


def is_page(name: str | Path | None) -> bool:
    """Return whether a directory holds an exported page."""
    return name is not None and Path(name, "index.html").is_file() and Path(name, "wllama.wasm").is_file()


def serve_page(directory: str | Path, *, host: str, port: int) -> None:
    """Serve the files of a directory until Ctrl-C. Port 0 takes a free one."""
    with ThreadingHTTPServer((host, port), partial(PageHandler, directory=str(directory))) as server:
        print_result(f"http://{host}:{server.server_address[1]}/ (Ctrl-C ends it)")
        server.serve_forever()
