"""What a server does as it starts, without a model: late, never well, or not at all. `python -m ... ARGUMENTS.json`"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from corerl_sglang.parent import end_with_parent


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
        else:
            self.connection.close()  # no answer, and it still runs

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    file = Path(sys.argv[1])
    end_with_parent(file.parent)
    arguments = json.loads(file.read_text())
    print("loading the model", flush=True)
    if arguments["mode"] == "fails":
        sys.exit("out of memory: the KV cache does not fit")
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # what must not outlive it
    print(f"rank {rank.pid}", flush=True)
    time.sleep(arguments.get("seconds", 0.0))
    Handler.status = 503 if arguments["mode"] == "never well" else 200
    HTTPServer((arguments["host"], arguments["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main()
