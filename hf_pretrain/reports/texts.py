"""
The texts of pages and listings in two languages. The English text is the key of the Chinese one.

The command reads this file without importing the package, so it imports only the standard library.
"""

import os
import re
from collections.abc import Callable
from unicodedata import east_asian_width


LANGUAGES = {"en": "English", "zh": "中文"}
# Returns a text in a language. Keyword arguments fill the names in its braces.
Translation = Callable[..., str]

_CHINESE = {
    # Charts
    "Loss over tokens": "损失随 token 数的变化",
    "Loss over minutes": "损失随时间的变化",
    "Reward over tokens": "奖励随 token 数的变化",
    "Reward over minutes": "奖励随时间的变化",
    "Reward accuracy": "奖励准确率",
    "Completion length": "回答长度",
    "KL divergence from the reference model": "与参考模型的 KL 散度",
    "Learning rate": "学习率",
    "Gradient norm": "梯度范数",
    "Speed": "速度",
    "Share of the peak speed": "峰值速度的占比",
    "Memory": "内存",
    "tokens (millions)": "token（百万）",
    "minutes of training": "训练分钟数",
    "loss (nats per token)": "损失（nats/token）",
    "nats per token": "nats/token",
    "({value} before)": "（训练前 {value}）",
    "(a unigram model: {value})": "（一元模型：{value}）",
    "{minutes} min": "{minutes} 分钟",
    "loss": "损失",
    "mean reward": "平均奖励",
    "share of the pairs": "偏好对的占比",
    "tokens": "token",
    "learning rate": "学习率",
    "norm": "范数",
    "GiB per process": "每个进程的 GiB",
    "training": "训练",
    "validation": "验证",
    "expected": "预期",
    "unigram model": "一元模型",
    # The report
    "Comparison of ": "对比：",
    "Differences": "差异",
    "The runs have the same arguments and versions.": "各次训练的参数和版本相同。",
    "Results": "结果",
    "Curves": "曲线",
    "Events": "事件",
    "validation loss": "验证损失",
    "perplexity": "困惑度",
    "bits per byte": "每字节比特数",
    "KL divergence from the teacher": "与教师模型的 KL 散度",
    "reward accuracy": "奖励准确率",
    "pairs ranked correctly": "排序正确的偏好对",
    "questions answered right": "答对的问题",
    "distinct-2 of the answers": "回答的 distinct-2",
    "share of repeated 4-grams": "重复 4-gram 的占比",
    "share of answers that end": "正常结束的回答占比",
    "mean length of the answers": "回答的平均长度",
    "steps": "步数",
    "tokens seen": "已训练的 token 数",
    "time of training": "训练时间",
    "started": "启动",
    "resumed from ": "恢复自 ",
    "ended": "结束",
    "Data, commands, environment": "数据、命令与环境",
    "This command started the run in the directory": "启动命令，所在目录：",
    "Talk to it": "与它对话",
    "Next stage": "下一阶段",
    "The run has not ended. Resume it from its newest checkpoint with:": "训练尚未结束。从最新的检查点恢复：",
    "All arguments": "全部参数",
    "launch": "启动方式",
    "commit": "提交",
    "not a checkout": "不是代码仓库",
    # The board: runs
    "Training board": "训练面板",
    "Runs": "训练列表",
    "Figures": "数值",
    "Step": "步数",
    "Loss": "损失",
    "Validation loss": "验证损失",
    "Time left": "剩余时间",
    "Samples": "样例",
    "Log": "日志",
    "Command": "命令",
    "starting": "正在启动",
    "running": "训练中",
    "finished": "已完成",
    "stopped": "已停止",
    "interrupted": "已中断",
    "There is no run in out/ yet. Start one in the tab “New run”.": "out/ 中还没有训练。请在“新建训练”中启动一个。",
    "Stop": "停止",
    "Resume": "恢复训练",
    "Stops after this step, with a checkpoint.": "将在当前这一步之后停止，并保存检查点。",
    "Resumes from the newest checkpoint.": "从最新的检查点恢复训练。",
    "It does not run.": "它没有在运行。",
    "It runs already.": "它已经在运行。",
    "Choose a run first.": "请先选择一个训练。",
    "Chat": "聊天",
    "End chat": "结束聊天",
    "Open the chat": "打开聊天页面",
    "The chat page is loading the model.": "聊天页面正在加载模型。",
    "The run has saved no model yet.": "这个训练还没有保存模型。",
    # The board: evaluations and exports
    "Evaluate": "评测",
    "Tasks": "任务",
    "Validation data": "验证数据",
    "Export and push": "导出与上传",
    "Format": "格式",
    "Repository on the Hub, to push the export": "Hub 上的仓库（填写后上传导出的模型）",
    "Export": "导出",
    "Output": "输出",
    # The board: a new run
    "New run": "新建训练",
    "Stage": "训练阶段",
    "Preset": "预设",
    "Name": "名称",
    "Directory below out/": "out/ 下的目录",
    "Settings": "设置",
    "More flags": "其他参数",
    "Command to copy": "可复制的命令",
    "Show the data": "查看数据",
    "Marked tokens are trained.": "高亮的 token 参与训练。",
    "Make the plan": "生成计划",
    "Plan": "计划",
    "A few steps are measured, and nothing is written. A run can start after its plan.": (
        "试跑几步，不写入任何文件。生成计划之后才能开始训练。"
    ),
    "Start": "开始训练",
    "Started. The tab “Runs” shows it.": "已启动，见“训练列表”。",
    "default": "默认",
    "Use letters, digits, and . _ - for the name.": "名称只能使用字母、数字和 . _ -",
    # The board: comparison
    "Compare": "对比",
    "Runs to compare": "要对比的训练",
    "Show the report": "显示报告",
    # The plan of a run, and its report in a terminal
    "Model": "模型",
    "Data": "数据",
    "Budget": "预算",
    "Steps": "步数",
    "Tokens": "token 数",
    "Optimizer": "优化器",
    "Time": "时间",
    "Disk": "磁盘",
    "Files": "文件",
    "Checkpoint": "检查点",
    "Sample": "样例",
    "{total} M parameters, {active} M active per token, {flops} MFLOP per token": (
        "{total} M 个参数，每个 token 激活 {active} M，每个 token {flops} MFLOP"
    ),
    "{steps} of {rows} sequences each, {passes}": "{steps}，每步 {rows} 个序列，{passes}",
    "streamed": "流式读取",
    "{number} passes over {rows} sequences": "遍历 {rows} 个序列 {number} 遍",
    "about {tokens}, {each} per parameter": "约 {tokens}，每个参数 {each}",
    "peak learning rate": "峰值学习率",
    "peak of {peak} GiB per process in the measured steps": "试跑时每个进程的峰值为 {peak} GiB",
    ", of {total} GiB": "，共 {total} GiB",
    ", of {limit} GiB that Metal recommends as the most": "，Metal 建议不超过 {limit} GiB",
    "; {free} GiB of the memory that GPU and CPU share are free": "；GPU 与 CPU 共用的内存有 {free} GiB 空闲",
    " (a longer run on a CPU may hold twice as much)": "（在 CPU 上，较长的训练可能占用两倍）",
    "{pace} s per step, {all} of training, without evaluations": "每步 {pace} 秒，训练共 {all}，不含评测",
    "{size} MB per checkpoint, {kept} kept, of {free} GB free": (
        "每个检查点 {size} MB，保留 {kept} 个，磁盘空闲 {free} GB"
    ),
    "all": "全部",
    "model, checkpoints, run.json, report.html": "模型、检查点、run.json、report.html",
    "prepared data": "处理好的数据",
    # `hf-pretrain list`. Descriptions are in recipes/chinese.json, beside the English ones.
    "Stages": "训练阶段",
    "Tools": "工具",
    "Presets": "预设",
    "configs": "配置",
    # The chat page
    "System message": "系统消息",
    "Temperature": "温度",
    "Top p": "Top p",
    "Longest answer in tokens": "回答的最大 token 数",
    "Thinking": "思考",
    "Earlier questions that the model sees": "模型能看到的历史提问数",
    "Type a message": "输入消息",
    "Send": "发送",
    "New chat": "新对话",
    "Call of the tool": "调用工具",
    "Error": "错误",
    "The answer is empty.": "回答为空。",
    "Wait for the end of the answer, or press Stop.": "请等待回答结束，或按“停止”。",
    "Type a message first.": "请先输入消息。",
}
TEXTS = tuple(_CHINESE)


