"""
The decoder in stages, for pipeline parallelism with `torch.distributed.pipelining`, and its meter.

Each rank builds the whole model and keeps the layers of its stages. The first stage embeds the tokens, the last one
computes the loss. Between the stages go the hidden states and, with experts, the sum of the router losses so far.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError
from .step_loss import StepTotals


class PassThrough(nn.Module):
    """A layer of another stage: returns its input. The other layers keep their numbers in the names of weights."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return `hidden_states`."""
        return hidden_states


class DecoderStage(nn.Module):
    """
    A part of the decoder, with the embedding if it is the first one, and the loss if it is the last one.

    Args:
        model ([`MiniMindForCausalLM`]): the whole model, which stays as it is. The stage shares its weights.
        index, num_stages (`int`): number of the stage, and of all stages.

    Attributes:
        totals ([`~training.step_loss.StepTotals`]): divisors of the loss; set before each step.
        parts (`torch.Tensor` of shape `(2,)`): cross-entropy and router loss of the step's micro-batches, divided by
            the totals; zero but for the last stage.
    """

    def __init__(self, model: MiniMindForCausalLM, index: int, num_stages: int):
        super().__init__()
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        bounds = [round(each * model.config.num_hidden_layers / num_stages) for each in range(num_stages + 1)]
        self.layers = range(bounds[index], bounds[index + 1])
        with torch.device("meta"):
            shell = type(model)(model.config)
        whole, part = model.model, shell.model
        part.layers = nn.ModuleList(
            layer if number in self.layers else PassThrough() for number, layer in enumerate(whole.layers)
        )
        part.rotary_emb = whole.rotary_emb
        # A tied head is the embedding.
        needs_embedding = self.is_first or (self.is_last and model.config.tie_word_embeddings)
        part.embed_tokens = whole.embed_tokens if needs_embedding else nn.Identity()
        part.norm, shell.lm_head = (whole.norm, model.lm_head) if self.is_last else (nn.Identity(), nn.Identity())
        shell.generation_config = model.generation_config
        self.shell, self.config = shell.train(), model.config
        self.totals: StepTotals | None = None
        self.parts = torch.zeros(2)

    def forward(
        self,
        inputs: torch.Tensor,
        aux_loss: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """
        Compute a micro-batch.

        Args:
            inputs (`torch.Tensor`): token ids of shape `(batch_size, seq_len)` for the first stage, hidden states of
                shape `(batch_size, seq_len, hidden_size)` for the others.
            aux_loss (`torch.Tensor` of shape `(1,)`, *optional*): router loss of the stages before, with experts.
            position_ids, labels, loss_mask (`torch.Tensor` of shape `(batch_size, seq_len)`): as for the model.

        Returns:
            The loss, a scalar, of the last stage; else what the next stage gets, its inputs and with experts the
            router loss.
        """
        has_experts = bool(self.config.num_experts)
        outputs = self.shell.model(
            **{"input_ids" if self.is_first else "inputs_embeds": inputs},
            position_ids=position_ids,
            output_router_logits=has_experts,
            use_cache=False,
        )
        hidden_states = outputs.last_hidden_state
        if has_experts:
            rows = {"position_ids": position_ids, "attention_mask": None, "loss_mask": loss_mask}
            divisors = {"num_items_in_batch": self.totals.weights, "num_documents_in_batch": self.totals.documents}
            own = self.shell._router_loss(outputs, labels, **rows, **divisors).reshape(1)
            aux_loss = own if aux_loss is None else aux_loss + own
        if not self.is_last:
            return (hidden_states, aux_loss) if has_experts else hidden_states
        loss, ce_loss, _ = self.shell.lm_head(
            hidden_states, labels, loss_mask=loss_mask, num_items_in_batch=self.totals.weights
        )
        self.parts = self.parts + torch.stack([ce_loss, aux_loss[0] if has_experts else 0 * ce_loss]).detach()
        return loss + self.config.router_aux_loss_coef * aux_loss[0] if has_experts else loss


class MeasuredStage(PipelineStage):
    """
    A stage that adds up the seconds in which it computes, and the bytes that it sends.

    Args:
        module ([`DecoderStage`]): the part of the decoder.
        index, num_stages (`int`): as for [`DecoderStage`].
        rows (`tuple[int, int]`): number and length of the rows of a micro-batch.
        device, group: device and process group of the pipeline.
    """

    def __init__(
        self, module: DecoderStage, index: int, num_stages: int, *, rows: tuple[int, int], device: Any, group: Any
    ):
        # With known shapes, torch need not run the model to find them.
        hidden = torch.empty(*rows, module.config.hidden_size, device=device, requires_grad=True)
        aux_loss = [torch.empty(1, device=device, requires_grad=True)] if module.config.num_experts else []
        inputs = torch.empty(*rows, dtype=torch.long, device=device) if module.is_first else (hidden, *aux_loss)
        outputs = torch.empty((), device=device, requires_grad=True) if module.is_last else (hidden, *aux_loss)
        super().__init__(module, index, num_stages, device, input_args=inputs, output_args=outputs, group=group)
        self.busy_seconds, self.bytes_sent = 0.0, 0
        self._spans: list[tuple[Any, Any]] = []

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().backward_one_chunk, *args, **kwargs)

    def _timed(self, compute: Any, *args: Any, **kwargs: Any) -> Any:
        start = self._clock()
        result = compute(*args, **kwargs)
        self._spans.append((start, self._clock()))
        return result

    def _clock(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device.type, enable_timing=True)
        event.record()
        return event

    def end_step(self) -> None:
        """Add up the seconds of a step that the device has ended."""
        for start, end in self._spans:
            self.busy_seconds += end - start if self.device.type == "cpu" else start.elapsed_time(end) / 1e3
        self._spans.clear()

    def get_fwd_send_ops(self, *args: Any) -> list[Any]:
        return self._counted(super().get_fwd_send_ops(*args))

    def get_bwd_send_ops(self, *args: Any) -> list[Any]:
        return self._counted(super().get_bwd_send_ops(*args))

    def _counted(self, operations: list[Any]) -> list[Any]:
        self.bytes_sent += sum(each.tensor.nbytes for each in operations)
        return operations


