"""Looks at every page of a served lab with headless Chromium, as the judge of tests/lab/test_page.py and benchmarks/lab.py.

    python tests/lab/browser.py ADDRESS [--pictures FOLDER] [--run NAME] [--other NAME] [--group TICKET]

It runs in an environment of its own, with playwright and axe-playwright-python, and prints one line of JSON: what went wrong,
and how long things took.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from playwright.sync_api import Page, sync_playwright

QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
# The time from an input to the frame with its answer, in the page itself.
TIMED = """async ({selector, value, kind}) => {
  const field = document.querySelector(selector), holder = document.querySelector('#page .card.scroll');
  const began = performance.now();
  const seen = new Promise((done) => {
    new MutationObserver(() => requestAnimationFrame(done)).observe(holder, {childList: true});
  });
  field.value = value;
  field.dispatchEvent(new Event(kind, {bubbles: true}));
  await seen;
  return performance.now() - began;
}"""


def axe_source() -> str:
    spec = importlib.util.find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).rglob("axe.min.js")
    return file.read_text(encoding="utf-8")


class Judge:
    """Collects what goes wrong on any page."""

    def __init__(self, page: Page, address: str, pictures: Path | None) -> None:
        self.page, self.address, self.pictures = page, address, pictures
        self.problems: list[str] = []
        self.times: dict[str, float] = {}
        page.on("console", lambda m: self.problems.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.problems.append("a dialog was opened"), dialog.dismiss()))
        page.on("request", self._requested)
        self.axe = axe_source()

    def _requested(self, request: Any) -> None:
        if urlparse(request.url).netloc != urlparse(self.address).netloc and not request.url.startswith("data:"):
            self.problems.append(f"a request to {request.url}")

    def open(self, path: str, wait: str) -> None:
        self.page.goto(f"{self.address}#/{path}")
        self.page.wait_for_selector(wait, timeout=60_000)

    def look(self, name: str, picture: bool = True) -> None:
        """Checks the page that is shown, in the light and the dark, and takes its picture."""
        for scheme in ("light", "dark"):
            self.page.emulate_media(color_scheme=scheme)
            self.page.evaluate(self.axe)
            found = self.page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
            for violation in found["violations"]:
                places = "; ".join(str(node["target"]) for node in violation["nodes"][:3])
                self.problems.append(f"axe, {name}, {scheme}: {violation['id']}: {violation['help']} ({places})")
        self.page.emulate_media(color_scheme="light")
        if self.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            self.problems.append(f"{name} is wider than the window")
        if self.page.evaluate("window.pwned !== undefined || document.querySelector('main script, main img') !== null"):
            self.problems.append(f"{name} made markup of a text")
        if picture and self.pictures:
            self.page.screenshot(path=self.pictures / f"lab-{name}.png")


def judge(judge: Judge, run: str, other: str | None, group: int, search: str) -> None:
    page = judge.page
    judge.open(f"{run}/overview", ".tile")
    judge.times["first_paint_ms"] = page.evaluate(PAINT)
    for summary in page.locator("details > summary").all():
        summary.click()
    judge.look("overview")
    for wrong in ("%", f"{run}/%E0%A4/%", "%zz/overview?with=%", f"{run}/nothing"):
        judge.open(wrong, "#page, .error")
    judge.problems[:] = [x for x in judge.problems if "404 (Not Found)" not in x]  # there is no such run
    judge.open(f"{run}/curves" + (f"?with={other}" if other else ""), ".chart svg")
    page.locator(".chart svg").first.press("ArrowLeft")
    judge.look("curves")
    judge.open(f"{run}/trajectories", "td.text .said")
    judge.look("trajectories")
    for name, selector, value, kind in (
        ("filter_outcome_ms", ".controls label:has-text('outcome') select", "scored", "change"),
        ("filter_reward_ms", ".controls label:has-text('reward from') input", "0.5", "input"),
        ("filter_task_ms", ".controls label:has-text('task') input", "1", "input"),
        ("filter_step_ms", ".controls label:has-text('step from') input", "1", "input"),
    ):
        page.evaluate("() => document.querySelectorAll('[data-timed]').forEach((x) => x.removeAttribute('data-timed'))")
        page.locator(selector).first.evaluate("(x) => x.setAttribute('data-timed', '')")
        judge.times[name] = page.evaluate(TIMED, {"selector": "[data-timed]", "value": value, "kind": kind})
    judge.open(f"{run}/trajectories?order=oldest", "tbody tr")
    page.keyboard.press("/")
    page.keyboard.type(search)
    began = time.monotonic()
    page.wait_for_selector("mark", timeout=60_000)
    judge.times["first_found_ms"] = 1000 * (time.monotonic() - began)
    judge.look("search", picture=False)
    judge.open(f"{run}/trajectories?order=oldest&step_min=1", "tbody tr")
    page.locator("#main").focus()
    page.keyboard.press("j")
    page.wait_for_selector("tr.at")
    page.keyboard.press("Enter")
    page.wait_for_selector(".t")
    page.keyboard.press("u")
    page.wait_for_selector(".side .card")
    judge.open(f"{run}/group/{group}", ".side .card")
    judge.look("group")
    judge.open(f"{run}/tokens/{group}/0", ".t")
    page.locator(".tokens").press("End")
    page.wait_for_selector(".inspect dl")
    judge.look("tokens")
    for button in page.locator("button[data-colour]").all():
        button.click()
    judge.open(f"{run}/tokens/{group + 1}/0", ".t")  # of a group without a record, which says why
    page.wait_for_selector("#lacking a")
    judge.look("tokens-unrecorded", picture=False)
    judge.open(f"{run}/failures", "#page p")
    judge.look("failures")
    judge.open(f"{run}/settings" + (f"?with={other}" if other else ""), "#page .card")
    judge.look("settings")
    judge.open(f"{run}/notes", "textarea")
    page.locator("textarea").fill("worth a second look <b>not bold</b>")
    page.wait_for_selector("#page [role=status]:has-text('Saved.')")
    judge.look("notes", picture=False)
    page.locator("#main").focus()
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    judge.look("keys", picture=False)
    page.keyboard.press("Escape")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--run", default="run")
    parser.add_argument("--other")
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--search", default="1")
    options = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        found = Judge(page, options.address, options.pictures)
        try:
            judge(found, options.run, options.other, options.group, options.search)
        except Exception as error:
            found.problems.append(f"{type(error).__name__}: {error}"[:2000])
        print(json.dumps({"problems": found.problems, "times": found.times}))
        browser.close()


if __name__ == "__main__":
    main()
