"""
Cut the answers of the server before a stop string. transformers ends an answer after it, and leaves it in the text.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any


# Parts of an answer, in the order in which a model writes them.
_PARTS = ("reasoning_content", "content", "text")

Send = Callable[[Any], Awaitable[None]]


class StopCutter:
    """
    Sender of ASGI messages that cuts the texts of one answer, as JSON or as a stream of events.

    Args:
        send (`Callable`): sends the messages on.
        stops (`list[str]`): the stop strings.
    """

    def __init__(self, send: Send, stops: list[str]):
        self.send = send
        self.stops = stops
        # The message that begins the response. That of a JSON body waits, because it holds the length of the body.
        self._start: dict[str, Any] = {}
        self._is_stream = False
        # The part of the body that is not sent yet.
        self._body = b""
        # The part of the answer that grows, and its end if that may begin a stop string.
        self._part, self._held = "", ""
        self._is_cut = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            if self._is_stream:
                await self.send(message)
            return
        self._body += message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self._is_stream:
            *events, self._body = self._body.split(b"\n\n")
            body = b"".join(self._cut_event(event) + b"\n\n" for event in events)
            await self.send({"type": "http.response.body", "body": body, "more_body": not is_last})
        elif is_last:
            body = self._cut_json(self._body)
            headers = [header for header in self._start["headers"] if header[0] != b"content-length"]
            headers.append((b"content-length", str(len(body)).encode()))
            await self.send(self._start | {"headers": headers})
            await self.send({"type": "http.response.body", "body": body})

    def _cut_event(self, event: bytes) -> bytes:
        """Cut an event of a stream: `data: ` and JSON."""
        name, separator, data = event.partition(b": ")
        return name + separator + self._cut_json(data)

    def _cut_json(self, data: bytes) -> bytes:
        try:
            answer = json.loads(data)
        except ValueError:
            # The report of an error.
            return data
        for choice in answer.get("choices", ()):
            texts = choice.get("delta", choice.get("message", choice))
            for part in _PARTS:
                if texts.get(part):
                    if part != self._part:
                        self._release(texts)
                    self._part, texts[part] = part, self._cut(texts[part])
            if choice.get("finish_reason") is not None:
                self._release(texts)
                if self._is_cut and choice["finish_reason"] == "length":
                    choice["finish_reason"] = "stop"
        return json.dumps(answer, ensure_ascii=False).encode()

    def _cut(self, text: str) -> str:
        """Return the further text of a part that is certain to stand before all stop strings, and hold the rest."""
        if self._is_cut:
            return ""
        text = self._held + text
        found = [text.find(stop) for stop in self.stops if stop in text]
        self._is_cut = bool(found)
        beginnings = (stop[:length] for stop in self.stops for length in range(1, len(stop)))
        num_held = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        end = min(found) if found else len(text) - num_held
        self._held = "" if found else text[end:]
        return text[:end]

    def _release(self, texts: dict[str, Any]) -> None:
        """Add the text that was held to its part."""
        if self._held:
            texts[self._part] = (texts.get(self._part) or "") + self._held
            self._held = ""


__all__ = ["StopCutter"]
