/** Files that go with a message, as text. */

const MOST = 1_000_000;
/** Bytes of one file: some 300,000 tokens, more than most contexts hold. */

/** A file as {name, text}. Raises Error that says why it cannot be taken. */
export async function readText(file) {
  if (file.size > MOST) throw new Error(`${file.name} has ${(file.size / 1e6).toFixed(1)} MB; one file may have ${MOST / 1e6} MB.`);
  const bytes = await file.arrayBuffer();
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error(`${file.name} is not text: models here read text only.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not text: models here read text only.`);
  return { name: file.name, text };
}

/** What the model is sent: the files, each in a fence longer than any in it, then the message. */
export function withFiles(content, files) {
  const parts = (files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter((part) => part !== "").join("\n\n");
}
