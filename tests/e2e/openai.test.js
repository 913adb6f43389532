// The official openai package: completions, chats, streams, usage, errors, an aborted stream. What the model says is not
// looked at; that streamed and whole replies say the same is.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import { client, healthUntil, modelId, url } from './helpers.js';

const model = await modelId();
const messages = [{ role: 'system', content: 'You are terse.' }, { role: 'user', content: 'Hello, who are you?' }];

async function collect(stream) {
  const all = { chunks: [], content: '', reasoning: '', finish: null, usage: null };
  for await (const chunk of stream) {
    all.chunks.push(chunk);
    assert.ok(Array.isArray(chunk.choices));
    if (chunk.usage) all.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    const delta = choice.delta ?? { content: choice.text };
    assert.ok(!(delta.content && delta.reasoning_content), 'a delta with both kinds of text');
    if (delta.reasoning_content) {
      assert.equal(all.content, '', 'reasoning after content');
      all.reasoning += delta.reasoning_content;
    }
    all.content += delta.content ?? '';
    all.finish = choice.finish_reason ?? all.finish;
  }
  return all;
}

test('models', async () => {
  const list = await client.models.list();
  assert.ok(list.data.some((m) => m.id === model));
  const one = await client.models.retrieve(model);
  assert.equal(one.object, 'model');
  assert.ok(one.max_model_len > 0);
  await assert.rejects(client.models.retrieve('no/such model'), OpenAI.NotFoundError);
});

test('chat, whole', async () => {
  const reply = await client.chat.completions.create({ model, messages, max_tokens: 64, seed: 1 });
  assert.match(reply.id, /^chatcmpl-[0-9a-f]{24}$/);
  assert.equal(reply.object, 'chat.completion');
  assert.equal(reply.model, model);
  assert.equal(reply.choices.length, 1);
  assert.equal(reply.choices[0].message.role, 'assistant');
  assert.equal(typeof reply.choices[0].message.content, 'string');
  assert.ok(['stop', 'length'].includes(reply.choices[0].finish_reason));
  assert.equal(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens);
  assert.ok(reply.usage.completion_tokens <= 64);
  assert.match(reply.tandem.token_sha, /^[0-9a-f]{16}$/);
});

test('chat, streamed: the same text, usage last', async () => {
  const request = { model, messages, max_tokens: 200, seed: 1, temperature: 0 };
  const whole = await client.chat.completions.create(request);
  const stream = await client.chat.completions.create({ ...request, stream: true, stream_options: { include_usage: true } });
  const all = await collect(stream);
  assert.equal(all.chunks[0].choices[0].delta.role, 'assistant');
  assert.equal(all.content, whole.choices[0].message.content);
  assert.equal(all.reasoning, whole.choices[0].message.reasoning_content ?? '');
  assert.equal(all.finish, whole.choices[0].finish_reason);
  assert.deepEqual(all.usage.completion_tokens, whole.usage.completion_tokens);
  const last = all.chunks.at(-1);
  assert.equal(last.choices.length, 0);
  assert.equal(last.tandem.token_sha, whole.tandem.token_sha);
  assert.ok(all.chunks.slice(0, -1).every((c) => c.usage === null));
});

test('chat, streamed without include_usage: no chunk without a choice', async () => {
  const all = await collect(await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true }));
  assert.ok(all.chunks.every((c) => c.choices.length === 1));
  assert.ok(all.usage.completion_tokens > 0);
});

test('the stream helper of the package', async () => {
  const runner = client.chat.completions.stream({ model, messages, max_tokens: 40 });
  const final = await runner.finalChatCompletion();
  assert.equal(typeof final.choices[0].message.content, 'string');
});

test('reasoning_effort none: no reasoning', async () => {
  const reply = await client.chat.completions.create({ model, messages, max_tokens: 16, reasoning_effort: 'none' });
  assert.equal(reply.choices[0].message.reasoning_content, undefined);
  assert.equal(reply.usage.completion_tokens_details.reasoning_tokens, 0);
});

