"""Compare the masked loss and the router loss with their formulas, written out one token at a time."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainingArguments

from hf_pretrain.model import loss as loss_module
from hf_pretrain.model.loss import (
    TokenLoss,
    cross_entropy,
    linear_loss,
    masked_cross_entropy,
    prediction_weights,
    weighted_tokens,
)
from hf_pretrain.model.router_loss import find_documents, router_loss
from tests.models import Operators, assert_near, gradients, packed_positions


def written_out_cross_entropy(logits, labels, weights) -> tuple[float, float]:
    """Return the sum of `w * CE` and the sum of `w`, in double precision."""
    total = items = 0.0
    for row in range(labels.shape[0]):
        for t in range(1, labels.shape[1]):
            if labels[row, t] != -100 and weights[row, t] > 0:
                scores = logits[row, t - 1].double()
                cross_entropy = math.log(scores.exp().sum()) - scores[labels[row, t]].item()
                total += weights[row, t].item() * cross_entropy
                items += weights[row, t].item()
    return total, items


def written_out_router_loss(router_logits, documents, top_k) -> float:
    """Return the mean over documents (lists of token numbers) of the sum over layers of `E * sum(f * P)`."""
    total = 0.0
    for tokens in documents:
        for logits in router_logits:
            num_experts = logits.shape[-1]
            chosen, probability = [0.0] * num_experts, [0.0] * num_experts
            for token in tokens:
                scores = logits[token].double().softmax(-1).tolist()
                for expert in sorted(range(num_experts), key=lambda e: -scores[e])[:top_k]:
                    chosen[expert] += 1 / (len(tokens) * top_k)
                for expert in range(num_experts):
                    probability[expert] += scores[expert] / len(tokens)
            total += num_experts * sum(f * p for f, p in zip(chosen, probability, strict=True))
    return total / len(documents)


@pytest.fixture
def batch() -> tuple[torch.Tensor, ...]:
    """Return hidden states (3, 10, 8), the weight of a head (13, 8), labels with gaps, and weights, some zero."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 10, 8, generator=generator), torch.randn(13, 8, generator=generator)
    labels, weights = torch.randint(0, 13, (3, 10), generator=generator), torch.rand(3, 10, generator=generator)
    labels[0, 6:] = labels[1, :4] = -100
    weights[2, 3:5] = 0
    return hidden.requires_grad_(), weight.requires_grad_(), labels, weights


@pytest.mark.parametrize("rows_at_a_time", [None, 1, 7, 30, 100])
@pytest.mark.parametrize(("num_items", "is_weighted"), [(None, True), (7.5, True), (None, False)])
def test_cross_entropy_is_the_formula(batch, rows_at_a_time, num_items, is_weighted, monkeypatch):
    """
    Compare also the gradients, with autograd through the formula in double precision and a gradient of the loss.
    `None` stands for all logits at once.
    """
    monkeypatch.setattr(loss_module, "MAX_LOGITS", (0, 13 * (rows_at_a_time or 0)))
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 1)
    monkeypatch.setattr(loss_module, "LOGITS_IN_CACHE", 13 * 4)
    hidden, weight, labels, weights = batch
    options = {"loss_mask": weights if is_weighted else None, "num_items_in_batch": num_items}
    if rows_at_a_time is None:
        loss = masked_cross_entropy(hidden @ weight.T, labels, **options)
    else:
        loss = linear_loss(hidden, weight, labels, **options).loss
    (loss * 3).backward()
    weights = weights if is_weighted else torch.ones_like(weights)
    total, items = written_out_cross_entropy((hidden @ weight.T).detach(), labels, weights)
    assert loss.item() == pytest.approx(total / (num_items or items), rel=1e-6)

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    log_probs = (exact[0] @ exact[1].T).log_softmax(-1)[:, :-1]
    chosen = log_probs.gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
    exact_loss = -(chosen * weights[:, 1:] * (labels[:, 1:] != -100)).sum() / (num_items or items)
    (exact_loss * 3).backward()
    for actual, expected in zip((hidden, weight), exact, strict=True):
        assert_near(actual.grad, expected.grad, 1e-6)


