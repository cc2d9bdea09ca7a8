"""The whole model beside transformers' models of the same shape, through the cache, generation and compilation."""

import copy

import pytest
import torch
import torch._dynamo
from safetensors import safe_open
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3ForCausalLM,
)

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM, MiniMindForSequenceClassification, MiniMindModel
from tests.conftest import GENERATIONS, TOY
from tests.models import assert_near, gradients, packed_positions, stock_model
from tests.toys import toy_model


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize("head_dim", [8, 12])
def test_logits_equal_llamas_and_qwen3s(qk_norm, head_dim, build_model, input_ids):
    model = build_model(qk_norm=qk_norm, head_dim=head_dim, rms_norm_eps=1e-6)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    other = stock_model(model, Qwen3ForCausalLM if qk_norm else LlamaForCausalLM)
    assert_near(model(input_ids).logits, other(input_ids).logits)
    greedy = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(input_ids, **greedy), other.generate(input_ids, **greedy))
    other.load_state_dict(model.state_dict())
    assert not torch.allclose(model(input_ids).logits, other(input_ids).logits, rtol=0.1)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_cached_is_uncached(model, input_ids, name):
    """transformers 5.23 passes the cache by the first name, 5.24 by the second."""
    expected = model(input_ids, use_cache=False).logits
    outputs = model(input_ids[:, :10], use_cache=True)
    logits = [outputs.logits]
    for start, stop in [(10, 17), *((t, t + 1) for t in range(17, 24))]:
        outputs = model(input_ids[:, start:stop], **{name: outputs.past_key_values})
        logits.append(outputs.logits)
    assert outputs.past_key_values.get_seq_length() == 24
    assert_near(torch.cat(logits, dim=1), expected)


