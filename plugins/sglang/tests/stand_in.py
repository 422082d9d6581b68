"""A server that answers as SGLang 0.5.17's does, with a small transformers model inside: where no GPU is, tests ask it.

Paths, JSON and what ends the server are those of SGLang's http_server.py, io_struct.py, sampler.py, weight_updater.py
and schedule_batch.py. It is started as SGLang is: `python -m plugins.sglang.tests.stand_in ARGUMENTS.json`. One
argument is its own, `stand_in`: how it is to misbehave. It draws a row at a time, and each tensor-parallel rank holds a
whole model.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import pickle
import signal
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from corerl_sglang.arguments import FEATURES_CACHED, TRANSPORT, VOCABULARY
from corerl_sglang.launch import end_with_parent, read_arguments
from plugins.sglang.tests.stand_in_pictures import Processor, taken

KNOWN = frozenset((Path(__file__).parent / "server_args.txt").read_text().split())  # in 0.5.15 and in 0.5.17
SINCE = {TRANSPORT}  # 0.5.17
# Of the modules that SGLang's SafeUnpickler may import from.
ALLOWED = ("builtins.", "collections.", "functools.", "operator.", "torch.")
TAGS = ("kv_cache", "weights", "cuda_graph")


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not f"{module}.".startswith(ALLOWED):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


def crash(why: str) -> None:
    """An exception in a scheduler of SGLang's ends the server."""
    print(f"Scheduler hit an exception: {why}", flush=True)
    os.killpg(0, signal.SIGKILL)


class Rank:
    """One rank's model, whose `load_weights` takes any part of a checkpoint and passes over names that are not its."""

    def __init__(self, model_path: str, dtype: str, lora: Mapping[str, Any]) -> None:
        """`lora`: rank and targets of adapters, if it has any."""
        import torch
        import transformers

        from corerl.models import named_views, routers

        config = transformers.AutoConfig.from_pretrained(model_path)
        self.stops = {getattr(config, "eos_token_id", None)} - {None}
        kind = getattr(transformers, config.architectures[0])  # as SGLang chooses it
        self.model = kind._from_config(config, dtype=getattr(torch, dtype), attn_implementation="eager")
        self.model.eval()
        self.adapters: dict[str, Any] = {}  # by the names of PEFT
        self.views, self.routers = named_views(self.model), routers(self.model)
        self.layers = config.get_text_config().num_hidden_layers
        if lora:
            self.put_adapters(lora, dtype)

    def put_adapters(self, lora: Mapping[str, Any], dtype: str) -> None:
        import torch

        from corerl.config import LoraConfig
        from corerl.models import put_adapters
        from corerl_testing import LoraLinear

        asked = LoraConfig(rank=lora["max_lora_rank"], targets=tuple(lora["lora_target_modules"])).settled({})
        put_adapters(self.model, asked, dtype=getattr(torch, dtype))
        self.scaled = [module for module in self.model.modules() if isinstance(module, LoraLinear)]
        for module in self.scaled:
            module.lora_A.to_empty(device="cpu")
            module.lora_B.to_empty(device="cpu")
        params = dict(self.model.named_parameters())
        self.adapters = {f"base_model.model.{name}": param.data for name, param in params.items() if ".lora_" in name}

    def use(self, adapters: Mapping[str, Any], scale: float) -> None:
        for name, held in self.adapters.items():
            held.copy_(adapters[name])
        for module in self.scaled:
            module.scale = scale

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return self.model.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        return iter(self.model.named_buffers())

    def modules(self) -> Iterator[Any]:
        return self.model.modules()

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            held = self.views.get(name)
            if held is None:
                print(f"Parameter {name} not found in params_dict", flush=True)
                continue
            held.copy_(tensor)