def test_linear_cross_entropy_under_autocast_equals_autocast(batch):
    *inputs, labels, weights = batch
    found = []
    for is_fused in (False, True):
        hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if is_fused:
                loss = linear_loss(hidden, weight, labels, loss_mask=weights).loss
            else:
                loss = masked_cross_entropy(torch.nn.functional.linear(hidden, weight), labels, loss_mask=weights)
        loss.backward()
        assert hidden.grad.dtype == weight.grad.dtype == torch.float32
        found.append((loss, hidden.grad, weight.grad))
    assert found[0][0] == found[1][0]
    for separate, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, separate, rtol=2e-2, atol=1e-3)


def test_linear_cross_entropy_computes_no_unneeded_gradient(batch):
    hidden, weight, labels, weights = batch
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_loss(hidden, weight, labels, loss_mask=weights)
    # A CPU computes no logits of tokens without weight.
    num_trained = int((prediction_weights(labels, weights) > 0).sum())
    assert num_trained == 18 < labels.numel()
    # 20 has three leading bits.
    assert counter.get_total_flops() == 2 * 20 * hidden.shape[-1] * len(weight)


def test_compiled_cross_entropy_is_called_once_per_chunk(batch, monkeypatch):
    """Each call of a compiled function checks its guards. On a CPU, what is not compiled runs in blocks instead."""
    monkeypatch.setattr(loss_module, "LOGITS_IN_CACHE", 2 * len(batch[1]))
    calls = []

    def compute(*arguments):
        calls.append(len(arguments[0]))
        return cross_entropy(*arguments)

    hidden, weight, labels, weights = batch
    found = linear_loss(hidden, weight, labels, loss_mask=weights, compute=compute).loss
    assert calls == [18]
    torch.testing.assert_close(found, linear_loss(hidden, weight, labels, loss_mask=weights).loss, rtol=1e-6, atol=0)


def test_the_losses_without_logits_are_the_same(model, input_ids, monkeypatch):
    """The loss of the labels, and one that replaces 0.75 of it: here the entropy, times a weight."""
    monkeypatch.setattr(loss_module, "MAX_LOGITS", (0, 0))
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 4)
    labels = input_ids.masked_fill(packed_positions(2) == 0, -100)
    rows = weighted_tokens(torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten() != -100)
    weights, sizes = torch.rand(len(rows)), []

    def entropy(logits: torch.Tensor, part: slice) -> torch.Tensor:
        sizes.append(len(logits))
        log_probs = logits.log_softmax(-1)
        return -((log_probs.exp() * log_probs).sum(-1) * weights[part]).sum()

    found = []
    for skip_logits in (False, True):
        model.zero_grad()
        what = {"labels": labels, "skip_logits": skip_logits, "token_loss": TokenLoss(rows, entropy, share=0.75)}
        outputs = model(input_ids, position_ids=packed_positions(2), **what)
        assert (outputs.logits is None) == skip_logits
        aux_loss = 0 if outputs.aux_loss is None else model.config.router_aux_loss_coef * outputs.aux_loss.item()
        expected = 0.25 * outputs.ce_loss.item() + 0.75 * outputs.token_loss.item() + aux_loss
        assert outputs.loss.item() == pytest.approx(expected)
        (3 * outputs.loss).backward()
        found.append((torch.stack([outputs.loss, outputs.token_loss]).detach(), gradients(model)))
    assert len(sizes) > 3 and sizes[0] == len(rows) and max(sizes[1:]) == 4
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)
    assert_near(found[1][1], found[0][1], 1e-6)


