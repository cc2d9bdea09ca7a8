import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from hf_pretrain import (
    MiniMindConfig,
    MiniMindForCausalLM,
    MiniMindForSequenceClassification,
    MiniMindModel,
)
from hf_pretrain.model import experts, packed_attention
from hf_pretrain.model.configuration_minimind import TESTED_VERSIONS
from hf_pretrain.model.loss import linear_masked_cross_entropy
from hf_pretrain.model.packed_attention import ATTENTION_BLOCK, _attend_in_blocks
from tests.conftest import GENERATIONS


def assert_near(actual: torch.Tensor, expected: torch.Tensor, rel: float = 1e-5):
    """Compare by the norm of the difference, relative to the norm of `expected`."""
    assert actual.shape == expected.shape
    difference = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)
    assert difference.item() <= rel


def gradients(model: MiniMindForCausalLM) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def to_half_split(state_dict: dict[str, torch.Tensor], head_dim: int) -> dict[str, torch.Tensor]:
    """Move channels `(2i, 2i + 1)` of each head, which MiniMind rotates together, to `(i, i + head_dim / 2)`."""
    permuted = {}
    for name, value in state_dict.items():
        if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            value = value.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        permuted[name] = value
    return permuted


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize("head_dim", [8, 12])
def test_logits_equal_llamas_and_qwen3s(qk_norm, head_dim, build_model, input_ids):
    model = build_model(qk_norm=qk_norm, head_dim=head_dim, rms_norm_eps=1e-6)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    config_class, model_class = (Qwen3Config, Qwen3ForCausalLM) if qk_norm else (LlamaConfig, LlamaForCausalLM)
    fields = {name: value for name, value in model.config.to_dict().items() if name in config_class().to_dict()}
    other = model_class(config_class(**fields | {"model_type": config_class.model_type, "auto_map": None})).eval()
    other.load_state_dict(to_half_split(model.state_dict(), head_dim))
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
    with pytest.raises(ValueError, match="cache once"):
        model(input_ids, past_key_values=outputs.past_key_values, cache=outputs.past_key_values)


@pytest.mark.parametrize("model_class", [MiniMindModel, MiniMindForCausalLM, MiniMindForSequenceClassification])
def test_unknown_arguments_are_refused(build_model, input_ids, model_class):
    model = model_class(build_model().config).eval()
    positions = {"position_ids": torch.arange(24).expand(2, 24), "seq_idx": torch.zeros(2, 24, dtype=torch.int32)}
    ignored = {"token_type_ids": input_ids, "num_items_in_batch": 3, "return_dict": True, **positions}
    expected = model(input_ids).to_tuple()
    # A value of None says nothing under any name.
    for found, value in zip(model(input_ids, **ignored, new_mask=None).to_tuple(), expected, strict=True):
        assert not isinstance(value, torch.Tensor) or torch.equal(found, value)
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(ValueError, match=f"{name} needs position_ids"):
            model(input_ids, **{name: torch.zeros(2, 24, dtype=torch.int32)})
    for name in ("kv_cache", "cache_position", "is_causal", "attention_masks", "target_ids"):
        with pytest.raises(TypeError, match=f"argument {name}, .*tested with transformers {TESTED_VERSIONS}"):
            model(input_ids, **{name: torch.zeros(2, 24)})


def test_the_head_of_a_classifier_equals_llamas(build_model, input_ids, tmp_path):
    config = build_model(num_labels=3, rms_norm_eps=1e-6, head_dim=8).config
    config.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_config(MiniMindConfig.from_pretrained(tmp_path)).eval()
    assert type(model) is MiniMindForSequenceClassification
    assert config.auto_map["AutoModelForSequenceClassification"].endswith("MiniMindForSequenceClassification")
    fields = {name: getattr(config, name) for name in LlamaConfig().to_dict() if name in MiniMindConfig().to_dict()}
    fields = {name: fields[name] for name in fields if name not in ("model_type", "architectures", "dtype")}
    other = LlamaForSequenceClassification(LlamaConfig(**fields)).eval()
    other.load_state_dict(to_half_split(model.state_dict(), 8))
    labels = torch.tensor([0, 2])
    found, expected = model(input_ids, labels=labels), other(input_ids, labels=labels)
    assert_near(found.loss, expected.loss)
    assert_near(found.logits, expected.logits, 1e-4)


