"""Distillation compared with its written-out formula; its teachers."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_pretrain import MaskedLossTrainer, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.stages.distillation import DistillationArguments, TeacherTerm, load_teacher
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.training_arguments import LMTrainingArguments
from hf_pretrain.weights.exporting import export
from hf_pretrain.weights.gguf import FILE_NAME
from tests.toys import LikeMPS, check_start_of_workers
from tests.trainers import make_documents, make_model, make_trainer, pack, train
from tests.trainers import written_out_loss as cross_entropy_and_router_loss


SIZES = [4, 1, 5, 3]


def make_teacher(**overrides) -> MiniMindForCausalLM:
    torch.manual_seed(5)
    sizes = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = MiniMindConfig(**sizes | {"max_position_embeddings": 128, "initializer_range": 0.3} | overrides)
    return MiniMindForCausalLM(config).eval().requires_grad_(False)


def make_distiller(tmp_path, rows, *, teacher=None, arguments=None, **kwargs):
    """Return a trainer; `kwargs` are fields of the distillation's arguments, and arguments of `make_trainer`."""
    flags = {name: kwargs.pop(name) for name in ("kl", "temperature", "ce_weight") if name in kwargs}
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    term = TeacherTerm(teacher or make_teacher(), DistillationArguments("teacher", **flags), args)
    kwargs = {"batch": 4, "eval_batch": 3, "term": term, "arguments": {"max_steps": 1} | (arguments or {})} | kwargs
    trainer = make_trainer(tmp_path, rows, **kwargs)
    # In another order, so that a row of one set never passes for a row of the other set.
    trainer.eval_dataset = rows[::-1]
    return trainer


def written_out_loss(model, teacher, documents, *, kl, temperature, ce_weight):
    """Return loss, cross-entropy and divergence by the formula, document by document."""
    divergence = weight_sum = torch.zeros(())
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        weights = torch.tensor(document["loss_mask"])[1:]
        with torch.no_grad():
            p = (teacher(ids).logits[0, :-1] / temperature).softmax(-1)
        q = (model(ids).logits[0, :-1] / temperature).softmax(-1)
        if kl == "reverse":
            p, q = q, p
        divergence = divergence + (weights * (p * (p / q).log()).sum(-1)).sum()
        weight_sum = weight_sum + weights.sum()
    divergence = temperature**2 * divergence / weight_sum
    ce, aux = cross_entropy_and_router_loss(model, documents)
    return ce_weight * ce + (1 - ce_weight) * divergence + 0.5 * aux, ce, divergence


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("num_experts", [0, 4])
@pytest.mark.parametrize(("kl", "temperature", "ce_weight"), [("forward", 1.5, 0.3), ("reverse", 0.8, 0.0)])
def test_a_step_is_the_formula(tmp_path, kl, temperature, ce_weight, num_experts, batch, accumulation):
    documents = make_documents(weighted=True)
    flags = {"kl": kl, "temperature": temperature, "ce_weight": ce_weight}
    model = make_model(num_experts)
    loss, ce, divergence = written_out_loss(model, make_teacher(), documents, **flags)
    loss.backward()
    expected = {name: p.detach() - 0.5 * p.grad for name, p in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

    sizes = {"batch": batch, "accumulation": accumulation}
    trainer = make_distiller(tmp_path, pack(documents, SIZES), model=make_model(num_experts), **sizes, **flags)
    before = trainer.evaluate()
    # The logits alone: a metric gets no losses.
    assert trainer.predict(trainer.eval_dataset).predictions.ndim == 3
    (step,) = train(trainer)
    figures = {"loss": loss, "ce_loss": ce, "kl_loss": divergence, "grad_norm": norm}
    figures |= {"eval_loss": ce, "eval_kl": divergence}
    for name, expected_figure in figures.items():
        assert (step | before)[name] == pytest.approx(expected_figure.item(), rel=1e-5), name
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.data, expected[name], rtol=0, atol=1e-5)