class EngineAttention(torch.nn.Module):
    """The attention of a layer as vLLM calls it, on requests that lie behind each other without a batch dimension."""

    def __init__(self, config, lengths):
        super().__init__()
        self.config, self.lengths, self.scale = config, lengths, None

    def forward(self, query, key, value):
        heads = (query, self.config.num_attention_heads), (key, self.config.num_key_value_heads)
        parts = [
            states.unflatten(-1, (number, -1)).split(self.lengths)
            for states, number in (*heads, (value, self.config.num_key_value_heads))
        ]
        # (length, num_heads, head_dim) -> (num_heads, length, head_dim)
        requests = [[states.transpose(0, 1) for states in request] for request in zip(*parts, strict=True)]
        attend = torch.nn.functional.scaled_dot_product_attention
        outputs = [attend(*request, is_causal=True, scale=self.scale, enable_gqa=True) for request in requests]
        return torch.cat([output.transpose(0, 1).flatten(1) for output in outputs])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_an_engine_brings_its_attention(build_model, input_ids, generation, engine):
    """The Transformers backends give their attention to the layers by an argument, and call the decoder so."""
    # The requests of a batch together are longer than the rotary table, and each is shorter.
    model = build_model(**GENERATIONS[generation], max_position_embeddings=6).eval()
    lengths = [5, 3]
    requests = [input_ids[:1, :5], input_ids[1:2, :3]]
    expected = torch.cat([model.model(request).last_hidden_state[0] for request in requests])

    def attend(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
        assert attention_mask is None
        attention = attention_instances[module.layer_idx]
        attention.scale = scaling
        # (1, num_heads, num_tokens, head_dim) -> (num_tokens, num_heads * head_dim)
        return attention(*(states[0].transpose(0, 1).flatten(1) for states in (query, key, value))), None

    AttentionInterface.register(engine, attend)
    try:
        model.config._attn_implementation = engine
        instances = {
            number: EngineAttention(model.config, lengths) for number in range(model.config.num_hidden_layers)
        }
        options = {"use_cache": False, "return_dict": False, "attention_instances": instances}
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        decoders = model.model, torch.compile(model.model, backend="eager")
        found = [decoder(torch.cat(requests, dim=1), position_ids=positions, **options)[0] for decoder in decoders]
    finally:
        AttentionInterface._global_mapping.pop(engine)
    for hidden_states in found:
        assert_near(hidden_states[0], expected)


class MissingModule(torch.nn.Identity):
    """A module of another rank, as vLLM writes it."""

    def forward(self, *args, **kwargs):
        return args[0] if args else next(iter(kwargs.values()))


def test_an_engine_splits_the_decoder_by_its_plan(model, input_ids):
    """Split over two ranks as vLLM 0.32 does: modules before the layers stay first, and modules behind them last."""
    expected = model.model(input_ids).last_hidden_state
    first, last = model.model, copy.deepcopy(model.model)
    assert first.supports_pp_plan
    (before, layers, after), options = first._pp_plan, {"use_cache": False, "return_dict": False}
    first.get_submodule(layers)[1] = last.get_submodule(layers)[0] = MissingModule()
    setattr(first, after, MissingModule())
    setattr(last, before, MissingModule())
    hidden_states, *_ = first(input_ids, **options)
    assert_near(last(inputs_embeds=hidden_states, **options)[0], expected)


def test_a_model_trains_beside_vllm_in_its_process(build_model, input_ids, monkeypatch):
    """vLLM 0.32 replaces `__call__` of the decoder class as below, and sets the attribute on its own models."""

    def call(self, *args, **kwargs):
        assert self.do_not_compile
        return self.forward(*args, **kwargs)

    model = build_model()
    expected = model(input_ids).logits
    monkeypatch.setattr(MiniMindModel, "__call__", call)
    assert torch.equal(model(input_ids).logits, expected)


@pytest.mark.parametrize("model_class", [MiniMindModel, MiniMindForCausalLM, MiniMindForSequenceClassification])
def test_unknown_arguments_are_refused(build_model, input_ids, model_class):
    model = model_class(build_model().config).eval()
    positions = {"position_ids": torch.arange(24).expand(2, 24), "seq_idx": torch.zeros(2, 24, dtype=torch.int32)}
    ignored = {"token_type_ids": input_ids, "num_items_in_batch": 3, "return_dict": True, **positions}
    expected = model(input_ids).to_tuple()
    # A value of None says nothing under any name.
    for found, value in zip(model(input_ids, **ignored, new_mask=None).to_tuple(), expected, strict=True):
        assert not isinstance(value, torch.Tensor) or torch.equal(found, value)
    with pytest.raises(TypeError):
        model(input_ids, new_mask=torch.zeros(2, 24))
    with pytest.raises(ValueError):
        model(input_ids, seq_idx=positions["seq_idx"])


def test_the_head_of_a_classifier_equals_llamas(build_model, input_ids, tmp_path):
    config = build_model(num_labels=3, rms_norm_eps=1e-6, head_dim=8).config
    config.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_config(MiniMindConfig.from_pretrained(tmp_path)).eval()
    assert type(model) is MiniMindForSequenceClassification
    assert config.auto_map["AutoModelForSequenceClassification"].endswith("MiniMindForSequenceClassification")
    other, labels = stock_model(model, LlamaForSequenceClassification), torch.tensor([0, 2])
    found, expected = model(input_ids, labels=labels), other(input_ids, labels=labels)
    assert_near(found.loss, expected.loss)
    assert_near(found.logits, expected.logits, 1e-4)


@torch.no_grad()
def test_greedy_is_the_argmax_without_cache(model, input_ids):
    expected = input_ids
    for _ in range(20):
        next_ids = model(expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, next_ids], dim=1)
    greedy = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(input_ids, **greedy), expected)
    assert torch.equal(model.generate(input_ids, **greedy, use_cache=False), expected)
    # Assisted decoding takes one row.
    assert torch.equal(model.generate(input_ids[:1], **greedy, assistant_model=model), expected[:1])
    assert torch.equal(model.generate(input_ids, **greedy, cache_implementation="static"), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(build_model, input_ids, tmp_path, tied):
    model = build_model(tie_word_embeddings=tied, num_experts=4, num_shared_experts=1, qk_norm=True)
    model.save_pretrained(tmp_path / "once")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "once")
    loaded.save_pretrained(tmp_path / "twice")
    with safe_open(tmp_path / "once" / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert ("lm_head.weight" in stored) is not tied
    assert stored | {"lm_head.weight"} == set(model.state_dict())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert type(loaded) is MiniMindForCausalLM
    assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)
    once, twice = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert once.keys() == twice.keys() and all(torch.equal(once[name], twice[name]) for name in once)