LENGTHS = (5, 9, 10)


def packed_positions(num_rows: int = 1) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS]).expand(num_rows, -1)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "packed"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"use_cache": False}, {"use_cache": True}, {"attention_mask": torch.ones(1, 24)}],
    ids=["default", "no-cache", "cache", "ones"],
)
@torch.no_grad()
def test_packed_is_separate(model, input_ids, attn_implementation, arguments):
    separate = torch.cat([model(document).logits for document in input_ids[:1].split(LENGTHS, dim=1)], dim=1)
    model.set_attn_implementation(attn_implementation)
    packed = model(input_ids[:1], position_ids=packed_positions(), **arguments).logits
    assert_near(packed, separate)


@pytest.mark.parametrize("arguments", [{}, {"attention_mask": torch.ones(1, 24)}], ids=["no-mask", "ones"])
def test_packed_training_equals_one_document_per_row(model, input_ids, arguments):
    documents = input_ids[0].split(LENGTHS)
    rows = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in documents], batch_first=True)
    outputs = model.train()(rows, attention_mask=mask, labels=rows.masked_fill(mask == 0, -100))
    outputs.loss.backward()
    expected = gradients(model)
    model.zero_grad()

    # The tail of the row is padding: a separate document that trains nothing.
    tail = torch.zeros(1, 6, dtype=torch.long)
    labels = input_ids[:1].masked_fill(packed_positions() == 0, -100)
    arguments = {name: torch.ones(1, 30) for name in arguments}
    packed = model(
        torch.cat([input_ids[:1], tail], dim=1),
        position_ids=torch.cat([packed_positions(), torch.arange(6)[None]], dim=1),
        labels=torch.cat([labels, tail - 100], dim=1),
        **arguments,
    )
    packed.loss.backward()
    torch.testing.assert_close(packed.ce_loss, outputs.ce_loss, rtol=1e-5, atol=0)
    if model.config.num_experts:
        torch.testing.assert_close(packed.aux_loss, outputs.aux_loss, rtol=1e-5, atol=0)
    assert_near(gradients(model), expected)


def test_packed_with_padding_mask_is_refused(build_model, input_ids):
    mask = torch.ones(1, 24)
    mask[0, -3:] = 0
    with pytest.raises(ValueError, match="position_ids restart"):
        build_model()(input_ids[:1], position_ids=packed_positions(), attention_mask=mask)


