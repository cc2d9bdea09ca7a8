"""Steps with a planted row of noise, or a planted learning rate, among steps that have become easy."""

import json
import random
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from transformers import TrainerCallback

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.training import spikes as spikes_module
from hf_pretrain.training.spikes import is_spike
from tests.models import assert_near
from tests.toys import toy_model
from tests.trainers import make_trainer


NOISE_STEP, NUM_STEPS = 140, 150
NOISE = torch.randint(3, 64, (24,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(autouse=True, scope="module")
def forgets_the_first_steps():
    """Steps in which a toy model learns fast are no measure of the later ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spikes_module, "WINDOW", 60)
        yield


def easy_rows(noise: list[int] | None = None) -> list[dict]:
    """Return a row per step. Each counts up from another number, but for the noise."""
    rows = [[3 + (7 * number + place) % 40 for place in range(24)] for number in range(2 * NUM_STEPS)]
    if noise is not None:
        rows[2 * NOISE_STEP - 1] = noise
    return [{"input_ids": row, "seq_lengths": [24]} for row in rows]


class Weights(TrainerCallback):
    """Keep the weights after some steps."""

    def __init__(self, *steps: int):
        self.steps = steps
        self.found: dict[int, torch.Tensor] = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step in self.steps:
            self.found[state.global_step] = torch.cat([weight.detach().flatten() for weight in model.parameters()])


def run(directory, rows, *callbacks, is_late=False, resume=None, dropout=0.0, **arguments):
    """Train two rows per step with AdamW. Return the trainer, and what it wrote about spikes."""
    arguments = {"max_steps": NUM_STEPS, "learning_rate": 3e-3, "weight_decay": 0.1} | arguments
    arguments = {"optim_preset": "adamw", "train_sampling_strategy": "sequential"} | arguments | {"optim": None}
    torch.manual_seed(0)
    model = toy_model(vocab_size=64, dropout=dropout)
    trainer = make_trainer(directory, rows, model=model, batch=2, arguments=arguments, callbacks=[*callbacks])
    trainer.finite_check.is_late = is_late
    trainer.train(resume_from_checkpoint=resume)
    path = directory / "spikes.jsonl"
    return trainer, [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_a_spike_lies_far_above_the_median():
    generator = random.Random(0)
    values = [generator.gauss(4, 0.1) for _ in range(200)]
    # A few spikes before it hide none.
    history = values[:190] + [50.0] * 10
    middle = median(history)
    limit = middle + 8 * 1.4826 * median(abs(value - middle) for value in history)
    assert 1.1 * middle < limit < 3 * middle
    assert not is_spike(limit - 0.01, history, 1.1) and is_spike(limit + 0.01, history, 1.1)
    assert not is_spike(3 * middle - 0.01, history, 3.0) and is_spike(3 * middle + 0.01, history, 3.0)
    assert not is_spike(50.0, values[:49], 1.1) and is_spike(50.0, values[:50], 1.1)
    assert not is_spike(-50.0, values, 1.1)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_row_of_noise_is_shown(tmp_path, is_late, capfd):
    """A GPU gives the norm one step late."""
    trainer, spikes = run(tmp_path, easy_rows(NOISE), is_late=is_late)
    assert [spike["step"] for spike in spikes] == [NOISE_STEP] and not spikes[0]["skipped"]
    assert {"loss", "gradient norm"} <= spikes[0].keys()
    worst, other = spikes[0]["rows"]
    assert worst["text"] == str(NOISE) and worst["loss"] > 3 > 1 > other["loss"]
    # The loss of a step is the mean over the tokens of both rows.
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert spikes[0]["loss"] == pytest.approx(
        {"value": logged[NOISE_STEP - 1], "median": median(logged[NOISE_STEP - 61 : NOISE_STEP - 1])}, rel=1e-5
    )
    printed = capfd.readouterr().out
    assert f"spike at step {NOISE_STEP}: loss" in printed and str(NOISE)[:40] in printed


def call_spikes(monkeypatch, least_steps: float = 5):
    """Call each step a spike that comes after `least_steps` others."""
    monkeypatch.setattr(spikes_module, "is_spike", lambda value, history, least_ratio: len(history) >= least_steps)


def test_the_report_changes_no_update(tmp_path, monkeypatch):
    """With dropout, which draws random numbers."""
    found = []
    for name, least_steps in (("with", 5), ("without", float("inf"))):
        call_spikes(monkeypatch, least_steps)
        weights = Weights(8)
        (tmp_path / name).mkdir()
        spikes = run(tmp_path / name, easy_rows(), weights, dropout=0.1, max_steps=8)[1]
        assert [bool(spike["rows"]) for spike in spikes] == ([True, False, False] if name == "with" else [])
        found.append(weights.found[8])
    assert torch.equal(*found)


NEAR = (NOISE_STEP - 1, NOISE_STEP, NOISE_STEP + 1)
SKIPPING = {"skip_spikes": True, "save_strategy": "steps", "save_steps": NOISE_STEP - 3}


@pytest.fixture(scope="module")
def skipping(tmp_path_factory):
    """Return the trainer and the weights of a run that skips the step with the noise. It saves a checkpoint before."""
    weights = Weights(*NEAR, NUM_STEPS)
    trainer, spikes = run(tmp_path_factory.mktemp("skipping"), easy_rows(NOISE), weights, **SKIPPING)
    assert [(spike["step"], spike["skipped"]) for spike in spikes] == [(NOISE_STEP, True)]
    return trainer, weights.found


def test_a_skipped_step_changes_no_weight(tmp_path, skipping):
    muon = Weights(*NEAR)
    spikes = run(tmp_path, easy_rows(NOISE), muon, skip_spikes=True, optim_preset="muon")[1]
    assert [(spike["step"], spike["skipped"]) for spike in spikes] == [(NOISE_STEP, True)]
    for found in (skipping[1], muon.found):
        before, at, after = (found[step] for step in NEAR)
        assert torch.equal(before, at) and not torch.equal(at, after)


def test_a_skipped_step_is_as_if_its_rows_were_not_there(tmp_path, skipping):
    """Compare with a loop that leaves the step out, without momentum from it. The learning rate is constant."""
    trainer, found = skipping
    torch.manual_seed(0)
    model = toy_model(vocab_size=64)
    arguments = {name: getattr(trainer.args, name) for name in ("learning_rate", "weight_decay", "optim_preset")}
    optimizer = make_trainer(
        tmp_path, easy_rows(), model=model, arguments=arguments | {"optim": None}
    ).create_optimizer()
    rows = [row["input_ids"] for row in easy_rows(NOISE)]
    for step in range(1, NUM_STEPS + 1):
        if step == NOISE_STEP:
            continue
        ids = torch.tensor(rows[2 * step - 2 : 2 * step])
        logits = model(ids, position_ids=torch.arange(24).expand(2, -1)).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert_near(found[NUM_STEPS], expected, 1e-3)


def test_a_resumed_run_skips_the_same_step(tmp_path, skipping):
    """The steps before the checkpoint tell what a spike is."""
    trainer, found = skipping
    again = Weights(NUM_STEPS)
    checkpoint = f"{trainer.args.output_dir}/checkpoint-{NOISE_STEP - 3}"
    spikes = run(tmp_path, easy_rows(NOISE), again, resume=checkpoint, **SKIPPING)[1]
    assert [spike["step"] for spike in spikes] == [NOISE_STEP]
    assert torch.equal(found[NUM_STEPS], again.found[NUM_STEPS])


def test_a_learning_rate_that_is_too_high_is_seen(tmp_path):
    """Its rows are looked up once, and not in each of its many steps."""

    class Raise(TrainerCallback):
        def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
            if state.global_step == NOISE_STEP:
                lr_scheduler.base_lrs = [1.0 for _ in lr_scheduler.base_lrs]

    spikes = run(tmp_path, easy_rows(), Raise())[1]
    assert len(spikes) > 3 and NOISE_STEP < spikes[0]["step"] < NOISE_STEP + 5
    assert [bool(spike["rows"]) for spike in spikes] == [True] + [False] * (len(spikes) - 1)


def test_a_trainer_with_a_loss_of_its_own_trains_without_the_watch(tmp_path):
    class OwnLoss(MaskedLossTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    arguments = {"max_steps": 2, "optim_preset": "adamw", "optim": None}
    trainer = make_trainer(tmp_path, easy_rows(), trainer_class=OwnLoss, arguments=arguments)
    trainer.train()
    assert trainer.state.global_step == 2 and not trainer.spikes.recent["loss"]


def test_ten_steps_in_a_row_are_skipped_at_most(tmp_path, monkeypatch):
    call_spikes(monkeypatch)
    spikes = run(tmp_path, easy_rows(), skip_spikes=True, max_steps=20)[1]
    assert [spike["step"] for spike in spikes] == list(range(6, 21))
    assert [spike["skipped"] for spike in spikes] == [True] * 10 + [False] + [True] * 4


def test_a_resumed_run_counts_the_steps_that_were_skipped(tmp_path, monkeypatch):
    """Of ten steps in a row, five come before the checkpoint."""
    call_spikes(monkeypatch)
    options = {"skip_spikes": True, "save_strategy": "steps", "save_steps": 10}
    run(tmp_path, easy_rows(), max_steps=10, **options)
    spikes = run(tmp_path, easy_rows(), resume=str(tmp_path / "checkpoint-10"), max_steps=18, **options)[1]
    assert [spike["step"] for spike in spikes] == list(range(6, 19))
    assert [spike["skipped"] for spike in spikes] == [True] * 10 + [False] + [True] * 2


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, capfd):
    call_spikes(monkeypatch)
    (tmp_path / "spikes.jsonl").mkdir()
    trainer, _ = run(tmp_path, easy_rows(), max_steps=7)
    assert trainer.state.global_step == 7
    assert "spikes.jsonl could not be written" in capfd.readouterr().out
