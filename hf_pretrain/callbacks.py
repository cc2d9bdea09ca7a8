"""What a run shows while it trains."""

from transformers.trainer_callback import ProgressCallback


HELD_OUT = {
    "eval_loss": "held-out loss",
    "eval_bits_per_byte": "bits per byte",
    "eval_kl": "divergence from the teacher",
    "eval_rewards/accuracies": "reward accuracy",
    "eval_reward": "held-out reward",
}


class TrainingProgressCallback(ProgressCallback):
    """A progress bar with loss and tokens/s beside the time left; held-out results stay on lines of their own."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None:
            return
        if "loss" in logs:
            shown = {"loss": f"{logs['loss']:.3f}"}
            if "tokens_per_second" in logs:
                shown["tok/s"] = f"{logs['tokens_per_second']:,.0f}"
            self.training_bar.set_postfix(shown)
            return
        figures = [f"{name} {logs[key]:.4f}" for key, name in HELD_OUT.items() if key in logs]
        if figures:
            self.training_bar.write(f"step {state.global_step}: {', '.join(figures)}")
