"""Serve the board under its guards, one address per language."""

import os
import re
import secrets
import sys
import webbrowser
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from ..inference.chat_page import HEAD, THEME
from ..inference.guards import HostGuard, refuse
from ..runtime.errors import needing_extra
from ..runtime.texts import LANGUAGES, preferred_language
from ..runtime.writing import written_whole
from .launching import read_flags
from .page import CSS, make_page


with needing_extra("web", "The board needs gradio"):
    import gradio as gr
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import RedirectResponse
    from starlette.middleware import Middleware
    from starlette.requests import HTTPConnection
    from starlette.types import ASGIApp, Receive, Scope, Send

_COOKIE = "hf_pretrain_board"


class TokenGuard:
    """
    ASGI middleware that refuses requests without the token of the board, and of pages at another address. The address
    with `?token=` gives a cookie.

    Args:
        app (`ASGIApp`): the application that gets all other requests.
        token (`str`): the token.
    """

    def __init__(self, app: ASGIApp, *, token: str):
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self.app if scope["type"] == "lifespan" else self._choose(HTTPConnection(scope))
        await respond(scope, receive, send)

    def _choose(self, request: HTTPConnection) -> ASGIApp:
        """Return what answers a request."""
        # A cookie holds for all ports of a host, and so for the pages of its other programs.
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            return refuse(None, HTTPException(403, "Only the pages of the board may ask it."))
        if self._is_token(request.cookies.get(_COOKIE, "")):
            return self.app
        if self._is_token(request.query_params.get("token", "")):
            # The address without the token does not end up in a history.
            response = RedirectResponse(request.scope["path"], 303)
            response.set_cookie(_COOKIE, self.token, httponly=True, samesite="strict")
            return response
        return refuse(
            None, HTTPException(401, "Open the address with the token, which `hf-pretrain board` has printed.")
        )

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())


def make_app(*, hosts: list[str], token: str, language: str | None) -> FastAPI:
    """
    Return the application.

    Args:
        hosts (`list[str]`): the names of this machine ([`~inference.guards.HostGuard`]).
        token (`str`): the token that requests need.
        language (`str`, *optional*): the language of the page; by default the browser's.
    """
    app = FastAPI(
        middleware=[Middleware(HostGuard, hosts=hosts), Middleware(TokenGuard, token=token)], openapi_url=None
    )
    flags = read_flags()

    @app.get("/")
    def choose(request: Request) -> RedirectResponse:
        return RedirectResponse(f"/{language or preferred_language(request.headers.get('accept-language', ''))}/")

    # Browsers ask for it at the root, and gradio has one below each page.
    app.get("/favicon.ico")(lambda: RedirectResponse("/en/favicon.ico"))
    options = {"theme": THEME, "css": CSS, "head": HEAD, "footer_links": [], "max_file_size": 1}
    for each in LANGUAGES:
        app = gr.mount_gradio_app(app, make_page(each, flags), f"/{each}", **options)
    return app


def read_token() -> str:
    """Return the token of this user. It stays the same, so that an open page survives the end of its board."""
    path = Path(HF_HOME, "hf_pretrain", "board_token")
    token = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    # An empty token would admit everyone, and a short one can be guessed.
    if not re.fullmatch(r"[\w-]{22,}", token, re.ASCII):
        token = secrets.token_urlsafe(16)
        with written_whole(path.parent) as scratch:
            # Other users of the machine can connect, too, but not read it.
            with open(os.open(scratch / path.name, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
                file.write(token)
    return token


def open_board(*, host: str, port: int, allowed_hosts: list[str], language: str | None) -> None:
    """Serve the board until the user stops it with Ctrl-C. The runs go on."""
    token = read_token()
    url = f"http://{host}:{port}/?token={token}"
    app = make_app(hosts=[host, *allowed_hosts], token=token, language=language)
    print(f"The board is at {url}", flush=True)
    if sys.stdout.isatty():
        webbrowser.open(url)
    # A page that is open holds its connection for ever.
    uvicorn.run(app, host=host, port=port, log_level="critical", timeout_graceful_shutdown=1)