def test_optional_outputs(build_model, input_ids):
    model = build_model(num_experts=4, attn_implementation="eager")
    outputs = model(input_ids, output_router_logits=True, output_hidden_states=True, output_attentions=True)
    assert [logits.shape for logits in outputs.router_logits] == [(48, 4)] * 2
    assert torch.equal(outputs.hidden_states[0], model.model.embed_tokens(input_ids))
    assert torch.equal(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
    attentions = torch.stack(outputs.attentions)
    torch.testing.assert_close(attentions.sum(-1), torch.ones(2, 2, 4, 24))
    assert not attentions.triu(1).any()


def test_activation_checkpointing_changes_nothing(model, input_ids):
    calls = []
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    results = []
    for enable in (False, True):
        calls.clear()
        model.train().zero_grad()
        if enable:
            model.activation_checkpointing_enable()
        outputs = model(input_ids, position_ids=packed_positions(2), labels=input_ids)
        outputs.loss.backward()
        results.append((outputs.loss.item(), gradients(model), len(calls)))
    (loss, grads, once), (checkpointed_loss, checkpointed_grads, twice) = results
    assert (once, twice) == (1, 2)
    assert checkpointed_loss == loss and torch.equal(checkpointed_grads, grads)


def test_dropout(build_model, input_ids):
    plain = build_model(attn_implementation="eager")
    model = build_model(dropout=0.5, attn_implementation="eager")
    assert torch.equal(model(input_ids).logits, plain(input_ids).logits)
    assert torch.equal(plain.train()(input_ids).logits, plain.eval()(input_ids).logits)
    model.train()
    assert not torch.equal(model(input_ids).logits, model(input_ids).logits)

    residual = []
    model.model.layers[0].dropout.register_forward_hook(lambda module, args, output: residual.append(output))
    outputs = model(input_ids, output_attentions=True, output_hidden_states=True)
    future = torch.ones(24, 24).triu(1).bool()
    assert len(residual) == 2
    for dropped in (*residual, outputs.hidden_states[0], outputs.attentions[0][:, :, ~future]):
        assert 0.4 < (dropped == 0).float().mean() < 0.6
    # Dropout doubles the remaining values, so that the mean stays the same.
    embeddings = model.model.embed_tokens(input_ids)
    kept = outputs.hidden_states[0] != 0
    torch.testing.assert_close(outputs.hidden_states[0][kept], 2 * embeddings[kept])


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def no_complex_operators(graph: torch.fx.GraphModule, _):
    """Return the graph uncompiled, and raise an error for operators that Inductor generates no code for."""
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        assert not (isinstance(value, torch.Tensor) and value.is_complex()), node
    return graph


@pytest.mark.compiles
@pytest.mark.parametrize("packed", [True, False])
def test_whole_model_is_one_graph_of_real_numbers(model, input_ids, packed, fresh_compiler):
    arguments = {"labels": input_ids, "use_cache": False}
    if packed:
        arguments["position_ids"] = packed_positions(2)
    outputs = model(input_ids, **arguments)
    outputs.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    compiled = torch.compile(model, backend=no_complex_operators, fullgraph=True)(input_ids, **arguments)
    compiled.loss.backward()
    assert_near(compiled.logits, outputs.logits)
    torch.testing.assert_close(compiled.loss, outputs.loss)
    assert_near(gradients(model), expected)


@pytest.mark.compiles
def test_compiled_models_keep_their_own_tables(build_model, input_ids, fresh_compiler):
    """With the same code and shapes but another base, the second model must not run the graph of the first."""
    for theta in (1e6, 1e2):
        model = build_model(rope_theta=theta)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_near(compiled(input_ids).logits, model(input_ids).logits)


@pytest.mark.parametrize(
    ("change", "num_products"), [("none", 4), ("adapter", 6), ("hook", 6), ("without gradients", 7)]
)
def test_compiled_layers_join_the_products_of_one_input(input_ids, change, num_products, fresh_compiler):
    """Queries, keys and values, and gate and up. Adapters and hooks change what one of them computes."""
    model = toy_model(**TOY)
    layer, found = model.model.layers[0], []
    if change == "adapter":
        layer.self_attn.k_proj.__class__ = type("AdaptedLinear", (torch.nn.Linear,), {})
    if change == "hook":
        layer.self_attn.k_proj.register_forward_hook(lambda module, inputs, output: 2 * output)

    def count_products(graph_module: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        found.append(sum(node.target is torch._C._nn.linear for node in graph_module.graph.nodes))
        return graph_module.forward

    def run() -> tuple[torch.Tensor, torch.Tensor | None]:
        model.zero_grad()
        with torch.set_grad_enabled(change != "without gradients"):
            outputs = model(input_ids, labels=input_ids)
        if change == "without gradients":
            return outputs.logits, None
        outputs.loss.backward()
        return outputs.logits, gradients(model)

    expected_logits, expected_gradients = run()
    layer.compile(backend=count_products, fullgraph=True)
    logits, found_gradients = run()
    assert found == [num_products]
    assert_near(logits, expected_logits)
    if found_gradients is not None:
        assert_near(found_gradients, expected_gradients)


def test_generation_does_not_run_the_compiled_layers(model, input_ids, fresh_compiler):
    expected = model.generate(input_ids, max_new_tokens=3, do_sample=False)
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=counter)
    torch.testing.assert_close(model.generate(input_ids, max_new_tokens=3, do_sample=False), expected)
    assert counter.frame_count == 0
    model(input_ids, labels=input_ids, use_cache=False)
    assert counter.frame_count > 0


@pytest.mark.parametrize("generation", GENERATIONS)
def test_residual_branches_that_start_at_zero(build_model, input_ids, tmp_path, generation):
    """The model begins as the identity: the logits come from the embeddings alone. No other weight changes."""
    plain, zero = (build_model(**GENERATIONS[generation], zero_init_residual=is_zero) for is_zero in (False, True))
    embedded = zero.model.norm(zero.model.embed_tokens(input_ids))
    torch.testing.assert_close(zero(input_ids).logits, zero.lm_head(embedded), rtol=0, atol=1e-6)
    for name, weight in plain.state_dict().items():
        expected = torch.zeros_like(weight) if "o_proj" in name or "down_proj" in name else weight
        assert torch.equal(zero.state_dict()[name], expected), name
    # The field does not touch the trained weights of a saved model.
    plain.config.zero_init_residual = True
    plain.save_pretrained(tmp_path)
    loaded = MiniMindForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.zero_init_residual
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in loaded.state_dict().items())