test('completion, whole and streamed', async () => {
  const request = { model, prompt: 'Once upon a time', max_tokens: 32, temperature: 0 };
  const whole = await client.completions.create(request);
  assert.equal(whole.object, 'text_completion');
  const all = await collect(await client.completions.create({ ...request, stream: true }));
  assert.equal(all.content, whole.choices[0].text);
  assert.equal(all.usage.completion_tokens, whole.usage.completion_tokens);
});

test('limit and stop string', async () => {
  const request = { model, prompt: 'Count:', max_tokens: 40, temperature: 0, ignore_eos: true };
  const whole = await client.completions.create(request);
  assert.equal(whole.choices[0].finish_reason, 'length');
  assert.equal(whole.usage.completion_tokens, 40);
  const text = whole.choices[0].text;
  const stop = Array.from(text).slice(3, 6).join('');
  if (!stop) return;
  for (const stream of [false, true]) {
    const reply = await client.completions.create({ ...request, stop, stream });
    const got = stream ? (await collect(reply)).content : reply.choices[0].text;
    assert.equal(got, text.slice(0, text.indexOf(stop)));
  }
});

test('logprobs', async () => {
  const reply = await client.chat.completions.create({ model, messages, max_tokens: 5, logprobs: true, top_logprobs: 3 });
  const tokens = reply.choices[0].logprobs.content;
  assert.ok(tokens.length >= 1 && tokens.length <= 5);
  for (const t of tokens) {
    assert.equal(t.top_logprobs.length, 3);
    assert.ok(t.logprob <= 0 && Array.isArray(t.bytes));
  }
});

test('the same request repeats its tokens', async () => {
  const request = { model, messages, max_tokens: 24 };
  const first = await client.chat.completions.create(request);
  const second = await client.chat.completions.create(request);
  assert.equal(first.tandem.token_sha, second.tandem.token_sha);
});

test('errors become the error classes of the package', async () => {
  const bad = (more) => client.chat.completions.create({ model, messages, ...more });
  await assert.rejects(bad({ temperature: 9 }), (e) => e instanceof OpenAI.BadRequestError && e.param === 'temperature');
  await assert.rejects(bad({ n: 2 }), (e) => e instanceof OpenAI.BadRequestError && e.param === 'n');
  await assert.rejects(bad({ messages: [] }), (e) => e.status === 400 && e.param === 'messages');
  await assert.rejects(bad({ max_tokens: 100_000_000 }), (e) =>
    e instanceof OpenAI.BadRequestError && e.code === 'context_length_exceeded' && e.param === 'messages' &&
    /maximum context length is \d+ tokens/.test(e.message));
  await assert.rejects(bad({ stream: true, top_p: 0 }), OpenAI.BadRequestError);
  await assert.rejects(client.completions.create({ model, prompt: 'x', echo: true }), OpenAI.BadRequestError);
  const lost = new OpenAI({ baseURL: `${url}/v2`, apiKey: 'x', maxRetries: 0 });
  await assert.rejects(lost.chat.completions.create({ model, messages }), OpenAI.NotFoundError);
});

test('an aborted stream frees its lane within half a second', async () => {
  await healthUntil((h) => h.requests_running === 0, 5000);
  const before = (await healthUntil(() => true, 1000)).completion_tokens_total;
  const abort = new AbortController();
  const stream = await client.completions.create(
    { model, prompt: 'Tell me everything.', max_tokens: 3000, ignore_eos: true, stream: true }, { signal: abort.signal });
  for await (const chunk of stream) if (chunk.choices[0].text) break;
  abort.abort();
  const after = await healthUntil((h) => h.requests_running === 0, 500);
  assert.ok(after.completion_tokens_total - before < 3000);
});

test('tokenize and detokenize go back and forth', async () => {
  const text = 'Grüße, 世界! 🙂 <|user|> \n\n x';
  const post = async (path, body) =>
    (await fetch(url + path, { method: 'POST', body: JSON.stringify(body), headers: { authorization: `Bearer ${client.apiKey}` } })).json();
  const { tokens, count } = await post('/tokenize', { prompt: text });
  assert.equal(tokens.length, count);
  assert.equal((await post('/detokenize', { tokens })).prompt, text);
  const chat = await post('/tokenize', { messages });
  const reply = await client.chat.completions.create({ model, messages, max_tokens: 1, return_token_ids: true });
  assert.deepEqual(reply.prompt_token_ids, chat.tokens);
});