def test_model_flops_include_the_teacher_and_workers_need_not_fork(tmp_path):
    trainer = make_distiller(tmp_path, pack(make_documents(), SIZES))
    numbers = [sum(p.numel() for p in model.parameters()) for model in (trainer.model, make_teacher())]
    check_start_of_workers(trainer.get_train_dataloader())
    check_start_of_workers(trainer.get_eval_dataloader())
    (step,) = train(trainer)
    flops = step["model_flops_per_second"] / step["tokens_per_second"]
    assert flops == pytest.approx(6 * numbers[0] + 2 * numbers[1])


def test_apple_gpus_have_what_a_run_needs(tmp_path):
    arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    with LikeMPS():
        trainer = make_distiller(tmp_path, make_documents(weighted=True), arguments=arguments)
        trainer.train()
        assert trainer.evaluate()["eval_kl"] > 0
        trainer.save_model()
        again = make_distiller(tmp_path, make_documents(weighted=True), arguments=arguments)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.state.global_step == 2


def test_the_teacher_does_not_change_and_two_trainers_have_its_digest(tmp_path):
    teacher = make_teacher(dropout=0.5)
    weights = {name: p.clone() for name, p in teacher.named_parameters()}
    trainer = make_distiller(tmp_path, make_documents(weighted=True), teacher=teacher, arguments={"max_steps": 3})
    optimized = {id(p) for group in trainer.create_optimizer().param_groups for p in group["params"]}
    train(trainer)
    again = MaskedLossTrainer(make_model(), trainer.args, term=trainer.term, train_dataset=trainer.train_dataset)
    assert trainer.run.fixed_weights["teacher"] == again.run.fixed_weights["teacher"]
    assert not teacher.training
    for name, parameter in teacher.named_parameters():
        assert id(parameter) not in optimized and parameter.grad is None and torch.equal(parameter, weights[name])


@pytest.mark.parametrize("kind", ["ours", "llama"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_teacher_computes_in_the_precision_of_the_student(tmp_path, kind, bf16):
    teacher = make_teacher() if kind == "ours" else llama().requires_grad_(False)
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=bf16, report_to="none")
    seen = []
    teacher.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    term = TeacherTerm(teacher, DistillationArguments("teacher"), args)
    ids = torch.arange(8).view(1, 8)
    term({"input_ids": ids, "labels": ids, "position_ids": ids})
    assert seen == [torch.bfloat16 if bf16 else torch.float32]


# Teachers


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3)).eval()


def test_a_llama_teaches_rows_that_are_not_packed(tmp_path):
    documents = [{**d, "input_ids": [i % 64 for i in d["input_ids"]]} for d in make_documents(weighted=True)]
    teacher = llama().requires_grad_(False)
    flags = {"kl": "forward", "temperature": 1.5, "ce_weight": 0.3}
    model = make_model()
    # The student shares 64 of the teacher's 320 entries.
    full = teacher.forward
    cut = lambda ids: type("Output", (), {"logits": full(ids).logits[..., :64]})  # noqa: E731
    loss, *_ = written_out_loss(model, cut, documents, **flags)
    (step,) = train(make_distiller(tmp_path, documents, teacher=teacher, batch=len(documents), **flags))
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_teacher_is_loaded_with_its_tokenizer_checked(tmp_path):
    tokenizer = train_tokenizer(["some words to learn from", "and a few others"] * 5, vocab_size=300)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=4)).eval()
    ours = MiniMindForCausalLM(MiniMindConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1)).eval()
    models = {"gpt2": gpt2, "llama": llama(), "own": ours}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    # A GGUF file holds weights and tokenizer; models of the package index are such files.
    export(ours, tmp_path / "gguf", "gguf", tokenizer=tokenizer)
    ids = torch.arange(20)[None]
    for name, model in (models | {f"gguf/{FILE_NAME}": ours}).items():
        teacher = load_teacher(str(tmp_path / name), tokenizer, is_packed=name != "gpt2")
        assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
        torch.testing.assert_close(teacher(ids).logits, model(ids).logits)
    other = train_tokenizer(["quite different letters, so other pairs"] * 5, vocab_size=300)
    with pytest.raises(UserError):
        load_teacher(str(tmp_path / "llama"), other)
