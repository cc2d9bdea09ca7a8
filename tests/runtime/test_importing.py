import gc
import signal
import sys

import pytest

from hf_pretrain.runtime.importing import collector_paused
from tests.invariants.launching import start


def test_a_trainer_needs_no_library_of_other_stages():
    """`unwrap_model` runs in the constructor of every Trainer."""
    code = """
        import sys, torch
        from accelerate import Accelerator
        from hf_pretrain import MaskedLossTrainer
        Accelerator(cpu=True).unwrap_model(torch.nn.Linear(1, 1))
        print(*sys.modules)
    """
    modules = set(start([sys.executable, "-c", "if True:" + code], fresh=True).stdout.split())
    assert "transformers.trainer" in modules
    assert modules.isdisjoint({"deepspeed", "lm_eval", "matplotlib", "scipy.optimize", "trl"})


def test_transformers_finds_scipy_when_it_calls_it():
    pytest.importorskip("scipy")
    from transformers.loss.loss_for_object_detection import linear_sum_assignment

    rows, columns = linear_sum_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])
    assert rows.tolist() == [0, 1, 2] and columns.tolist() == [1, 0, 2]
    assert hasattr(sys.modules["scipy.optimize"], "minimize")


def test_other_names_of_scipy_come_from_the_real_module():
    pytest.importorskip("scipy")
    code = """
        from hf_pretrain.runtime.importing import scipy_deferred
        import sys
        for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
            del sys.modules[name]
        with scipy_deferred():
            from scipy.optimize import linear_sum_assignment
            from scipy.optimize import minimize
        print(minimize.__module__, hasattr(sys.modules["scipy.optimize"], "minimize"))
    """
    assert start([sys.executable, "-c", "if True:" + code]).stdout.split()[-2:] == ["scipy.optimize._minimize", "True"]


def test_objects_of_the_libraries_are_exempt_from_collection():
    """Importing the package created these objects. Collections run again since then."""
    assert gc.isenabled()
    assert gc.get_freeze_count() > 200_000


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), collector_paused():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="torch uses GNU OpenMP only on Linux")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "GOMP_SPINCOUNT = '10000'"),
        ("GOMP_SPINCOUNT=77", "GOMP_SPINCOUNT = '77'"),
        # GNU OpenMP's own choice for this policy.
        ("OMP_WAIT_POLICY=passive", "GOMP_SPINCOUNT = '0'"),
    ],
)
def test_idle_threads_sleep_soon_unless_the_user_has_chosen(given, expected):
    """GNU OpenMP prints its settings when torch loads it. This process has set the variable already."""
    command = [
        "env",
        "-u",
        "GOMP_SPINCOUNT",
        "-u",
        "OMP_WAIT_POLICY",
        *given.split(),
        sys.executable,
        "-c",
        "import hf_pretrain",
    ]
    assert expected in start(command, fresh=True, OMP_DISPLAY_ENV="verbose").stdout


@pytest.mark.parametrize("name", ["HF_PRETRAIN_PROGRAM", "OTHER"])
def test_an_interrupt_prints_no_traceback_from_the_command(tmp_path, name):
    """In a program of the user's own, it does."""
    script = tmp_path / "script.py"
    script.write_text("import hf_pretrain, os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    result = start([sys.executable, str(script)], fresh=True, **{name: "hf-pretrain chat"})
    if name == "OTHER":
        assert result.stdout.endswith("KeyboardInterrupt\n")
    else:
        assert result.stdout == "" and result.returncode == -signal.SIGINT
    # Other errors keep their traceback.
    script.write_text("import hf_pretrain\n1 / 0")
    result = start([sys.executable, str(script)], fresh=True, **{name: "hf-pretrain chat"})
    assert "ZeroDivisionError" in result.stdout and result.returncode == 1
