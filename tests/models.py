"""Helpers of the tests that compare models."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_pretrain import MiniMindForCausalLM
from tests.conftest import TOY
from tests.toys import toy_model


FIXTURES = Path(__file__).parent / "fixtures"
# Models of MiniMind's own code, with what it computed.
GOLDEN = FIXTURES / "golden"
# Letters, digits, control tokens and blanks that tokenizers split differently.
TEXT = "The river 河流 walks, 12345 steps <|im_start|>user\n你好  world<|im_end|><think>'s"
LENGTHS = (5, 9, 10)


def recorded(name: str) -> dict[str, torch.Tensor]:
    """Return what MiniMind's own code computed with a golden model."""
    return load_file(GOLDEN / name / "expected.safetensors")


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


def saved_model(directory: Path, **overrides: Any) -> MiniMindForCausalLM:
    """Save a toy model, and return it as it loads again: it then has a name, which adapters need."""
    toy_model(**TOY | {"initializer_range": 0.1} | overrides).save_pretrained(directory)
    return MiniMindForCausalLM.from_pretrained(directory, dtype=torch.float32)


def stock_model(model: PreTrainedModel, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Return a model of transformers with the sizes and the weights of ours."""
    known = model_class.config_class().to_dict().keys() - {"model_type", "auto_map", "architectures", "dtype"}
    fields = {name: value for name, value in model.config.to_dict().items() if name in known}
    other = model_class(model_class.config_class(**fields)).eval()
    other.load_state_dict(to_half_split(model.state_dict(), model.config.head_dim))
    return other


def packed_positions(num_rows: int = 1) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS]).expand(num_rows, -1)


def left_padded(input_ids: torch.Tensor, num_pads: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch with row 0 shortened and padded on the left, and row 1 whole."""
    mask = torch.ones_like(input_ids)
    mask[0, :num_pads] = 0
    return torch.cat([F.pad(input_ids[:1, :-num_pads], (num_pads, 0)), input_ids[1:]]), mask


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
