"""
Two hosts train like one, a host dies and comes back, and checkpoints and pushes are complete.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_pretrain.checkpoints.manifest import find_damage
from tests.faults.driving import STEPS, command, final_bits, make_workspace, run, wait_for, zero
from tests.hub_server import HubServer
from tests.invariants.hosts import TEST_ADDRESS, Cluster, why_impossible
from tests.invariants.launching import BIN, launcher_command


REASON = why_impossible()
pytestmark = [pytest.mark.distributed, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
# Otherwise the agent of a host that came back waits for an address that the others announce only once.
REJOINING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
KEPT = ["--save_total_limit", "9"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def one_host(workspace, tmp_path_factory):
    """Return a function from a launcher and flags to the output directory of a run with two ranks on one host."""
    found: dict[str, Path] = {}

    def get(launcher: str, *flags: str) -> Path:
        if launcher not in found:
            found[launcher] = tmp_path_factory.mktemp(launcher) / "out"
            result = run(command(workspace, found[launcher], *KEPT, *flags, launcher=launcher))
            assert result.returncode == 0, result.stdout[-4000:]
        return found[launcher]

    return get


def launch(cluster: Cluster, workspace: Path, launcher: str, number: int, *flags: str, **environment: str):
    """Start the launcher of one host, with one rank of a run over all hosts."""
    words = command(workspace, cluster.path / "out", *KEPT, *flags, launcher=launcher)
    recipe = words[len(launcher_command(launcher)) :]
    # A fixed port: each host has a network of its own.
    agent = [str(BIN / "torchrun"), "--nnodes", "2", "--nproc_per_node", "1", "--max_restarts", "1"]
    agent += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "host-0:29400", "--rdzv_id", "run"]
    if launcher == "deepspeed":
        hostfile = workspace / "hostfile"
        hostfile.write_text("host-0 slots=1\nhost-1 slots=1\n")
        agent = [str(BIN / "deepspeed"), "--no_ssh", "--hostfile", str(hostfile), "--node_rank", str(number)]
        agent += ["--master_addr", "host-0", "--master_port", "29500"]
    return cluster.hosts[number].start([*agent, *recipe], **environment)


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-4000:] for text in outputs)
    return outputs


def losses(output_dir: Path) -> list[float]:
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def check_checkpoints(output_dir: Path) -> None:
    """Check that all checkpoints are intact, with the files of the ranks of both hosts."""
    assert sorted(path.name for path in output_dir.glob("*checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 4, 6, 8)]
    assert not (output_dir / ".saving").exists()
    for checkpoint in output_dir.glob("checkpoint-*"):
        assert find_damage(checkpoint) == []
        assert {path.name for path in checkpoint.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_two_hosts_train_and_push_like_one(cluster, workspace, one_host):
    push = ["--push_to_hub", "--hub_model_id", "toy", "--hub_strategy", "all_checkpoints"]
    with HubServer(address=TEST_ADDRESS) as hub:
        client = hub.client_environment() | {"HF_HOME": str(cluster.path / "home")}
        finish([launch(cluster, workspace, "torchrun", number, *push, **client) for number in range(2)])
        pushed = hub.repos["user/toy"].files
    out = cluster.path / "out"
    assert losses(out) == pytest.approx(losses(one_host("torchrun")), abs=1e-5)
    check_checkpoints(out)
    # The repository has every file of the checkpoints, also those that ranks of the other host wrote.
    names = {path.relative_to(out).as_posix() for path in out.rglob("checkpoint-*/**/*") if path.is_file()}
    assert "checkpoint-8/rng_state_1.pth" in names
    assert all(pushed[name] == (out / name).read_bytes() for name in (*names, "model.safetensors"))


def test_a_host_dies_and_comes_back(cluster, workspace, one_host):
    # torchrun does not count restarts because of a host that joins, so the run needs the flag.
    resume = ["--resume_from_checkpoint", "auto"]
    processes = [launch(cluster, workspace, "torchrun", number, *resume, **REJOINING) for number in range(2)]
    out = cluster.path / "out"
    assert wait_for((out / "checkpoint-4").is_dir, processes[0])
    cluster.hosts[1].die()
    processes[1] = launch(cluster, workspace, "torchrun", 1, *resume, **REJOINING)
    assert "Resuming from" in finish(processes)[0]
    check_checkpoints(out)
    assert final_bits(out) == final_bits(one_host("torchrun"))


def test_under_deepspeed_a_host_dies_and_the_run_is_started_again(cluster, workspace, one_host):
    flags = [*zero(2), "--resume_from_checkpoint", "auto"]
    processes = [launch(cluster, workspace, "deepspeed", number, *flags) for number in range(2)]
    out = cluster.path / "out"
    assert wait_for((out / "checkpoint-4").is_dir, processes[1])
    cluster.hosts[1].die()
    # DeepSpeed starts no ranks again. The other rank has noticed and ends.
    assert processes[0].wait(timeout=300) != 0
    outputs = finish([launch(cluster, workspace, "deepspeed", number, *flags) for number in range(2)])
    assert "Resuming from" in outputs[0]
    assert (
        losses(out) == pytest.approx(losses(one_host("deepspeed", *zero(2))), abs=1e-5) and len(losses(out)) == STEPS
    )
    check_checkpoints(out)
    for rank in range(2):
        assert list((out / "checkpoint-8").glob(f"global_step8/*zero_pp_rank_{rank}_*"))
