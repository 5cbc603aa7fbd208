"""Serve a sealed model to clients who seal their requests, or be such a client.

    python -m examples.serving demo
    python -m examples.serving serve FOLDER --key owner.key --workers 4
    python -m examples.serving ask URL --policy policy.toml 17 4 42
    python -m examples.serving ask URL --policy policy.toml --text "Once upon a time"

On a machine without confidential hardware add --development to both: the offer then proves nothing.
"""

import argparse
import http.client
import logging
import os
import socket
import sys
from contextlib import closing
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # or NumPy starts threads, and the supervisor is to have none

import torch

import fastrack
from examples.serving.client import Client
from examples.serving.demo import run_demo
from examples.serving.refusals import RefusedError
from examples.serving.sealing import collect_nothing, trust_nothing, verify_offer
from fastrack import attest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a sealed folder; SIGHUP reloads it")
    serve.add_argument("folder", type=Path, help="the folder, or a link to it")
    serve.add_argument("--key", required=True, help="what fastrack takes as keys=: a key file, or a wrapped key")
    serve.add_argument("--anchor", type=Path, help="refuse editions that are older than in this anchor")
    serve.add_argument("--workers", type=int, default=2)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    serve.add_argument("--watch", type=float, default=0.0, metavar="SECONDS", help="look for a new edition this often")
    ask = commands.add_parser("ask", help="ask a server for the next token, or how a text goes on")
    ask.add_argument("url")
    ask.add_argument("tokens", type=int, nargs="*")
    ask.add_argument("--text", help="a text in place of tokens")
    ask.add_argument("--edition", default="", help="the edition that must answer")
    ask.add_argument("--policy", type=Path, help="what the machine has to prove")
    ask.add_argument("--collateral", type=Path, help="folder of `fastrack attest fetch`")
    for command in (serve, ask):
        command.add_argument("--development", action="store_true", help="without evidence: proves nothing")
    demo = commands.add_parser("demo", help="serve, ask, reload and refuse, on this machine")
    demo.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.command == "demo":
        return run_demo(options.workers)
    if options.command == "ask":
        if bool(options.tokens) is (options.text is not None):
            parser.error("ask: expected tokens, or --text TEXT, got both or neither")
        if (options.policy is None) is not options.development:
            parser.error("ask: expected --policy POLICY, or --development, got both or neither")
    try:
        return print_answer(options) if options.command == "ask" else run_server(options)
    except (RefusedError, fastrack.FastrackError, OSError, http.client.HTTPException) as error:
        print(f"{options.command}: {error or type(error).__name__}", file=sys.stderr)
        return 1


def run_server(options: argparse.Namespace) -> int:
    from examples.serving.supervisor import Supervisor  # a client needs no models, nor seconds to import transformers

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with socket.create_server((options.host, options.port), backlog=1024) as listener:
        supervisor = Supervisor(
            options.folder,
            options.key,
            workers=options.workers,
            listener=listener,
            collect=collect_nothing if options.development else attest.collect_evidence,
            anchor=options.anchor,
            watch=options.watch,
        )
        print(f"serving on http://{options.host}:{listener.getsockname()[1]}", flush=True)
        return supervisor.run()


def print_answer(options: argparse.Namespace) -> int:
    verify = trust_nothing
    if not options.development:
        verify = verify_offer(attest.Policy.from_toml(options.policy.read_text()), collateral=options.collateral)
    asked = torch.tensor(options.tokens) if options.text is None else options.text
    with closing(Client(options.url, verify)) as client:
        answer = client.ask(asked, options.edition)
    said = answer.text if answer.logits is None else f"next token: {answer.logits.argmax().item()}"
    print(f"{said}, by edition {answer.edition}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
