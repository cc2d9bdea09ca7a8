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
from transformers import TrainerState
from transformers.integrations import TensorBoardCallback

from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.run_record import add_to_record, begin_record
from hf_pretrain.training.running import train_and_evaluate
from hf_pretrain.training.tracking import Trackers, continue_tracking
from tests.faults.conftest import workspace  # noqa: F401
from tests.faults.driving import command, run, start
from tests.training.test_trainer import make_documents, make_model, make_trainer


VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME", "SWANLAB_RUN_ID", "SWANLAB_RESUME")
# A test that resumes a run may set these, too.
MLFLOW_VARIABLES = ("MLFLOW_RUN_ID", "MLFLOW_MAX_LOG_PARAMS", "MLFLOW_EXPERIMENT_ID")


@pytest.fixture(autouse=True)
def keep_environment(monkeypatch):
    """Give each test an environment without these variables, and restore it afterwards."""
    for name in (*VARIABLES, *MLFLOW_VARIABLES):
        # Setting a variable first lets monkeypatch also remove what the test leaves behind.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


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


def test_two_runs_in_one_process_are_two_runs(tmp_path):
    for name in ("a", "b"):
        args = LMTrainingArguments(output_dir=str(tmp_path / name), use_cpu=True, report_to="none")
        assert continue_tracking(args, checkpoint=None) == os.environ["WANDB_RUN_ID"]


def test_a_new_run_in_the_process_of_a_resumed_run_does_not_continue_its_mlflow_run(launch, tmp_path):
    launch(None)
    args = LMTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    add_to_record(args, mlflow_run_id="of-the-first")
    launch("checkpoint-2")
    assert os.environ["MLFLOW_RUN_ID"] == "of-the-first" and os.environ["MLFLOW_MAX_LOG_PARAMS"] == "0"
    launch(None)
    assert not {"MLFLOW_RUN_ID", "MLFLOW_MAX_LOG_PARAMS"} & os.environ.keys()


def test_the_users_variables_stay(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")
    args = LMTrainingArguments(output_dir=str(tmp_path / "other"), use_cpu=True, report_to="none")
    for _ in range(2):
        continue_tracking(args, checkpoint=None)
        assert os.environ["WANDB_RUN_ID"] == os.environ["MLFLOW_RUN_ID"] == "mine"


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that trains and evaluates two steps of a run in this process, tracked by MLflow."""
    pytest.importorskip("mlflow", reason="needs the extra `trackers`")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "toy")

    def run(name: str, checkpoint: str | None = None) -> None:
        flags = {"max_steps": 2, "report_to": "mlflow", "save_strategy": "steps", "save_steps": 1}
        trainer = make_trainer(tmp_path / name, make_documents(), model=make_model(), arguments=flags)
        tracking_id = continue_tracking(trainer.args, checkpoint=checkpoint)
        begin_record(trainer.args, (), checkpoint=checkpoint)
        add_to_record(trainer.args, tracking_id=tracking_id)
        train_and_evaluate(trainer, checkpoint=checkpoint)

    yield run
    import mlflow

    mlflow.end_run()


def find_mlflow_runs() -> dict[str, tuple[str, list[int]]]:
    """Return the id and the steps of each tracked run that was not deleted, by the name of the run."""
    import mlflow

    client = mlflow.MlflowClient()
    found = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert len({run.info.run_name for run in found}) == len(found)
    return {
        run.info.run_name.partition("-")[0]: (
            run.info.run_id,
            [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")],
        )
        for run in found
    }


def test_runs_in_one_process_have_their_own_mlflow_runs(train, tmp_path):
    """The evaluation after the last step leaves a tracked run open, which must not get the figures of the next run."""
    train("a")
    train("b")
    train("a", checkpoint=str(tmp_path / "a/checkpoint-1"))
    assert {name: steps for name, (_, steps) in find_mlflow_runs().items()} == {"a": [1, 2], "b": [1, 2]}


def test_a_deleted_mlflow_run_is_replaced_by_a_new_one(train, tmp_path, caplog, monkeypatch):
    import mlflow

    train("a")
    ((deleted, _),) = find_mlflow_runs().values()
    mlflow.end_run()
    mlflow.MlflowClient().delete_run(deleted)
    with caplog.at_level("WARNING", logger="hf_pretrain"):
        train("a", checkpoint=str(tmp_path / "a/checkpoint-1"))
    assert f"The tracked run {deleted} of MLflow" in caplog.text and f"MLFLOW_RUN_ID={deleted}" in caplog.text
    ((new, steps),) = find_mlflow_runs().values()
    assert new != deleted and steps == [2] and mlflow.get_run(new).data.params
    # The next resume continues the new one.
    train("a", checkpoint=str(tmp_path / "a/checkpoint-1"))
    assert find_mlflow_runs() == {"a": (new, [2])}
    monkeypatch.setenv("MLFLOW_RUN_ID", "unknown")
    with pytest.raises(ValueError, match="The tracked run unknown of MLflow .* Correct or unset MLFLOW_RUN_ID"):
        train("a", checkpoint=str(tmp_path / "a/checkpoint-1"))


def test_samples_are_on_the_disk_at_once(tmp_path):
    """A resumed run leaves out the samples of the history, so a killed run must not lose those of TensorBoard."""
    pytest.importorskip("tensorboard")
    args = LMTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="tensorboard", run_name="a")
    callback = TensorBoardCallback()
    trackers = Trackers(args, [callback], is_resumed=False)
    callback.on_train_begin(args, TrainerState(), None)
    # TensorBoard's own thread needs a while to write so much.
    trackers.log_samples(1, [("once", "upon a time " * 50_000)])
    (file,) = (tmp_path / "run/runs/a").iterdir()
    assert file.stat().st_size > 600_000
    callback.on_train_end(args, TrainerState(), None)


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