def left_padded(input_ids: torch.Tensor, num_pads: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch with row 0 shortened and padded on the left, and row 1 whole."""
    mask = torch.ones_like(input_ids)
    mask[0, :num_pads] = 0
    return torch.cat([F.pad(input_ids[:1, :-num_pads], (num_pads, 0)), input_ids[1:]]), mask


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "packed"])
@pytest.mark.parametrize("padding_position", [0, 1])
@torch.no_grad()
def test_left_padded_is_unpadded(model, input_ids, attn_implementation, padding_position):
    short, whole = model(input_ids[:1, :18]).logits, model(input_ids[1:]).logits
    ids, mask = left_padded(input_ids)
    model.set_attn_implementation(attn_implementation)
    position_ids = (mask.cumsum(-1) - 1).masked_fill(mask == 0, padding_position)
    logits = model(ids, attention_mask=mask, position_ids=position_ids).logits
    assert_near(logits[:1, 6:], short)
    assert_near(logits[1:], whole)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "packed"])
@pytest.mark.parametrize("documents", [LENGTHS, (24,), (1,) * 24, (2, 17, 1, 4)], ids=str)
def test_gradients_agree_with_eager(model, input_ids, attn_implementation, documents):
    """The second row is one document. The lengths form one group, or several."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in documents]), torch.arange(24)])
    found = []
    for name in ("eager", attn_implementation):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(input_ids, position_ids=positions, labels=input_ids).loss.backward()
        found.append(gradients(model))
    assert_near(*found)


@torch.no_grad()
def test_documents_begin_where_positions_are_not_consecutive(model, input_ids):
    """A document may begin at position 0 or any other, as in transformers' own masks."""
    positions = torch.cat([torch.arange(5), torch.arange(7, 16), torch.arange(3, 13)])[None]
    outputs = []
    for attn_implementation in ("eager", "packed"):
        model.set_attn_implementation(attn_implementation)
        outputs.append(model(input_ids[:1], position_ids=positions, use_cache=False).logits)
    assert_near(*outputs)


@pytest.mark.parametrize("seq_len", [1, 40, 2 * ATTENTION_BLOCK + 7])
def test_attention_in_blocks_is_attention(seq_len):
    """Compare the attention that a CPU computes in half precision with torch's, here in double precision."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": 6, "key": 2, "value": 2}
    found = []
    states = [torch.randn(3, n, seq_len, 8, dtype=torch.float64, generator=generator) for n in sizes.values()]
    for attend in ("blocks", "torch"):
        given = [part.clone().requires_grad_() for part in states]
        if attend == "blocks":
            output = _attend_in_blocks(*given, 0.3, 0.0)
        else:
            output = F.scaled_dot_product_attention(*given, is_causal=True, scale=0.3, enable_gqa=True)
        (output * output.detach().cos()).sum().backward()
        found.append([output, *(part.grad for part in given)])
    torch.testing.assert_close(*found)


def test_packed_attention_creates_no_quadratic_tensor(model, input_ids):
    """Check that attention creates no mask, and no tensor of size seq_len squared."""
    model.set_attn_implementation("packed")
    with Operators() as operators:
        model(input_ids, position_ids=packed_positions(2), use_cache=False)
    assert operators.shapes and not [shape for shape in operators.shapes if shape[-2:] == (24, 24)]


def test_the_loss_without_logits_is_the_same(model, input_ids):
    labels = input_ids.masked_fill(packed_positions(2) == 0, -100)
    found = []
    for skip_logits in (False, True):
        model.zero_grad()
        outputs = model(input_ids, position_ids=packed_positions(2), labels=labels, skip_logits=skip_logits)
        assert (outputs.logits is None) == skip_logits
        outputs.loss.backward()
        found.append((outputs.loss.detach(), gradients(model)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)
    assert_near(found[1][1], found[0][1], 1e-6)


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
    static = model.generate(input_ids, **greedy, cache_implementation="static")
    assert torch.equal(static, expected)


def loop_over_experts(mlp: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute the sparse block one token and one expert at a time."""
    config, outputs = mlp.experts.config, []
    for token in hidden_states.flatten(0, 1):
        scores = (mlp.gate.weight @ token).softmax(-1)
        chosen = scores.argsort(descending=True)[: config.num_experts_per_tok]
        weights = scores[chosen] / scores[chosen].sum() if config.norm_topk_prob else scores[chosen]
        output = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert] @ token).split(config.moe_intermediate_size)
            output = output + weight * (mlp.experts.down_proj[expert] @ (F.silu(gate) * up))
        # `n` shared experts, each a slice of the one wide SwiGLU.
        for shared in range(config.num_shared_experts):
            part = slice(shared * config.moe_intermediate_size, (shared + 1) * config.moe_intermediate_size)
            inner = F.silu(mlp.shared_experts.gate_proj.weight[part] @ token)
            inner = inner * (mlp.shared_experts.up_proj.weight[part] @ token)
            output = output + mlp.shared_experts.down_proj.weight[:, part] @ inner
        outputs.append(output)
    return torch.stack(outputs).view_as(hidden_states)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize(
    ("top_k", "norm_topk_prob", "num_shared_experts"),
    [(2, True, 1), (2, False, 2), (1, False, 0), (1, True, 0), (3, True, 0)],
)
def test_experts_equal_a_loop_over_experts(build_model, implementation, top_k, norm_topk_prob, num_shared_experts):
    model = build_model(
        num_experts=4,
        num_experts_per_tok=top_k,
        norm_topk_prob=norm_topk_prob,
        num_shared_experts=num_shared_experts,
        moe_intermediate_size=48,
    )
    model.set_experts_implementation(implementation)
    mlp = model.model.layers[0].mlp
    assert mlp.experts.config._experts_implementation == implementation
    hidden_states = torch.randn(2, 9, 32, requires_grad=True)
    inputs = [hidden_states, *mlp.parameters()]
    direction = torch.randn(2, 9, 32)
    results = []
    for output in (mlp(hidden_states)[0], loop_over_experts(mlp, hidden_states)):
        results.append((output, torch.autograd.grad((output * direction).sum(), inputs)))
    (output, grads), (expected, expected_grads) = results
    assert_near(output, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        # The router of a normalised top-1 gets no gradient except rounding noise.
        assert (grad - expected_grad).norm() <= 1e-5 * expected_grad.norm() + 1e-4


def test_attention_that_may_be_wrong_is_refused(build_model, input_ids):
    model = build_model()
    AttentionInterface.register("of_another", sdpa_attention_forward)
    for name in ("flex_attention", "of_another"):
        model.set_attn_implementation(name)
        with pytest.raises(ValueError, match=f'"{name}" may give wrong results on cpu'):
            model(input_ids)


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2])
def test_grouped_experts_equal_the_loop(build_model, monkeypatch, top_k, dtype, has_kernel):
    """Check both branches for GPUs: torch's kernel for groups, and sizes that the host reads."""
    asked = []
    monkeypatch.setattr(experts, "has_grouped_kernel", lambda *args: asked.append(args) or has_kernel)
    module = build_model(num_experts=4, num_experts_per_tok=top_k).model.layers[0].mlp.experts.to(dtype)
    tokens = torch.randn(50, 32, dtype=dtype, requires_grad=True)
    weights = torch.rand(50, top_k, dtype=dtype, requires_grad=True)
    # Most tokens go to expert 3, and none to expert 1.
    index = torch.stack([torch.full((50,), 3), torch.arange(50) % 2 * 2], dim=1)[:, :top_k]
    index[0, 0] = 2 - index[0, -1] if top_k == 2 else 0
    results = []
    for implementation in ("grouped_mm", "eager"):
        module.config._experts_implementation = implementation
        output = module(tokens, index, weights)
        inputs = [tokens, weights, module.gate_up_proj, module.down_proj]
        results.append([output, *torch.autograd.grad((output * tokens.detach()).sum(), inputs)])
    assert asked == [(torch.device("cpu"), dtype)]
    for result, expected in zip(*results, strict=True):
        assert result.dtype == dtype
        assert_near(result.float(), expected.float(), 1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("overrides", [{}, {"num_experts": 4, "num_shared_experts": 1}], ids=["dense", "moe"])
def test_a_layer_is_one_graph_for_any_documents(build_model, varlen_kernel, overrides):
    """Check it in training, which asks for router logits, and on the branch for GPUs in half precision."""
    model = build_model(**overrides)
    model.set_attn_implementation("packed")
    counter = CompileCounter()
    model.model.layers[0].compile(backend=counter)
    for starts in ([0, 24], [0, 5, 24, 31], [0, 3, 24, 30, 40]):
        position_ids = torch.arange(48)
        for start in starts:
            position_ids[start:] = torch.arange(48 - start)
        ends = torch.tensor([*starts, 48], dtype=torch.int32)
        arguments = {"cu_seq_lens_q": ends, "max_length_q": int(ends.diff().max())}
        input_ids = torch.randint(100, (2, 24))
        model.train()(input_ids, position_ids=position_ids.view(2, 24), labels=input_ids, **arguments).loss.backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("longest", "seq_len", "expected"), [(7, 24, 24), (7, 1000, 128), (129, 1000, 256), (600, 1000, 1000)]
)
def test_few_lengths_reach_compiled_layers(longest, seq_len, expected):
    """The kernel needs an upper bound; a power of two or the row length."""
    ends = torch.tensor([0, longest, seq_len], dtype=torch.int32)
    position_ids = torch.arange(seq_len).expand(1, -1)
    found = packed_attention.find_packed_documents(position_ids, in_groups=False, cu_seq_lens=ends, max_length=longest)
    assert found.max_length == expected


