"""Compare Muon with torch's own Muon, with its formula, and with a resumed run."""

from functools import partial

import pytest
import torch
from transformers import get_scheduler

from hf_pretrain.runtime.devices import has_bfloat16_units
from hf_pretrain.training import optimizers
from hf_pretrain.training.optimizers import Muon, build_muon, deepspeed_muon, is_matrix_of_muon, muon_parameter_groups
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import EXPERTS, toy_model


def give_gradients(model: torch.nn.Module, step: int):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def build(model: torch.nn.Module) -> Muon:
    return Muon(muon_parameter_groups(model, learning_rate=0.02, weight_decay=0.1), lr=0.02)


@pytest.mark.parametrize(
    ("has_units", "dtype", "tolerance"), [(True, torch.bfloat16, 2e-2), (False, torch.float32, 1e-4)]
)
def test_the_iteration_is_in_bfloat16_only_where_there_are_units_for_it(monkeypatch, has_units, dtype, tolerance):
    """Compare with the same five steps, written out in float64."""
    monkeypatch.setattr(optimizers, "has_bfloat16_units", lambda device_type: has_units)
    matrix = torch.randn(24, 48, generator=torch.Generator().manual_seed(0))
    expected = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = expected @ expected.T
        expected = 3.4445 * expected + (-4.7750 * gram + 2.0315 * gram @ gram) @ expected
    (found,) = optimizers.orthogonalize(matrix[None])
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("feature", ["avx2", "avx512_f", "avx512_bf16", "amx_bf16"])
def test_bfloat16_units_are_read_from_the_cpu(monkeypatch, feature):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True})
    assert has_bfloat16_units("cpu") is ("bf16" in feature)


def test_muon_trains_the_matrices_of_the_layers():
    model = toy_model(**EXPERTS)
    names = {name for name, parameter in model.named_parameters() if is_matrix_of_muon(name, parameter)}
    kinds = {name.split("layers.")[1].split(".", 1)[1] for name in names}
    assert kinds == {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
        *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    }
    groups = muon_parameter_groups(model, learning_rate=0.02, weight_decay=0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    # Vectors, routers, the embedding, matrices.
    assert [(group["use_muon"], group["lr"], group["weight_decay"]) for group in groups] == [
        (False, 0.02, 0.0),
        (False, 0.02, 0.1),
        (False, 0.05, 0.1),
        (True, 0.02, 0.1),
    ]
    assert groups[2]["params"] == [model.model.embed_tokens.weight]
    # Trainer logs the rate of the first group. At larger widths, the embedding has a lower one than all others.
    groups = muon_parameter_groups(toy_model(hidden_size=512), learning_rate=0.02, weight_decay=0.1)
    assert groups[0]["lr"] == 0.02 and {group["lr"] for group in groups} == {0.02, 0.02 * 0.9375}


def test_matrices_move_as_under_torchs_muon_and_the_rest_as_under_adamw():
    model, reference = toy_model(), toy_model()
    ours = build(model)
    named = dict(reference.named_parameters())
    muons = [parameter for name, parameter in named.items() if is_matrix_of_muon(name, parameter)]
    rest = [parameter for name, parameter in named.items() if not is_matrix_of_muon(name, parameter)]
    torchs = torch.optim.Muon(muons, lr=0.02, momentum=0.85, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    # The embedding is the only matrix among the rest.
    decays = [
        {"params": [p], **({"lr": 0.05, "weight_decay": 0.1} if p.ndim >= 2 else {"weight_decay": 0.0})} for p in rest
    ]
    adamw = torch.optim.AdamW(decays, lr=0.02, betas=(0.9, 0.95))
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    for step in range(3):
        for optimizer, net in ((ours, model), (torchs, reference), (adamw, None)):
            if net is not None:
                give_gradients(net, step)
            optimizer.step()
    for name, parameter in model.named_parameters():
        moved, expected = parameter - start[name], named[name] - start[name]
        # Both iterate in bfloat16. Ours stacks matrices of one shape.
        tolerance = 2e-2 if is_matrix_of_muon(name, parameter) else 1e-5
        assert (moved - expected).norm() <= tolerance * expected.norm(), name


def test_stacked_experts_are_orthogonalized_one_by_one():
    stacked = torch.nn.Parameter(torch.zeros(4, 24, 16))
    single = [torch.nn.Parameter(torch.zeros(24, 16)) for _ in range(4)]
    gradient = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(0))
    # One expert is much larger: without a separate iteration, only this expert would become orthogonal.
    gradient[0] *= 1000
    stacked.grad = gradient.clone()
    for parameter, part in zip(single, gradient, strict=True):
        parameter.grad = part.clone()
    for parameters in ([stacked], single):
        Muon([{"params": parameters, "use_muon": True, "weight_decay": 0.0}], lr=1.0).step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in single]), rtol=2e-2, atol=2e-2)
    assert stacked[1].norm() > 0.5 * stacked[0].norm()


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 6, 4)])
def test_ranks_gather_contiguous_updates(monkeypatch, shape):
    """NCCL refuses other tensors. Gloo, which the other tests use, takes them."""
    sent = []
    monkeypatch.setattr(optimizers, "num_ranks", lambda _: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", lambda *pair, group: sent.append(pair))
    optimizers.orthogonalize_together([torch.randn(shape) for _ in range(3)])
    assert [part.is_contiguous() for pair in sent for part in pair] == [True, True]


@pytest.mark.slow
def test_deepspeeds_weight_decay_equals_ours():
    """The matrix is wide, so that the two scales of an update differ clearly: 0.2 * sqrt(512) is 4.5."""
    for build_optimizer in (partial(Muon, lr=0.01), partial(deepspeed_muon, betas=(0.9, 0.95), eps=1e-8)):
        matrix = torch.nn.Parameter(torch.ones(512, 512))
        matrix.grad = torch.zeros_like(matrix)
        optimizer = build_optimizer([{"params": [matrix], "use_muon": True, "lr": 0.01, "weight_decay": 0.1}])
        optimizer.step()
        torch.testing.assert_close(matrix.detach(), torch.full((512, 512), 1 - 0.01 * 0.1))
    # `optimizer` is now DeepSpeed's.
    from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

    is_half = ns_compute_dtype(optimizer.param_groups[0]["ns_method"]) != torch.float32
    assert is_half == has_bfloat16_units("cpu")


def test_a_loaded_state_continues_bit_for_bit(tmp_path):
    whole, half = toy_model(**EXPERTS), toy_model(**EXPERTS)
    optimizers = [build(whole), build(half)]
    for step in range(2):
        for model, optimizer in zip((whole, half), optimizers, strict=True):
            give_gradients(model, step)
            optimizer.step()
    torch.save(optimizers[1].state_dict(), tmp_path / "optimizer.pt")
    resumed = build(half)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for model, optimizer in ((whole, optimizers[0]), (half, resumed)):
        give_gradients(model, 2)
        optimizer.step()
    for expected, parameter in zip(whole.parameters(), half.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_deepspeeds_muon_has_the_rate_that_schedules_with_a_minimum_read():
    args = LMTrainingArguments(output_dir="unused", use_cpu=True, learning_rate=0.02)
    optimizer = build_muon(toy_model(), args, uses_deepspeed=True)
    schedule = get_scheduler("polynomial", optimizer, num_warmup_steps=0, num_training_steps=2)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert optimizer.defaults["lr"] == rates[0] == 0.02 and schedule.get_last_lr() == rates
