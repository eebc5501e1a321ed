"""A headless Chromium, over its debugging pipe: windows narrower than Chromium's own least width, 500 pixels."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE = 120.0  # seconds for an answer


class Page:
    """A page of ``width`` x 1,200 pixels."""

    def __init__(self, ask, width):
        target = ask("Target.createTarget", url="about:blank")["targetId"]
        session = ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask = lambda method, **params: ask(method, session, **params)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=1200, deviceScaleFactor=1, mobile=False)

    def open(self, url, ready):
        """Load ``url``; wait until the expression ``ready`` is true."""
        self.ask("Page.navigate", url=url)
        end = time.monotonic() + PATIENCE
        while not self.value(ready):
            assert time.monotonic() < end, f"{url} never had {ready}"
            time.sleep(0.1)

    def value(self, expression):
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")


@contextmanager
def browser(folder, width):
    """Yield a :class:`Page`; the profile is in ``folder``."""
    (ours, theirs), (reads, writes) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    # Chromium reads commands from descriptor 3 and answers on 4.
    plumbing = f'exec "$0" "$@" 3<&{ours} 4>&{writes}'
    command = ["bash", "-c", plumbing, CHROMIUM, *options]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, pass_fds=(ours, writes), **silent) as process:
        os.close(ours)
        os.close(writes)
        numbers, rest = itertools.count(1), b""

        def ask(method, session=None, **params):
            nonlocal rest
            number = next(numbers)
            message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
            os.write(theirs, json.dumps(message).encode() + b"\0")
            end = time.monotonic() + PATIENCE
            while True:
                line, zero, left = rest.partition(b"\0")
                if not zero:
                    assert select.select([reads], [], [], end - time.monotonic())[0], f"no answer to {method}"
                    more = os.read(reads, 1 << 16)
                    assert more, "the browser has ended"
                    rest += more
                    continue
                rest, answer = left, json.loads(line)
                if answer.get("id") == number:
                    assert "error" not in answer, answer["error"]
                    return answer["result"]

        try:
            yield Page(ask, width)
        finally:
            process.kill()
            os.close(theirs)
            os.close(reads)