@pytest.mark.parametrize("is_grouped", [True, False], ids=["grouped", "torch 2.11"])
@pytest.mark.parametrize("counted", [True, False], ids=["collator", "positions"])
def test_varlen_branch_is_eager(model, input_ids, varlen_kernel, monkeypatch, counted, is_grouped):
    """Check the branch for GPUs in half precision, with a written-out kernel in place of FlashAttention."""
    monkeypatch.setattr(packed_attention, "SHARES_KEY_HEADS", is_grouped)
    arguments = {"position_ids": packed_positions(2), "labels": input_ids, "use_cache": False}
    model.set_attn_implementation("eager")
    expected = model(input_ids, **arguments)
    expected.loss.backward()
    expected_gradients = gradients(model)

    model.zero_grad()
    model.set_attn_implementation("packed")
    starts = (packed_positions(2).flatten() == 0).nonzero().flatten()
    cu_seq_lens = torch.cat([starts, torch.tensor([48])])
    longest = int(cu_seq_lens.diff().max())
    if counted:
        arguments |= {"cu_seq_lens_q": cu_seq_lens.int(), "max_length_q": longest}
    with Operators() as operators:
        output = model(input_ids, **arguments)
    output.loss.backward()
    assert_near(output.logits, expected.logits)
    assert_near(gradients(model), expected_gradients, 1e-4)
    key_heads = model.config.num_key_value_heads if is_grouped else model.config.num_attention_heads
    assert varlen_kernel[-1] == (cu_seq_lens.tolist(), 24, 24, key_heads)
    # On a GPU, `nonzero` waits for all queued kernels.
    assert ("aten.nonzero.default" in operators.names) is not counted


