// The official Node client against a gateway; prints what it got as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "client-key", maxRetries: 0 });
const ask = (content, more = {}) =>
  client.chat.completions.create({ model: "auto", messages: [{ role: "user", content }], ...more });

const answer = await ask("Hi");
let text = "";
let usage = null;
for await (const chunk of await ask("Hi", { stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const tools = [{ type: "function", function: { name: "get_weather", parameters: { type: "object" } } }];
const calls = (await ask("tools", { tools })).choices[0].message.tool_calls;
const errors = [];
for (const wish of [ask("Hi", { model: "gpt-9" }), ask("Hi", { messages: [] })]) {
  errors.push(await wish.then(() => "none", (error) => error.constructor.name));
}
const names = [];
for await (const model of client.models.list()) names.push(model.id);
const embedding = (await client.embeddings.create({ model: "auto", input: "Hi" })).data[0].embedding;
console.log(
  JSON.stringify({
    whole: answer.choices[0].message.content,
    text,
    completionTokens: usage.completion_tokens,
    arguments: calls[0].function.arguments,
    errors,
    names,
    length: embedding.reduce((sum, x) => sum + x * x, 0),
  }),
);