def test_the_loss_of_many_tokens_needs_no_tensor_of_all_logits():
    hidden = torch.randn(1, 4096, 8, requires_grad=True)
    weight = torch.randn(6400, 8, requires_grad=True)
    with Operators() as operators:
        linear_loss(hidden, weight, torch.randint(6400, (1, 4096))).loss.backward()
    assert max(shape.numel() for shape in operators.shapes) <= 4096 * 6400 / 4


@pytest.mark.parametrize("masked_by", ["labels", "loss_mask"])
def test_the_loss_without_trained_tokens_is_zero(model, input_ids, masked_by):
    labels = torch.full_like(input_ids, -100) if masked_by == "labels" else input_ids
    loss_mask = torch.zeros(input_ids.shape) if masked_by == "loss_mask" else None
    outputs = model.train()(input_ids, labels=labels, loss_mask=loss_mask)
    outputs.loss.backward()
    assert outputs.loss.item() == 0 and outputs.ce_loss.item() == 0
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()


PACKED = [[0, 1, 0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("arguments", "index", "counted"),
    [
        ({}, [0, 0, 0, 0, 1, 1, 1, 1], [1] * 8),
        ({"position_ids": PACKED}, [0, 0, 1, 1, 2, 2, 2, 2], [1] * 8),
        # The second part of a split document continues its positions; any other step begins a document.
        ({"position_ids": [[4, 5, 2, 3]] * 2}, [0, 0, 1, 1, 2, 2, 3, 3], [1] * 8),
        ({"attention_mask": [[0, 0, 1, 1], [1, 1, 1, 0]]}, [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 0]),
        # The tail of a packed row, and a padding row of the last batch, train nothing.
        (
            {"position_ids": PACKED, "labels": [[-100, 5, -100, -100], [-100] * 4]},
            *([0, 0, 1, 1, 2, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0, 0]),
        ),
    ],
    ids=["rows", "packed", "cut", "padded", "untrained"],
)
def test_find_documents(arguments, index, counted):
    documents = find_documents((2, 4), **{name: torch.tensor(value) for name, value in arguments.items()})
    assert documents.index.tolist() == index and documents.token_mask.int().tolist() == counted
    assert documents.count == len({document for document, counts in zip(index, counted, strict=True) if counts})


@pytest.fixture
def router_logits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2 * 8, 4, generator=generator) * 2 for _ in range(2))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_router_loss_of_packed_rows(router_logits, top_k):
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 0, 1]])
    labels = torch.where(position_ids == 0, -100, 5)
    labels[1, 6:] = -100
    documents = find_documents((2, 8), position_ids=position_ids, labels=labels)
    # Token 7 is a document of one token, which predicts nothing. Tokens 14 and 15 are padding.
    rows = [[0, 1, 2], [3, 4, 5, 6], list(range(8, 14))]
    expected = written_out_router_loss(router_logits, rows, top_k)
    assert router_loss(router_logits, top_k, documents).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("level", ["sequence", "batch"])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_model_reports_the_formula(build_model, input_ids, level, padding_side):
    model = build_model(num_experts=4, router_aux_loss_coef=0.3, router_aux_loss_level=level)
    lengths = (15, 24)
    kept = [list(range(24 - n, 24)) if padding_side == "left" else list(range(n)) for n in lengths]
    attention_mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(kept):
        attention_mask[row, tokens] = 1
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    outputs = model(
        input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels, output_router_logits=True
    )
    rows = [[row * 24 + token for token in tokens] for row, tokens in enumerate(kept)]
    rows = rows if level == "sequence" else [sum(rows, [])]
    expected = written_out_router_loss(outputs.router_logits, rows, 2)
    assert outputs.aux_loss.item() == pytest.approx(expected, rel=1e-5)
    assert outputs.loss.item() == pytest.approx(outputs.ce_loss.item() + 0.3 * expected, rel=1e-6)
    without = model(input_ids, attention_mask=attention_mask, position_ids=position_ids, output_router_logits=True)
    assert without.loss is None and without.aux_loss.item() == pytest.approx(expected, rel=1e-5)
    # A training loop that computes its own cross-entropy passes no labels. Inference has no use for the loss.
    rows = {"attention_mask": attention_mask, "position_ids": position_ids}
    assert model(input_ids, **rows).aux_loss is None
    trained = model.train()(input_ids, **rows).aux_loss
    trained.backward()
    assert trained.item() == pytest.approx(expected, rel=1e-5) and model.model.layers[0].mlp.gate.weight.grad.any()
    with torch.no_grad():
        assert model(input_ids, **rows).aux_loss is None


