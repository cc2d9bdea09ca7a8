"""Toy models for all tests: two layers, width 32, a fixed seed."""

import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread, as in the processes that tests start: on some CPUs, sums over several threads give other bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise the output would be in the language of the terminal.
os.environ["LANGUAGE"] = "en"
# `ATEN_CPU_CAPABILITY=avx2 make test` imitates another CPU. Inductor's cache does not know the difference, and kernels
# compiled for both in one cache corrupt memory.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{capability}")
# `make test ARGS="-k name"` passes its variables on to the `make` that a test starts.
MAKE_VARIABLES = re.findall(r"^(\w+) \?=", (Path(__file__).parents[1] / "Makefile").read_text(), re.MULTILINE)
for variable in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", *MAKE_VARIABLES):
    os.environ.pop(variable, None)
# `make test &` ignores SIGINT and `nohup make test` SIGHUP, and every run that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention import varlen  # noqa: E402

from hf_pretrain import MiniMindForCausalLM  # noqa: E402
from hf_pretrain.model import packed_attention  # noqa: E402
from tests.matrix import toys, trained  # noqa: E402, F401
from tests.talking import train_talker  # noqa: E402
from tests.toys import toy_model  # noqa: E402


TOY = {
    "vocab_size": 160,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough for attention that is not uniform, and for a router with preferences.
    "initializer_range": 0.3,
}
GENERATIONS = {
    "v1": {},
    "v1-moe": {"num_experts": 4, "num_shared_experts": 1, "router_aux_loss_coef": 0.1},
    "v3-moe": {"num_experts": 4, "num_experts_per_tok": 1, "qk_norm": True, "router_aux_loss_coef": 0.1},
}


def pytest_configure(config):
    """
    Build DeepSpeed's kernels in a directory of this checkout, without the lock files of earlier sessions.

    torch waits without limit for the lock of a build, also if the process that built was killed.
    """
    if not hasattr(config, "workerinput"):
        folder = config.cache.mkdir("torch_extensions")
        for lock in folder.glob("*/lock"):
            lock.unlink()
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
        if sys.platform == "linux":
            # A compiler that builds them faster.
            os.environ.setdefault("CXX", str(Path(__file__).parent / "fixtures/compiler/g++"))


def pytest_collection_finish():
    """
    Leave what is imported by now out of garbage collections.

    Trainer collects at the start of each training, which takes ten times as long as a step of a toy model if all
    modules are searched.
    """
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def native_copies(tmp_path_factory):
    """Keep the native copies of this process out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_pretrain.weights.localizing.COPIES", tmp_path_factory.mktemp("native"))
        yield


@pytest.fixture(scope="session")
def build_model() -> Callable[..., MiniMindForCausalLM]:
    """Return a function that builds a toy model in eval mode from config overrides, with equal weights per call."""

    def build(**overrides) -> MiniMindForCausalLM:
        return toy_model(**TOY | overrides).eval()

    return build


@pytest.fixture(params=GENERATIONS)
def model(request, build_model) -> MiniMindForCausalLM:
    """Return a toy model, one per MiniMind generation."""
    return build_model(**GENERATIONS[request.param])


@pytest.fixture(scope="session")
def input_ids() -> torch.Tensor:
    """Return random ids of shape (2, 24), without special tokens."""
    return torch.randint(3, TOY["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    """Return the directory of a toy model that has memorized the answers of `tests/talking.py`."""
    path = tmp_path_factory.mktemp("talker")
    train_talker(path)
    return path


@pytest.fixture
def page():
    """Return an empty page of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    # Use the system's browser: `playwright install` would download another one. Start one browser per test: the driver
    # of a browser for the whole session would run during the tests that kill processes.
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


def weights_by_document(query, key, cu_seq_lens, window_size, scale):
    """Yield the documents' slices, scores and attention weights `(num_heads, length, length)`, written out."""
    left, right = (size if size >= 0 else len(query) for size in window_size or (-1, -1))
    for start, stop in cu_seq_lens.unfold(0, 2, 1).tolist():
        part = slice(start, stop)
        scores = torch.einsum("qhd,khd->hqk", query[part], key[part]) * scale
        places = torch.arange(stop - start)
        offset = places[None, :] - places[:, None]
        scores = scores.masked_fill((offset > right) | (offset < -left), -torch.inf)
        yield part, scores, scores.softmax(-1)


@pytest.fixture
def varlen_kernel(monkeypatch):
    """Put CPU kernels behind torch's `varlen_attn`; return the lengths and the number of key heads of its calls."""
    calls = []

    def repeat(states, query):
        return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)

    def forward(query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size, *rest):
        calls.append((cu_q.tolist(), max_q, max_k, key.shape[1]))
        key, value = repeat(key, query), repeat(value, query)
        output, normaliser = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
        for part, scores, weights in weights_by_document(query, key, cu_q, window_size, scale):
            output[part] = torch.einsum("hqk,khd->qhd", weights, value[part])
            normaliser[:, part] = scores.logsumexp(-1)
        return output, normaliser, torch.zeros(2, dtype=torch.uint64)

    def backward(gradient, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng, scale, window_size):
        num_heads, (keys, values) = key.shape[1], (repeat(key, query), repeat(value, query))
        of_query, of_key, of_value = (torch.empty_like(query) for _ in range(3))
        for part, _, weights in weights_by_document(query, keys, cu_q, window_size, scale):
            of_value[part] = torch.einsum("hqk,qhd->khd", weights, gradient[part])
            of_weights = torch.einsum("qhd,khd->hqk", gradient[part], values[part])
            of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
            of_query[part] = torch.einsum("hqk,khd->qhd", of_scores, keys[part])
            of_key[part] = torch.einsum("hqk,qhd->khd", of_scores, query[part])
        # The gradients of query heads that share a key head add up.
        shared = (states.unflatten(1, (num_heads, -1)).sum(2) for states in (of_key, of_value))
        return of_query, *shared

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    find = packed_attention.find_packed_documents
    monkeypatch.setattr(
        packed_attention, "find_packed_documents", lambda *args, in_groups, **kw: find(*args, in_groups=False, **kw)
    )
    return calls
