"""
How a run ends before its end, with nothing lost.

| what happens | what the run does | exit status |
|---|---|---|
| SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank | all ranks finish the step and save a checkpoint | 128 + signal: 143, 130, 138, 129 |
| the second of them, two seconds later | ends the wait for a push; Ctrl-C ends at once | the same |
| a loss or a gradient that is not finite | stops before the update and names the rows; `--on_nonfinite skip` goes on | 65 |
| a rank that dies or hangs | the others stop after `--ddp_timeout` at the latest and say which one is missing | 1 |
| a disk that is full or read-only | keeps the checkpoints that are there (`checkpointing.py`) | 74 |
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import datasets
import torch
import torch.distributed as dist
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..runtime.locking import watch_launcher
from ..runtime.processes import on_main_process
from .arguments import launcher
from .checkpointing import CheckpointMixin


logger = logging.get_logger(__name__)

# sysexits.h calls it EX_DATAERR.
EXIT_NOT_FINITE = 65
# Windows has the first two alone.
_SIGNAL_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in _SIGNAL_NAMES if hasattr(signal, name))
MAX_SKIPPED_STEPS = 10
_ROLL_CALL_SECONDS = 5.0


class _EvaluationStopped(Exception):
    """A signal came during an evaluation."""

    def __init__(self, number: int):
        self.number = number


class StoppingMixin(CheckpointMixin):
    """A `Trainer` that stops at a step boundary when it is told to, and before an update that would ruin the model."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._signal = 0
        self._is_impatient = self._is_ending = False
        self._evaluation_is_due = False
        self._signal_time = 0.0
        self._num_skipped_steps = 0
        super().__init__(*args, **kwargs)
        if self._skips_nonfinite and self.is_deepspeed_enabled:
            raise ValueError(
                "--on_nonfinite skip is not possible under DeepSpeed, which updates the weights within its backward "
                "pass. Leave it out: the run then stops, and its checkpoints are good."
            )

    def train(self, *args: Any, **kwargs: Any):
        watch_launcher(launcher())
        with self._listening(), self._naming_missing_ranks():
            try:
                return super().train(*args, **kwargs)
            except _EvaluationStopped as stopped:
                # Before the first step.
                self._stop(stopped.number, "Nothing was trained since the run was started.")

    # Signals

    @contextmanager
    def _listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # `nohup` ignores SIGHUP.
        heeded = [
            number for number in SIGNALS if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN
        ]
        previous = {number: signal.signal(number, self._note_signal) for number in heeded}
        try:
            yield
        finally:
            for number, handler in previous.items():
                # On the way out, signals of other ranks' launchers still come in, and are answered by exiting.
                signal.signal(number, signal.SIG_IGN if self._is_ending else handler)

    def _get_dataloader(self, *args: Any, **kwargs: Any):
        loader = super()._get_dataloader(*args, **kwargs)
        inner = getattr(loader, "base_dataloader", loader)
        inner.worker_init_fn = partial(_survive_one_sigterm, inner.worker_init_fn)
        return loader

    def _note_signal(self, number: int, frame: Any) -> None:
        """
        The first signal counts: launchers pass on what a terminal has sent already. A later Ctrl-C ends at once, another
        later signal the wait for a push.
        """
        now = time.monotonic()
        if not self._signal:
            self._signal, self._signal_time = number, now
        elif now > self._signal_time + 2:
            self._is_impatient = True
            if number == signal.SIGINT:
                raise KeyboardInterrupt

    @cached_property
    def _cpu_group(self) -> dist.ProcessGroup | None:
        """A group whose collectives do not wait for a GPU; `None` is the default one."""
        if dist.get_backend() == "gloo":
            return None
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.ddp_timeout))

    def _any_rank(self, number: int) -> int:
        """The largest number of all ranks."""
        if self.args.world_size == 1:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._cpu_group)
        return int(tensor.item())

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        number = self._any_rank(self._signal)
        if not number:
            try:
                super()._maybe_log_save_evaluate(*args, **kwargs)
                return
            except _EvaluationStopped as stopped:
                number = stopped.number
                self.control.should_log, self.control.should_evaluate = False, True
        self._evaluation_is_due = self.control.should_evaluate
        self.control.should_save, self.control.should_evaluate = True, False
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._stop(number, self._where_to_go_on())

    def _where_to_go_on(self) -> str:
        go_on = (
            "It has no optimizer: start a new run from it with --model_name_or_path."
            if self.args.save_only_model
            else "Go on with the same command and `--resume_from_checkpoint auto`."
        )
        return f"Its checkpoint is in {self.args.output_dir}. {go_on}"

    def prediction_step(self, *args: Any, **kwargs: Any):
        if self.is_in_train and (number := self._any_rank(self._signal)):
            raise _EvaluationStopped(number)
        return super().prediction_step(*args, **kwargs)

    def _stop(self, number: int, go_on: str) -> NoReturn:
        if self.is_world_process_zero():
            name = signal.Signals(number).name
            print(f"Stopped by {name} after step {self.state.global_step}. {go_on}", file=sys.stderr, flush=True)
        self._end(128 + number)

    def _end(self, status: int) -> NoReturn:
        """Ends all ranks together: a launcher kills the others when the first one is gone."""
        self._finish_current_push()
        self._is_ending = True
        self.accelerator.wait_for_everyone()
        if self._is_impatient:
            # NOTE: the interpreter would wait for the threads of what is still under way.
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(status)
        raise SystemExit(status)

    # What is not finite

    @property
    def _skips_nonfinite(self) -> bool:
        return getattr(self.args, "on_nonfinite", "stop") == "skip"

    def _get_grad_norm(self, model: Any, grad_norm: Any = None):
        # NOTE: with `no_sync` and clipping done, this is Trainer's last word before the update (DeepSpeed's is over).
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if grad_norm is None:
            return grad_norm
        if getattr(self.accelerator, "scaler", None) is not None:
            # Of float16. It meets infinite gradients by design and leaves the step out itself; a loss is another thing.
            if self._any_rank(int(not self._is_loss_finite())):
                self._meet_nonfinite("The loss is not finite")
            return grad_norm
        if not torch.as_tensor(grad_norm).isfinite().all():
            self._meet_nonfinite(f"The gradient's norm is {float(grad_norm)}")
        return grad_norm

    def _meet_nonfinite(self, what: str) -> None:
        """Stops the run, or leaves this step's update out. All ranks call it."""
        step = self.state.global_step + 1
        rows = self._describe_step()
        if self.args.world_size > 1:
            gathered: list[Any] = [None] * self.args.world_size
            dist.all_gather_object(gathered, rows, group=self._cpu_group)
            rows = [row for part in gathered for row in part]
        suspects = [row for row in rows if not row["is_finite"]] or rows
        path = Path(self.args.output_dir, f"nonfinite-{step}.json")
        report = json.dumps({"step": step, "what": what, "rows": suspects}, indent=1, ensure_ascii=False)

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(report, encoding="utf-8")

        on_main_process(self.args, write)
        message = f"{what} in step {step}; {path} has the {len(suspects)} row(s) it may come from."
        if self._skips_nonfinite and self._num_skipped_steps < MAX_SKIPPED_STEPS:
            self._num_skipped_steps += 1
            if self.is_world_process_zero():
                logger.warning(f"{message} The step is left out ({self._num_skipped_steps} of {MAX_SKIPPED_STEPS}).")
            self._skip_step()
            return
        if self.is_world_process_zero():
            print(
                f"{message} Nothing was updated with it, and no checkpoint written: those in {self.args.output_dir} "
                "are good. Look at the rows, lower --learning_rate, or leave such steps out with --on_nonfinite skip.",
                file=sys.stderr,
                flush=True,
            )
        self._end(EXIT_NOT_FINITE)

    def _skip_step(self) -> None:
        """Leaves the step under way out of the weights, and out of the means that are logged."""
        self.model_wrapped.zero_grad(set_to_none=True)
        self._tr_loss.copy_(self._loss_before_step)
        self._globalstep_last_logged += 1

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        self._loss_before_step = self._tr_loss.clone()
        is_stream = isinstance(self.train_dataset, (torch.utils.data.IterableDataset, datasets.IterableDataset))
        if self.args.world_size > 1 and not is_stream:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        # A file may change while it is streamed, and a worker of the loader may be killed.
        batches, error = [], None
        try:
            for batch in islice(epoch_iterator, num_batches):
                batches.append(batch)
        except Exception as raised:
            error = raised
        if self._any_rank(int(error is not None)):
            self._save_before_failing()
            raise error or RuntimeError("Another rank could not read its data: see its output.")
        return super().get_batch_samples(iter(batches), num_batches, device)

    def _save_before_failing(self) -> None:
        """Saves what was trained until data could not be read. All ranks call it."""
        step = self.state.global_step
        path = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if step > 0 and not on_main_process(self.args, path.is_dir):
            self._save_checkpoint(self.model, trial=None)
        if step > 0 and self.is_world_process_zero():
            print(
                f"The data could not be read after step {step}. {self._where_to_go_on()}", file=sys.stderr, flush=True
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._num_skipped_steps:
            logs["skipped_steps"] = self._num_skipped_steps
        super().log(logs, *args, **kwargs)

    def _is_loss_finite(self) -> bool:
        """Whether the losses of this rank's step are; for subclasses that know before the gradient does."""
        return True

    def _describe_step(self) -> list[dict[str, Any]]:
        """This rank's rows of the step, with `is_finite` for the loss that they were in; for subclasses."""
        return []

    # Ranks

    @contextmanager
    def _naming_missing_ranks(self) -> Iterator[None]:
        """Adds to an error of communication which ranks do not answer any more."""
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            # NOTE: gloo's own errors have no class of their own.
            is_of_others = isinstance(error, (dist.DistError, ConnectionError)) or "gloo" in str(error)
            missing = self._missing_ranks() if self.args.world_size > 1 and is_of_others else []
            if not missing:
                raise
            raise RuntimeError(
                f"Rank(s) {', '.join(map(str, missing))} of {self.args.world_size} died, hang, or failed first: see "
                f"their output. Rank {self.args.process_index} stopped for want of them ({error})."
            ) from error

    def _missing_ranks(self) -> list[int]:
        """Who does not say within some seconds that it stopped, too."""
        store = dist.distributed_c10d._get_default_store()
        try:
            store.set(f"stopped/{self.args.process_index}", "")
            names = [f"stopped/{rank}" for rank in range(self.args.world_size)]
            deadline = time.monotonic() + _ROLL_CALL_SECONDS
            while time.monotonic() < deadline and not store.check(names):
                time.sleep(0.1)
            return [rank for rank, name in enumerate(names) if not store.check([name])]
        except (RuntimeError, ConnectionError):
            # Where no launcher keeps the store, rank 0 does.
            return [0]


def _survive_one_sigterm(initialize: Callable[[int], None] | None, worker_id: int) -> None:
    """
    For workers of a loader. NOTE: a signal to the whole group would end them, and torch raises an error where they are
    missed. The next one ends them, since that is how they are ended at last.
    """
    if initialize is not None:
        initialize(worker_id)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))


__all__ = ["EXIT_NOT_FINITE", "MAX_SKIPPED_STEPS", "SIGNALS", "StoppingMixin"]
