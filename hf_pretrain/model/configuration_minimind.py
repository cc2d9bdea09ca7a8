"""
Configuration of the MiniMind architecture.

One architecture covers three generations of MiniMind (https://github.com/jingyaogong/minimind). The fields `qk_norm`,
`num_experts`, `num_shared_experts` and `norm_topk_prob` tell them apart. This file travels to the Hub with every
checkpoint and imports only files that travel, too.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version


# Checked before the imports below, so that users of an older version get a sentence and not a missing name.
if Version(transformers.__version__).release < (5, 19):
    raise ImportError(
        f"This MiniMind checkpoint needs transformers 5.19 or newer (tested: 5.19 to 5.24), and "
        f"{transformers.__version__} is installed: pip install -U transformers. For older versions, convert it to an "
        "architecture that they know, where hf_pretrain is installed: hf-pretrain convert --from CHECKPOINT --to DIR "
        "--format llama (or qwen3, qwen3_moe, ernie4_5_moe)."
    )

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig


# The versions of transformers that the tests load a checkpoint with. Training needs 5.23 (pyproject.toml), and engines
# hold back: vLLM 0.32 takes 5.19. A checkpoint on the Hub should load in newer versions too: `forward` raises for an
# argument that they renamed.
TESTED_VERSIONS = "5.19 to 5.24"
# Raise it when older code would misread new checkpoints.
FORMAT_VERSION = 1
# Files that a checkpoint carries, so that it loads with `trust_remote_code=True` where this package is not installed.
CODE_FILES = (
    *("configuration_minimind.py", "modeling_minimind.py", "rotary.py", "packed_attention.py", "mlp.py"),
    *("decoder_layer.py", "inputs.py", "loss.py", "router_loss.py", "pretrained.py"),
)
AUTO_MAP = {
    "AutoConfig": "configuration_minimind.MiniMindConfig",
    "AutoModel": "modeling_minimind.MiniMindModel",
    "AutoModelForCausalLM": "modeling_minimind.MiniMindForCausalLM",
    "AutoModelForSequenceClassification": "modeling_minimind.MiniMindForSequenceClassification",
}
# Fields of MiniMind's and transformers' configs that are whole numbers of at least 1, and numbers above 0.
_COUNTS = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "moe_intermediate_size max_position_embeddings num_experts_per_tok moe_k dim n_layers n_heads n_kv_heads "
    "hidden_dim max_seq_len original_max_position_embeddings".split()
)
# The rotary table has a row for each position. The longest published contexts have ten million.
_MOST_POSITIONS = 2**24
_POSITIVE = frozenset("rms_norm_eps norm_eps rope_theta factor beta_fast beta_slow".split())


def check_fields(fields: Mapping[str, Any]) -> None:
    """
    Check the sizes and constants of a config, also within nested objects such as `rope_parameters`.

    `MiniMindConfig` and the importers of other checkpoints run this check first. Without it, a wrong value would fail
    deep inside torch, with a message that does not name the field.

    Args:
        fields (`Mapping`): names and values. A value of `None` counts as absent; unknown names are not checked.

    Raises:
        `ValueError`: for the first field with a value of the wrong type or range.
    """
    for name, value in fields.items():
        # `bool` is a subclass of `int`.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, Mapping):
            check_fields(value)
        elif value is None:
            continue
        elif name in _COUNTS and not (is_number and isinstance(value, int) and value >= 1):
            raise ValueError(f"The config says {name}={value!r}; it must be a whole number of at least 1.")
        elif name in ("max_position_embeddings", "max_seq_len") and value > _MOST_POSITIONS:
            raise ValueError(f"The config says {name}={value!r}; it must be at most {_MOST_POSITIONS}.")
        elif name in _POSITIVE and not (is_number and 0 < value < float("inf")):
            raise ValueError(f"The config says {name}={value!r}; it must be a number above 0.")


@strict
class MiniMindConfig(PreTrainedConfig):
    """
    Configuration of a [`MiniMindForCausalLM`].

    The names of MiniMind v1 (`dim`, `n_layers`, `n_heads`, `n_kv_heads`, `hidden_dim`, `norm_eps`, `max_seq_len`) work
    as aliases.

    Args:
        vocab_size (`int`, defaults to 6400): number of entries in the embedding table.
        hidden_size (`int`, defaults to 512): width of the residual stream.
        num_hidden_layers (`int`, defaults to 8): number of decoder layers.
        num_attention_heads (`int`, defaults to 8): number of query heads.
        num_key_value_heads (`int`, *optional*, defaults to `num_attention_heads`): number of key and value heads
            (grouped-query attention).
        head_dim (`int`, *optional*, defaults to `hidden_size // num_attention_heads`): width of one head.
        intermediate_size (`int`, *optional*): width of the SwiGLU. The default is `8/3 * hidden_size` rounded up to a
            multiple of 64, as in MiniMind v1 and v2.
        hidden_act (`str`, defaults to `"silu"`): name of the activation in transformers' `ACT2FN`.
        max_position_embeddings (`int`, defaults to 32768): length of the rotary table in tokens. With YaRN, building a
            model raises it to `original_max_position_embeddings * factor`, see [`MiniMindConfig.extend_positions`].
        initializer_range (`float`, defaults to 0.02): standard deviation of the initial weight matrices.
        zero_init_residual (`bool`, defaults to `False`): start the last matrix of each residual branch (`o_proj` and
            `down_proj`) at zero, so that a new model begins as the identity. It changes the first weights only.
        rms_norm_eps (`float`, defaults to 1e-5): value added to the mean square in every RMSNorm.
        rope_parameters (`dict`, *optional*): as in transformers. The default is `rope_theta=1e6` without scaling.
            `rope_type="yarn"` and the other static types are computed into the table.
        tie_word_embeddings (`bool`, defaults to `True`): use one matrix for embedding and output.
        dropout (`float`, defaults to 0.0): dropout probability of embeddings, attention weights and residual branches.
        qk_norm (`bool`, defaults to `False`): apply an RMSNorm to each query and key head before the rotation (v3).
        num_experts (`int`, defaults to 0): number of routed experts per layer; 0 gives a dense model.
        num_experts_per_tok (`int`, defaults to 2): number of experts that the router picks per token (top-k).
        num_shared_experts (`int`, defaults to 0): number of experts that process every token, without a gate.
        moe_intermediate_size (`int`, *optional*, defaults to `intermediate_size`): SwiGLU width of one expert.
        norm_topk_prob (`bool`, defaults to `True`): divide the top-k probabilities by their sum, also for top-1.
        output_router_logits (`bool`, defaults to `False`): return router logits and `aux_loss` also without labels.
        router_aux_loss_coef (`float`, defaults to 0.01): weight of the router loss in `loss`; always 0 without
            experts.
        router_aux_loss_level (`str`, defaults to `"sequence"`): `"sequence"` averages one router loss per document.
            `"batch"` computes one over all tokens of a forward pass, so it depends on how rows are batched.
        format_version (`int`): layout of the checkpoint. A config file without it was not written by this package.

    Raises:
        `ValueError`: if sizes do not fit together, or a field holds an unknown name.
    """

    model_type = "minimind"
    # Trainer drops these outputs from the predictions that it gathers for metrics.
    keys_to_ignore_at_inference = ["past_key_values", "cache", "ce_loss", "token_loss", "aux_loss", "router_logits"]
    # transformers reads this name where `rope_parameters` gives no theta.
    default_theta = 1000000.0
    attribute_map = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "hidden_dim": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "max_seq_len": "max_position_embeddings",
    }
    # transformers shards the decoder by these plans of tensor and expert parallelism.
    base_model_tp_plan = {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        # Ranks split the heads. Each rank holds the whole norm, but sees only the gradient of its own heads.
        **{f"layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"},
        "layers.*.self_attn.o_proj": "rowwise",
        **{
            f"layers.*.mlp.{name}_proj": "colwise"
            for name in ("gate", "up", "shared_experts.gate", "shared_experts.up")
        },
        **{f"layers.*.mlp.{part}down_proj": "rowwise" for part in ("", "experts.", "shared_experts.")},
        # Gate and up rows lie in one matrix; each rank needs its share of both.
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    }
    base_model_ep_plan = {
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts": "ep_dispatch_experts",
    }
    # The order of the modules in the decoder, with the names of their inputs and outputs. vLLM splits a model by it.
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 6400
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float | int = 0.02
    zero_init_residual: bool = False
    rms_norm_eps: float | int = 1e-5
    use_cache: bool = True
    rope_parameters: dict | None = None
    tie_word_embeddings: bool = True
    dropout: float | int = 0.0
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 2
    num_shared_experts: int = 0
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    output_router_logits: bool = False
    router_aux_loss_coef: float | int = 0.01
    router_aux_loss_level: str = "sequence"
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any):
        # v1's names arrive as extra keyword arguments. They must be set before other sizes are derived from them.
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        check_fields(vars(self))
        # Configs of v1 and v2 have no such field.
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads != 0:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of "
                    f"num_attention_heads={self.num_attention_heads}; change one of them or pass head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        self._check_sizes()
        if self.intermediate_size is None:
            # Integer division of the negated number rounds up.
            self.intermediate_size = 64 * -(-int(8 * self.hidden_size / 3) // 64)
        if self.moe_intermediate_size is None:
            self.moe_intermediate_size = self.intermediate_size
        if self.num_experts == 0:
            # NOTE: TRL's trainers treat a model as one with experts if this coefficient is not 0.
            self.router_aux_loss_coef = 0.0
        super().__post_init__(**kwargs)

    def extend_positions(self):
        """
        Raise `max_position_embeddings` to the length that YaRN extends the model to. The usual recipe adds
        `rope_parameters` alone.
        """
        # This keeps the original length in `rope_parameters`, where it may be missing.
        self.standardize_rope_params()
        if self.rope_parameters["rope_type"] != "yarn":
            return
        original = self.rope_parameters["original_max_position_embeddings"]
        extended = int(original * (self.rope_parameters["factor"] or 1))
        self.max_position_embeddings = max(self.max_position_embeddings, extended)

    def _check_sizes(self):
        """
        Raise `ValueError` for sizes that do not fit together.

        NOTE: huggingface_hub's `@strict` wraps a `ValueError` of a `validate_*` method in its own type, so this method
        has another name.
        """
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; change one of them."
            )
        # The rotation multiplies pairs of channels as complex numbers.
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim={self.head_dim} is odd, but pairs of channels rotate. Use an even one.")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            limits = f"between 1 and num_experts={self.num_experts}"
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_tok} must lie {limits}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f'hidden_act={self.hidden_act!r} is not an activation of transformers; use "silu".')
        if self.router_aux_loss_level not in ("sequence", "batch"):
            level = self.router_aux_loss_level
            raise ValueError(f'router_aux_loss_level="{level}" is unknown; use "sequence" or "batch".')

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any):
        """
        Save the config as transformers does, with the model's code beside it.

        NOTE: transformers' `register_for_auto_class` copies the module that defines the model's class. FSDP2 replaces
        that class by a class of torch, so the checkpoint would carry torch's files instead of ours.
        """
        self.auto_map = dict(AUTO_MAP)
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        for name in CODE_FILES:
            source, target = Path(__file__).with_name(name), Path(save_directory, name)
            # If only the config was loaded from the Hub, the modeling file is not beside it. Skip absent files.
            if source.is_file() and source.resolve() != target.resolve():
                shutil.copyfile(source, target)
        super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """
        Build a config from the content of a `config.json`.

        Raises:
            `ValueError`: if a value is wrong, or if `format_version` is missing or newer than this code. A file
                without it was written by MiniMind itself: `model_type` and tensor names are equal, but the rotary
                layout differs, so the weights would load without an error and give wrong logits.
        """
        if "model_type" not in config_dict:
            raise ValueError("This config has no `model_type`. Check that the path names a checkpoint directory.")
        version = config_dict.get("format_version")
        if version is None:
            raise ValueError(
                "This config.json has no `format_version`: MiniMind itself wrote it, and its weights would give wrong "
                "logits here. Convert the checkpoint once with `hf_pretrain.weights.importing.load_upstream(path)` or "
                "`hf-pretrain convert --from PATH --to DIR`."
            )
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise ValueError(
                f"This checkpoint has format_version={version!r}, and this code reads up to {FORMAT_VERSION}. "
                "Install a newer version of hf_pretrain."
            )
        return super().from_dict(config_dict, **kwargs)
