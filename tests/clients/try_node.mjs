// The openai and ai packages of npm.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [url, model, key] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const content = "How is the weather in Paris?";
const messages = [{ role: "user", content }];
const sentence = "It rains in Paris.";
const city = z.object({ city: z.string() });
const weather = z.object({ sky: z.enum(["clear", "cloudy"]), is_cold: z.boolean() });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

async function withOpenai() {
  const client = new OpenAI({ baseURL, apiKey: key, maxRetries: 0 });
  const create = (more) => client.chat.completions.create({ model, messages, ...more });
  assert.equal((await create()).choices[0].message.content, sentence);
  let text = "";
  for await (const chunk of await create({ stream: true })) text += chunk.choices[0]?.delta.content ?? "";
  assert.equal(text, sentence);
  const [call] = (await create({ tools, tool_choice: "auto" })).choices[0].message.tool_calls;
  assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["get_weather", { city: "Paris" }]);
  const schema = z.toJSONSchema(weather);
  const shaped = await create({ response_format: { type: "json_schema", json_schema: { name: "weather", schema } } });
  weather.parse(JSON.parse(shaped.choices[0].message.content));
  await assert.rejects(create({ temperature: -1 }), OpenAI.BadRequestError);
  await assert.rejects(create({ model: "another" }), OpenAI.NotFoundError);
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
}

async function withAi() {
  const ours = (apiKey) =>
    createOpenAICompatible({ name: "ours", baseURL, apiKey, supportsStructuredOutputs: true, includeUsage: true });
  const asked = { model: ours(key)(model), prompt: content, maxRetries: 0 };
  const answer = await generateText(asked);
  assert.deepEqual([answer.text, answer.finishReason, answer.usage.outputTokens], [sentence, "stop", 4]);
  const streamed = streamText(asked);
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, sentence);
  assert.equal((await streamed.usage).outputTokens, 4);
  for (const run of [generateText, streamText]) {
    const cities = [];
    const execute = async (input) => (cities.push(input.city), "rain");
    const get_weather = tool({ description: "The weather of a city", inputSchema: city, execute });
    const result = await run({ ...asked, tools: { get_weather }, stopWhen: stepCountIs(3) });
    assert.equal(await result.text, sentence);
    assert.deepEqual(cities, ["Paris"]);
  }
  weather.parse((await generateText({ ...asked, output: Output.object({ schema: weather }) })).output);
  const refused = (status) => (error) => APICallError.isInstance(error) && error.statusCode === status;
  await assert.rejects(generateText({ ...asked, temperature: -1 }), refused(400));
  await assert.rejects(generateText({ ...asked, model: ours(key)("another") }), refused(404));
  await assert.rejects(generateText({ ...asked, model: ours("wrong")(model) }), refused(401));
}

await withOpenai();
await withAi();
