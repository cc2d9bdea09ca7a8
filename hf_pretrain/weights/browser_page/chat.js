// The chat of one model in this tab. `model.json` describes the model; wllama.js is llama.cpp for WebAssembly.
const TEXTS = {
  en: {
    load: "Load the model", size: "{0} MB are loaded once, and then work offline.", sizeOnline: "{0} MB are loaded.", loading: "Loading: {0} of {1} MB",
    starting: "Starting ...", ready: "Ready: {0}", speed: "{0} tokens, {1} per second", send: "Send", stop: "Stop",
    question: "Your question (Enter sends)", settings: "Settings", system: "System message", temperature: "Temperature",
    top_p: "Top p", top_k: "Top k", repetition_penalty: "Repetition penalty", max_tokens: "Longest answer in tokens",
    thinking: "Thinking", tools: "Tools in JavaScript", reset: "New conversation", thoughts: "Thoughts", auto: "As the model does by default", on: "On", off: "Off",
    long: "The conversation is longer than the model's context. Start a new one.", threads: "{0} threads",
    big: "The model has {0} MB, more than a tab can hold. Export it with --dtype q4_0, or serve it.",
  },
  zh: {
    load: "加载模型", size: "加载一次 {0} MB，之后可以离线使用。", sizeOnline: "需要加载 {0} MB。", loading: "正在加载：{0} / {1} MB",
    starting: "正在启动……", ready: "就绪：{0}", speed: "{0} 个 token，每秒 {1} 个", send: "发送", stop: "停止",
    question: "输入问题（回车发送）", settings: "设置", system: "系统消息", temperature: "温度",
    top_p: "Top p", top_k: "Top k", repetition_penalty: "重复惩罚", max_tokens: "回答的最大 token 数",
    thinking: "思考", tools: "JavaScript 工具", reset: "新对话", thoughts: "思考过程", auto: "模型默认", on: "开", off: "关",
    long: "对话超过了模型的上下文长度。请开始新对话。", threads: "{0} 个线程",
    big: "模型有 {0} MB，超过一个标签页能容纳的大小。请用 --dtype q4_0 导出，或用服务器运行。",
  },
};
const EXAMPLE_TOOLS = `// [{
//   name: "add", description: "Add two numbers.",
//   parameters: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } }, required: ["a", "b"] },
//   run: ({ a, b }) => String(a + b),
// }]`;
// A tab addresses 4 GB, and the cache of keys and values needs its share.
const MOST_BYTES = 2e9;
const MOST_CALLS = 8;

const $ = id => document.getElementById(id);
const texts = TEXTS[navigator.language.startsWith("zh") ? "zh" : "en"];
const t = (name, ...values) => texts[name].replace(/\{(\d)\}/g, (_, n) => values[n]);
const megabytes = bytes => Math.ceil(bytes / 1e6);
const model = await (await fetch("model.json")).json();
let wllama, messages = [], running = null;

function label() {
  document.documentElement.lang = texts === TEXTS.zh ? "zh" : "en";
  document.title = $("name").textContent = model.name;
  for (const name of ["load", "send", "reset"]) $(name).textContent = t(name);
  $("settings").querySelector("summary").textContent = t("settings");
  for (const field of $("settings").querySelectorAll("label")) {
    const input = field.querySelector("input, textarea, select");
    field.querySelector("span").textContent = t(input.id);
    if (input.id in model.sampling) input.value = model.sampling[input.id];
  }
  $("thinking").closest("label").hidden = !model.thinks;
  for (const option of $("thinking").options) option.textContent = t(option.value || "auto");
  $("tools").placeholder = EXAMPLE_TOOLS;
  $("question").placeholder = $("question").ariaLabel = t("question");
}

async function load() {
  $("load").hidden = true;
  try {
    await start();
  } catch (error) {
    show("error", String(error.message ?? error));
    $("load").hidden = false;
  }
}

