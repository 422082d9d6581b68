"""An agent as a program: `agent.py URL PROMPT_FILE [what]` asks once, and does what it is asked to."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit


def post(path: str, body: object) -> dict[str, object]:
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc, timeout=60)
    connection.request("POST", f"{url.path}/{path}", json.dumps(body))
    answer: dict[str, object] = json.load(connection.getresponse())
    connection.close()
    return answer


def main(url: str, file: str, what: str = "reward") -> None:
    prompt = json.loads(Path(file).read_text())
    assert url == os.environ["OPENAI_BASE_URL"] and prompt["answer"]
    assert os.environ["OPENAI_API_KEY"] == "none" and os.environ["CORERL_PROMPT_FILE"] == file
    post("chat/completions", {"messages": prompt["messages"], "max_tokens": 2})
    print("I have asked.", flush=True)
    match what.partition(":")[0]:
        case "reward":
            print(json.dumps({"reward": prompt["index"] / 8, "parts": {"asked": 1}}))
        case "number":
            print(0.25)
        case "none":
            print("That is all.")
        case "brackets":
            print("[" * 5000)
        case "post":
            post("reward", {"reward": 0.5})
        case "nan":
            print('{"reward": NaN}')
        case "exit":
            print("no such tool\nsee above", file=sys.stderr)
            sys.exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "flood":
            while True:
                sys.stdout.write("x" * 2**16)
        case "once":  # the first one waits to be killed, and says whose it is
            try:
                with Path(what.partition(":")[2]).open("x") as pids:
                    pids.write(f"{os.getppid()} {os.getpid()}\n")
            except FileExistsError:
                print(json.dumps({"reward": 1.0, "parts": {"at": int(urlsplit(url).hostname.replace(".", ""))}}))
            else:
                time.sleep(600)
        case "hang" | "leave":
            # One child in this group, and one that leaves it and its parent: their numbers go to a file.
            for options in ({}, {"start_new_session": True}):
                child = subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(600)"], **options)
                with Path(what.partition(":")[2]).open("a") as pids:
                    pids.write(f"{child.pid}\n")
            if what.startswith("hang"):
                time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
