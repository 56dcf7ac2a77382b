/** Conversations as files, and files as conversations. */

import { DEFAULTS, NUMBERS } from "./answer.js";
import { withFiles } from "./attachments.js";

const FORMAT = "forerun-conversations";
const ROLES = ["user", "assistant", "tool"];

const TEXTS = ["reasoning", "problem", "finish", "tool_call_id"];

const isText = (value) => typeof value === "string";
const isList = (value, fits) => value === undefined || (Array.isArray(value) && value.every(fits));
const moment = (value, otherwise) => new Date(Number(value)).getTime() || otherwise;

/** Whether a message, or a variant of one, can be shown: what the page reads of it is of the kind that it writes. */
function fits(message) {
  return isText(message?.content) && TEXTS.every((name) => message[name] === undefined || isText(message[name]))
    && isList(message.files, (file) => isText(file?.name) && isText(file.text))
    && isList(message.tool_calls, (call) => isText(call?.function?.name) && isText(call.function.arguments))
    && isList(message.variants, fits) && (message.variant === undefined || Number.isInteger(message.variant));
}

/** Whether a setting can be used. */
function suits(name, value) {
  return typeof value === typeof DEFAULTS[name] || (NUMBERS.includes(name) && typeof value === "number");
}

/** A file name from a title. */
export function fileName(conversation, kind) {
  const words = conversation.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${words.slice(0, 40) || "conversation"}.${kind}`;
}

/** Conversations with their settings; `messages` are as the API takes them, and what is known beside. */
export function asJson(conversations) {
  return `${JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2)}\n`;
}

/** The conversations of such a file, under new ids. Raises Error that says what is wrong with it. */
export function fromJson(text, newId) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  if (found?.format !== FORMAT || !Array.isArray(found.conversations)) {
    throw new Error("The file holds no conversations: choose one that “JSON” or “Export all” wrote.");
  }
  return found.conversations.map((one, place) => {
    const wrong = (what) => new Error(`Conversation ${place + 1} of the file ${what}.`);
    if (!isText(one?.title) || !Array.isArray(one.messages)) throw wrong("has no title or no messages");
    const messages = one.messages.map((message) => {
      if (!ROLES.includes(message?.role) || !isText(message.content)) throw wrong("has a message without role or text");
      if (!fits(message)) throw wrong("has a message that is damaged");
      return { ...message, id: newId() };
    });
    const time = moment(one.updated, Date.now());
    const { title, options } = one;
    const known = Object.entries({ ...options }).filter(([name]) => name in DEFAULTS);
    if (!known.every(([name, value]) => suits(name, value))) throw wrong("has a setting that is damaged");
    return { id: newId(), title, created: moment(one.created, time), updated: time, messages, options: Object.fromEntries(known) };
  });
}

/** One conversation to read. */
export function asMarkdown({ title, created, options, messages }) {
  const parts = [`# ${title}`, new Date(created).toISOString().slice(0, 10)];
  if (options.system.trim()) parts.push("## System", options.system.trim());
  for (const message of messages) {
    parts.push(`## ${{ user: "You", assistant: "Model", tool: "Tool result" }[message.role]}`);
    if (message.reasoning) parts.push(message.reasoning.trim().replace(/^/gm, "> "));
    for (const { function: called } of message.tool_calls ?? []) {
      parts.push(`Calls \`${called.name}\`:`, `\`\`\`json\n${called.arguments}\n\`\`\``);
    }
    const content = withFiles(message.content.trim(), message.files);
    if (content) parts.push(content);
    if (message.problem) parts.push(`*${message.problem}*`);
  }
  return `${parts.join("\n\n")}\n`;
}
