// Sends a picture with the AI SDK and prints the answers, of one call and of a stream, as JSON.
// Arguments: base URL, file of the picture, question.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(`${process.env.NODE_PATH}/`);
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateText, streamText } = require("ai");

const [baseURL, file, question] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "quire", baseURL, includeUsage: true })("quire-tiny");
const content = [
  { type: "file", mediaType: "image/png", data: readFileSync(file) },
  { type: "text", text: question },
];
const asked = { model, messages: [{ role: "user", content }], temperature: 0, maxOutputTokens: 20, maxRetries: 0 };
const whole = await generateText(asked);
let streamed = "";
for await (const piece of streamText(asked).textStream) streamed += piece;
console.log(JSON.stringify({ whole: whole.text, streamed, inputTokens: whole.usage.inputTokens }));
