"""
Serve an exported page (`convert --format web`) with the headers that threads in a browser need.

    hf-pretrain serve out/web --port 8001
"""

import argparse
import socket
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..runtime.command_line import one_line_errors, print_result
from ..runtime.errors import UserError


class PageHandler(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".wasm": "application/wasm", ".js": "text/javascript"}

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing for each file."""


class PageServer(ThreadingHTTPServer):
    """A server of the files in a directory."""

    def __init__(self, directory: str | Path, host: str, port: int):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), partial(PageHandler, directory=str(directory)))

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A reader may leave while the model is sent.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 admits the whole network.")
    parser.add_argument("--port", type=int, default=8000, help="TCP port; 0 takes a free one.")
    args = parser.parse_args()
    try:
        server = PageServer(args.directory, args.host, args.port)
    except OSError as error:
        raise UserError(f"Port {args.port} of {args.host} cannot be used: {error}. Choose another port.") from None
    with server:
        host = f"[{args.host}]" if ":" in args.host else args.host
        print_result(f"http://{host}:{server.server_address[1]}/ (Ctrl-C ends it)")
        server.serve_forever()


if __name__ == "__main__":
    with one_line_errors():
        main()
