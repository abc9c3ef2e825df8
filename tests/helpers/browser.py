"""Open a file in headless Chromium, over its pipe for developer tools."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.waiting import PATIENCE, until

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
]
FLAGS += ["--disable-3d-apis", "--disable-dev-shm-usage", "--remote-debugging-pipe"]


class Browser:
    """One page.

    `events` has what it reported since it was opened, such as requests and messages on its console.
    """

    def __init__(self, commands: int, answers: int):
        self.commands, self.answers, self.rest = commands, answers, b""
        self.number, self.session, self.events = 0, "", []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the developer tools."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Open a file in a window of this width, and wait until it has loaded."""
        self.events.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=media)
        self.ask("Page.navigate", url=path.absolute().as_uri())
        until(lambda: self.value("document.readyState") == "complete")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def named(self, method: str) -> list[dict[str, Any]]:
        """The events of this name."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            read = os.read(self.answers, 2**20)
            assert read, "the browser has ended"
            self.rest += read
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in `folder`; it ends with the block."""
    (commands_in, commands), (answers, answers_out) = os.pipe(), os.pipe()
    words = ["chromium", *FLAGS, f"--user-data-dir={folder}"]
    # Chromium reads from descriptor 3 and writes to 4.
    script = f'exec "$@" 3<&{commands_in} 4>&{answers_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *words],
        pass_fds=(commands_in, answers_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_in)
    os.close(answers_out)
    try:
        yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait(PATIENCE)
        os.close(commands)
        os.close(answers)
