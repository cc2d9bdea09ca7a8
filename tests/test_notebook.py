"""The notebook of `examples/` runs from its first cell to its last."""

import re

import pytest

from tests.invariants.launching import ROOT


nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_notebook_trains_draws_the_loss_and_answers(tmp_path, monkeypatch, num_processes):
    monkeypatch.setenv("NUM_PROCESSES", str(num_processes))
    monkeypatch.setenv("MINUTES", "0.3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # The kernel would take the package of this environment instead of the package of this checkout.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    printed = {name: "".join(output.get("text", "") for output in some) for name, some in outputs.items()}
    assert outputs["install"] == []
    found = re.search(r"processes: (\d); validation loss: ([\d.]+) before, ([\d.]+) after", printed["train"])
    # How far the loss falls depends on the steps that the machine makes in this time.
    assert int(found[1]) == num_processes and float(found[3]) < float(found[2]) - 0.1
    # A busy machine logs one entry.
    assert re.search(r"'loss': '[\d.]+'", printed["train"])
    (picture,) = [output.data["image/png"] for output in outputs["loss"] if "image/png" in output.get("data", {})]
    assert len(picture) > 5000
    # An answer may begin with a line break.
    _, *answers = re.split(r"[?？] -> ", printed["chat"])
    assert len(answers) == 2 and any(answer.strip() for answer in answers)
    assert (tmp_path / "out/notebook/model.safetensors").is_file()
