"""
Which card, how long, what price: hours of training for four models on seven cards.

    python -m benchmarks.cards
    python -m benchmarks.cards --price 0.35
    python -m benchmarks.cards --price T4=0.35 3090=0.4 H100=2.5

One NVIDIA H200 measured the steps of two models (`results/step-nvidia-h200.json`). All other figures are calculated:
matrix products scale with the peak of a card, the rest of a step with its memory bandwidth, and a step takes no less
than the host needs to enqueue it. docs/cards.md has the formula and the sources.
"""

import argparse
import json
from functools import cache
from pathlib import Path

import torch

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.training.measurements import PEAK_FLOPS_PER_SECOND, flops_per_token


RECORD = json.loads(Path(__file__).with_name("results").joinpath("step-nvidia-h200.json").read_text(encoding="utf-8"))
STEP_TOKENS = 64 * 512
# Peak FLOP/s of dense products in half precision with sums in float32, and bytes per second of the memory. The T4 has
# float16 and no bfloat16.
CARDS = {
    "T4": (PEAK_FLOPS_PER_SECOND["T4"], 320e9),
    "RTX 3060": (PEAK_FLOPS_PER_SECOND["RTX 3060"], 360e9),
    "RTX 3090": (PEAK_FLOPS_PER_SECOND["RTX 3090"], 936e9),
    "RTX 4090": (PEAK_FLOPS_PER_SECOND["RTX 4090"], 1008e9),
    "A100": (PEAK_FLOPS_PER_SECOND["A100"], 2039e9),
    "H100": (PEAK_FLOPS_PER_SECOND["H100"], 3350e9),
    "H200": (PEAK_FLOPS_PER_SECOND["H200"], 4800e9),
}
MODELS = {
    "26M": PRESETS["minimind2-small"],
    "64M": PRESETS["minimind3"],
    "104M": PRESETS["minimind2"],
    "135M": PRESETS["smollm2"] | {"vocab_size": 49152},
}
# Milliseconds of a step, tokens per second and layers, as measured on the H200.
MEASURED = {
    "26M": (RECORD["programs"]["ours, compiled"], 8),
    "104M": (RECORD["programs of 104M"]["ours, compiled"], 16),
}
# MiniMind's README gives the sizes, and 1.5 Chinese characters, of three bytes each, or 4 to 5 English ones per token.
BYTES_PER_TOKEN = 4.5
FILES = {"pretrain_t2t_mini.jsonl": 1.2e9 / BYTES_PER_TOKEN, "sft_t2t_mini.jsonl": 1.6e9 / BYTES_PER_TOKEN}


@cache
def build(name: str) -> MiniMindForCausalLM:
    with torch.device("meta"):
        return MiniMindForCausalLM(MiniMindConfig(**MODELS[name]))


def products_ms(model: MiniMindForCausalLM) -> float:
    """Return the time of a step's matrix products on the H200, at the rate that was measured there."""
    return 1000 * flops_per_token(model) * STEP_TOKENS / RECORD["gemm_flops_per_second"]


def moved_bytes_per_token(model: MiniMindForCausalLM) -> int:
    """Return a bound of the bytes that the layers of a dense model write for a token."""
    config = model.config
    per_layer = 6 * config.intermediate_size + 18 * config.hidden_size
    keys = config.num_key_value_heads * config.head_dim
    return config.num_hidden_layers * (per_layer + 8 * keys) + 24 * config.hidden_size


def rest_ms(model: MiniMindForCausalLM) -> float:
    """
    Return the time of the rest of a step on the H200, which moves memory: that of 26M is the measured time of the GPU
    without the products, and others differ by the bytes that a token moves.
    """
    small = build("26M")
    rest = RECORD["profile of ours, compiled"]["device_ms"] - products_ms(small)
    return rest * moved_bytes_per_token(model) / moved_bytes_per_token(small)


def host_ms(num_layers: int) -> float:
    """Return a bound of the time in which the host enqueues a step: the line through the two measured steps."""
    (small, few), (large, many) = MEASURED.values()
    slope = (large["step_ms"] - small["step_ms"]) / (many - few)
    return small["step_ms"] + slope * (num_layers - few)


def step_ms(model: MiniMindForCausalLM, card: str) -> float:
    """Return the calculated time of a step of 64 sequences of 512 tokens."""
    (flops, bandwidth), (known_flops, known_bandwidth) = CARDS[card], CARDS["H200"]
    device = products_ms(model) * known_flops / flops + rest_ms(model) * known_bandwidth / bandwidth
    return max(device, host_ms(model.config.num_hidden_layers))


def tokens_per_second(name: str, card: str) -> tuple[float, bool]:
    """Return the speed of a model on a card, and whether it was measured."""
    if card == "H200" and name in MEASURED:
        return MEASURED[name][0]["tokens_per_second"], True
    # As many of the tokens train as in the measured step of 26M.
    small = MEASURED["26M"][0]
    return small["tokens_per_second"] * small["step_ms"] / step_ms(build(name), card), False


def hours(name: str, card: str) -> dict[str, float]:
    """Return the hours for one pass over each file, for both, and for 20 tokens per parameter."""
    speed, _ = tokens_per_second(name, card)
    tokens = FILES | {"both": sum(FILES.values()), "20 per parameter": 20.0 * build(name).num_parameters()}
    return {each: number / speed / 3600 for each, number in tokens.items()}


def rounded(number: float) -> str:
    """Return two significant digits, or all digits before the point."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:#.2g}"


def row(name: str, card: str, price: float) -> list[str]:
    speed, is_measured = tokens_per_second(name, card)
    found = hours(name, card)
    figures = [found[each] for each in (*FILES, "20 per parameter")]
    figures += [price * found[each] for each in ("both", "20 per parameter")]
    source = "measured" if is_measured else "calculated"
    return [name, card, f"{float(f'{speed:.2g}'):,.0f}", source, *map(rounded, figures)]


def table(prices: dict[str, float]) -> list[str]:
    """Return the lines of the table in Markdown, for the cards that have a price."""
    header = ["model", "card", "tokens/s", "", *(f"`{name}`, hours" for name in FILES)]
    header += ["20 tokens per parameter, hours", "both files, price", "20 tokens per parameter, price"]
    rows = [row(name, card, price) for name in MODELS for card, price in prices.items()]
    return [f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows]]


def read_prices(words: list[str]) -> dict[str, float]:
    """Return the price of an hour of each card: `0.35` is that of all cards, `3090=0.35` that of one."""
    given = {card: float(price) for card, _, price in (word.rpartition("=") for word in words)}
    known = {card.split()[-1]: card for card in CARDS} | {"": ""}
    if unknown := given.keys() - known.keys():
        raise SystemExit(f"--price {unknown.pop()}=…: the cards are {', '.join(filter(None, known))}.")
    named = {known[card]: price for card, price in given.items() if card}
    return {card: named.get(card, given.get("", 0.0)) for card in CARDS if card in named or "" in given}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--price", nargs="+", default=["1"], help="of an hour, in your currency: 0.35, or T4=0.35 H100=2"
    )
    print("\n".join(table(read_prices(parser.parse_args().price))))


if __name__ == "__main__":
    main()
