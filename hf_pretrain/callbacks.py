"""What a run shows while it trains."""

from transformers.trainer_callback import ProgressCallback


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
        elif "eval_loss" in logs:
            line = f"step {state.global_step}: held-out loss {logs['eval_loss']:.4f}"
            for key, name in (("eval_bits_per_byte", "bits per byte"), ("eval_rewards/accuracies", "reward accuracy")):
                if key in logs:
                    line += f", {name} {logs[key]:.4f}"
            self.training_bar.write(line)