def test_padded_prompts_generate_with_router_logits(build_model, input_ids):
    model = build_model(num_experts=4, router_aux_loss_coef=0.3)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :9] = 0
    options = {"attention_mask": attention_mask, "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(input_ids, **options)
    assert model.generate(input_ids, output_router_logits=True, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("divisors", [{}, {"num_documents_in_batch": torch.tensor(8.0)}])
def test_router_loss_is_divided_by_the_given_divisors(build_model, input_ids, divisors):
    model = build_model(num_experts=4)
    alone = model(input_ids, labels=input_ids).aux_loss
    part = model(input_ids, labels=input_ids, num_items_in_batch=torch.tensor(46 * 4.0), **divisors).aux_loss
    torch.testing.assert_close(part * 4, alone, rtol=1e-6, atol=0)


def train_one_step(model, rows, tmp_path, *, batch_size: int) -> dict[str, float]:
    options = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": len(rows) // batch_size}
    options |= {"max_steps": 1, "logging_steps": 1, "train_sampling_strategy": "sequential", "optim": "sgd"}
    options |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows)
    trainer.train()
    return trainer.state.log_history[0]


def ragged_rows(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    rows = []
    for length in lengths:
        ids = torch.randint(3, 160, (16,), generator=generator)
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(16) < length, ids, -100)})
    return rows


@pytest.mark.parametrize("batch_size", [8, 2, 1])
def test_stock_trainer_gets_the_right_loss(build_model, tmp_path, batch_size):
    model, rows = build_model(), ragged_rows([16, 2, 9, 3, 16, 5, 2, 12])
    labels = torch.stack([row["labels"] for row in rows])
    logits = model(torch.stack([row["input_ids"] for row in rows])).logits
    total, items = written_out_cross_entropy(logits.detach(), labels, torch.ones(labels.shape))
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    grad_norm = torch.nn.utils.get_total_norm(torch.autograd.grad(loss, list(model.parameters())))
    logged = train_one_step(model, rows, tmp_path, batch_size=batch_size)
    assert logged["loss"] == pytest.approx(total / items, rel=1e-5)
    assert logged["grad_norm"] == pytest.approx(grad_norm.item(), rel=1e-5)


@pytest.mark.parametrize("lengths", [[16] * 8, [16, 2, 9, 3, 16, 5, 2, 12]], ids=["equal", "ragged"])
def test_stock_trainer_does_not_inflate_the_router_loss(build_model, tmp_path, lengths):
    """
    The stock Trainer does not count documents: it weights the router loss of each micro-batch by its share of the
    labels. With equal counts this is the mean over documents, otherwise a weighted mean.
    """
    rows = ragged_rows(lengths)
    logged = {}
    for batch_size in (8, 1):
        model = build_model(num_experts=4, router_aux_loss_coef=1.0)
        outputs = [model(row["input_ids"][None], labels=row["labels"][None]) for row in rows]
        logged[batch_size] = train_one_step(model, rows, tmp_path, batch_size=batch_size)
    share = [(length - 1) / (sum(lengths) - 8) for length in lengths]
    expected = sum(s * outputs.loss.item() for s, outputs in zip(share, outputs, strict=True))
    assert logged[1]["loss"] == pytest.approx(expected, rel=1e-5)
    if lengths[0] == lengths[1]:
        assert logged[8]["loss"] == pytest.approx(expected, rel=1e-5)
        assert logged[1]["grad_norm"] == pytest.approx(logged[8]["grad_norm"], rel=1e-5)
