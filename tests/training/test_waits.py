"""On a GPU, the host must not wait for the device within a training step. Shown on the CPU, with a GPU's branches."""

import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.stages.distillation import DistillationArguments, TeacherTerm
from tests.toys import EXPERTS, toy_model
from tests.trainers import make_documents, make_trainer


aten = torch.ops.aten
# Operators whose result, or the shape of whose result, the host must read.
WAITING = (
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten._unique2.default, aten.repeat_interleave.Tensor),
)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
# Functions that read tensors of the host: the late check of the gradient's norm, what runs only on a CPU, the
# loader and its sampler, and the kernel in place of FlashAttention.
ON_HOST = {"read", "check_positions", "find_packed_documents", "fetch", "__iter__", "weights_by_document"}
ON_HOST |= {"weighted_tokens"}


class Waits(TorchDispatchMode):
    """Collect the places of operators that would wait for a GPU, in the steps from the second one to the last one."""

    def __init__(self, trainer):
        super().__init__()
        self.trainer, self.places = trainer, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_mask = func in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if (func in WAITING or is_mask) and 1 <= self.trainer.state.global_step < 5:
            frames = traceback.extract_stack()[:-1]
            if not ON_HOST & {frame.name for frame in frames}:
                own = [frame for frame in frames if "site-packages" not in frame.filename]
                self.places.add(f"{func} in {own[-1].name}, line {own[-1].lineno}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["dense", "experts", "distillation"])
def test_no_step_waits(tmp_path, varlen_kernel, name):
    sizes = {"vocab_size": 64, **(EXPERTS if name == "experts" else {})}
    model = toy_model(**sizes)
    model.set_attn_implementation("packed")
    arguments = {"logging_steps": 100, "optim": None, "optim_preset": "muon", "max_grad_norm": 1.0}
    trainer = make_trainer(tmp_path, make_documents(), model=model, accumulation=2, batch=2, arguments=arguments)
    if name == "distillation":
        teacher = toy_model(**sizes).eval()
        teacher.set_attn_implementation("packed")
        trainer = MaskedLossTrainer(
            model=model,
            args=trainer.args,
            data_collator=trainer.data_collator,
            train_dataset=trainer.train_dataset,
            term=TeacherTerm(teacher, DistillationArguments("teacher"), trainer.args),
        )
    trainer.finite_check.is_late = True
    with Waits(trainer) as waits:
        trainer.train()
    assert varlen_kernel and waits.places == set()
