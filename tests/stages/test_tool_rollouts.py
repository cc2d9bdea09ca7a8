"""Rollouts with tools in GRPO, on toy models: what runs, what is trained, and the limits of a turn and the whole."""

from itertools import groupby

import pytest
import torch
from datasets import Dataset

from examples.agent_tools import TOOLS as MINIMIND_TOOLS
from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.inference.tools import calculator
from hf_pretrain.stages.reinforcement import _parse_response
from hf_pretrain.stages.rewards import agent_reward
from tests.rollouts import make_model, toy_trainer


def teach(model: MiniMindForCausalLM, tokenizer, conversation: list[dict], tools: list) -> None:
    """Train a toy model on one conversation until it reproduces it."""
    encoding = tokenizer.apply_chat_template(
        conversation, tools=tools, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    ids = encoding["input_ids"]
    labels = ids.masked_fill(torch.as_tensor(encoding["assistant_masks"]) == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 5e-3:
            return
    raise AssertionError(f"the conversation was not learnt: loss {loss}")


def test_a_rollout_calls_a_tool_reads_its_result_and_trains_on_its_own_tokens(tokenizer, tmp_path):
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "12 + 30"}}}
    conversation = [
        {"role": "user", "content": "What is 12 + 30?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": "42"},
        {"role": "assistant", "content": "Blue 42."},
    ]
    model = make_model()
    teach(model, tokenizer, conversation, [calculator])
    rollouts = []

    def reward(completions, **columns):
        rollouts.extend(completions)
        return [float(number) for number in range(len(completions))]

    options = {"tools": [calculator], "reward_funcs": reward}
    options |= {"train_dataset": Dataset.from_dict({"prompt": [conversation[:1]] * 4})}
    flags = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 160, "max_steps": 1}
    trainer = toy_trainer(tokenizer, tmp_path, model=model, trainer=options, temperature=0.1, **flags)
    inputs = trainer._prepare_inputs([{"prompt": conversation[:1]}] * 2)
    for rollout in rollouts:
        assert [message["role"] for message in rollout] == ["assistant", "tool", "assistant"]
        assert rollout[0]["tool_calls"] == [call]
        assert rollout[1]["content"] == "42" and rollout[2]["content"] == "Blue 42."
    # The model sees the tool's words, but does not train on them.
    ids, mask = inputs["completion_ids"][0], inputs["tool_mask"][0]
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(ids[mask == 0])
    assert "42" not in tokenizer.decode(ids[mask == 1]).split("</tool_call>")[0].replace("12 + 30", "")
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "tools/call_frequency" in entry]
    assert (entry["tools/call_frequency"], entry["tools/failure_frequency"]) == (1.0, 0.0)


def look_up(word: str) -> str:
    """
    Look up.

    Args:
        word: A word.
    """
    return " ".join(map(str, range(100, 160)))


LONG_ANSWER = [
    {"role": "user", "content": "Sky?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"word": "sky"}}}],
    },
    {"role": "tool", "name": "look_up", "content": look_up("sky")},
    {"role": "assistant", "content": "It is blue in the day, black in the night, and red between both."},
]


