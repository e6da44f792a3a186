"""Shows the lab's widget in headless Chromium, on a page with styles of its own that should not reach it.

    python tests/lab/widget_browser.py [PICTURE] < JSON

The JSON has the widget's `source` and `state`. Prints what is seen after a press of "engine–trainer gap" and a look at token 7,
as one line of JSON. It runs in the environment of tests/lab/browser.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys

from playwright.sync_api import sync_playwright

DRAW = """async ({source, state}) => {
  const {default: widget} = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
  const set = (name, x) => { state[name] = x; };
  const model = {get: (name) => state[name], set, save_changes() {}, on() {}, off() {}};
  widget.render({model, el: document.getElementById("place")});
}"""
INLINE = ("data:", "blob:", "about:")


def main() -> None:
    problems: list[str] = []
    with sync_playwright() as playwright:
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 900, "height": 400})
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(INLINE) else problems.append(request.url))
        page.set_content("<style>* { color: red !important }</style><div id=place></div>")
        page.evaluate(DRAW, json.load(sys.stdin))
        page.locator("button[data-colour=gap]").click()
        page.locator(".t").nth(7).hover()
        style = "(x, name) => getComputedStyle(x)[name]"
        found = {
            "problems": problems,
            "text": page.locator(".tokens").inner_text(),
            "color": page.locator(".t").nth(7).evaluate(style, "color"),
            "backgrounds": [page.locator(".t").nth(i).evaluate(style, "backgroundColor") for i in (0, 7)],
            "read": page.locator(".inspect").inner_text().split("\n"),
            "markup": page.evaluate("window.pwned !== undefined"),
        }
        if len(sys.argv) > 1:
            page.screenshot(path=sys.argv[1])
        print(json.dumps(found))
        browser.close()


if __name__ == "__main__":
    main()
