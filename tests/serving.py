"""A server in this process, and requests to it: by the official `openai` client, and as any program may send them."""

import contextlib
import json
from collections.abc import Iterator

import pytest
import requests

from hf_pretrain.inference.serving import serve_model
from tests.invariants.launching import free_port


openai = pytest.importorskip("openai")


@contextlib.contextmanager
def served(model: str, **options) -> Iterator[openai.OpenAI]:
    """Serve a model in this process, and give a client, whose `model` is its name."""
    port = free_port()
    server = serve_model(model, host="127.0.0.1", port=port, use_cpu=True, **{"hosts": []} | options)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=3, timeout=500)
    client.served = model
    yield client
    # A server that must exit leaves a coroutine, whose late end disturbs what runs when Python collects it.
    client.close()
    server.stop()


def ask(client, messages, **options):
    return client.chat.completions.create(model=client.served, messages=messages, **{"temperature": 0} | options)


def texts(answer, stream: bool) -> tuple[str, str]:
    """Return the reasoning and the content of an answer or of a stream."""
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    return tuple("".join(getattr(p, name, None) or "" for p in parts) for name in ("reasoning_content", "content"))


def send(client, path: str, method: str = "get", content: bytes | None = None, **headers: str) -> requests.Response:
    """Send a request as any program may do."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    with requests.Session() as session:
        session.trust_env = False
        url = str(client.base_url).removesuffix("/v1/") + path
        return session.request(method, url, data=content, headers=headers, timeout=500)


def post(client, path: str, body, **headers: str) -> requests.Response:
    """Send `body` as JSON, or as it is if it is bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(client, path, "post", content, **{"Content_Type": "application/json"} | headers)
