// Requests to this page's own server, relative to the address that has the key.

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function get(path, parameters, signal) {
  return await send(path, parameters, { signal });
}

export async function put(path, body) {
  return await send(path, null, {
    method: "PUT",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
}

async function send(path, parameters, options) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters || {})) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  }
  let answer;
  try {
    answer = await fetch(`api/${path}${query.size ? `?${query}` : ""}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "The server of this page does not answer: was areal-x lab stopped?");
  }
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Failure(answer.status, body.error || `The server answered ${answer.status}.`);
  return body;
}

export const ofRun = (name, rest = "") => `runs/${encodeURIComponent(name)}${rest}`;
