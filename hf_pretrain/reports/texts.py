"""The texts of the pages in two languages. The English text is the key of the Chinese one."""

import re
from collections.abc import Callable


LANGUAGES = {"en": "English", "zh": "中文"}
# Returns a text in the language of a page.
Translation = Callable[[str], str]

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
    # The board: exports
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
    """Return the function that translates the texts of a page. It keeps texts without a translation."""
    return str if language == "en" else lambda text: _CHINESE.get(text, text)


def preferred_language(accepted: str) -> str:
    """Return the language of this package that a browser prefers, by its header `Accept-Language`."""
    found = re.findall(r"\b(en|zh)\b", accepted.lower())
    return found[0] if found else "en"
