/** One answer: the request that a conversation makes, and how its stream becomes a message. */

import { connection, stream } from "./api.js";
import { withFiles } from "./attachments.js";

/** What a new conversation asks for. Empty values leave the choice to the server. */
export const DEFAULTS = {
  system: "", temperature: "", top_p: "", top_k: "", min_p: "", seed: "", max_tokens: "",
  frequency_penalty: "", presence_penalty: "", repetition_penalty: "", stop: "",
  schema: "", tools: "", tool_choice: "auto", speculation: true,
};

export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens",
  "frequency_penalty", "presence_penalty", "repetition_penalty"];

/**
 * The request for an answer to these messages; `continues`: for more of the last one, which the model
 * wrote. Raises SyntaxError where a text is no JSON.
 */
export function requestOf(messages, options, continues = false) {
  const body = { ...connection.named, messages: [], stream: true, stream_options: { include_usage: true } };
  if (options.system.trim()) body.messages.push({ role: "system", content: options.system });
  body.messages.push(...messages.filter((message) => !message.failed).map(plain));
  for (const name of NUMBERS) if (options[name] !== "") body[name] = Number(options[name]);
  const stops = options.stop.split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops;
  if (options.schema.trim()) {
    const schema = parsed(options.schema, "The JSON schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  if (options.tools.trim()) {
    body.tools = parsed(options.tools, "The list of tools");
    body.tool_choice = options.tool_choice;
  }
  if (continues) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  body.speculative = { enabled: options.speculation, stats: true };
  return body;
}

/** Parse JSON that a user typed. Raises SyntaxError that says which text is wrong. */
export function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${what} is not JSON: ${error.message}`);
  }
}

function plain({ role, content, files, tool_calls, tool_call_id }) {
  const message = { role, content: withFiles(content, files) };
  if (tool_calls?.length) Object.assign(message, { tool_calls, content: content || null });
  if (tool_call_id) message.tool_call_id = tool_call_id;
  return message;
}

/** Stream an answer into `message`, calling `changed` whenever it grew. Raises what `stream` does. */
export async function answer(body, message, signal, changed) {
  const begun = performance.now();
  let first = 0;
  for await (const chunk of stream("v1/chat/completions", body, signal)) {
    if (chunk.usage) message.usage = chunk.usage;
    if (chunk.metrics) message.speculation = chunk.metrics.speculative_decoding;
    for (const choice of chunk.choices) {
      take(message, choice);
      if (!first && (message.content || message.reasoning || message.tool_calls)) first = performance.now();
    }
    changed();
  }
  const end = performance.now();
  message.seconds = { first: (first - begun) / 1000, rest: (end - first) / 1000 };
  changed();
}

function take(message, { delta, finish_reason }) {
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = message.tool_calls[piece.index];
    if (call) call.function.arguments += piece.function.arguments;
    else message.tool_calls[piece.index] = { id: piece.id, type: "function", function: { ...piece.function } };
  }
  if (finish_reason) message.finish = finish_reason;
}
