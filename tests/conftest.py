"""Toy models for all tests: two layers, width 32, a fixed seed."""

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread, as in the processes that tests start: on some CPUs, sums over several threads give other bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `ATEN_CPU_CAPABILITY=avx2 make test` imitates another CPU. Inductor's cache does not know the difference, and kernels
# compiled for both in one cache corrupt memory.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{capability}")
# `make test ARGS="-k name"` passes its variables on to the `make` that a test starts.
MAKE_VARIABLES = re.findall(r"^(\w+) \?=", (Path(__file__).parents[1] / "Makefile").read_text(), re.MULTILINE)
for variable in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", *MAKE_VARIABLES):
    os.environ.pop(variable, None)
if hasattr(signal, "SIGHUP"):
    # `nohup make test` ignores SIGHUP, and every run that a test starts would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest  # noqa: E402
import torch  # noqa: E402

from hf_pretrain import MiniMindForCausalLM  # noqa: E402
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
