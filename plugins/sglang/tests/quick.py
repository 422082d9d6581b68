"""What a server does without a model: late, never well, slow, silent, or not there. `python -m ... ARGUMENTS.json`"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from corerl_sglang.launch import end_with_parent, read_arguments


def stop() -> None:
    """All of the process, and never to return: this thread may have a moment until the signal has stopped it too."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


class Handler(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/refuse":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": "not so"}}).encode())
        elif self.path.startswith("/slow"):
            time.sleep(float(self.path.partition("=")[2]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"late")
        elif self.path == "/stops_within":
            self.send_response(200)
            self.send_header("Content-Length", "10")
            self.end_headers()
            self.wfile.write(b"begun")
            stop()
        else:
            self.connection.close()  # no answer, and it still runs

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    file = Path(sys.argv[1])
    end_with_parent(file.parent)
    arguments = read_arguments(file)
    print("loading the model", flush=True)
    if arguments["mode"] == "fails":
        sys.exit("out of memory: the KV cache does not fit")
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # what must not outlive it
    print(f"rank {rank.pid}", flush=True)
    time.sleep(arguments.get("seconds", 0.0))
    Handler.status = 503 if arguments["mode"] == "never well" else 200
    ThreadingHTTPServer((arguments["host"], arguments["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main()
