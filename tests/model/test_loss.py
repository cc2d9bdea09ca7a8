"""Compare the masked loss and the router loss with their formulas, written out one token at a time."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainingArguments

from hf_pretrain.model import loss as loss_module
from hf_pretrain.model.loss import (
    find_documents,
    linear_masked_cross_entropy,
    masked_cross_entropy,
    router_loss,
)


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
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits (3, 10, 13), labels with gaps, and float weights, some of them zero."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 10, 13, generator=generator) * 3
    labels = torch.randint(0, 13, (3, 10), generator=generator)
    labels[0, 6:] = -100
    labels[1, :4] = -100
    weights = torch.rand(3, 10, generator=generator)
    weights[2, 3:5] = 0
    return logits, labels, weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_items", [None, 7.5])
def test_cross_entropy_is_the_formula(batch, weighted, num_items):
    logits, labels, weights = batch
    total, items = written_out_cross_entropy(logits, labels, weights if weighted else torch.ones_like(weights))
    loss = masked_cross_entropy(
        logits,
        labels,
        loss_mask=weights if weighted else None,
        num_items_in_batch=num_items and torch.tensor(num_items),
    )
    assert loss.item() == pytest.approx(total / (num_items or items), rel=1e-6)


@pytest.fixture
def head() -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states (3, 10, 8) and the weight of a head (13, 8)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 10, 8, generator=generator), torch.randn(13, 8, generator=generator)


@pytest.mark.parametrize("rows_at_a_time", [1, 7, 30, 100])
@pytest.mark.parametrize("num_items", [None, 7.5])
def test_linear_cross_entropy_is_the_formula(batch, head, rows_at_a_time, num_items, monkeypatch):
    """Compare also the gradients, with autograd through the formula in double precision and a gradient of the loss."""
    monkeypatch.setattr(loss_module, "MAX_LOGITS", (0, 13 * rows_at_a_time))
    monkeypatch.setattr(loss_module, "MIN_ROWS", 1)
    _, labels, weights = batch
    hidden, weight = (tensor.requires_grad_() for tensor in head)
    loss = linear_masked_cross_entropy(hidden, weight, labels, loss_mask=weights, num_items_in_batch=num_items)
    (loss * 3).backward()
    total, items = written_out_cross_entropy(hidden.detach() @ weight.detach().T, labels, weights)
    assert loss.item() == pytest.approx(total / (num_items or items), rel=1e-6)

    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in head)
    log_probs = (exact_hidden @ exact_weight.T).log_softmax(-1)[:, :-1]
    chosen = log_probs.gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
    exact = -(chosen * weights[:, 1:] * (labels[:, 1:] != -100)).sum() / (num_items or items)
    (exact * 3).backward()
    for actual, expected in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert torch.linalg.vector_norm(actual - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


def test_linear_cross_entropy_under_autocast_equals_autocast(batch, head):
    _, labels, weights = batch
    found = []
    for fused in (False, True):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in head)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if fused:
                loss = linear_masked_cross_entropy(hidden, weight, labels, loss_mask=weights)
            else:
                loss = masked_cross_entropy(torch.nn.functional.linear(hidden, weight), labels, loss_mask=weights)
        loss.backward()
        assert hidden.grad.dtype == weight.grad.dtype == torch.float32
        found.append((loss, hidden.grad, weight.grad))
    assert found[0][0] == found[1][0]
    for separate, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, separate, rtol=2e-2, atol=1e-3)


def test_linear_cross_entropy_computes_no_unneeded_gradient(batch, head):
    hidden, weight = (tensor.requires_grad_() for tensor in head)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_masked_cross_entropy(hidden, weight, batch[1])
    assert counter.get_total_flops() == 2 * hidden.numel() * len(weight)


@pytest.mark.parametrize("masked_by", ["labels", "loss_mask"])
def test_the_loss_without_trained_tokens_is_zero(model, input_ids, masked_by):
    labels = torch.full_like(input_ids, -100) if masked_by == "labels" else input_ids
    loss_mask = torch.zeros(input_ids.shape) if masked_by == "loss_mask" else None
    outputs = model.train()(input_ids, labels=labels, loss_mask=loss_mask)
    outputs.loss.backward()
    assert outputs.loss.item() == 0 and outputs.ce_loss.item() == 0
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize(
    ("arguments", "index", "counted", "count"),
    [
        ({}, [0, 0, 0, 0, 1, 1, 1, 1], [1] * 8, 2),
        (
            {"position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])},
            [0, 0, 1, 1, 2, 2, 2, 2],
            [1] * 8,
            3,
        ),
        # The second part of a split document continues its positions; any other step begins a document.
        ({"position_ids": torch.tensor([[4, 5, 2, 3]] * 2)}, [0, 0, 1, 1, 2, 2, 3, 3], [1] * 8, 4),
        (
            {"attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])},
            [0, 0, 0, 0, 1, 1, 1, 1],
            [0, 0, 1, 1, 1, 1, 1, 0],
            2,
        ),
        # The tail of a packed row, and a padding row of the last batch, train nothing.
        (
            {
                "position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]),
                "labels": torch.tensor([[-100, 5, -100, -100], [-100] * 4]),
            },
            [0, 0, 1, 1, 2, 2, 2, 2],
            [1, 1, 0, 0, 0, 0, 0, 0],
            1,
        ),
    ],
    ids=["rows", "packed", "cut", "padded", "untrained"],
)
def test_find_documents(arguments, index, counted, count):
    documents = find_documents((2, 4), **arguments)
    assert documents.index.tolist() == index
    assert documents.token_mask.int().tolist() == counted
    assert documents.count.item() == count


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


def test_padded_prompts_generate_with_router_logits(build_model, input_ids):
    model = build_model(num_experts=4, router_aux_loss_coef=0.3)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :9] = 0
    options = {"attention_mask": attention_mask, "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(input_ids, **options)
    assert model.generate(input_ids, output_router_logits=True, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("by_documents", [True, False])
def test_router_loss_is_divided_by_the_given_divisors(build_model, input_ids, by_documents):
    model = build_model(num_experts=4)
    alone = model(input_ids, labels=input_ids).aux_loss
    items = {"num_items_in_batch": torch.tensor(46 * 4.0)}
    if by_documents:
        part = model(input_ids, labels=input_ids, num_documents_in_batch=torch.tensor(8.0), **items).aux_loss
    else:
        part = model(input_ids, labels=input_ids, **items).aux_loss
    torch.testing.assert_close(part * 4, alone, rtol=1e-6, atol=0)


def train_one_step(model, rows, tmp_path, *, batch_size: int) -> dict[str, float]:
    trainer = Trainer(
        model,
        TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=len(rows) // batch_size,
            max_steps=1,
            logging_steps=1,
            train_sampling_strategy="sequential",
            optim="sgd",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
    )
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