class Server:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.misbehave = arguments.get("stand_in", {})
        self.vocabulary = arguments.get(VOCABULARY)
        names = ("max_lora_rank", "lora_target_modules")
        lora = {name: arguments[name] for name in names} if arguments.get("enable_lora") else {}
        self.ranks = [Rank(arguments["model_path"], arguments["dtype"], lora) for _ in range(arguments["tp_size"])]
        self.processor: Processor | None = None
        if arguments.get("enable_multimodal"):
            self.processor = Processor(arguments["model_path"])
        self.loaded: dict[str, tuple[dict[str, Any], float]] = {}  # adapters and their scale, by name
        self.version = "default"
        self.asleep: set[str] = set()
        self.cached = 0  # prompts that the prefix cache remembers
        self.running = 0
        self.generations = 0
        self.holding = 0  # rows that wait until somebody interrupts them
        self.interrupted = False  # ever
        self.aborted = threading.Event()
        self.ended: set[str] = set()  # requests that were aborted by themselves
        self.changing = threading.Lock()
        self.log: list[str] = []  # of what changed the server, for a test to read

    # ---- generating --------------------------------------------------------------------------------------------------

    def generate(self, body: dict[str, Any], sending: Callable[[Any], None] | None = None) -> tuple[int, Any]:
        """`sending` takes what a stream has of its rows before their ends."""
        if self.asleep:
            crash(f"generate while {sorted(self.asleep)} have no memory")
        with self.changing:
            self.running += 1
            self.generations += 1
            self.aborted.clear()
            print(f"Prefill batch, #new-seq: {len(body['input_ids'])}", flush=True)
        marker = self.misbehave.get("die_once")
        if marker and self.generations == self.misbehave["at"] and not Path(marker).exists():
            Path(marker).touch()
            crash("told to die")
        try:
            if (asked := body.get("lora_path")) is not None:
                if asked not in self.loaded:
                    return 400, {"error": {"message": f"Got LoRA adapter that has never been loaded: {asked}"}}
                # While it looks adapters up, SGLang goes on with other requests, such as one to abort this one.
                if self.generations in self.misbehave.get("held_in_lookup", ()):
                    self.holding += 1
                    self.aborted.wait()
                    return 400, {"error": {"message": f"Request {self.generations} was aborted"}}
            prompts = self.prompts(body)
            # As SGLang 0.5.17: the tokenizer manager's check, and then the scheduler's, which cuts what may be drawn.
            context = self.arguments.get("context_length", 1 << 30)
            for (prompt, _), params in zip(prompts, body["sampling_params"], strict=True):
                if len(prompt) + params["max_new_tokens"] > context or len(prompt) >= context - 6:
                    return 400, {"error": {"message": "The input is longer than the model's context length"}}
                params["max_new_tokens"] = min(params["max_new_tokens"], context - 2 - len(prompt))
            rows = [
                self.row(prompt, params, body, given, index, sending)
                for index, ((prompt, given), params) in enumerate(zip(prompts, body["sampling_params"], strict=True))
            ]
            for (prompt, _), start, row in zip(prompts, body.get("logprob_start_len", ()), rows, strict=False):
                row["meta_info"] |= self.scores(prompt, start, body)
            return 200, rows
        finally:
            with self.changing:
                self.running -= 1
                self.cached += len(body["input_ids"])

    def prompts(self, body: dict[str, Any]) -> list[tuple[list[int], dict[str, Any]]]:
        """Each row's tokens, and what the model takes of its pictures."""
        ids = body["input_ids"]
        if not (data := body.get("image_data")):
            return [(prompt, {}) for prompt in ids]
        assert self.processor is not None and isinstance(data[0], list)  # else each is the one picture of its row
        rows = zip(ids, data, strict=True)
        return [self.processor.prompt(prompt, own) if own else (prompt, {}) for prompt, own in rows]

    def load_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, config = body["lora_name"], body["config_dict"]
        if not self.arguments.get("enable_lora") or name in self.loaded:
            return 400, {"success": False, "error_message": f"{name} cannot be loaded"}
        given = [base64.b64decode(each) for each in body["serialized_named_tensors"]]
        tensors, *others = (SafeUnpickler(io.BytesIO(each)).load() for each in given)
        if len(others) + 1 != len(self.ranks):
            return 400, {"success": False, "error_message": f"{len(others) + 1} for {len(self.ranks)} ranks"}
        if tensors.keys() != self.ranks[0].adapters.keys() or config["r"] > self.arguments["max_lora_rank"]:
            return 400, {"success": False, "error_message": f"{name} has other adapters than the server"}
        self.loaded[name] = tensors, config["lora_alpha"] / config["r"]
        self.log.append(f"load {name}")
        return 200, {"success": True}

    def unload_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.loaded.pop(body["lora_name"])
        self.log.append(f"unload {body['lora_name']}")
        return 200, {"success": True}

    def row(
        self,
        prompt: list[int],
        params: dict[str, Any],
        body: dict[str, Any],
        given: Mapping[str, Any],
        index: int,
        sending: Callable[[Any], None] | None,
    ) -> dict[str, Any]:
        import torch

        greedy = params["temperature"] < 1e-6  # then it stands for top_k = 1, and nothing divides the logits
        temperature = 1.0 if greedy else params["temperature"]
        stops = set(params["stop_token_ids"]) | self.ranks[0].stops
        tokens: list[int] = []
        triples: list[tuple[float, int, None]] = []
        reason: dict[str, Any] | None = None
        chosen: list[Any] = []
        request = body["rid"][index] if "rid" in body else ""
        sent = 0  # tokens
        while reason is None:
            held = self.misbehave.get("held", {}).get(str(self.generations))  # what it says of the rows it aborts
            first = held and not tokens and index == 0  # the others come after it
            if first or (len(tokens) == self.misbehave.get("held_at") and not self.interrupted):
                self.holding += 1
                self.aborted.wait()
            with torch.inference_mode(), self.changing:
                for rank in self.ranks if self.loaded else ():
                    rank.use(*self.loaded[body["lora_path"]])
                logits, chosen = self.logits([*prompt, *tokens], given)
                logits[self.vocabulary or len(logits) :] = -torch.inf
            logprobs = torch.log_softmax(logits / temperature, dim=-1)
            token = int(logprobs.argmax() if greedy else self.draw(logprobs, params, len(prompt) + len(tokens)))
            tokens.append(token)
            triples.append((float(logprobs[token]), token, None))
            if self.aborted.is_set():
                reason = {"type": "abort", "message": held or "Abort in waiting queue", "status_code": None}
            elif len(tokens) >= params["max_new_tokens"]:  # before stop tokens are looked for
                reason = {"type": "length", "length": params["max_new_tokens"]}
            elif token in stops:
                reason = {"type": "stop", "matched": token}
            elif request in self.ended:
                reason = {"type": "abort", "message": "Aborted", "status_code": None}
            if sending is not None and len(tokens) % params["stream_interval"] == 1 and reason is None:
                part = {"finish_reason": None, "weight_version": self.version, "completion_tokens": len(tokens)}
                part["output_token_logprobs"] = triples[sent:]
                sending({"index": index, "output_ids": tokens[sent:], "meta_info": part})
                sent = len(tokens)
        told: dict[str, Any] = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "weight_version": self.version,
            "num_retractions": self.misbehave.get("retractions", 0),
            "output_token_logprobs": triples[sent:],
        }
        if body.get("return_routed_experts") and self.arguments["enable_return_routed_experts"]:
            told["routed_experts"] = self.routes(chosen, len(prompt) + len(tokens) - 1)
        asked = {"prompt_token_ids": prompt} if body.get("return_prompt_token_ids") else {}
        return {"output_ids": tokens[sent:], **asked, "meta_info": told, "index": index}

    def scores(self, prompt: list[int], start: int, body: dict[str, Any]) -> dict[str, Any]:
        """Of the tokens from `start` on, but for that one: of logits as they are, whatever the temperature."""
        import torch

        with torch.inference_mode(), self.changing:
            if self.loaded:
                self.ranks[0].use(*self.loaded[body["lora_path"]])
            logits = self.ranks[0].model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, start:-1].float()
            logits[:, self.vocabulary or logits.shape[1] :] = -torch.inf
            logprobs = torch.log_softmax(logits, dim=-1)
            own = [float(each[token]) for each, token in zip(logprobs, prompt[start + 1 :], strict=True)]
            values, tokens = logprobs.topk(body["top_logprobs_num"], dim=-1)
        top = {"val": values.numpy(), "idx": tokens.int().numpy()}
        assert body["return_flat_raw_top_logprobs"] and body["return_flat_raw_top_logprobs_b64"]
        return {
            "input_token_logprobs": list(zip([None, *own], prompt[start:], [None] * (len(own) + 1), strict=True)),
            **{
                f"input_top_logprobs_{name}_flat_b64": base64.b64encode(each.tobytes()).decode()
                for name, each in top.items()
            },
        }

    def logits(self, tokens: list[int], given: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """[V] after the last token, and the experts [T, k] of each layer that has any."""
        import torch

        chosen: list[Any] = []

        def keep(router: Any, given: Any, out: Any) -> None:
            chosen.append(next(each for each in out if not each.is_floating_point()))

        handles = [router.register_forward_hook(keep) for router in self.ranks[0].routers]
        more = taken(self.ranks[0].model, given, len(tokens)) if given else {}
        all_logits = [
            rank.model(input_ids=torch.tensor([tokens]), use_cache=False, **more).logits[0, -1].float()
            for rank in self.ranks
        ]
        for handle in handles:
            handle.remove()
        if not all(torch.equal(all_logits[0], other) for other in all_logits[1:]):
            crash("the ranks hold different weights")
        return all_logits[0], chosen

    def draw(self, logprobs: Any, params: dict[str, Any], position: int) -> int:
        import torch

        ordered, order = logprobs.exp().sort(descending=True)
        ordered[(ordered.cumsum(-1) - ordered) > params["top_p"]] = 0.0
        if params.get("top_k", -1) != -1:
            ordered[params["top_k"] :] = 0.0
        generator = torch.Generator()
        if self.arguments["enable_deterministic_inference"]:
            generator.manual_seed((params.get("sampling_seed", 42) * 1_000_003 + position) % (1 << 63))
        else:
            generator.seed()
        return int(order[torch.multinomial(ordered, 1, generator=generator)])

    def routes(self, chosen: list[Any], length: int) -> str:
        import numpy as np

        rank = self.ranks[0]
        names = {id(module): name for name, module in rank.model.named_modules()}
        told = np.zeros((length, rank.layers, chosen[0].shape[-1]), dtype=np.int32)  # what no layer writes to stays 0
        for router, layer in zip(rank.routers, chosen, strict=True):
            told[:, int(names[id(router)].split(".")[2])] = layer[:length].numpy()
        return base64.b64encode(told.tobytes()).decode()

    # ---- everything else ---------------------------------------------------------------------------------------------

    def update(self, body: dict[str, Any]) -> tuple[int, Any]:
        import torch

        payloads = [base64.b64decode(each) for each in body["serialized_named_tensors"]]
        failures: list[str] = []

        def one(rank: int) -> None:
            try:
                tensors = [(n, t.to("cpu")) for n, t in SafeUnpickler(io.BytesIO(payloads[rank])).load()]
                if body["load_format"] not in self.arguments["custom_weight_loader"]:
                    raise NotImplementedError(f"Unknown load_format={body['load_format']}")
                module, _, function = body["load_format"].rpartition(".")
                with torch.inference_mode():
                    getattr(importlib.import_module(module), function)(self.ranks[rank], tensors)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")

        with self.changing:
            self.log.append("update")
            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.ranks))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failures:
            crash(failures[0])
        if body.get("flush_cache", True):
            self.cached = 0
        return 200, {"success": True, "message": "Success"}

    def flush(self, body: dict[str, Any], timeout: float) -> tuple[int, Any]:
        deadline = time.monotonic() + timeout
        while self.running:
            if time.monotonic() > deadline:
                return 400, "Timed out waiting for idle state."
            time.sleep(0.01)
        self.cached = 0
        return 200, "Cache flushed."

    def release(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.running:
            crash("release_memory_occupation should be called only when server is idle.")
        tags = set(body["tags"] or TAGS)
        self.asleep |= tags
        self.log.append(f"release {' '.join(sorted(tags))}")
        return 200, None

    def resume(self, body: dict[str, Any]) -> tuple[int, Any]:
        tags = set(body["tags"] or TAGS)
        if tags - self.asleep:
            crash(f"KeyError: {sorted(tags - self.asleep)}")
        self.asleep -= tags
        self.log.append(f"resume {' '.join(sorted(tags))}")
        if "weights" in tags:  # they are not backed up
            import torch

            with torch.no_grad():
                for rank in self.ranks:
                    for held in rank.views.values():
                        held.fill_(float("nan"))
        return 200, None

    def set_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("abort_all_requests", True):
            self.aborted.set()
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def abort(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not body["abort_all"]:
            self.ended.add(body["rid"])
            return 200, ""
        self.log.append("abort")
        if self.misbehave.get("aborts") == "unanswered":
            threading.Event().wait()
        if self.misbehave.get("aborts") == "ignored":
            return 200, ""
        self.interrupted = True
        self.aborted.set()
        return 200, ""

    def freeze(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.log.append("freeze")
        return 200, "Garbage collection frozen.\n"

    def loads(self) -> dict[str, Any]:
        """As SGLang's v1_loads.py tells them, of two attention groups, one of which is idle."""
        busy = {"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": 1, "num_used_tokens": 90}
        idle = {"dp_rank": 1, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
        both = [{**busy, "num_total_tokens": 120}, {**idle, "num_total_tokens": 0}]
        return {"version": "0.5.17", "loads": [{**each, "max_total_num_tokens": 500} for each in both]}

    def info(self) -> dict[str, Any]:
        weight = sum(view.nbytes for view in self.ranks[0].views.values()) / 2**30
        usage = {"weight": weight, "kvcache": 0.5, "token_capacity": 1000, "graph": {}}
        return {
            **self.arguments,
            "internal_states": [{"memory_usage": usage}],
            "stand_in": {
                "holding": self.holding,
                "running": self.running,
                "log": self.log,
                "cached": self.cached,
                "features_cached": os.environ.get(FEATURES_CACHED),
                "pictures": self.processor.read if self.processor is not None else [],
            },
        }


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    posts = {
        "/generate": server.generate,
        "/update_weights_from_tensor": server.update,
        "/update_weight_version": server.set_version,
        "/release_memory_occupation": server.release,
        "/resume_memory_occupation": server.resume,
        "/abort_request": server.abort,
        "/freeze_gc": server.freeze,
        "/load_lora_adapter_from_tensors": server.load_adapter,
        "/unload_lora_adapter": server.unload_adapter,
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def refused(self) -> bool:
            """As by SGLang's auth.py, where there is an `api_key`."""
            allowed = self.headers["Authorization"] == f"Bearer {server.arguments['api_key']}"
            if not allowed:
                self.answer(401, {"error": "Unauthorized"})
            return not allowed

        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer(200, "")
            elif self.refused():
                pass
            elif self.path == "/ping":
                self.answer(200, "")
            elif self.path == "/v1/loads?include=core":
                self.answer(200, server.loads())
            else:
                self.answer(200, server.info()) if self.path == "/server_info" else self.answer(404, "no such path")

        def do_POST(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.refused():
                return
            if body.get("stream"):
                self.stream(body)
            elif url.path == "/flush_cache":
                self.answer(*server.flush(body, float(urllib.parse.parse_qs(url.query)["timeout"][0])))
            else:
                self.answer(*posts[url.path](body))

        def stream(self, body: dict[str, Any]) -> None:
            """Rows as SGLang sends them: those that have ended whole, here after all have."""
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()

            def sending(told: Any) -> None:
                data = b"data: " + (told if isinstance(told, bytes) else json.dumps(told).encode()) + b"\n\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

            status, told = server.generate(body, sending)
            for each in told if status == 200 else [told]:
                sending(each)
            sending(b"[DONE]")
            self.wfile.write(b"0\r\n\r\n")

        def answer(self, status: int, told: Any) -> None:
            text = told.encode() if isinstance(told, str) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class Listening(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    file = Path(sys.argv[1])
    end_with_parent(file.parent)
    arguments = read_arguments(file)
    if unknown := sorted(arguments.keys() - KNOWN - SINCE - {"stand_in", VOCABULARY}):
        sys.exit(f"SGLang's server has no argument {unknown[0]!r}")
    server = Server(arguments)
    listening = Listening((arguments["host"], arguments["port"]), handler(server))
    print("The server is fired up and ready to roll!", flush=True)
    listening.serve_forever()


if __name__ == "__main__":
    main()