async function start() {
  const total = model.bytes;
  const blobs = [];
  let loaded = 0;
  for (const part of model.parts) {
    const response = await fetch(part.name);
    if (!response.ok) throw new Error(`${part.name}: ${response.status}`);
    const pieces = [];
    for (const reader = response.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      pieces.push(value);
      loaded += value.length;
      $("status").textContent = t("loading", megabytes(loaded), megabytes(total));
    }
    blobs.push(new Blob(pieces));
  }
  $("status").textContent = t("starting");
  const { Wllama, LoggerWithoutDebug } = await import("./wllama.js");
  wllama = new Wllama({ default: new URL("wllama.wasm", location).href }, { logger: LoggerWithoutDebug });
  // Safari and older browsers lack what the faster engine needs.
  const compat = kind => new URL(`wllama-compat.${kind}`, location).href;
  wllama.setCompat({ worker: compat("js"), wasm: compat("wasm") }, "firefox_safari");
  // Hyperthreads help little, and small machines have none.
  const n_threads = Math.min(navigator.hardwareConcurrency, Math.max(2, navigator.hardwareConcurrency >> 1));
  await wllama.loadModel([new Blob(blobs)], { n_ctx: model.context, n_threads, jinja: true, reasoning_format: "deepseek" });
  $("status").textContent = t("ready", t("threads", wllama.getNumThreads()));
  $("question").disabled = $("send").disabled = false;
  $("question").focus();
}

// Text never becomes a control token: an invisible character breaks the spelled ones.
export const broken = text => model.control_tokens.reduce((all, token) => all.replaceAll(token, token[0] + "\u200b" + token.slice(1)), text);

