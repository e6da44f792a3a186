// Addresses of the pages: #/NAME/PAGE/REST…?PARAMETERS, and the runs that there are.

export const known = { runs: [] };

export function address() {
  const [path, query] = location.hash.slice(2).split("?");
  const [name, kind, ...rest] = path.split("/").map(decodeURIComponent);
  return { name, kind: kind || "overview", rest, parameters: new URLSearchParams(query || "") };
}

export function link(name, kind, rest = [], parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, x]) => x !== "" && x !== null && x !== undefined));
  const path = [name, kind, ...rest].map((x) => encodeURIComponent(String(x))).join("/");
  return `#/${path}${query.size ? `?${query}` : ""}`;
}

export const go = (to) => { location.hash = to.slice(1); };
export const allRuns = () => known.runs;
export const runNamed = (name) => known.runs.find((run) => run.name === name);
