"""Two hosts with shared storage train like one, also when one of them dies and comes back."""

import subprocess

import pytest

from hf_pretrain.checkpoints.manifest import find_damage
from tests.faults.driving import STEPS, command, final_bits, wait_for
from tests.invariants.hosts import Cluster, why_impossible
from tests.invariants.launching import BIN, launcher_command


REASON = why_impossible()
pytestmark = [pytest.mark.distributed, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
# A fixed port: the hosts have a network of their own.
AGENT = [str(BIN / "torchrun"), "--nnodes", "2", "--nproc_per_node", "1", "--max_restarts", "1"]
AGENT += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "host-0:29400", "--rdzv_id", "run"]


def test_a_host_dies_and_comes_back(workspace, reference, tmp_path):
    # torchrun does not count restarts because of a host that joins, so the run needs the flag.
    flags = ["--save_total_limit", "9", "--resume_from_checkpoint", "auto"]
    run = tmp_path / "run"
    recipe = command(workspace, run, *flags, launcher="torchrun")[len(launcher_command("torchrun")) :]
    with Cluster(tmp_path) as cluster:

        def launch(number: int) -> subprocess.Popen[str]:
            # Otherwise the agent of a host that came back waits for an address that the others announce only once.
            return cluster.start(number, [*AGENT, *recipe], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

        agents = [launch(0), launch(1)]
        assert wait_for((run / "checkpoint-4").is_dir, agents[0])
        cluster.die(1)
        agents[1] = launch(1)
        outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(text[-4000:] for text in outputs)
    assert f"Resuming from {run}/checkpoint-" in outputs[0]
    for step in range(2, STEPS + 1, 2):
        assert find_damage(run / f"checkpoint-{step}") == []
        # Both hosts have written their files.
        assert len(list((run / f"checkpoint-{step}").glob("rng_state_*.pth"))) == 2
    assert final_bits(run) == final_bits(reference("torchrun"))
