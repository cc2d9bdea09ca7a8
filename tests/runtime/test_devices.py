"""Which precision a device has; a GPU that torch cannot use, and a compiler that does not work, are found."""

import operator
import os
import platform
import re
import runpy
import sys

import pytest
import torch

from hf_pretrain.runtime import devices
from hf_pretrain.runtime.devices import can_compile, find_unused_gpu, has_bfloat16_units
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.invariants.launching import ROOT, start


VERSION = torch.__version__.partition("+")[0]


@pytest.mark.parametrize(("macos", "expected"), [((13, 6), False), ((14, 0), True), ((26, 1), True)], ids=str)
def test_apple_gpus_have_bfloat16_from_macos_14_on(monkeypatch, macos, expected):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos >= (major, minor))
    assert has_bfloat16_units("mps") is expected


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Put a program `nvidia-smi` on the path that prints a text; return a function that sets text and status."""
    if sys.platform == "win32":
        pytest.skip("the program is a shell script")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)

    def write(text: str, status: int = 0):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_gpu_that_torch_cannot_use_is_refused(nvidia_smi, monkeypatch, tmp_path, cuda):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    nvidia_smi("NVIDIA A100-SXM4-80GB, 470.57.02")
    found = find_unused_gpu()
    advice = "Update the driver, or install" if cuda else "Run `pip install --force-reinstall torch=="
    assert advice in found and "NVIDIA A100-SXM4-80GB with driver 470.57.02" in found
    assert f"built {f'for CUDA {cuda}' if cuda else 'without CUDA'}" in found
    with pytest.raises(UserError):
        LMTrainingArguments(output_dir=str(tmp_path))
    assert LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True).device.type == "cpu"


@pytest.mark.parametrize(("cuda", "built"), [(None, "without CUDA"), ("13.0", "for CUDA 13.0")])
def test_an_old_gpu_is_told_the_wheel_that_has_its_kernels(nvidia_smi, monkeypatch, cuda, built):
    """Without a driver that fits, torch finds no GPU, and a newer driver would not help."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for line, wheel in (
        (
            "Tesla V100-SXM2-16GB, 535.183.01, 7.0",
            f"torch=={VERSION} --index-url https://download.pytorch.org/whl/cu126",
        ),
        ("Tesla K80, 470.57.02, 3.7", "No torch that this package supports has any."),
    ):
        nvidia_smi(f"{line}\nNVIDIA H100 80GB HBM3, 535.183.01, 9.0")
        name, driver, _ = line.split(", ")
        found = find_unused_gpu()
        assert f"{name} with driver {driver}" in found and f"built {built}" in found and wheel in found
        assert "Update the driver" not in found
    # It is that wheel already.
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    nvidia_smi("Tesla V100-SXM2-16GB, 470.57.02, 7.0")
    assert "Update the driver" in find_unused_gpu()


