// The npm package `openai` against the server.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { errorOf, inEachWay, run, task } from "./probe.mjs";

const client = new OpenAI({ baseURL: `${task.url}/v1`, apiKey: task.key, maxRetries: 0, timeout: 60_000 });
const withoutKey = new OpenAI({ baseURL: `${task.url}/v1`, apiKey: "wrong", maxRetries: 0 });

const ask = (content, options = {}) => ({
  model: task.model,
  messages: [{ role: "user", content }],
  max_tokens: task.max_tokens,
  temperature: 0,
  ...options,
});
const usageOf = (usage) => [usage.prompt_tokens, usage.completion_tokens];
const callOf = ({ message, finish_reason }) => {
  const [call, ...more] = message.tool_calls;
  if (more.length) throw new Error("more than one call");
  return { name: call.function.name, arguments: JSON.parse(call.function.arguments), finish: finish_reason };
};

async function chat() {
  const reply = await client.chat.completions.create(ask(task.question));
  const [choice] = reply.choices;
  return { text: choice.message.content, finish: choice.finish_reason, usage: usageOf(reply.usage) };
}

async function stream() {
  const parts = ask(task.question, { stream: true, stream_options: { include_usage: true } });
  let [text, pieces, finish, usage] = ["", 0, null, null];
  for await (const chunk of await client.chat.completions.create(parts)) {
    const piece = chunk.choices[0]?.delta.content ?? "";
    text += piece;
    pieces += piece ? 1 : 0;
    finish = chunk.choices[0]?.finish_reason ?? finish;
    usage = chunk.usage ?? usage;
  }
  return { text, pieces, finish, usage: usageOf(usage) };
}

const asking = (way) => ask(task.tool_question, { tools: [task.tool], tool_choice: way.tool_choice, ...way.body });

async function tools(way) {
  const asked = asking(way);
  const [choice] = (await client.chat.completions.create(asked)).choices;
  const result = { role: "tool", tool_call_id: choice.message.tool_calls[0].id, content: task.tool_result };
  const messages = [...asked.messages, choice.message, result];
  const answered = await client.chat.completions.create(ask("", { tools: [task.tool], messages, max_tokens: 12 }));
  return { ...callOf(choice), answer: answered.choices[0].message.content };
}

async function toolsStreamed(way) {
  const completion = await client.chat.completions.stream(asking(way)).finalChatCompletion();
  return callOf(completion.choices[0]);
}

async function structured() {
  const form = { type: "json_schema", json_schema: { name: "person", strict: true, schema: task.schema } };
  const asked = ask(task.schema_question, { response_format: form, max_tokens: 200 });
  return (await client.chat.completions.parse(asked)).choices[0].message.parsed;
}

/** Through the package's helper for Zod, whose schema is judged by it as the stream ends. */
async function structuredStreamed() {
  const person = z.object({ name: z.string().max(12), age: z.int().min(0).max(130) });
  const asked = ask(task.schema_question, { response_format: zodResponseFormat(person, "person"), max_tokens: 200 });
  return (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message.parsed;
}

async function errors() {
  const drain = async (chunks) => {
    for await (const _ of await chunks);
  };
  return {
    bad: await errorOf(() => client.chat.completions.create(ask("x", { top_p: 7 }))),
    bad_streamed: await errorOf(() => drain(client.chat.completions.create(ask("x", { top_p: 7, stream: true })))),
    too_long: await errorOf(() => client.chat.completions.create(ask(task.too_long))),
    missing: await errorOf(() => client.chat.completions.create(ask("x", { model: "other" }))),
    key: await errorOf(() => withoutKey.chat.completions.create(ask("x"))),
  };
}

async function responses() {
  const asked = { model: task.model, input: task.question, max_output_tokens: task.max_tokens, temperature: 0 };
  const reply = await client.responses.create(asked);
  let streamed = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  return { text: reply.output_text, streamed, usage: [reply.usage.input_tokens, reply.usage.output_tokens] };
}

await run({
  chat,
  stream,
  tools: inEachWay(tools),
  tools_streamed: inEachWay(toolsStreamed),
  structured,
  structured_streamed: structuredStreamed,
  errors,
  responses,
});
