// Addresses of the pages: #/NAME/PAGE/REST…?PARAMETERS, and the runs that there are.

export const known = { runs: [] };

export function address() {
  const [path, query] = location.hash.slice(2).split("?");
  const [name, kind, ...rest] = path.split("/").map(decoded);
  return { name, kind: kind || "overview", rest, parameters: new URLSearchParams(query || "") };
}

// an address that somebody typed may have a % that stands for nothing: it is then a name that no run has
function decoded(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

export function link(name, kind, rest = [], parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, x]) => x !== "" && x !== null && x !== undefined));
  const path = [name, kind, ...rest].map((x) => encodeURIComponent(String(x))).join("/");
  return `#/${path}${query.size ? `?${query}` : ""}`;
}

export const go = (to) => { location.hash = to.slice(1); };
export const allRuns = () => known.runs;
export const runNamed = (name) => known.runs.find((run) => run.name === name);