function show(role, text = "") {
  const article = document.createElement("article");
  article.className = role;
  article.textContent = text;
  $("log").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

function showAnswer(article, answer) {
  const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
  const thoughts = answer.reasoning_content.trim(), isThinking = !answer.content && !answer.tool_calls?.length;
  let details = article.querySelector("details"), body = article.querySelector(":scope > div");
  if (!body) article.append(body = document.createElement("div"));
  if (thoughts && !details) {
    details = document.createElement("details");
    details.append(document.createElement("summary"), document.createElement("div"));
    details.firstChild.textContent = t("thoughts");
    details.open = true;
    article.prepend(details);
  }
  if (details) details.lastChild.textContent = thoughts;
  // Fold the thoughts once, when the answer begins.
  if (details && !isThinking && !details.dataset.folded) details.open = !(details.dataset.folded = "1");
  const calls = (answer.tool_calls ?? []).map(call => `\n${call.function.name}(${call.function.arguments})`);
  body.textContent = answer.content + calls.join("");
  if (isAtEnd) article.scrollIntoView({ block: "end" });
}

function readTools() {
  const code = $("tools").value.trim();
  return code ? new Function(`"use strict"; return (${code.replace(/;\s*$/, "")}\n);`)() : [];
}

const isJson = text => { try { JSON.parse(text); return true; } catch { return false; } };

async function answer(tools, messages) {
  const number = id => Number($(id).value), message = { role: "assistant", content: "", reasoning_content: "", tool_calls: [] };
  const article = show("assistant");
  article.ariaBusy = "true";
  const system = $("system").value.trim(), thinking = $("thinking").value;
  const stream = await wllama.createChatCompletion({
    messages: [...(system ? [{ role: "system", content: broken(system) }] : []), ...messages],
    stream: true, max_tokens: number("max_tokens"), temperature: number("temperature"), abortSignal: running.signal,
    top_p: number("top_p"), top_k: number("top_k"),
    repeat_penalty: number("repetition_penalty"), repeat_last_n: model.context, min_p: 0,
    samplers: ["penalties", "temperature", "top_k", "top_p"], timings_per_token: true,
    ...(thinking ? { chat_template_kwargs: { enable_thinking: thinking === "on", open_thinking: thinking === "on" } } : {}),
    ...(tools.length ? { tools: tools.map(({ run, ...about }) => ({ type: "function", function: about })) } : {}),
  });
  try {
    for await (const chunk of stream) {
      const delta = chunk.choices[0]?.delta ?? {};
      message.content += delta.content ?? "";
      message.reasoning_content += delta.reasoning_content ?? "";
      for (const piece of delta.tool_calls ?? []) {
        const call = (message.tool_calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
        call.id ||= piece.id ?? `call_${messages.length}_${piece.index}`;
        call.function.name += piece.function?.name ?? "";
        call.function.arguments += piece.function?.arguments ?? "";
      }
      showAnswer(article, message);
      const { predicted_n: count, predicted_per_second: speed } = chunk.timings ?? {};
      if (count) $("speed").textContent = t("speed", count, speed.toFixed(1));
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  } finally {
    article.ariaBusy = "false";
  }
  // A call that was cut off cannot be run, and the engine refuses it in a conversation.
  const isCut = running.signal.aborted || message.tool_calls.some(call => !isJson(call.function.arguments));
  if (isCut || !message.tool_calls.length) delete message.tool_calls;
  messages.push(message);
  return message;
}

async function ask() {
  const text = $("question").value.trim();
  if (!text) return;
  $("question").value = "";
  show("user", text);
  // A new conversation has another list.
  const own = messages, before = own.length;
  own.push({ role: "user", content: broken(text) });
  running = new AbortController();
  const stopped = new Promise((_, reject) => running.signal.addEventListener("abort", () => reject(new Error(t("stop")))));
  stopped.catch(() => {});
  $("send").textContent = t("stop");
  try {
    const tools = readTools();
    for (let round = 0; round < MOST_CALLS && !running.signal.aborted; round += 1) {
      const { tool_calls: calls } = await answer(tools, own);
      if (!calls) break;
      for (const call of calls) {
        let result;
        try {
          const tool = tools.find(each => each.name === call.function.name);
          result = String(await Promise.race([tool.run(JSON.parse(call.function.arguments)), stopped]));
        } catch (error) {
          result = `error: ${error?.message ?? error}`;
        }
        show("tool", result);
        own.push({ role: "tool", tool_call_id: call.id, content: broken(result) });
      }
    }
  } catch (error) {
    const message = String(error?.message ?? error);
    show("error", /exceeds the available context/.test(message) ? t("long") : message);
    // The question can be asked again, or otherwise.
    own.length = before;
    $("question").value ||= text;
  } finally {
    running = null;
    $("send").textContent = t("send");
  }
}

function act(event) {
  event.preventDefault();
  if (running) running.abort();
  else if (wllama) ask();
}

label();
$("load").addEventListener("click", load);
$("form").addEventListener("submit", act);
$("question").addEventListener("keydown", event => {
  // Safari ends the composition of a Chinese character before its Enter, which has the code 229.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  if (!running) act(event);
});
addEventListener("keydown", event => event.key === "Escape" && running?.abort());
$("reset").addEventListener("click", () => { running?.abort(); messages = []; $("log").replaceChildren(); });
// A server without the headers for threads gets them from the worker, from the second load on.
// Some browsers and settings have no workers or no storage: then the page is loaded each time.
let works = false;
try {
  // A new export replaces all files.
  const hadWorker = navigator.serviceWorker.controller;
  navigator.serviceWorker.addEventListener("controllerchange", () => { if (hadWorker && !messages.length) location.reload(); });
  await navigator.serviceWorker.register("worker.js");
  await navigator.serviceWorker.ready;
  works = true;
  if (!crossOriginIsolated && !sessionStorage.getItem("reloaded")) {
    sessionStorage.setItem("reloaded", "1");
    location.reload();
  }
} catch (error) {
  console.warn(error);
}
if (model.bytes > MOST_BYTES) {
  $("status").textContent = t("big", megabytes(model.bytes));
} else if (works && await caches.match(model.parts.at(-1).name)) {
  await load();
} else {
  $("status").textContent = t(works ? "size" : "sizeOnline", megabytes(model.bytes + model.engine_bytes));
  $("load").hidden = false;
}