def test_a_turn_has_a_limit_of_its_own_beside_that_of_the_whole(tokenizer, tmp_path):
    """The prompt has 346 tokens, the call 28, the result of the tool 240, and the answer 60."""
    taught = make_model(max_position_embeddings=1024)
    teach(taught, tokenizer, LONG_ANSWER, [look_up])

    def roll_out(**limits: int) -> tuple[list[list[int]], float, str]:
        """Return pairs of mask and length, the share of clipped completions, and the last message."""
        model = make_model(max_position_embeddings=1024)
        model.load_state_dict(taught.state_dict())
        rollouts = []

        def reward(completions, **columns):
            rollouts.extend(completions)
            return [0.0, 1.0]

        data = {"tools": [look_up], "reward_funcs": reward}
        sizes = {"per_device_train_batch_size": 2, "num_generations": 2}
        trainer = toy_trainer(tokenizer, tmp_path, model=model, trainer=data, temperature=0.01, **sizes, **limits)
        inputs = trainer._prepare_inputs([{"prompt": LONG_ANSWER[:1]}] * 2)
        mask = inputs["tool_mask"][0][inputs["completion_mask"][0].bool()]
        spans = [[bit, len([*span])] for bit, span in groupby(mask.tolist())]
        return spans, trainer._metrics["train"]["completions/clipped_ratio"][-1], rollouts[0][-1]["content"]

    answer = LONG_ANSWER[-1]["content"]
    # The result of the tool takes no room of the answer.
    assert roll_out(max_turn_length=64, max_completion_length=400) == ([[1, 28], [0, 240], [1, 60]], 0.0, answer)
    spans, is_clipped, text = roll_out(max_turn_length=40, max_completion_length=400)
    assert (spans, is_clipped) == ([[1, 28], [0, 240], [1, 40]], 1.0) and answer.startswith(text)
    # What ends the whole is counted as clipped, too.
    assert roll_out(max_turn_length=64, max_completion_length=300)[:2] == ([[1, 28], [0, 240], [1, 32]], 1.0)
    # A call that is cut off ends the rollout.
    assert roll_out(max_turn_length=20, max_completion_length=400)[:2] == ([[1, 20]], 1.0)
    # With one limit for all, TRL drops the result that exceeds it.
    assert roll_out(max_completion_length=64)[0] == [[1, 28]]


def test_a_call_without_an_end_does_not_run(tokenizer):
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    # A limit has cut off the brace and the tag.
    cut = call.removesuffix("}\n</tool_call>")
    for before, number in (
        ("", 0),
        (call + "\n", 1),
        ("<tool_call>\nx\n</tool_call>\n", 0),
        ("A </tool_call> first. ", 0),
    ):
        for text, more in ((cut, 0), (call, 1)):
            ids = tokenizer.encode(before + text, add_special_tokens=False)
            message = _parse_response(tokenizer.parse_response, tokenizer.decode, ids, prefix="")
            assert len(message.get("tool_calls", [])) == number + more, before + text


BRACKETS = "[" * 100_000


CALL = '{"name": "get_current_weather", "arguments": {"location": %s}}'


@pytest.mark.parametrize("tools", [None, MINIMIND_TOOLS])
def test_a_run_survives_any_completion(tokenizer, tmp_path, tools):
    """Replace only the sampling: parsing, tools, rendering and rewards are real."""
    calls = [
        *('{"name": {}, "arguments": {}}', '{"name": "\\ud83d", "arguments": {}}', "3"),
        *(BRACKETS, CALL % BRACKETS, CALL % ("[" * 500 + "]" * 500)),
        *(CALL % ("9" * 5000), CALL % '"\\ud83d"', CALL % "NaN", CALL % "{}", CALL % '"Oslo", "x": null'),
    ]
    texts = [f"<tool_call>\n{call}\n</tool_call><|im_end|>" for call in calls]
    written = [[tokenizer.encode(text, add_special_tokens=False) for text in texts]]
    model = make_model(max_position_embeddings=4096)
    trainer = toy_trainer(tokenizer, tmp_path, model=model, trainer={"tools": tools}, max_completion_length=200_000)
    trainer._generate_single_turn = lambda prompt_ids, *_, **__: (
        written.pop() if written else [[]] * len(prompt_ids),
        None,
    )
    # TRL creates these before it generates.
    trainer._sync_tool_dicts = [{tool.__name__: tool for tool in tools or []}] * len(texts)
    trainer._async_tool_dicts = [{}] * len(texts)
    prompts = [[{"role": "user", "content": "Weather?"}] for _ in texts]
    completions = trainer._generate(prompts)[3]
    rewards = agent_reward(completions, solution=[["5"]] * len(texts))
    assert len(rewards) == len(texts) and max(rewards) <= 0.5
    # The model called one tool.
    if tools:
        assert [message["role"] for message in completions[-1]][:2] == ["assistant", "tool"]
