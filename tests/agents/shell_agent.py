"""An agent's program, of the standard library: runs each reply of the model as a command in its
container, until one does nothing. python shell_agent.py PROMPT"""

import json
import os
import sys
import urllib.request

from areal_x.agents.mini_swe_agent import ask


def complete(messages: list) -> str:
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def main(prompt: str) -> None:
    assert "hidden" not in os.environ["AREAL_X_TASK"]
    messages = [{"role": "user", "content": prompt}]
    while (command := complete(messages).strip()) != "done":
        reply = ask({"command": command, "seconds": 20})
        messages += [{"role": "assistant", "content": command}]
        messages += [{"role": "user", "content": f"{reply['code']}: {reply['output']}{reply['error'] or ''}"}]


if __name__ == "__main__":
    main(sys.argv[1])
