// 200 connections at once, one of which does not read: everybody else gets a complete reply, nothing mixes.
import assert from 'node:assert/strict';
import net from 'node:net';
import { test } from 'node:test';
import { apiKey, healthUntil, modelId, url } from './helpers.js';

const model = await modelId();
const N = Number(process.env.TD_CONNECTIONS ?? 200);
const { hostname, port } = new URL(url);

function request(body) {
  const text = JSON.stringify(body);
  return `POST /v1/completions HTTP/1.1\r\nHost: e2e\r\nAuthorization: Bearer ${apiKey}\r\nConnection: close\r\n` +
    `Content-Length: ${Buffer.byteLength(text)}\r\n\r\n${text}`;
}

// A stream read by hand: resolves to the text of its events.
function streamed(body) {
  return new Promise((resolve, reject) => {
    const socket = net.connect(Number(port), hostname, () => socket.write(request(body)));
    const parts = [];
    socket.on('data', (d) => parts.push(d));
    socket.on('error', reject);
    socket.on('close', () => resolve(Buffer.concat(parts).toString()));
    socket.setTimeout(120_000, () => reject(new Error('no byte for two minutes')));
  });
}

test(`${N} connections and a slow reader`, { timeout: 180_000 }, async () => {
  const slow = net.connect(Number(port), hostname);
  slow.on('error', () => {});
  slow.pause(); // takes nothing of what is sent to it
  slow.write(request({ model, prompt: 'slow', max_tokens: 2000, ignore_eos: true, stream: true, priority: 'background' }));

  const body = { model, prompt: 'Hello there', max_tokens: 8, temperature: 0, stream: true };
  const alone = await streamed(body);
  const textOf = (raw) => [...raw.matchAll(/"text":"((?:[^"\\]|\\.)*)"/g)].map((m) => m[1]).join('');
  const replies = await Promise.all(Array.from({ length: N }, () => streamed(body)));
  for (const reply of replies) {
    assert.match(reply, /^HTTP\/1\.1 (200|429) /);
    if (reply.startsWith('HTTP/1.1 429')) continue; // a queue that is full says so
    assert.match(reply, /data: \[DONE\]\n\n\r\n0\r\n\r\n$/);
    assert.equal(textOf(reply), textOf(alone));
  }
  assert.ok(replies.some((r) => r.startsWith('HTTP/1.1 200')));
  slow.destroy();
  await healthUntil((h) => h.requests_running === 0 && h.requests_waiting === 0, 10_000);
});
