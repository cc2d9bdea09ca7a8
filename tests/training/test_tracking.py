"""A resumed run continues the same tracked run, and the trackers show its samples."""

import json
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.run_record import add_to_record, begin_record
from hf_pretrain.training.tracking import continue_tracking
from tests.faults.conftest import workspace  # noqa: F401
from tests.faults.driving import command, run, start


VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME", "SWANLAB_RUN_ID", "SWANLAB_RESUME")


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Return a function that launches a run, and returns what the trackers get."""

    def start(checkpoint: str | None, **arguments) -> dict[str, str]:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        args = LMTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", **arguments)
        (tmp_path / "run").mkdir(exist_ok=True)
        tracking_id = continue_tracking(args, checkpoint=checkpoint)
        begin_record(args, (), checkpoint=checkpoint)
        add_to_record(args, tracking_id=tracking_id)
        return {"id": tracking_id, "name": args.run_name} | {name: os.environ[name] for name in VARIABLES}

    return start


def test_a_resumed_run_has_the_same_id_everywhere(launch):
    first = launch(None)
    assert launch("checkpoint-2") == first and launch("checkpoint-4") == first
    assert first["WANDB_RUN_ID"] == first["SWANLAB_RUN_ID"] == first["id"] and len(first["id"]) == 21
    assert first["WANDB_RESUME"] == first["SWANLAB_RESUME"] == "allow"
    assert first["name"].startswith("run-")


def test_a_new_run_has_a_new_id_and_the_users_name_stays(launch):
    first = launch(None)
    assert launch(None)["id"] != first["id"]
    assert launch(None, run_name="mine")["name"] == "mine"


def test_two_runs_in_one_process_are_two_runs(tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("a", "b"):
        args = LMTrainingArguments(output_dir=str(tmp_path / name), use_cpu=True, report_to="none")
        assert continue_tracking(args, checkpoint=None) == os.environ["WANDB_RUN_ID"]


def test_the_users_variables_stay(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    args = LMTrainingArguments(output_dir=str(tmp_path / "other"), use_cpu=True, report_to="none")
    continue_tracking(args, checkpoint=None)
    assert os.environ["WANDB_RUN_ID"] == "mine"


@pytest.mark.parametrize("is_installed", [True, False])
def test_trackio_is_the_default_where_it_is_installed(monkeypatch, tmp_path, is_installed):
    from hf_pretrain.training import arguments

    find_spec = arguments.importlib.util.find_spec
    found = object() if is_installed else None
    monkeypatch.setattr(
        arguments.importlib.util, "find_spec", lambda name: found if name == "trackio" else find_spec(name)
    )
    monkeypatch.setattr(arguments, "_check_trackers", lambda names: None)
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert args.report_to == (["trackio"] if is_installed else [])
    # With --push_to_hub, transformers would publish the figures unless this is False.
    assert args.trackio_static_space_id is False


def read_tensorboard(directory: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracked,) = directory.glob("run/runs/*")
    events = EventAccumulator(str(tracked)).Reload()
    return {
        "loss": [event.step for event in events.Scalars("train/loss")],
        "eval": [event.step for event in events.Scalars("eval/loss")],
        "samples": [event.step for event in events.Tensors("samples/text_summary")],
    }


def read_trackio(directory: Path) -> dict[str, list[int]]:
    (tracked,) = directory.glob("trackio/*.db")
    with sqlite3.connect(tracked) as database:
        rows = database.execute("select run_name, metrics from metrics order by id").fetchall()
    assert len({name for name, _ in rows}) == 1
    entries = [json.loads(metrics) for _, metrics in rows]
    keys = {"loss": "train/loss", "eval": "eval/loss", "samples": "samples"}
    return {name: [int(entry["train/global_step"]) for entry in entries if key in entry] for name, key in keys.items()}


def read_mlflow(directory: Path) -> dict[str, list[int]]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{directory}/mlflow.db")
    (tracked,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    run_id = tracked.info.run_id
    samples = [file.path for file in client.list_artifacts(run_id, "samples")]
    return {
        "loss": [metric.step for metric in client.get_metric_history(run_id, "loss")],
        "eval": [metric.step for metric in client.get_metric_history(run_id, "eval_loss")],
        "samples": sorted(int(path.removeprefix("samples/step-").removesuffix(".md")) for path in samples),
    }


def read_leveldb_log(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log of LevelDB: blocks of 32 KiB with chunks of checksum, length, type and data."""
    data, place = b"", 7
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            # The rest of a block is too short for a chunk.
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        # 1 is a whole record, 4 the last chunk of one.
        if kind in (1, 4):
            yield data
            data = b""


def read_wandb(directory: Path) -> dict[str, list[int]]:
    from wandb.proto import wandb_internal_pb2 as messages

    steps: dict[str, list[int]] = {"loss": [], "eval": [], "samples": []}
    launches = sorted(directory.glob("wandb/offline-run-*"))
    # Both launches have one id. `wandb sync` sends them to one run.
    assert len(launches) == 2 and len({launch.name.rpartition("-")[2] for launch in launches}) == 1
    for launch in launches:
        for data in read_leveldb_log(next(launch.glob("*.wandb")).read_bytes()):
            record = messages.Record.FromString(data)
            names = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for name, key in {"loss": "train/loss", "eval": "eval/loss", "samples": "samples"}.items():
                if any(found == key or found.startswith(f"{key}/") for found in names):
                    steps[name].append(int(json.loads(names["train/global_step"])))
    # The second launch sends the steps again that it repeats.
    return {name: sorted(set(found)) for name, found in steps.items()}


def read_swanlab(directory: Path) -> dict[str, list[int]]:
    launches = sorted(directory.glob("swanlog/run-*"))
    # SwanLab's server joins launches with one id; its offline files stay apart.
    assert len(launches) == 2 and len({launch.name.rpartition("-")[2] for launch in launches}) == 1
    texts = [file for launch in launches for file in launch.glob("media/text/*.txt")]
    return {"samples": sorted({int(text.name.split("-")[0]) for text in texts})}


READERS = {
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
    "swanlab": read_swanlab,
}


@pytest.mark.slow
@pytest.mark.parametrize("tracker", READERS)
def test_a_killed_run_continues_its_tracked_run(workspace, tmp_path, monkeypatch, tracker):  # noqa: F811
    pytest.importorskip(tracker, reason="needs the extra `trackers`")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(tmp_path / "swanlog"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "toy")
    if tracker == "mlflow":
        import mlflow

        client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        client.create_experiment("toy", artifact_location=(tmp_path / "artifacts").as_uri())
    words = command(workspace, tmp_path / "run", "--validation_fraction", "0.2", "--eval_steps", "10")
    words += ["--max_steps", "40", "--save_steps", "10", "--save_total_limit", "9", "--report_to", tracker]
    with start(words) as process:
        for line in process.stdout:
            if line.startswith("step 20/40: loss"):
                # Trackers send their figures in the background.
                time.sleep(1)
                break
        else:
            pytest.fail("the run ended too early")
    # Without later checkpoints, the resumed run repeats steps that the tracker has.
    for later in tmp_path.glob("run/checkpoint-[234]0"):
        shutil.rmtree(later)
    resumed = run([*words, "--resume_from_checkpoint", "auto"])
    assert resumed.returncode == 0 and "ERROR" not in resumed.stdout, resumed.stdout[-4000:]
    expected = {"loss": list(range(1, 41)), "eval": [10, 20, 30, 40], "samples": [10, 20, 30, 40]}
    found = READERS[tracker](tmp_path)
    assert found == {name: expected[name] for name in found}
