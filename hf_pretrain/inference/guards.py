"""
The guard in front of the server, the chat page and the board: it refuses requests to another host name than the
allowed ones, and those of a page of another one, with status 403. All refusals have the form of OpenAI's API.
"""

import re
from typing import Any

from jinja2 import TemplateError

from ..runtime.errors import needing_extra


with needing_extra("serve", "Serving needs FastAPI"):
    from pydantic import ValidationError
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

# The errors that wrong fields raise. All others are ours.
MISTAKES = (ValueError, TypeError, LookupError, AttributeError, TemplateError)


def refuse(_: Any, error: BaseException) -> JSONResponse:
    """Return the response to a request that raises an error, in the form of OpenAI's API."""
    # A `ConnectionError` means that llama.cpp has ended.
    status = 503 if isinstance(error, ConnectionError) else 400 if isinstance(error, MISTAKES) else 500
    param = None
    message = f"The request cannot be answered: {type(error).__name__}: {error}"
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:] or None
        # NOTE: pydantic puts "Value error" before the text of a `ValueError`.
        text = first["msg"].removeprefix("Value error, ").replace("Extra inputs are", "This field is")
        message = f"{param or 'The body'}: {text}."
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status)


class HostGuard:
    """
    ASGI middleware that refuses requests to and from foreign host names.

    A web page whose name leads to this machine (DNS rebinding) sends its own name as the host. Every IP address is
    allowed as a host: no page can make one lead elsewhere.

    Args:
        app (`ASGIApp`): the application that gets all other requests.
        hosts (`list[str]`): the names of this machine beside `localhost`.
    """

    def __init__(self, app: ASGIApp, *, hosts: list[str]):
        self.app = app
        self.hosts = {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers({"host": "localhost"})
        host, origin = (_host_name(headers.get(name, "")) for name in ("host", "origin"))
        is_own = host in self.hosts or re.fullmatch(r"[\d.]+|[\da-f.]*:[\da-f:.]+", host)
        if is_own and (not origin or origin in {host, *self.hosts}):
            await self.app(scope, receive, send)
            return
        name = origin if is_own else host
        error = HTTPException(403, f"{name!r:.200} is no name of this server. Allow it with --allowed_hosts.")
        await refuse(None, error)(scope, receive, send)


def _host_name(address: str) -> str:
    """Return the name or number in `localhost:8000` or `http://[::1]:8000`."""
    return re.sub(r":\d*$", "", address.rpartition("/")[2]).strip("[]").lower()
