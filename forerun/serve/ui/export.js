/** Conversations as files. */

/** A file name from a title. */
export function fileName(conversation, kind) {
  const words = conversation.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${words.slice(0, 40) || "conversation"}.${kind}`;
}

/** Conversations with their settings; `messages` are as the API takes them, and what is known beside. */
export function asJson(conversations) {
  return `${JSON.stringify({ format: "forerun-conversations", version: 1, conversations }, null, 2)}\n`;
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
    if (message.content) parts.push(message.content.trim());
    if (message.problem) parts.push(`*${message.problem}*`);
  }
  return `${parts.join("\n\n")}\n`;
}
