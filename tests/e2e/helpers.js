// What the end-to-end tests share: where the server is, and a few requests without the openai package.
import OpenAI from 'openai';

export const url = process.env.TD_URL;
if (!url) throw new Error('TD_URL is not set: http://HOST:PORT of a running server');
export const apiKey = process.env.TD_API_KEY ?? 'none';
export const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 60_000 });

export async function modelId() {
  return process.env.TD_MODEL ?? (await client.models.list()).data[0].id;
}

export async function health() {
  const response = await fetch(`${url}/health`, { headers: { authorization: `Bearer ${apiKey}` } });
  return response.json();
}

// Waits until check(health) holds; fails after ms.
export async function healthUntil(check, ms) {
  const end = Date.now() + ms;
  for (;;) {
    const now = await health();
    if (check(now)) return now;
    if (Date.now() > end) throw new Error(`not within ${ms} ms: ${JSON.stringify(now)}`);
    await new Promise((done) => setTimeout(done, 20));
  }
}