def translation(language: str) -> Translation:
    """Return the function that translates texts. It keeps texts without a translation."""
    table = _CHINESE if language == "zh" else {}

    def translate(text: str, **fields: object) -> str:
        found = table.get(text, text)
        return found.format(**fields) if fields else found

    return translate


def format_rows(rows: list[tuple[str, str]], t: Translation, *, width: int) -> str:
    """Return a line per row: a label, which is translated and has at least `width` columns, and a text."""
    labels = [t(label) for label, _ in rows]
    # A Chinese character is two columns wide.
    columns = [sum(1 + (east_asian_width(each) in "WF") for each in label) for label in labels]
    gaps = [" " * (max(width, *columns) + 1 - used) for used in columns]
    parts = zip(labels, gaps, rows, strict=True)
    return "\n".join(label[:1].upper() + label[1:] + gap + text for label, gap, (_, text) in parts)


def terminal_language() -> str:
    """Return the language of this package for a terminal, from the environment."""
    # As gettext does: the first variable that has a value decides.
    names = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
    return "zh" if next(filter(None, map(os.environ.get, names)), "").startswith("zh") else "en"


def preferred_language(accepted: str) -> str:
    """Return the language of this package that a browser prefers, by its header `Accept-Language`."""
    found = re.findall(r"\b(en|zh)\b", accepted.lower())
    return found[0] if found else "en"
