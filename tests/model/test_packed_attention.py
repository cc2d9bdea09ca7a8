"""Packed documents stay apart, and every implementation agrees with the eager one, also on Apple GPUs."""

from contextlib import nullcontext

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_pretrain.model import packed_attention
from hf_pretrain.model.packed_attention import ATTENTION_BLOCK, _attend_in_blocks
from tests.models import LENGTHS, Operators, assert_near, gradients, left_padded, packed_positions
from tests.toys import LikeMPS


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


@pytest.mark.parametrize(
    ("attn_implementation", "mode"),
    [("eager", nullcontext), *((name, mode) for name in ("sdpa", "packed") for mode in (nullcontext, LikeMPS))],
)
@pytest.mark.parametrize("padding_position", [None, 0, 1])
@torch.no_grad()
def test_padded_and_cached_texts_are_plain_ones(model, input_ids, attn_implementation, mode, padding_position):
    model.set_attn_implementation("eager")
    short, whole = model(input_ids[:1, :18]).logits, model(input_ids).logits
    ids, mask = left_padded(input_ids)
    places = (
        {}
        if padding_position is None
        else {"position_ids": (mask.cumsum(-1) - 1).masked_fill(mask == 0, padding_position)}
    )
    model.set_attn_implementation(attn_implementation)
    with mode():
        padded = model(ids, attention_mask=mask, **places).logits
        alone, start = model(input_ids, use_cache=False).logits, model(input_ids[:, :-1])
        end = model(input_ids[:, -1:], past_key_values=start.past_key_values).logits
    assert_near(padded[:1, 6:], short)
    for found, expected in ((padded[1:], whole[1:]), (alone, whole), (torch.cat([start.logits, end], dim=1), whole)):
        assert_near(found, expected)


@pytest.mark.parametrize(
    ("attn_implementation", "mode"), [("sdpa", nullcontext), ("packed", nullcontext), ("packed", LikeMPS)]
)
@pytest.mark.parametrize(
    "documents",
    [
        [(0, 5), (0, 9), (0, 10)],
        [(0, 24)],
        [(0, 1)] * 24,
        [(0, 2), (0, 17), (0, 1), (0, 4)],
        # A document may begin at any position, as in transformers' own masks.
        [(0, 5), (7, 16), (3, 13)],
    ],
    ids=str,
)
def test_losses_and_gradients_agree_with_eager(model, input_ids, attn_implementation, mode, documents):
    """The second row is one document. The lengths form one group, or several."""
    positions = torch.stack([torch.cat([torch.arange(*span) for span in documents]), torch.arange(24)])
    found = []
    for name, around in (("eager", nullcontext), (attn_implementation, mode)):
        model.set_attn_implementation(name)
        model.zero_grad()
        with around():
            loss = model(input_ids, position_ids=positions, labels=input_ids).loss
            loss.backward()
        found.append(torch.cat([loss.detach()[None], gradients(model)]))
    assert_near(*found)


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


def random_documents(batch_size: int, seq_len: int, *, longest: int) -> torch.Tensor:
    """Return positions of random documents, of shape `(batch_size, seq_len)`."""
    starts = torch.rand(batch_size, seq_len) < 2 / longest
    starts[:, 0] = True
    starts[:, ::longest] = True
    place = torch.arange(seq_len).expand(batch_size, -1)
    return place - (place * starts).cummax(dim=1).values


class ProductShapes(TorchDispatchMode):
    """The shapes of the matrix products of a block, for each of which oneDNN keeps a primitive."""

    def __init__(self):
        super().__init__()
        self.found: set[tuple] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "addmm_"):
            tensors = [part for part in args if isinstance(part, torch.Tensor)]
            self.found.add((function, *(tuple(part.shape) for part in tensors)))
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
def test_many_batches_have_few_shapes_of_matrix_products(build_model):
    """Forward and backward, in half precision on a CPU; each batch has other documents."""
    model = build_model(vocab_size=256).train()
    model.set_attn_implementation("packed")
    with ProductShapes() as shapes:
        for _ in range(100):
            position_ids = random_documents(16, 128, longest=128)
            labels = torch.randint(256, position_ids.shape).masked_fill(position_ids == 0, -100)
            with torch.autocast("cpu", torch.bfloat16):
                model(labels.clamp(min=0), position_ids=position_ids, labels=labels, skip_logits=True).loss.backward()
    # Without rounded lengths, counts and chunks there are ten times as many.
    assert len(shapes.found) < 200


@pytest.mark.parametrize(("batch_size", "seq_len", "longest"), [(8, 100, 20), (2, 300, 300), (16, 64, 8), (3, 7, 3)])
def test_filled_groups_change_no_loss_and_no_gradient(build_model, batch_size, seq_len, longest):
    """Documents of any lengths, whose groups hold empty documents, train as with the eager reference."""
    model = build_model(max_position_embeddings=512).double().train()
    position_ids = random_documents(batch_size, seq_len, longest=longest)
    input_ids = torch.randint(64, position_ids.shape)
    found = []
    for name in ("eager", "packed"):
        model.set_attn_implementation(name)
        loss = model(input_ids, position_ids=position_ids, labels=input_ids).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
        model.zero_grad()
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)
    assert_near(found[1][1], found[0][1], 1e-6)


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


def test_generation_needs_only_what_apple_gpus_have(model, input_ids):
    ids, mask = left_padded(input_ids)
    greedy = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    expected = model.generate(ids, **greedy)
    with LikeMPS():
        assert torch.equal(model.generate(ids, **greedy), expected)
        for options in ({"top_p": 0.8, "temperature": 0.7}, {"top_k": 5, "repetition_penalty": 1.1}):
            sampled = model.generate(ids, **greedy | {"do_sample": True, **options})
            assert sampled.shape[0] == 2 and sampled.shape[1] > ids.shape[1]


def test_the_mode_finds_what_apple_gpus_lack():
    states = torch.randn(1, 2, 9, 8)
    with LikeMPS():
        with pytest.raises(TypeError):
            torch.zeros(2).double()
        with pytest.raises(NotImplementedError):
            torch.linalg.eig(torch.eye(3))
        with pytest.raises(AssertionError):
            F.scaled_dot_product_attention(states, states, states, is_causal=True)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "packed"])
def test_only_this_model_leaves_out_cudnn(build_model, monkeypatch, attn_implementation):
    """Attention itself does, because checkpointing recomputes a layer outside of the model's call."""
    attention = build_model().to("meta").model.layers[0].self_attn
    attention.config._attn_implementation = attn_implementation
    found = []

    def note(*args, **kwargs):
        found.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(packed_attention, "sdpa_attention_forward", note)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", note)
    states = torch.zeros(1, 8, attention.config.hidden_size, device="meta")
    attention(states, torch.zeros(1, 8, 1, attention.head_dim // 2, 2, device="meta"))
    assert found == [(False, True)] and torch.backends.cuda.cudnn_sdp_enabled()