def test_a_driver_that_does_not_know_the_capability_is_asked_again(nvidia_smi, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    script = tmp_path / "nvidia-smi"
    nvidia_smi("NVIDIA A100-SXM4-80GB, 450.80.02")
    script.write_text(
        script.read_text().replace("echo", "case $1 in *compute_cap*) echo 'Field is invalid.';; *) echo") + "\nesac"
    )
    assert "NVIDIA A100-SXM4-80GB with driver 450.80.02" in find_unused_gpu()


@pytest.mark.parametrize("recipe", ["chat", "serve"])
def test_chatting_asks_before_it_takes_the_cpu(nvidia_smi, monkeypatch, recipe):
    monkeypatch.setattr(torch.version, "cuda", None)
    nvidia_smi("NVIDIA A100-SXM4-80GB, 470.57.02")
    main, arguments = operator.itemgetter("main", "ARGUMENTS")(runpy.run_path(str(ROOT / f"recipes/{recipe}.py")))
    with pytest.raises(UserError):
        main(*(cls() for cls in arguments))


def test_a_hidden_gpu_and_a_machine_without_one_train_on_the_cpu(nvidia_smi, monkeypatch, tmp_path):
    nvidia_smi("No devices were found", status=6)
    assert find_unused_gpu() is None
    nvidia_smi("NVIDIA A100-SXM4-80GB, 535.183.01")
    for visible, is_hidden in (("", True), ("-1", True), ("0,1", False), ("MIG-7b1a", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert (find_unused_gpu() is None) is is_hidden, visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert LMTrainingArguments(output_dir=str(tmp_path)).device.type == "cpu"


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        # The wheels of torch 2.13 for CUDA 13.0, and a GTX 1080 Ti, an A100, an RTX 4090, a B300 and a DGX Spark.
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (6, 1), False),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (8, 0), True),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (8, 9), True),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (10, 3), True),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (12, 1), True),
        # A newer GPU than the wheel: only PTX runs there, and no binary code of an older major version.
        ("sm_80 sm_90", (12, 0), False),
        ("sm_80 sm_90 compute_90", (12, 0), True),
        # An older minor version than the code.
        ("sm_86", (8, 0), False),
        ("sm_90a compute_90a", (10, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False),
    ],
)
def test_a_gpu_without_kernels_is_refused(monkeypatch, tmp_path, built, capability, runs):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0+cu130"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", built.split)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA X")
    found = find_unused_gpu()
    assert (found is None) is runs, found
    if not runs:
        assert re.search(
            rf"kernels for {built.replace(' ', ', ')}, and none for NVIDIA X \(sm_\d+\)\. Run `pip", found
        )
        # The wheels for CUDA 13 lack what is older than Turing, and those for CUDA 12.6 what is newer than Hopper.
        index = f"https://download.pytorch.org/whl/cu{126 if capability < (7, 5) else 130}"
        assert f"pip install --force-reinstall torch==2.13.0 --index-url {index}`" in found
        with pytest.raises(UserError):
            LMTrainingArguments(output_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("version", "capability", "wheel"),
    [
        ("2.14.0+cu130", (6, 0), "torch==2.14.0 --index-url https://download.pytorch.org/whl/cu126"),
        # Nobody builds wheels of torch 2.15 for CUDA 12.6.
        ("2.15.1+cu132", (7, 0), "torch==2.14.0 --index-url https://download.pytorch.org/whl/cu126"),
        ("2.15.1+cu132", (12, 0), "torch==2.15.1 --index-url https://download.pytorch.org/whl/cu130"),
    ],
)
def test_the_wheel_that_is_named_exists(monkeypatch, version, capability, wheel):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert wheel in devices._advise(capability)
    # torch's own table of its wheels agrees.
    kernels = getattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", None)
    if kernels is not None:
        found = kernels[f"{wheel[-3:-1]}.{wheel[-1]}"]["x86_64"]
        assert any(devices._runs_on(f"sm_{code}", capability) for code in found)
        assert capability >= (7, 5) or not any(
            devices._runs_on(f"sm_{code}", capability)
            for cuda, each in kernels.items()
            if cuda != "12.6"
            for code in each["x86_64"]
        )


def test_a_compiler_that_fails_is_found(caplog):
    def fail(graph, inputs):
        raise RuntimeError("Failed to find C compiler.\nSet TORCHDYNAMO_VERBOSE=1")

    assert can_compile(torch.device("cpu"), backend="eager")
    assert not can_compile(torch.device("cpu"), backend=fail)
    (warning,) = [record.message for record in caplog.records if record.name.endswith("runtime.devices")]
    assert "trains without it, more slowly" in warning and warning.endswith("Failed to find C compiler.")


@pytest.mark.slow
def test_a_machine_without_a_compiler_trains(tmp_path):
    """Neither Inductor nor its cache has anything for this run."""
    environment = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHDYNAMO_DISABLE": "0"}
    words = ["recipes/pretrain.py", "--config", "recipes/tiny/pretrain.yaml", "--max_steps", "2", "--torch_compile"]
    words += ["--train_fraction", "0.01", "--per_device_train_batch_size", "1", "--output_dir", str(tmp_path / "out")]
    result = start([sys.executable, *words, "--use_cpu"], fresh=True, **environment)
    assert result.returncode == 0 and "No working C++ compiler" in result.stdout, result.stdout


TRAIN = """
import resource, sys
from transformers import TrainerCallback
from hf_pretrain import LMTrainingArguments, MaskedLossTrainer
from tests.toys import toy_model

faults = []
class CountFaults(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    def on_step_end(self, *args, **kwargs):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self.before)

args = LMTrainingArguments(
    output_dir=sys.argv[1], max_steps=12, per_device_train_batch_size=8, save_strategy="no", bf16=False, use_cpu=True,
    report_to="none", disable_tqdm=True,
)
rows = [{"input_ids": [3 + (row + place) % 100 for place in range(256)]} for row in range(96)]
model = toy_model(hidden_size=128, intermediate_size=512, max_position_embeddings=256)
MaskedLossTrainer(model=model, args=args, train_dataset=rows, callbacks=[CountFaults()]).train()
print("FAULTS", *faults[3:])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("environment", [{}, {"MALLOC_MMAP_THRESHOLD_": "131072"}], ids=["default", "configured"])
def test_a_step_reuses_memory(tmp_path, environment):
    result = start([sys.executable, "-c", TRAIN, str(tmp_path)], **environment)
    found = re.search(r"FAULTS (.+)", result.stdout)
    assert found, result.stdout[-3000:]
    # Each fault gives the process one page of 4 KiB. With the recipe's settings, most steps have fewer than 500
    # faults; in some, other threads touch new pages. Without the settings, a step has 5,000 to 20,000. With the
    # variable, which turns the settings off, it has more than 20,000.
    faults = [int(number) for number in found[1].split()]
    assert min(faults) < 500 if not environment else min(faults) > 2_000