class Pipeline:
    """
    The stages of this rank, their weights and gradients, in a mesh with the dimensions `pp`, `dp` and `tp`.

    Args:
        model ([`MiniMindForCausalLM`]): the whole model, equal on all ranks, on the CPU.
        device (`torch.device`): where the stages of this rank go.
        mesh ([`~torch.distributed.device_mesh.DeviceMesh`]): the mesh of all ranks, `pp` first.
        rows (`tuple[int, int]`): number and length of the rows of a micro-batch.
        stages_per_rank (`int`): more than one for interleaved schedules.

    Attributes:
        weights (`dict[str, nn.Parameter]`): the weights of this rank by their names in the whole model.
        bytes_of_gradients (`int`): bytes of the gradients that this rank has sent to be added up.

    Raises:
        `UserError`: for fewer layers than stages, or matrices that cannot be split.
    """

    def __init__(
        self,
        model: MiniMindForCausalLM,
        mesh: DeviceMesh,
        rows: tuple[int, int],
        stages_per_rank: int = 1,
        *,
        device: torch.device,
    ):
        config, size = model.config, mesh["pp"].size()
        num_stages, group = size * stages_per_rank, mesh.get_group("pp")
        if num_stages > config.num_hidden_layers:
            raise UserError(f"{num_stages} stages need as many layers, and the model has {config.num_hidden_layers}.")
        own = range(mesh["pp"].get_local_rank(), num_stages, size)
        # The whole model may not fit into the memory of one GPU.
        self.mesh, self.modules = mesh, [DecoderStage(model, index, num_stages).to(device) for index in own]
        if mesh["tp"].size() > 1:
            for module in self.modules:
                split_matrices(module, mesh["tp"])
        self.stages = [
            MeasuredStage(module, index, num_stages, rows=rows, device=device, group=group)
            for module, index in zip(self.modules, own, strict=True)
        ]
        self.weights = {name: weight for each in self.modules for name, weight in each.shell.named_parameters()}
        # A row has the ranks with the same layers, which share out what Muon computes, and a column is a pipeline.
        grid = mesh.mesh.flatten(1)
        row, column = (grid == dist.get_rank()).nonzero()[0].tolist()
        self.ranks_of_stage = [dist.new_group(ranks) for ranks in grid.tolist()][row]
        # In a group of NCCL, gathered objects would need the memory of the GPUs. All pipelines know the same.
        self._gathering, self._gathers = dist.new_group(grid[:, 0].tolist(), backend="gloo"), column == 0
        # The first and the last rank of each pipeline have the tied matrix.
        self._tied = self._tied_group = None
        if config.tie_word_embeddings and size > 1:
            groups = [dist.new_group(ends) for ends in grid[[0, -1]].T.tolist()]
            if row in (0, size - 1):
                self._tied, self._tied_group = "model.embed_tokens.weight", groups[column]
        self._is_tied_copy = self._tied is not None and own[0] > 0
        self.bytes_of_gradients = 0

    def add_up_gradients(self) -> None:
        """Add up the gradients of the copies of the pipeline, of the tied matrix, and of norms of split heads."""
        gradients = {name: _local(weight.grad) for name, weight in self.weights.items()}
        norms = [gradients[name] for name in gradients if name.endswith(("q_norm.weight", "k_norm.weight"))]
        # Each tensor-parallel rank has the share of its heads.
        self.bytes_of_gradients += sum_in_place(norms, self.mesh.get_group("tp"))
        if self._tied is not None:
            self.bytes_of_gradients += sum_in_place([gradients[self._tied]], self._tied_group)
        self.bytes_of_gradients += sum_in_place(gradients.values(), self.mesh.get_group("dp"))

    def clip_gradients(self, limit: float) -> float:
        """Clip the gradients to a norm of `limit`, 0 for none, and return their norm. All ranks call this method."""
        # NCCL adds up on GPUs only.
        split, whole = torch.zeros(2, device=self.stages[0].device)
        for name, weight in self.weights.items():
            if not (self._is_tied_copy and name == self._tied):
                square = _local(weight.grad).square().sum()
                split, whole = (split + square, whole) if isinstance(weight, DTensor) else (split, whole + square)
        dist.all_reduce(split, group=self.mesh.get_group("tp"))
        total = split + whole
        dist.all_reduce(total, group=self.mesh.get_group("pp"))
        norm = total.sqrt().item()
        if limit and norm > limit:
            for weight in self.weights.values():
                _local(weight.grad).mul_(limit / (norm + 1e-6))
        return norm

    def gather(self, own: dict[str, Any]) -> dict[str, Any]:
        """
        Return what all stages know by names of weights, on the CPU of the first rank; split tensors become whole. All
        ranks call this method, and the others get nothing.

        Args:
            own (`dict`): tensors, or `dict`s with them, by the names of this rank's weights.
        """
        own = {name: _whole(value) for name, value in own.items()}
        if not self._gathers:
            return {}
        parts: list[Any] = [None] * self.mesh["pp"].size()
        dist.gather_object(own, parts if dist.get_rank() == 0 else None, dst=0, group=self._gathering)
        return {name: value for part in parts if part is not None for name, value in part.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(value: Any) -> Any:
    """Return a tensor, or those in a `dict`, on the CPU, without the rows of other ranks missing."""
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()


def split_matrices(stage: DecoderStage, mesh: DeviceMesh) -> None:
    """
    Split the projections of a stage over the ranks of a one-dimensional mesh (tensor parallelism). Experts, norms,
    embedding and head stay whole.

    Raises:
        `UserError`: if the heads or the width of the feed-forward parts cannot be split evenly.
    """
    size, config = mesh.size(), stage.config
    if config.num_key_value_heads % size or config.intermediate_size % size:
        raise UserError(
            f"--tp_size {size} must divide num_key_value_heads={config.num_key_value_heads} and "
            f"intermediate_size={config.intermediate_size} of the model."
        )
    for number in stage.layers:
        layer = stage.shell.model.layers[number]
        # Experts are parameters, no linear layers.
        matrices = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        is_last = {name: name.endswith(("o_proj", "down_proj")) for name in matrices}
        plan = {name: RowwiseParallel() if is_last[name] else ColwiseParallel() for name in matrices}
        parallelize_module(layer, mesh, plan)


def bubble_share(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """
    Return the share of a step in which a rank waits, `(p - 1) / (v * m + p - 1)` for `p` ranks with `v` stages each
    and `m` micro-batches (https://arxiv.org/abs/2104.04473, section 2.2).
    """
    return (num_ranks - 1) / (stages_per_rank * num_microbatches + num_ranks - 1)


def sum_in_place(tensors: Iterable[torch.Tensor], group: Any) -> int:
    """Add up tensors over the ranks of a group, as one message, and return the bytes of the message."""
    tensors = list(tensors)
    if not tensors or dist.get_world_size(group) == 1:
        return 0
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
    return flat.nbytes
