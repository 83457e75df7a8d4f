// The Vercel AI SDK (npm `ai`) with its OpenAI-compatible provider against the server.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { errorOf, inEachWay, run, task } from "./probe.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

const providerWith = (apiKey) =>
  createOpenAICompatible({
    name: "oneloop",
    baseURL: `${task.url}/v1`,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
const provider = providerWith(task.key);

const ask = (prompt, options = {}) => ({
  model: provider(task.model),
  prompt,
  maxOutputTokens: task.max_tokens,
  temperature: 0,
  maxRetries: 0,
  ...options,
});
const usageOf = (usage) => [usage.inputTokens, usage.outputTokens];
const weather = {
  [task.tool.function.name]: tool({
    description: task.tool.function.description,
    inputSchema: jsonSchema(task.tool.function.parameters),
    execute: () => task.tool_result,
  }),
};
const asking = ({ tool_choice, body }) =>
  ask(task.tool_question, { tools: weather, toolChoice: tool_choice, providerOptions: { oneloop: body } });
const person = { output: Output.object({ name: "person", schema: jsonSchema(task.schema) }), maxOutputTokens: 200 };

async function chat() {
  const { text, finishReason, usage } = await generateText(ask(task.question));
  return { text, finish: finishReason, usage: usageOf(usage) };
}

async function stream() {
  const reply = streamText(ask(task.question));
  let [text, pieces] = ["", 0];
  for await (const piece of reply.textStream) {
    text += piece;
    pieces += 1;
  }
  return { text, pieces, finish: await reply.finishReason, usage: usageOf(await reply.usage) };
}

async function tools(way) {
  const reply = await generateText(asking(way));
  const [call] = reply.toolCalls;
  const messages = [{ role: "user", content: task.tool_question }, ...reply.response.messages];
  const { prompt: _, ...rest } = ask("", { tools: weather, maxOutputTokens: 12 });
  const { text } = await generateText({ ...rest, messages });
  return { name: call.toolName, arguments: call.input, finish: reply.finishReason, answer: text };
}

async function toolsStreamed(way) {
  const reply = streamText(asking(way));
  const [call] = await reply.toolCalls;
  return { name: call.toolName, arguments: call.input, finish: await reply.finishReason };
}

async function structured() {
  return (await generateText(ask(task.schema_question, person))).output;
}

async function structuredStreamed() {
  let last;
  for await (const partial of streamText(ask(task.schema_question, person)).partialOutputStream) last = partial;
  return last;
}

async function errors() {
  const failedStream = async () => {
    let failure;
    const reply = streamText(ask("x", { topP: 7, onError: ({ error }) => (failure = error) }));
    await reply.consumeStream();
    if (failure) throw failure;
  };
  const failing = (prompt, options) => errorOf(() => generateText(ask(prompt, options)), "statusCode");
  return {
    bad: await failing("x", { topP: 7 }),
    bad_streamed: await errorOf(failedStream, "statusCode"),
    too_long: await failing(task.too_long),
    missing: await failing("x", { model: provider("other") }),
    key: await failing("x", { model: providerWith("wrong")(task.model) }),
  };
}

await run({
  chat,
  stream,
  tools: inEachWay(tools),
  tools_streamed: inEachWay(toolsStreamed),
  structured,
  structured_streamed: structuredStreamed,
  errors,
});
