"""Checks of the arguments of `MiniMindModel.forward`. Each refuses what would give a wrong result without an error."""

from typing import Any

import torch
import transformers

from .configuration_minimind import TESTED_VERSIONS


# Keyword arguments that `MiniMindModel.forward` accepts beside its parameters.
KNOWN_ARGUMENTS = frozenset(
    {
        # read by the decorators of `forward`
        *("output_attentions", "output_hidden_states"),
        *("return_dict", "debug_io", "debug_io_dir", "prune_layers"),
        # packed sequences
        *("cu_seq_lens_q", "max_length_q", "packed_documents"),
        # read by the attention of vLLM and of SGLang
        *("attention_instances", "forward_batch"),
        # without effect beside `position_ids`, which say the same
        *("cu_seq_lens_k", "max_length_k", "seq_idx"),
        # without effect: a decoder has no segments and computes neither loss nor logits
        *("token_type_ids", "num_items_in_batch", "skip_logits", "logits_to_keep"),
        # without effect: `generate` uses them for stop strings and drafts, and passes them on to `forward`
        *("tokenizer", "assistant_tokenizer"),
    }
)


def check_positions(position_ids: torch.Tensor, *, length: int, limit: int):
    """
    Raise `ValueError` for a position past the rotary table, which has `limit` positions.

    To read positions from a GPU, the CPU would have to wait for it. So on a GPU only the length of the input is
    checked here, and the lookup kernel itself fails for an index past the table.
    """
    if position_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        length = int(position_ids.max()) + 1
    if length > limit:
        raise ValueError(
            f"Position {length - 1} lies past the rotary table of {limit} positions (max_position_embeddings). "
            "Shorten the input (--max_length), or build the model with a larger max_position_embeddings."
        )


def unmask_packed_rows(attention_mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor | None:
    """
    Drop an attention mask that marks no padding, if the rows hold packed documents.

    transformers keeps packed documents apart only if `attention_mask is None`. A mask of ones carries no
    information and is dropped. A mask with padding together with restarting positions is ambiguous and raises
    `ValueError`. A compiled graph cannot read the values of these tensors, so a compiled model needs packed
    sequences without a mask.
    """
    mask = attention_mask.bool()
    # A position of 0 begins a document where neither it nor the token before it is padding.
    restarts = (position_ids[:, 1:] == 0) & mask[:, 1:] & mask[:, :-1]
    if not restarts.any():
        return attention_mask
    if mask.all():
        return None
    raise ValueError(
        "position_ids restart inside a row (packed documents) and attention_mask marks padding: pass one of them. "
        "For packed sequences pass attention_mask=None; their padding counts as a last document."
    )


def check_names(arguments: dict[str, Any], *, has_positions: bool):
    """
    Raise `TypeError` for an argument with an unknown name, unless it is `None`, and `ValueError` for arguments of
    packed sequences without positions.

    transformers may rename an argument or add one. If `forward` ignored it, the results would be wrong without an
    error. The heads pass their unknown arguments on to the decoder, so this check covers them too.
    """
    unknown = sorted(name for name in arguments if name not in KNOWN_ARGUMENTS and arguments[name] is not None)
    if unknown:
        raise TypeError(
            f"MiniMind's forward does not know the argument {', '.join(unknown)}, which could change the result. "
            "Leave it out or correct its name. If transformers passes it: this code was tested with transformers "
            f"{TESTED_VERSIONS}, and {transformers.__version__} is installed."
        )
    packed = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx") if arguments.get(name) is not None]
    if packed and not has_positions:
        raise ValueError(f"{packed[0]} needs position_ids, which restart at 0 where a document begins.")