def test_lengths_of_another_batch_are_refused(build_model, input_ids):
    model = build_model()
    model.set_attn_implementation("packed")
    with pytest.raises(ValueError, match="end at 24, the batch has 48"):
        model(input_ids, position_ids=packed_positions(2), use_cache=False, cu_seq_lens_q=torch.tensor([0, 10, 24]))


class Operators(TorchDispatchMode):
    """Record the names and results of all operators, and the dtypes of the operands of every grouped product."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()
        self.shapes: list[torch.Size] = []
        self.grouped_dtypes: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.names.add(str(function))
        self.shapes += [part.shape for part in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(part)]
        if "grouped_mm" in str(function):
            self.grouped_dtypes.append({arg.dtype for arg in args[:2]})
        return result


def test_experts_compute_in_the_dtype_of_autocast(build_model, input_ids):
    model = build_model(num_experts=4)
    model.set_experts_implementation("grouped_mm")
    with Operators() as products:
        model(input_ids, labels=input_ids).loss.backward()
    # Two layers with two products each, and one operator for the gradients of each.
    assert products.grouped_dtypes == [{torch.float32}] * 8
    with Operators() as products:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids, labels=input_ids).loss
        loss.backward()
    assert products.grouped_dtypes == [{torch.bfloat16}] * 8
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_an_expert_without_tokens_has_a_zero_gradient(build_model, input_ids, implementation):
    """The gradient must exist: a rank without it would make the others hang."""
    model = build_model(num_experts=4, num_experts_per_tok=1)
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[1:] = layer.mlp.gate.weight[:1]
    model(input_ids, labels=input_ids).ce_loss.backward()
    for layer in model.model.layers:
        used = layer.mlp.experts.gate_up_proj.grad.flatten(1).any(-1)
        assert used.sum() == 1


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


def test_reentrant_checkpointing_would_lose_the_gradient_of_the_router_loss(build_model):
    with pytest.raises(ValueError, match="router loss"):
        build_model(num_experts=4).activation_checkpointing_enable({"use_reentrant": True})


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


def test_compiled_models_keep_their_own_tables(build_model, input_ids, fresh_compiler):
    """With the same code and shapes but another base, the second model must not run the graph of the first."""
    for theta in (1e6, 1e2):
        model = build_model(rope_theta=theta)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_near(compiled(input_ids).logits, model(input_ids).logits)


def test_generation_does_not_run_the_compiled_layers(model, input_ids, fresh_compiler):
    num_graphs = 0

    def counting(graph: torch.fx.GraphModule, _):
        nonlocal num_graphs
        num_graphs += 1
        return graph

    expected = model.generate(input_ids, max_new_tokens=3, do_sample=False)
    for layer in model.model.layers:
        layer.compile(backend=counting)
    torch.testing.assert_close(model.generate(input_ids, max_new_tokens=3, do_sample=False), expected)
    assert num_graphs == 0
    model(input_ids, labels=input_ids, use_cache=False)
    assert num_graphs > 0


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


def test_the_loss_of_many_tokens_needs_no_tensor_of_all_logits():
    hidden = torch.randn(1, 4096, 8, requires_grad=True)
    weight = torch.randn(6400, 8, requires_grad=True)
    with Operators() as operators:
        linear_masked_cross_entropy(hidden, weight, torch.randint(6400, (1, 4096))).backward()
    assert max(shape.numel() for shape in operators.shapes) <= 4096 * 6400 / 4
