"""The files of a Space start a page that answers with an exported model."""

import subprocess
import sys
import tomllib

import pytest
import requests
import yaml
from packaging.requirements import Requirement

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.weights.exporting import export
from tests.faults.driving import wait_for
from tests.invariants.launching import ROOT, cpu_environment, free_port


gradio_client = pytest.importorskip("gradio_client")
SPACE = ROOT / "examples/space"


def test_the_front_matter_starts_the_page_with_a_gradio_that_is_tested():
    front = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert front["sdk"] == "gradio" and (SPACE / front["app_file"]).is_file()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bounds,) = [Requirement(line).specifier for line in extras["web"] if line.startswith("gradio")]
    assert front["sdk_version"] in bounds


@pytest.mark.slow
def test_the_page_answers_with_a_model_in_llamas_format(talker, tmp_path):
    tokenizer = load_tokenizer(talker)
    model = MiniMindForCausalLM.from_pretrained(talker)
    export(model, tmp_path / "llama", "llama", tokenizer=tokenizer)
    port = free_port()
    variables = {
        "MODEL": str(tmp_path / "llama"),
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
    }
    command = [sys.executable, str(SPACE / "app.py")]
    # Without the directory of this package: a Space does not have it.
    environment = cpu_environment(**variables) | {"PYTHONPATH": ""}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as page:
        try:
            wait_for(lambda: answers(port), page)
            client = gradio_client.Client(f"http://127.0.0.1:{port}", verbose=False)
            assert client.predict("你好吗", api_name="/chat") == "我很好，谢谢😀。"
        finally:
            page.terminate()


def answers(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/config", timeout=5).ok
    except requests.ConnectionError:
        return False
